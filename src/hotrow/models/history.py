"""History: the columns of one history, and how a tower reads them.

The columns are aligned: event 3 of one is event 3 of the others. Features are columns with vectors (item, action);
times and categories are columns of integers without rows. A tower takes any number of histories.

`HistoryColumns` are those columns of a batch, checked. What is checked by comparing values (lengths) is checked on the
CPU and outside of export alone: on a GPU a comparison would wait for it, and the collection has compared the lengths
of the batch already (nn/tower_form.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hotrow.errors import BatchError, OptionError, choices
from hotrow.models.inputs import Features, common_width, feature_widths, present, present_number
from hotrow.nn.histories.segments import users_of_events
from hotrow.nn.mlp import linear
from hotrow.nn.sizes import positive

COMBINE = ("concat", "sum")


@dataclass(frozen=True)
class History:
    """One history of at most `max_length` events: aligned features, and perhaps times and categories of the events.

    `features` are names, or name → width. `times` names a number feature, in milliseconds, and `categories` another.
    `combine` says how an event's vectors become one: side by side ("concat") or added ("sum").

    >>> history = History(["seen_item", "seen_action"], times="seen_time", max_length=200)
    >>> history.name, history.columns
    ('seen_item', ('seen_item', 'seen_action', 'seen_time'))
    """

    features: Features
    times: str | None = None
    categories: str | None = None
    max_length: int = 1024
    combine: str = "concat"

    def __post_init__(self) -> None:
        if isinstance(self.features, str):
            object.__setattr__(self, "features", (self.features,))
        if not isinstance(self.features, (Mapping, Sequence)) or not self.features:
            raise OptionError(f"features of a history are {self.features!r}; give the names of its columns in a list")
        positive("max_length", self.max_length)
        if self.combine not in COMBINE:
            raise OptionError(f"combine={self.combine!r} of history {self.name!r}; {choices(self.combine, COMBINE)}")
        twice = [name for name in self.columns if self.columns.count(name) > 1]
        if twice:
            raise OptionError(f"history {self.name!r} has column {twice[0]!r} twice; name each column once")

    @property
    def name(self) -> str:
        """Its first feature."""
        return str(next(iter(self.features)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Its features, times and categories."""
        return (*self.features, *(name for name in (self.times, self.categories) if name is not None))

    @property
    def widths(self) -> dict[str, int]:
        """Width by feature."""
        if not isinstance(self.features, Mapping):
            raise OptionError(
                f"history {self.name!r} has no widths; pass dim= to the tower, or features of the history as "
                "{name: width}"
            )
        return dict(self.features)

    @property
    def width(self) -> int:
        """Of an event's vectors together."""
        widths = self.widths
        return sum(widths.values()) if self.combine == "concat" else common_width(widths, "combine='sum'")

    def with_widths(self, dim: int | None) -> History:
        """The same with the width of each feature: `dim`, where it carries none of its own."""
        if isinstance(self.features, Mapping):
            return replace(self, features=feature_widths(self.features, None))
        return replace(self, features=feature_widths(self.features, dim)) if dim is not None else self

    @staticmethod
    def of(given: object) -> History:
        """A History as a job file or a short call gives it: a name, a table of options, or a History.

        >>> History.of({"features": ["seen"], "max_length": 50}).max_length
        50
        """
        if isinstance(given, History):
            return given
        if isinstance(given, str):
            return History((given,))
        if not isinstance(given, Mapping):
            raise OptionError(f"a history is {given!r}; give hr.models.History(['seen_item'], max_length=200)")
        known = [field.name for field in fields(History)]
        for option in given:
            if option not in known:
                raise OptionError(f"a history has no option {option!r}; {choices(option, known)}")
        if "features" not in given:
            raise OptionError(f"a history has no features: {dict(given)!r}; give features=, the names of its columns")
        return History(**given)

    def read(self, vectors: Mapping[str, Tensor]) -> HistoryColumns:
        """Its columns in a batch. Raises BatchError for a missing column, or one of another form, width or length."""
        widths = self.widths
        features = [self._column(vectors, name, width) for name, width in widths.items()]
        times = None if self.times is None else self._column(vectors, self.times, 0)
        categories = None if self.categories is None else self._column(vectors, self.categories, 0)
        lengths = present(vectors, f"{self.name}_lengths")
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_lengths(vectors, lengths)
        joined = torch.cat(features, dim=1) if self.combine == "concat" else sum(features[1:], features[0])
        return HistoryColumns(joined, lengths, times, categories)

    def _column(self, vectors: Mapping[str, Tensor], name: str, width: int) -> Tensor:
        values = present(vectors, name) if width else present_number(vectors, name)
        if values.dim() == (3 if width else 2) or f"{name}_mask" in vectors:
            raise BatchError(
                f"history {name!r} came padded, but the tower reads it jagged: {name!r} [events, dim] and "
                f"'{name}_lengths'; call it through hr.Recommender, or with vectors of that form"
            )
        if width and (values.dim() != 2 or values.shape[1] != width):
            raise BatchError(
                f"history {name!r} came as {list(values.shape)}, but the tower reads events {width} wide; "
                f"leave the feature unpooled and give its table dim={width}"
            )
        if not width and (values.dim() != 1 or values.dtype != torch.int64):
            raise BatchError(f"{name!r} is {values.dtype} {list(values.shape)}; give it as a number: int64 [events]")
        return values

    def _check_lengths(self, vectors: Mapping[str, Tensor], lengths: Tensor) -> None:
        for name in self.columns:
            own, events = present(vectors, f"{name}_lengths"), vectors[name].shape[0]
            if own is not lengths and not torch.equal(own, lengths):
                raise BatchError(
                    f"{self.name!r} and {name!r} are columns of one history, but their lengths differ; "
                    "give each event a value in both, or put them into two histories"
                )
            if int(lengths.sum()) > events:
                raise BatchError(f"{name!r} has {events} events, but its lengths sum to {int(lengths.sum())}")
        longest = int(lengths.max()) if lengths.numel() else 0
        if longest > self.max_length:
            raise BatchError(
                f"history {self.name!r} has {longest} events, but max_length={self.max_length}; keep the newest "
                f"{self.max_length} (max_length= of the sequence in the feature spec), or build the tower for {longest}"
            )
        if self.times is not None:
            self._check_times(vectors[self.times], lengths)

    def _check_times(self, times: Tensor, lengths: Tensor) -> None:
        users = users_of_events(lengths, times.shape[0])
        falls = (times[1:] < times[:-1]) & (users[1:] == users[:-1]) & (users[1:] < lengths.shape[0])
        if bool(falls.any()):
            at = int(falls.nonzero()[0]) + 1
            user = int(users[at])
            raise BatchError(
                f"the times {self.times!r} of history {self.name!r} run backwards: entry {user} has "
                f"{int(times[at - 1])} and then {int(times[at])}; sort the events of each history by time, oldest first"
            )


