"""UserTower: a tower with a user part and a candidate part, over any number of histories.

The user part (`encode_user`) reads the histories and the pooled features of the user, once for each user of a batch.
The candidate part (`score`) reads the other features, once for each row, and what the user part left.

Between them is one `HistoryReader` per history: it encodes the events and later compares candidates with them. What it
gives for a row (its interest), the row's vectors, its user's vectors and the dense features go to a `RankingTop`. BST,
HSTU, SIM and JaggedDIN differ in their readers alone. To write another tower, write a reader.

The encoding is a flat dict, `<history>_<key>`. A tensor `x` with one entry per event has `x_lengths` beside it; the
others have one entry per user. So users can be cut out of an encoding and joined with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hotrow.errors import BatchError, OptionError, choices
from hotrow.models.history import History, HistoryColumns
from hotrow.models.inputs import Features, FeatureTower, check_dense, pick, present, present_number
from hotrow.models.part_vectors import CandidateVectors, UserVectors
from hotrow.models.ranking_top import RankingTop, TopOptions
from hotrow.nn.histories.segments import RowGroups, first_events, group_rows, newest_seen


@dataclass(frozen=True)
class UserInputs:
    """What a UserTower reads.

    `features` are the pooled ones, names (all `dim` wide) or name → width; `user_features` says which of them are the
    user's. `target` names those that describe the candidate as an event. `time` and `category` name number features of
    one entry per example: the time of the example, and the category of its candidate.
    """

    features: Features
    histories: object
    target: object
    dim: int | None = None
    dense_features: int = 0
    user_features: Sequence[str] = ()
    time: str | None = None
    category: str | None = None


class Candidates(NamedTuple):
    """The candidates of a batch, in the order of their users: the target's vectors, times and categories.

    `visible` is how many events of the history each sees, or None if all.
    """

    target: list[Tensor]
    groups: RowGroups
    times: Tensor | None
    categories: Tensor | None
    visible: Tensor | None


class HistoryReader(nn.Module):
    """How a tower reads one history: `encode` in the user part, `interest` in the candidate part.

    `encode` returns the tensors named in `per_event` (`[events, ...]`) and `per_user` (`[users, ...]`). A `causal`
    reader encodes an event from it and earlier ones alone, and `interest` honours `candidates.visible`. A reader that
    is not causal may honour it too (`honours_visible`): a row then sees the first events as the whole history encodes
    them, so such rows are grouped by who makes the batch, never by `share_users`.
    """

    out_features: int
    causal = False
    per_event: tuple[str, ...] = ()
    per_user: tuple[str, ...] = ()

    @property
    def honours_visible(self) -> bool:
        """Whether rows may see the first events of a history alone."""
        return self.causal

    def encode(self, history: HistoryColumns) -> dict[str, Tensor]:
        """What candidates will read of this history."""
        raise NotImplementedError

    def interest(self, candidates: Candidates, encoded: Mapping[str, Tensor], lengths: Tensor) -> Tensor:
        """`[rows, out_features]` in the order of `candidates`. `lengths` are the events of each user, if any of
        `encoded` has one entry per event."""
        raise NotImplementedError


ReaderFactory = Callable[[History, Sequence[int]], HistoryReader]
"""From a history and the widths of the target's features to a reader."""


