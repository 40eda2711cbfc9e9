"""DCN-v2: cross layers that multiply features explicitly, then an MLP.

The network's input is the concatenation of the vectors and the dense features. Each cross layer raises the degree of
their products by one, and the MLP reads the last layer's output (the paper's stacked form). Features may differ in
width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hotrow.models.inputs import Features, FeatureTower
from hotrow.models.tower_top import TowerTop
from hotrow.nn.cross import CrossLayer
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import positive, widths


class DCNv2(FeatureTower):
    """Logit = MLP(cross layers(vectors, dense)).

    `features` are names, all `dim` wide, or name → width. `layers` cross layers are full, or of `rank`, or a mixture of
    `experts` of that rank. `head` ends the tower in logits of several tasks (nn/multitask.py).

    >>> tower = DCNv2({"user": 16, "country": 4}, dense_features=2, rank=8, deep=(32,))
    >>> tower({"user": torch.zeros(4, 16), "country": torch.zeros(4, 4)}, torch.zeros(4, 2)).shape
    torch.Size([4])
    """

    def __init__(
        self,
        features: Features,
        dim: int | None = None,
        *,
        dense_features: int = 0,
        layers: int = 3,
        rank: int | None = None,
        experts: int = 1,
        deep: Sequence[int] = (1024, 512, 256),
        head: Head | None = None,
    ) -> None:
        super().__init__(features, dim, dense_features)
        width = sum(self.widths.values()) + dense_features
        self.cross = nn.ModuleList(
            CrossLayer(width, rank=rank, experts=experts) for _ in range(positive("layers", layers))
        )
        self.deep = TowerTop(width, widths("deep", deep), head)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """Logits, `[batch]`, or `[batch, tasks]` with a head."""
        rows, dense = self.inputs(vectors, dense)
        start = torch.cat(rows if dense is None else [*rows, dense], dim=1)
        x = start
        for cross in self.cross:
            x = cross(start, x)
        logits: Tensor = self.deep(x)
        return logits
