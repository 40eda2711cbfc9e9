"""BST and HSTU: rankers that read a candidate as the event behind its user's history.

The events go through layers of self-attention once for each user. Then each candidate goes through the same layers, as
one more event: in each layer it sees the history's keys of that layer and its own key. Its output of the last layer is
its interest. A history of 1,024 events with 500 candidates costs one pass over the events and 500 queries in each
layer, not 500 passes.

The events do not see the candidate. In the published BST they do, which makes every candidate cost a whole pass.

The user part leaves keys and values of all layers, `[events, layers, 2, heads, head_dim]`. Nothing reads the events'
own output of the last layer, so it is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotrow.errors import OptionError, choices
from hotrow.models.history import EventProjection, History, HistoryColumns
from hotrow.models.inputs import Features
from hotrow.models.ranking_top import TopOptions
from hotrow.models.user_tower import Candidates, HistoryReader, UserInputs, UserTower
from hotrow.nn.histories.encoder_block import EncoderBlock
from hotrow.nn.histories.hstu import HSTUBlock
from hotrow.nn.histories.positions import LearnedPositions
from hotrow.nn.histories.transformer import TransformerBlock
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import positive

POSITIONS = ("learned", "relative", "none")


@dataclass(frozen=True)
class EncoderOptions:
    """The size and form of an encoder over histories.

    `positions` are "learned" (a vector per place, counted from the newest event), "relative" (a bias per distance) or
    "none". `checkpoint=True` keeps only the inputs of layers in training and computes the rest again.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    positions: str = "relative"
    causal: bool = True
    dropout: float = 0.0
    checkpoint: bool = False

    def blocks(self, kind: Callable[..., EncoderBlock], history: History) -> nn.ModuleList:
        """The layers for one history."""
        if self.positions not in POSITIONS:
            raise OptionError(f"positions={self.positions!r}; {choices(self.positions, POSITIONS)}")
        return nn.ModuleList(
            kind(
                self.width,
                self.heads,
                causal=self.causal,
                positions=history.max_length if self.positions == "relative" else 0,
                times=history.times is not None,
                dropout=self.dropout,
                checkpoint=self.checkpoint,
            )
            for _ in range(positive("layers", self.layers))
        )

    def places(self, history: History) -> LearnedPositions | None:
        """The vectors of places, if they are learned."""
        return LearnedPositions(history.max_length, self.width) if self.positions == "learned" else None

    @property
    def keeps_prefixes(self) -> bool:
        """Whether an event's encoding stays as it is when newer events follow."""
        return self.causal and self.positions != "learned"


class PrefixReader(HistoryReader):
    """Encodes the events as a prefix, and candidates as the event behind it.

    >>> reader = PrefixReader(TransformerBlock, EncoderOptions(8, heads=2), History({"seen": 4}), [4])
    >>> history = HistoryColumns(torch.zeros(5, 4), torch.tensor([3, 2]), None, None)
    >>> reader.encode(history)["keys"].shape
    torch.Size([5, 2, 2, 2, 4])
    """

    def __init__(
        self, kind: Callable[..., EncoderBlock], options: EncoderOptions, history: History, target: Sequence[int]
    ) -> None:
        super().__init__()
        self.out_features = options.width
        self.causal = options.keeps_prefixes
        self.per_event = ("keys",) if history.times is None else ("keys", "times")
        self.projection = EventProjection(history, target, options.width)
        self.blocks = options.blocks(kind, history)
        self.places = options.places(history)
        self.as_candidate = nn.Parameter(torch.randn(options.width) * 0.02)
        self.norm = nn.LayerNorm(options.width)

    def encode(self, history: HistoryColumns) -> dict[str, Tensor]:
        """Keys and values of all layers, and times."""
        x = self.projection(history.events)
        if self.places is not None:
            x = self.places(x, history.lengths)
        last: EncoderBlock = self.blocks[-1]  # type: ignore[assignment]
        keys = []
        for block in self.blocks[:-1]:
            x, own = block(x, history.lengths, history.times)
            keys.append(own)
        encoded = {"keys": torch.stack([*keys, last.keys(x)], dim=1)}
        if history.times is not None:
            encoded["times"] = history.times
        return encoded

    def interest(self, candidates: Candidates, encoded: Mapping[str, Tensor], lengths: Tensor) -> Tensor:
        """The output of the last layer for each candidate."""
        x = self.projection.of_target(*candidates.target) + self.as_candidate
        rows, times = candidates.groups.lengths, encoded.get("times")
        asked = None if times is None else candidates.times
        for block, keys in zip(self.blocks, encoded["keys"].unbind(1), strict=True):
            assert isinstance(block, EncoderBlock)
            x = block.candidates(x, keys, rows, lengths, asked, times, candidates.visible)
        out: Tensor = self.norm(x)
        return out


class BST(UserTower):
    """Behavior Sequence Transformer: a ranker over histories, the candidate being the next event.

    `features` are the pooled features, `histories` one or more of `hr.models.History`, and `target` the features that
    describe the candidate. `user_features` says which pooled features are the user's. The other options are those of
    `UserInputs`, `EncoderOptions` and `TopOptions`.

    >>> tower = BST(["age", "item"], ["seen"], "item", 8, user_features=["age"], width=8, heads=2, layers=1)
    >>> vectors = {"seen": torch.zeros(5, 8), "seen_lengths": torch.tensor([5]), "age": torch.zeros(1, 8)}
    >>> tower(vectors | {"item": torch.zeros(3, 8), "user_of": torch.tensor([0, 0, 0])}).shape
    torch.Size([3])
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
        time: str | None = None,
        width: int = 64,
        heads: int = 4,
        layers: int = 1,
        positions: str = "learned",
        causal: bool = True,
        dropout: float = 0.0,
        checkpoint: bool = False,
        interaction: str = "concat",
        top: Sequence[int] = (200, 80),
        head: Head | None = None,
    ) -> None:
        inputs = UserInputs(features, histories, target, dim, dense_features, user_features, time)
        options = EncoderOptions(width, heads, layers, positions, causal, dropout, checkpoint)
        super().__init__(
            inputs,
            lambda history, widths: PrefixReader(TransformerBlock, options, history, widths),
            TopOptions(interaction, top, head),
        )


class HSTU(UserTower):
    """HSTU ranker: pointwise attention over histories with biases of position and time.

    Options as for BST. Positions are relative, so the encoding of an event never changes when newer ones follow.

    >>> tower = HSTU(["item"], [History(["seen"], times="seen_time")], "item", 8, width=8, heads=2)
    >>> tower.user_features, tower.causal
    (('seen', 'seen_time'), True)
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
        time: str | None = None,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.0,
        checkpoint: bool = False,
        interaction: str = "concat",
        top: Sequence[int] = (200, 80),
        head: Head | None = None,
    ) -> None:
        inputs = UserInputs(features, histories, target, dim, dense_features, user_features, time)
        options = EncoderOptions(width, heads, layers, "relative", True, dropout, checkpoint)
        super().__init__(
            inputs,
            lambda history, widths: PrefixReader(HSTUBlock, options, history, widths),
            TopOptions(interaction, top, head),
        )
