"""RankingTop: what turns the vectors of a row into logits, from parts of DLRM and DCN.

It reads several vectors per row (of the user, of the candidate, an interest per history) and the dense features, and
lets them interact before the MLP:

    "concat"  not at all: the MLP reads them side by side
    "dot"     DLRM: the dot products of all pairs go beside them. Vectors of another width than the first
              are projected to it, and a layer makes one vector of the dense features
    "cross"   DCN-v2: cross layers over all of them side by side
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotrow.errors import OptionError, choices
from hotrow.models.tower_top import TowerTop
from hotrow.nn.cross import CrossLayer
from hotrow.nn.interaction import DotInteraction
from hotrow.nn.mlp import MLP, linear
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import positive, widths

INTERACTIONS = ("concat", "dot", "cross")


@dataclass(frozen=True)
class TopOptions:
    """How vectors interact, the hidden widths of the MLP, its activation, and a head of several tasks."""

    interaction: str = "concat"
    top: Sequence[int] = (200, 80)
    head: Head | None = None
    activation: str = "relu"
    cross_layers: int = 2


class RankingTop(nn.Module):
    """Vectors of the given widths and dense features in; logits `[rows]` out, or `[rows, tasks]` with a head.

    >>> top = RankingTop([4, 4, 8], 2, TopOptions("dot", (16,)))
    >>> top([torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(3, 8)], torch.zeros(3, 2)).shape
    torch.Size([3])
    """

    def __init__(self, vectors: Sequence[int], dense_features: int, options: TopOptions) -> None:
        super().__init__()
        if options.interaction not in INTERACTIONS:
            raise OptionError(f"interaction={options.interaction!r}; {choices(options.interaction, INTERACTIONS)}")
        self.interaction = options.interaction
        reads = sum(vectors) + dense_features
        if self.interaction == "dot":
            common = vectors[0]
            self.maps = nn.ModuleList(nn.Identity() if w == common else linear(w, common, bias=False) for w in vectors)
            self.bottom = MLP(dense_features, (common,), last_activation=True) if dense_features else None
            self.dots = DotInteraction(len(vectors) + (dense_features > 0))
            reads += self.dots.out_features
        if self.interaction == "cross":
            layers = positive("cross_layers", options.cross_layers)
            self.cross = nn.ModuleList(CrossLayer(reads) for _ in range(layers))
        self.mlp = TowerTop(reads, widths("top", options.top), options.head, activation=options.activation)

    def forward(self, vectors: Sequence[Tensor], dense: Tensor | None) -> Tensor:
        """Vectors `[rows, width]` each, dense features `[rows, dense_features]`."""
        start = torch.cat([*vectors] if dense is None else [*vectors, dense], dim=1)
        x = start
        if self.interaction == "dot":
            mapped = [layer(vector) for layer, vector in zip(self.maps, vectors, strict=True)]
            if dense is not None and self.bottom is not None:
                mapped.append(self.bottom(dense))
            x = torch.cat([start, self.dots(torch.stack([one.to(start.dtype) for one in mapped], dim=1))], dim=1)
        if self.interaction == "cross":
            for layer in self.cross:
                x = layer(start, x)
        logits: Tensor = self.mlp(x)
        return logits
