"""JaggedDIN: Deep Interest Network over jagged histories, in two parts.

The formula of `DIN`, over any number of histories with several columns each. The events of a user are in memory once,
whatever the number of candidates, and the MLP that weighs them runs over the pairs that exist, not over padding.

By default events and target are read as the tables give them and must be equally wide, as in DIN. With `width=` both
are projected first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.models.history import EventProjection, History, HistoryColumns
from hotrow.models.inputs import Features
from hotrow.models.ranking_top import TopOptions
from hotrow.models.user_tower import Candidates, HistoryReader, UserInputs, UserTower
from hotrow.nn.histories.local_activation import JaggedLocalActivation
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import widths as layer_widths


class LocalActivationReader(HistoryReader):
    """The sum of a history's events, weighed by an MLP over each event and the candidate."""

    causal = True
    per_event = ("events",)

    def __init__(self, history: History, target: Sequence[int], hidden: Sequence[int], width: int | None) -> None:
        super().__init__()
        if width is None and history.width != sum(target):
            raise OptionError(
                f"an event of history {history.name!r} is {history.width} wide but the target is {sum(target)}; "
                "pass width= to project both, or give both the same features"
            )
        self.out_features = history.width if width is None else width
        self.projection = None if width is None else EventProjection(history, target, width)
        self.attention = JaggedLocalActivation(self.out_features, layer_widths("attention", hidden))

    def encode(self, history: HistoryColumns) -> dict[str, Tensor]:
        """The events, projected if there is a projection."""
        return {"events": history.events if self.projection is None else self.projection(history.events)}

    def interest(self, candidates: Candidates, encoded: Mapping[str, Tensor], lengths: Tensor) -> Tensor:
        """The weighted sum of each candidate's history."""
        target = (
            torch.cat(candidates.target, dim=1)
            if self.projection is None
            else self.projection.of_target(*candidates.target)
        )
        rows = candidates.groups.lengths
        out: Tensor = self.attention(target, encoded["events"], rows, lengths, candidates.visible)
        return out


class JaggedDIN(UserTower):
    """Logit = top(vectors, attention of the target over each history, dense).

    `attention` are the hidden widths of the MLP that weighs an event. The other options are those of BST.

    >>> tower = JaggedDIN(["item"], ["seen"], "item", 8, attention=(4,))
    >>> vectors = {"seen": torch.zeros(5, 8), "seen_lengths": torch.tensor([5]), "item": torch.zeros(1, 8)}
    >>> tower(vectors).shape
    torch.Size([1])
    """

    def __init__(
        self,
        features: Features,
        histories: object,
        target: object,
        dim: int | None = None,
        *,
        dense_features: int = 0,
        user_features: Sequence[str] = (),
        attention: Sequence[int] = (80, 40),
        width: int | None = None,
        interaction: str = "concat",
        top: Sequence[int] = (200, 80),
        head: Head | None = None,
    ) -> None:
        super().__init__(
            UserInputs(features, histories, target, dim, dense_features, user_features),
            lambda history, widths: LocalActivationReader(history, widths, attention, width),
            TopOptions(interaction, top, head, activation="prelu"),
        )
