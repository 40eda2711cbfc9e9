"""SIM: two-stage search over histories of thousands of events.

The first stage picks at most `keep` events of a history for each candidate, the second is attention over those. Search
is "hard" (the newest events of the candidate's category) or "soft" (the events whose vectors are the most similar to
the candidate's). A history that is no longer than `keep` needs no search: the candidate attends to all of it. So a
tower reads a short history of the last events beside a very long one.

The user part of hard search sorts events by category; no part of this tower projects all events of a searched history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotrow.errors import OptionError, choices
from hotrow.models.history import EventProjection, History, HistoryColumns, starts_with
from hotrow.models.inputs import Features
from hotrow.models.ranking_top import TopOptions
from hotrow.models.user_tower import Candidates, HistoryReader, UserInputs, UserTower
from hotrow.nn.histories.search import most_similar, newest_in_category, sort_by_category
from hotrow.nn.histories.target_attention import SelectedAttention, TargetAttention
from hotrow.nn.mlp import linear
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import positive

SEARCHES = ("hard", "soft")


class WholeReader(HistoryReader):
    """Attention of candidates to all events of a history."""

    causal = True

    def __init__(self, history: History, target: Sequence[int], width: int, heads: int) -> None:
        super().__init__()
        self.out_features = width
        self.per_event = ("keys",) if history.times is None else ("keys", "times")
        self.projection = EventProjection(history, target, width)
        self.attention = TargetAttention(width, heads, positions=history.max_length, times=history.times is not None)

    def encode(self, history: HistoryColumns) -> dict[str, Tensor]:
        """Keys and values, and times."""
        encoded = {"keys": self.attention.keys(self.projection(history.events))}
        return encoded if history.times is None else encoded | {"times": history.times}

    def interest(self, candidates: Candidates, encoded: Mapping[str, Tensor], lengths: Tensor) -> Tensor:
        """The attention's output for each candidate."""
        x, times = self.projection.of_target(*candidates.target), encoded.get("times")
        asked = None if times is None else candidates.times
        rows = candidates.groups.lengths
        out: Tensor = self.attention(x, encoded["keys"], rows, lengths, asked, times, candidates.visible)
        return out


class SearchReader(HistoryReader):
    """Attention of each candidate to at most `keep` events that a search picks for it."""

    def __init__(self, history: History, target: Sequence[int], search: str, keep: int, width: int, heads: int) -> None:
        super().__init__()
        self.out_features, self.keep, self.max_length = width, keep, history.max_length
        self.hard, self.compared = search == "hard", sum(target)
        self.causal = not self.hard
        self.per_event = ("events", *(("categories",) if self.hard else ()), *(("times",) if history.times else ()))
        if self.hard and history.categories is None:
            raise OptionError(
                f"hard search over {history.name!r} needs categories= of the history, the number feature with each "
                f"event's category; or use search='soft', or give the history max_length={keep}, which needs no search"
            )
        comparable = history.width == self.compared if history.combine == "sum" else starts_with(history, target)
        if not self.hard and not comparable:
            raise OptionError(
                f"soft search compares the target, {list(target)} wide, with the first features of history "
                f"{history.name!r}, {list(history.widths.values())} wide; list first those that share the target's "
                "tables"
            )
        self.queries = linear(sum(target), width)
        self.attention = SelectedAttention(width, history.width, heads, times=history.times is not None)

    def encode(self, history: HistoryColumns) -> dict[str, Tensor]:
        """The events as the tables gave them, with times; of hard search in the order of their categories."""
        encoded = {"events": history.events}
        if history.times is not None:
            encoded["times"] = history.times
        if not self.hard:
            return encoded
        assert history.categories is not None
        encoded["categories"] = history.categories
        order = sort_by_category(history.categories, history.lengths)
        return {name: column.index_select(0, order) for name, column in encoded.items()}

    def interest(self, candidates: Candidates, encoded: Mapping[str, Tensor], lengths: Tensor) -> Tensor:
        """The attention's output for each candidate."""
        target, groups, events = torch.cat(candidates.target, dim=1), candidates.groups, encoded["events"]
        if self.hard:
            assert candidates.categories is not None
            index, counts = newest_in_category(
                encoded["categories"], lengths, groups.users, candidates.categories, self.keep, self.max_length
            )
        else:
            index, counts = most_similar(
                target, events[:, : self.compared], groups.lengths, lengths, self.keep, candidates.visible
            )
        times = encoded.get("times")
        asked = None if times is None else candidates.times
        out: Tensor = self.attention(self.queries(target), events, index, counts, asked, times)
        return out


class SIM(UserTower):
    """Search-based Interest Model: attention over the `keep` events of a long history that matter to the candidate.

    `search="hard"` needs `categories=` of the history and `category=`, the number feature of the candidate's category.
    The other options are those of BST.

    >>> history = History(["seen"], categories="seen_category", max_length=10_000)
    >>> tower = SIM(["item"], [history], "item", 8, search="hard", category="item_category", width=8, heads=2)
    >>> tower.user_features
    ('seen', 'seen_category')
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
        category: str | None = None,
        search: str = "hard",
        keep: int = 100,
        width: int = 64,
        heads: int = 4,
        interaction: str = "concat",
        top: Sequence[int] = (200, 80),
        head: Head | None = None,
    ) -> None:
        if search not in SEARCHES:
            raise OptionError(f"search={search!r}; {choices(search, SEARCHES)}")
        positive("keep", keep)

        def reader(history: History, widths: Sequence[int]) -> HistoryReader:
            if history.max_length <= keep:
                return WholeReader(history, widths, width, heads)
            if search == "hard" and category is None:
                raise OptionError("hard search needs category=, the number feature with each candidate's category")
            return SearchReader(history, widths, search, keep, width, heads)

        inputs = UserInputs(features, histories, target, dim, dense_features, user_features, time, category)
        super().__init__(inputs, reader, TopOptions(interaction, top, head))
