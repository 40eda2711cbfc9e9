"""Wide & Deep: a linear model and an MLP, added.

The linear model needs one weight per key. A key already owns a row, so its wide weight is the first column of that
row and the rest is its deep vector: a feature with a deep vector of 16 has a table of dim 17. One lookup and one
optimizer then serve both parts. A feature of width 1 is wide only: use that for a crossed feature ("user's country x
item").

The wide weights of a pooled feature are pooled in the same way. Both parts read the dense features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.models.inputs import Features, FeatureTower, first_order
from hotrow.models.tower_top import TowerTop, add_to_each_task
from hotrow.nn.mlp import linear
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import widths


class WideAndDeep(FeatureTower):
    """Logit = sum of the wide weights + linear(dense) + MLP(deep vectors, dense).

    `features` are names, all `dim` wide, or name → width, where a width is 1 (the wide weight) + the deep width.
    `head` ends the MLP in logits of several tasks (nn/multitask.py); the wide part is added to each.

    >>> tower = WideAndDeep({"user": 17, "item": 17, "user_x_item": 1}, deep=(32,))
    >>> vectors = {"user": torch.zeros(4, 17), "item": torch.zeros(4, 17), "user_x_item": torch.zeros(4, 1)}
    >>> tower(vectors, None).shape
    torch.Size([4])
    """

    def __init__(
        self,
        features: Features,
        dim: int | None = None,
        *,
        dense_features: int = 0,
        deep: Sequence[int] = (1024, 512, 256),
        dropout: float = 0.0,
        head: Head | None = None,
    ) -> None:
        super().__init__(features, dim, dense_features)
        deep_width = sum(self.widths.values()) - len(self.widths) + dense_features
        if deep_width == 0:
            raise OptionError(
                "every feature is 1 wide, which is its wide weight, so nothing is left for the deep part; "
                "give a table dim=1 + its deep width, or pass dense_features="
            )
        self.deep = TowerTop(deep_width, widths("deep", deep), head, dropout=dropout)
        self.wide_dense = linear(dense_features, 1, bias=False) if dense_features else None

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """Logits, `[batch]`, or `[batch, tasks]` with a head."""
        rows, dense = self.inputs(vectors, dense)
        deep = [row[:, 1:] for row in rows if row.shape[1] > 1]
        if dense is not None:
            deep.append(dense)
        wide = first_order(rows, dense, self.wide_dense)
        logits: Tensor = add_to_each_task(self.deep(torch.cat(deep, dim=1)), wide)
        return logits