class HistoryColumns(NamedTuple):
    """The columns of a history in a batch: vectors `[events, width]`, lengths `[users]`, int64 `[events]` columns."""

    events: Tensor
    lengths: Tensor
    times: Tensor | None
    categories: Tensor | None


class EventProjection(nn.Module):
    """A linear map of a history's events, and of candidates, to `[n, width]`.

    The target's features are the candidate as an event. If the history begins with features as wide as those, both use
    the same weights (they usually share tables, too), and what a candidate lacks, such as the action, counts as zeros.
    Otherwise the target has weights of its own. With `learned=False` there are no weights: events and candidates are
    what the tables gave, which must be `width` wide.

    >>> projection = EventProjection(History({"seen_item": 4, "seen_action": 2}), [4], 8)
    >>> projection.shared, projection.of_target(torch.zeros(3, 4)).shape
    (True, torch.Size([3, 8]))
    """

    def __init__(self, history: History, target: Sequence[int], width: int, learned: bool = True) -> None:
        super().__init__()
        self.shared = starts_with(history, target)
        self.sums = history.combine == "sum" and self.shared
        reads = (history.width, target[0] if self.sums else sum(target))
        if not learned and reads != (positive("width", width),) * 2:
            raise OptionError(
                f"project=False, but events of history {history.name!r} are {reads[0]} wide, the target {reads[1]} and "
                f"the encoder {width}; give all one width, or leave project= out"
            )
        self.events = linear(history.width, positive("width", width)) if learned else nn.Identity()
        self.target = None if self.shared or not learned else linear(sum(target), width)

    def forward(self, events: Tensor) -> Tensor:
        """Events `[events, history's width]` in, `[events, width]` out."""
        out: Tensor = self.events(events)
        return out

    def of_target(self, *vectors: Tensor) -> Tensor:
        """The target's vectors, each `[rows, ...]`, in; `[rows, width]` out."""
        joined = sum(vectors[1:], vectors[0]) if self.sums else torch.cat(vectors, dim=1)
        if self.target is not None:
            out: Tensor = self.target(joined)
            return out
        if isinstance(self.events, nn.Identity):
            return joined
        return nn.functional.linear(joined, self.events.weight[:, : joined.shape[1]], self.events.bias)


def starts_with(history: History, target: Sequence[int]) -> bool:
    """Whether a history's first features are as wide as the target's."""
    return list(history.widths.values())[: len(target)] == list(target)
