"""SASRec: a user as the output of the newest event, compared with candidates by a dot product.

A causal Transformer reads each history. The output of its last event is the user's vector, and the logit is its dot
product with the candidate's. The encoding of a user is that one vector, so a candidate costs the least of all towers,
and candidates may be searched by it (retrieval). Rows cannot see only the beginning of a history: the tower is not
`causal`. With `top` an MLP (and a head) reads the products and all other features too, and its logit is added.

With `every_event=True` the encoding keeps the output of each event, and a row that sees the first i events
(`<history>_visible`) is compared with event i. So one pass over a history trains the next item after each of its
events. With relative positions this equals one history per row (the tower is `causal`). Learned positions count from
the newest event of the whole history, as in the paper; then the batch must name `visible` itself.

`event_vectors` and `candidate_vectors` give both sides of the dot product, to compare all events with all items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hotrow.errors import OptionError, choices
from hotrow.models.history import EventProjection, History, HistoryColumns
from hotrow.models.inputs import Features
from hotrow.models.prefix_ranker import EncoderOptions
from hotrow.models.ranking_top import TopOptions
from hotrow.models.tower_top import add_to_each_task
from hotrow.models.user_tower import Candidates, HistoryReader, UserInputs, UserTower
from hotrow.nn.histories.hstu import HSTUBlock
from hotrow.nn.histories.segments import last_events, newest_seen
from hotrow.nn.histories.transformer import TransformerBlock
from hotrow.nn.multitask import Head

BLOCKS = {"transformer": TransformerBlock, "hstu": HSTUBlock}


class NewestReader(HistoryReader):
    """Encodes a history into the output of its newest event; interest is its product with the candidate, elementwise.

    With `every_event` it keeps the output of all events, and a candidate is compared with the newest that it sees.

    >>> reader = NewestReader(EncoderOptions(8, heads=2, positions="learned"), History({"seen": 4}), [4])
    >>> history = HistoryColumns(torch.zeros(5, 4), torch.tensor([3, 0, 2]), None, None)
    >>> reader.encode(history)["user"].shape
    torch.Size([3, 8])
    """

    def __init__(
        self,
        options: EncoderOptions,
        history: History,
        target: Sequence[int],
        block: str = "transformer",
        every_event: bool = False,
        project: bool = True,
    ) -> None:
        super().__init__()
        if block not in BLOCKS:
            raise OptionError(f"block={block!r}; {choices(block, BLOCKS)}")
        self.out_features = options.width
        self.every_event = every_event
        self.per_event, self.per_user = (("outputs",), ()) if every_event else ((), ("user",))
        self.causal = every_event and options.keeps_prefixes
        self.projection = EventProjection(history, target, options.width, project)
        self.blocks = options.blocks(BLOCKS[block], history)
        self.places = options.places(history)
        self.dropout = nn.Dropout(options.dropout)
        self.norm = nn.LayerNorm(options.width)

    @property
    def honours_visible(self) -> bool:
        """Whether the encoding has every event."""
        return self.every_event

    def events(self, history: HistoryColumns) -> Tensor:
        """Each event's output, `[events, width]`."""
        x = self.projection(history.events)
        if self.places is not None:
            x = self.places(x, history.lengths)
        x = self.dropout(x)
        for block in self.blocks:
            x, _ = block(x, history.lengths, history.times)
        out: Tensor = self.norm(x)
        return out

    def encode(self, history: HistoryColumns) -> dict[str, Tensor]:
        """The outputs of all events, or the user's vector (zeros for an empty history)."""
        outputs = self.events(history)
        return {"outputs": outputs} if self.every_event else {"user": last_events(outputs, history.lengths)}

    def interest(self, candidates: Candidates, encoded: Mapping[str, Tensor], lengths: Tensor) -> Tensor:
        """The products of the newest event that a candidate sees and the candidate's vector."""
        users = candidates.groups.users
        if self.every_event:
            seen = lengths.index_select(0, users) if candidates.visible is None else candidates.visible
            newest = newest_seen(encoded["outputs"], lengths, users, seen)
        else:
            newest = encoded["user"].index_select(0, users)
        return newest * self.candidates(*candidates.target)

    def candidates(self, *target: Tensor) -> Tensor:
        """What users are multiplied with, `[n, width]`."""
        scale: float = self.out_features**-0.5
        return self.projection.of_target(*target) * scale


class SASRec(UserTower):
    """Logit = dot(output of the newest event, candidate), plus an MLP over all features if `top` or `head` is given.

    Options as for BST. `block` is the layer: "transformer", or "hstu" (with `positions="relative"`, as HSTU's papers
    compare it with SASRec). `every_event=True` is for training on the next item after each event.
    `project=False` leaves out the linear map of events and candidates to `width`, as in the paper.

    >>> tower = SASRec(["item"], ["seen"], "item", 8, width=8, heads=2)
    >>> vectors = {"seen": torch.zeros(5, 8), "seen_lengths": torch.tensor([5]), "item": torch.zeros(1, 8)}
    >>> tower(vectors).shape, tower.event_vectors(vectors)[0].shape
    (torch.Size([1]), torch.Size([5, 8]))
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
        width: int = 64,
        heads: int = 2,
        layers: int = 2,
        positions: str = "learned",
        dropout: float = 0.0,
        checkpoint: bool = False,
        block: str = "transformer",
        every_event: bool = False,
        project: bool = True,
        interaction: str = "concat",
        top: Sequence[int] | None = None,
        head: Head | None = None,
    ) -> None:
        inputs = UserInputs(features, histories, target, dim, dense_features, user_features)
        options = EncoderOptions(width, heads, layers, positions, True, dropout, checkpoint)
        super().__init__(
            inputs,
            lambda history, widths: NewestReader(options, history, widths, block, every_event, project),
            TopOptions(interaction, top or (), head),
        )
        self.dots_alone = top is None and head is None
        if self.dots_alone:
            unread = [name for name in self.widths if name not in self.target]
            if unread or dense_features:
                raise OptionError(
                    f"a dot product reads the histories and the target alone, not {unread[0] if unread else 'dense'}; "
                    "pass top=[64] for an MLP that reads the rest, or leave it out"
                )
            del self.top

    def score(
        self, vectors: Mapping[str, Tensor], encoding: Mapping[str, Tensor], dense: Tensor | None = None
    ) -> Tensor:
        """Logits `[rows]`, or `[rows, tasks]` with a head."""
        parts, dense = self.parts(vectors, encoding, dense)
        dots = torch.stack([product.sum(dim=1) for product in parts[-len(self.histories) :]]).sum(dim=0)
        if self.dots_alone:
            return dots
        return add_to_each_task(self.top(parts, dense), dots)

    def event_vectors(self, vectors: Mapping[str, Tensor]) -> list[Tensor]:
        """Each event's output, `[events, width]`, by history."""
        return [
            reader.events(history.read(vectors))
            for history, reader in zip(self.histories, self._newest_readers(), strict=True)
        ]

    def candidate_vectors(self, *target: Tensor) -> list[Tensor]:
        """What event vectors are multiplied with, `[n, width]`, by history; from the target's vectors in order."""
        return [reader.candidates(*target) for reader in self._newest_readers()]

    def _newest_readers(self) -> list[NewestReader]:
        return [reader for reader in self._readers if isinstance(reader, NewestReader)]
