"""DLRM: dot products between all pairs of features, then an MLP.

The bottom MLP turns the dense features into one more vector of the features' width; the dot products of all pairs of
vectors, and that vector itself, go into the top MLP. The vectors are copied once, into `[batch, features, dim]`, and
the pairs once, after the bottom's output; there is no other copy. Without dense features there is no bottom MLP, and
the top reads only the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.models.inputs import Features, FeatureTower, common_width
from hotrow.models.tower_top import TowerTop
from hotrow.nn.interaction import DotInteraction
from hotrow.nn.mlp import MLP
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import widths


class DLRM(FeatureTower):
    """Logit = top(bottom(dense), dot products of all pairs of vectors).

    `features` are names, all `dim` wide, or name → width, all the same. A last layer of that width is
    added to the bottom MLP, and one of width 1 to the top; or `head` ends the top in logits of several tasks
    (nn/multitask.py).

    >>> tower = DLRM(features=["C1", "C2"], dim=16, dense_features=13, bottom=(64,), top=(128, 64))
    >>> tower({"C1": torch.zeros(4, 16), "C2": torch.zeros(4, 16)}, torch.zeros(4, 13)).shape
    torch.Size([4])
    """

    def __init__(
        self,
        features: Features,
        dim: int | None = None,
        *,
        dense_features: int = 0,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (1024, 1024, 512, 256),
        head: Head | None = None,
    ) -> None:
        super().__init__(features, dim, dense_features)
        width = common_width(self.widths, "a dot product")
        hidden = widths("bottom", bottom)
        count = len(self.widths) + (dense_features > 0)
        if count < 2:
            raise OptionError(
                "one feature and no dense ones make no pair; name a second feature or pass dense_features="
            )
        self.bottom = MLP(dense_features, (*hidden, width), last_activation=True) if dense_features else None
        self.interaction = DotInteraction(count)
        reads = self.interaction.out_features + (width if dense_features else 0)
        self.top = TowerTop(reads, widths("top", top), head)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """Logits, `[batch]`, or `[batch, tasks]` with a head."""
        rows, dense = self.inputs(vectors, dense)
        if dense is None or self.bottom is None:
            seen: Tensor = self.interaction(torch.stack(rows, dim=1))
        else:
            bottom: Tensor = self.bottom(dense)
            seen = torch.cat([bottom, self.interaction(torch.stack([bottom, *rows], dim=1))], dim=1)
        logits: Tensor = self.top(seen)
        return logits
