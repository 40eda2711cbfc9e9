"""DIN: a user's history, summed with attention to the candidate item.

The history is a sequence (its table has no pooling). Attention with the target item as its query sums it into one
vector. An MLP reads that vector, the pooled features (the target is one of them) and the dense features. History and
target share a table, or at least have the same width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.errors import OptionError, choices
from hotrow.models.inputs import Features, FeatureTower, pick_sequence
from hotrow.models.tower_top import TowerTop
from hotrow.nn.attention import LocalActivation
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import widths


class DIN(FeatureTower):
    """Logit = MLP(vectors, attention of the target over the history, dense).

    `features` are the pooled ones, including the target: names, all `dim` wide, or name → width. `history` is the
    unpooled one and is as wide as the target. `attention` are the hidden widths of the MLP that weighs an item.
    `head` ends the tower in logits of several tasks (nn/multitask.py).

    >>> tower = DIN(features=["user", "item"], history="seen", target="item", dim=16, attention=(8,), top=(32,))
    >>> vectors = {"user": torch.zeros(4, 16), "item": torch.zeros(4, 16)}
    >>> vectors |= {"seen": torch.zeros(4, 50, 16), "seen_mask": torch.zeros(4, 50, dtype=torch.bool)}
    >>> tower(vectors, None).shape
    torch.Size([4])
    """

    def __init__(
        self,
        features: Features,
        history: str,
        target: str,
        dim: int | None = None,
        *,
        dense_features: int = 0,
        attention: Sequence[int] = (80, 40),
        top: Sequence[int] = (200, 80),
        head: Head | None = None,
    ) -> None:
        super().__init__(features, dim, dense_features)
        if target not in self.widths:
            raise OptionError(f"target {target!r} is not among the features; {choices(target, self.widths)}")
        if history in self.widths:
            raise OptionError(
                f"history {history!r} is among the pooled features; leave it out of features=, it is read as a sequence"
            )
        self.history = history
        self.target = target
        self.attention = LocalActivation(self.widths[target], widths("attention", attention))
        reads = sum(self.widths.values()) + self.widths[target] + dense_features
        self.top = TowerTop(reads, widths("top", top), head, activation="prelu")

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """Logits, `[batch]`, or `[batch, tasks]` with a head."""
        rows, dense = self.inputs(vectors, dense)
        items, mask = pick_sequence(vectors, self.history, self.widths[self.target])
        interest: Tensor = self.attention(vectors[self.target], items, mask)
        rows.append(interest)
        if dense is not None:
            rows.append(dense)
        logits: Tensor = self.top(torch.cat(rows, dim=1))
        return logits
