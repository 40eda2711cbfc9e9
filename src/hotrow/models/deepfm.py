"""DeepFM: a factorization machine and an MLP over the same vectors.

As in Wide & Deep, a key's first-order weight is the first column of its row and the rest is its vector, so a table
for vectors of 16 has dim 17. All features share one width, because the factorization machine takes dot products
between them. Dense features have no vectors: the first-order part and the MLP read them, the factorization machine does
not.

The deep vectors are concatenated once; the factorization machine reads that copy as `[batch, features, dim]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.models.inputs import Features, FeatureTower, common_width, first_order
from hotrow.models.tower_top import TowerTop, add_to_each_task
from hotrow.nn.interaction import FactorizationMachine
from hotrow.nn.mlp import linear
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import widths


class DeepFM(FeatureTower):
    """Logit = first-order weights + linear(dense) + FM(vectors) + MLP(vectors, dense).

    `features` are names, all `dim` wide, or name → width, all the same: 1 (the first-order weight) + the
    vector's width. `head` ends the MLP in logits of several tasks (nn/multitask.py); the other terms are added to each.

    >>> tower = DeepFM(["user", "item"], dim=17, deep=(32,))
    >>> tower({"user": torch.zeros(4, 17), "item": torch.zeros(4, 17)}, None).shape
    torch.Size([4])
    """

    def __init__(
        self,
        features: Features,
        dim: int | None = None,
        *,
        dense_features: int = 0,
        deep: Sequence[int] = (400, 400, 400),
        dropout: float = 0.0,
        head: Head | None = None,
    ) -> None:
        super().__init__(features, dim, dense_features)
        self.vector = common_width(self.widths, "the factorization machine") - 1
        if self.vector == 0:
            raise OptionError(
                "features are 1 wide, and the first column is the first-order weight, so no vector is left; "
                "give their tables dim=1 + the vector's width, for instance 17"
            )
        self.fm = FactorizationMachine()
        width = len(self.widths) * self.vector + dense_features
        self.deep = TowerTop(width, widths("deep", deep), head, dropout=dropout)
        self.first_order_dense = linear(dense_features, 1, bias=False) if dense_features else None

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """Logits, `[batch]`, or `[batch, tasks]` with a head."""
        rows, dense = self.inputs(vectors, dense)
        deep = [row[:, 1:] for row in rows]
        side_by_side = torch.cat(deep if dense is None else [*deep, dense], dim=1)
        stacked = side_by_side[:, : len(rows) * self.vector].view(side_by_side.shape[0], len(rows), self.vector)
        linear = first_order(rows, dense, self.first_order_dense)
        logits: Tensor = add_to_each_task(self.deep(side_by_side), linear + self.fm(stacked))
        return logits