class UserTower(FeatureTower):
    """The base of towers over histories. `reader` makes a HistoryReader for each.

    `user_features`, `aligned`, `numbers`, `prefixes`, `causal` and `max_lengths` describe its inputs to whoever runs,
    exports or serves it.
    """

    jagged = True

    def __init__(self, inputs: UserInputs, reader: ReaderFactory, top: TopOptions) -> None:
        super().__init__(inputs.features, inputs.dim, inputs.dense_features)
        self.histories = tuple(history.with_widths(inputs.dim) for history in _histories(inputs.histories))
        self.target, self.time, self.category = _names(inputs.target), inputs.time, inputs.category
        _check_names(self.widths, self.histories, self.target, inputs)
        of_user = _names(inputs.user_features)
        self.user_widths = {name: width for name, width in self.widths.items() if name in of_user}
        self.candidate_widths = {name: width for name, width in self.widths.items() if name not in of_user}
        columns = [column for history in self.histories for column in history.columns]
        self.user_features: tuple[str, ...] = (*columns, *self.user_widths)
        self.aligned = tuple(history.columns for history in self.histories if len(history.columns) > 1)
        of_history = [name for history in self.histories for name in (history.times, history.categories)]
        self.numbers = tuple(name for name in (*of_history, self.time, self.category) if name is not None)
        self.max_lengths = {column: history.max_length for history in self.histories for column in history.columns}
        self.max_lengths |= {name: 1 for name in (self.time, self.category) if name is not None}
        target = [self.widths[name] for name in self.target]
        self.readers = nn.ModuleList(reader(history, target) for history in self.histories)
        widths = [*self.user_widths.values(), *self.candidate_widths.values()]
        self.top = RankingTop([*widths, *(reader.out_features for reader in self._readers)], inputs.dense_features, top)

    @property
    def causal(self) -> bool:
        """Whether the encoding of an event depends on it and on earlier events alone."""
        return all(reader.causal for reader in self._readers)

    @property
    def prefixes(self) -> tuple[tuple[str, ...], ...] | None:
        """The columns of each history, if rows may see the beginnings of histories."""
        return tuple(history.columns for history in self.histories) if self.causal else None

    @property
    def _readers(self) -> Iterable[HistoryReader]:
        return self.readers  # type: ignore[return-value]

    def encode_user(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The user part: from user features alone to the encoding of each user."""
        encoding: dict[str, Tensor] = {}
        if self.user_widths:
            encoding["user"] = torch.cat(pick(vectors, self.user_widths), dim=1)
        for history, reader in zip(self.histories, self._readers, strict=True):
            columns = history.read(vectors)
            for key, tensor in reader.encode(columns).items():
                encoding[f"{history.name}_{key}"] = tensor
                if key in reader.per_event:
                    encoding[f"{history.name}_{key}_lengths"] = columns.lengths
        return encoding

    def score(
        self, vectors: Mapping[str, Tensor], encoding: Mapping[str, Tensor], dense: Tensor | None = None
    ) -> Tensor:
        """The candidate part: logits `[rows]`, or `[rows, tasks]` with a head. `vectors["user_of"]` int64 `[rows]`."""
        logits: Tensor = self.top(*self.parts(vectors, encoding, dense))
        return logits

    def parts(
        self, vectors: Mapping[str, Tensor], encoding: Mapping[str, Tensor], dense: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """What the top reads: the vectors of each row's user, of its candidate, its interests; and dense features."""
        pooled, dense = pick(vectors, self.candidate_widths), check_dense(dense, self.dense_features)
        user_of = present(vectors, "user_of")
        if self.user_widths:
            widths = list(self.user_widths.values())
            pooled = [*encoding["user"].index_select(0, user_of).split(widths, dim=1), *pooled]
        return [*pooled, *self.interests(vectors, encoding)], dense

    def interests(self, vectors: Mapping[str, Tensor], encoding: Mapping[str, Tensor]) -> list[Tensor]:
        """What each history says about each row, `[rows, width]`."""
        groups = group_rows(present(vectors, "user_of"), self._users(encoding))
        target = [groups.sort(present(vectors, name)) for name in self.target]
        categories = None if self.category is None else groups.sort(_number(vectors, self.category))
        given = None if self.time is None else groups.sort(_number(vectors, self.time))
        found = []
        for history, reader in zip(self.histories, self._readers, strict=True):
            encoded = {key: encoding[f"{history.name}_{key}"] for key in (*reader.per_event, *reader.per_user)}
            key = f"{history.name}_{reader.per_event[0]}_lengths" if reader.per_event else ""
            lengths = encoding[key] if key else groups.lengths.new_zeros(groups.lengths.shape)
            visible = self._visible(vectors, history, groups)
            times = given
            if times is None and "times" in encoded:
                seen = lengths.index_select(0, groups.users) if visible is None else visible
                times = newest_seen(encoded["times"], lengths, groups.users, seen)
            candidates = Candidates(target, groups, times, categories, visible)
            found.append(groups.restore(reader.interest(candidates, encoded, lengths)))
        return found

    def _visible(self, vectors: Mapping[str, Tensor], history: History, groups: RowGroups) -> Tensor | None:
        """How many events of a history each row sees, or None if all."""
        name = f"{history.name}_visible"
        if name not in vectors:
            return None
        if not all(reader.honours_visible for reader in self._readers):
            raise BatchError(
                f"the batch has {name!r}, so some rows see the beginning of a history, but this tower encodes whole "
                "histories (causal is False); share users by equal histories: batch.share_users(tower.user_features)"
            )
        return groups.sort(vectors[name])

    def _users(self, encoding: Mapping[str, Tensor]) -> int:
        """How many users the encoding has."""
        history, reader = self.histories[0], next(iter(self._readers))
        key = reader.per_user[0] if reader.per_user else f"{reader.per_event[0]}_lengths"
        return encoding[f"{history.name}_{key}"].shape[0]

    def forward(self, vectors: Mapping[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """Logits `[rows]`, or `[rows, tasks]` with a head. Without `user_of` each row is a user of its own."""
        names = {*self.user_features, *(f"{name}_lengths" for name in self.user_features)}
        of_user = {name: vector for name, vector in vectors.items() if name in names}
        rest = {name: vector for name, vector in vectors.items() if name not in names}
        if not torch.compiler.is_compiling():
            of_user, rest = UserVectors(of_user, self.user_features), CandidateVectors(rest, self.user_features)
        if "user_of" not in rest:
            rows = present(rest, next(iter(self.candidate_widths)))
            rest["user_of"] = torch.arange(rows.shape[0], device=rows.device)
        return self.score(rest, self.encode_user(of_user), dense)


def _histories(given: object) -> tuple[History, ...]:
    each = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    histories = tuple(History.of(history) for history in each)
    if not histories:
        raise OptionError("histories is empty; give at least one: histories=[hr.models.History(['seen_item'])]")
    return histories


def _names(given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Sequence) or not all(isinstance(name, str) for name in given):
        raise OptionError(f"{given!r} is no list of names of features; give for instance ['item']")
    return tuple(given)


def _check_names(
    widths: Mapping[str, int], histories: Sequence[History], target: Sequence[str], inputs: UserInputs
) -> None:
    of_user = _names(inputs.user_features)
    for option, names in (("target", target), ("user_features", of_user)):
        for name in names:
            if name not in widths:
                raise OptionError(f"{option} has {name!r}, which is not among the features; {choices(name, widths)}")
    if not target:
        raise OptionError("target is empty; name the features that describe the candidate: target=['item']")
    for name in target:
        if name in of_user:
            raise OptionError(
                f"target {name!r} is among user_features, but the user part runs before candidates are known; "
                "leave it out of user_features"
            )
    columns = [column for history in histories for column in history.columns]
    for column in columns:
        if column in widths:
            raise OptionError(
                f"{column!r} is a column of a history and among the pooled features; leave it out of features="
            )
        if columns.count(column) > 1:
            raise OptionError(f"column {column!r} is in two histories; give each history columns of its own")
    for history in histories:
        history.widths  # noqa: B018  raises where they are missing
    for option, number in (("time", inputs.time), ("category", inputs.category)):
        if number in columns:
            raise OptionError(
                f"{option}={number!r} is a column of a history; name the number feature of one entry per example"
            )


def _number(vectors: Mapping[str, Tensor], name: str) -> Tensor:
    """A number feature of one entry per row, int64 `[rows]`."""
    values, lengths = present_number(vectors, name), present(vectors, f"{name}_lengths")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and not bool((lengths == 1).all()):
        at = int((lengths != 1).nonzero()[0])
        raise BatchError(f"example {at} has {int(lengths[at])} values of {name!r}; give each example one")
    if values.shape[0] == 0:
        return values.new_zeros(lengths.shape[0])
    return values.index_select(0, first_events(lengths).clamp(max=values.shape[0] - 1))
