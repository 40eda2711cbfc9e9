"""LongInterests: a synthetic log whose clicks are decided by what a user bought long ago.

A visit is a user with a history of up to 10,000 events, and one or more candidate items. The user has a few interests:
categories, each shown by a short run of bought items (`action` 2) somewhere before the last `recent` events. All other
events are viewed (0) or clicked (1) items of any category. A candidate is clicked with the logit

    bias + INTEREST if its category is an interest + RECENT if one of the last `recent` events was a click on its
    category + a quality of the item

So a model that reads the last `recent` events sees the last two terms and not the first one, which carries most of the
signal; attention over the whole history can find it. Users have no key and never return, so nothing can be learned by
heart. Every number is a hash of (seed, visit, event), and the known best is the AUC of the true logit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hotrow.batch import Jagged, KeyedBatch
from hotrow.data.source import check_batch_size
from hotrow.data.synthetic_log.counter_rng import (
    NORMAL_STD,
    FloatArray,
    bits,
    counters,
    normals,
    spread,
    stream,
    uniforms,
)
from hotrow.data.synthetic_log.generated import GeneratedStream
from hotrow.data.synthetic_log.world import START_MS, auc_of, logistic
from hotrow.data.synthetic_log.zipf import Zipf
from hotrow.errors import OptionError
from hotrow.features.hashing import BoolArray, IntArray, cross, hash_ints
from hotrow.features.keys import offsets_of
from hotrow.features.times import HOUR_MS

VIEW, CLICK, BUY = 0, 1, 2
BIAS, INTEREST, RECENT, QUALITY = -2.0, 3.0, 0.6, 0.5
FADE = 200
VISIT_MS = 1000
EVENT_MS = HOUR_MS // 6
UNIT_EVENTS = 1 << 20
MOST = 10_000


@dataclass(frozen=True)
class LongInterests(GeneratedStream):
    """A source of `examples` examples, beginning with example number `offset` of the stream.

    history_length: the longest history, up to 10,000 events; the shortest is half of it. items, categories: how many
    there are. interests: categories that a user is interested in. shown: how many bought items show each. recent: no
    interest is shown among so many newest events. candidates: consecutive examples that share one visit and history.

    A batch has the ids `item`, `category` (of the candidate), `seen_item`, `seen_category`, `seen_action`, and
    `seen_time` in `batch.numbers`: the aligned columns of the history, oldest first.

    >>> batch, _ = next(LongInterests(examples=100, history_length=1000, batch_size=64).batches())
    >>> bool((batch.ids["seen_item"].lengths() == batch.numbers["seen_time"].lengths()).all())
    True
    """

    examples: int = 100_000
    batch_size: int = 256
    offset: int = 0
    seed: int = 0
    history_length: int = 1000
    items: int = 20_480
    categories: int = 64
    interests: int = 8
    shown: int = 4
    recent: int = 50
    candidates: int = 1
    zipf: float = 1.05

    kind = "synthetic interests"
    same = "pass the same options as before"
    aligned = (("seen_item", "seen_category", "seen_action", "seen_time"),)
    sparse = ("item", "category", "seen_item", "seen_category", "seen_action")

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        for name, low in (
            ("examples", 0),
            ("offset", 0),
            ("interests", 1),
            ("shown", 1),
            ("recent", 0),
            ("candidates", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise OptionError(f"{name}={value!r}; give a whole number, {low} or more")
        if self.categories < 2 * self.interests or self.categories % self.interests:
            raise OptionError(
                f"categories={self.categories} with interests={self.interests}; give a multiple of "
                "interests, twice or more"
            )
        if self.items < self.categories or self.items % self.categories:
            raise OptionError(f"items={self.items}; give a multiple of categories={self.categories}")
        if not 0 < self.history_length <= MOST or self._room < self.shown:
            events = 2 * (self.recent + self.interests * self.shown)
            raise OptionError(f"history_length={self.history_length}; give {events} to {MOST} for these options")

    @property
    def unit_examples(self) -> int:
        """How many examples a worker makes at once."""
        return max(1, UNIT_EVENTS // self.history_length)

    @property
    def _shortest(self) -> int:
        return (self.history_length + 1) // 2

    @property
    def _room(self) -> int:
        """In how many events of the shortest history each interest is shown."""
        return (self._shortest - self.recent) // self.interests

    def describe(self) -> str:
        """One line for a log."""
        ends = f"{self.offset:,} to {self.offset + self.examples:,}"
        return f"synthetic: examples {ends} of seed {self.seed}, histories of {self._shortest} to {self.history_length}"

    def best_auc(self, n: int = 20_000, start: int | None = None) -> float:
        """The AUC of the true probability on n examples, by default those after this source's range."""
        begin = self.offset + self.examples if start is None else start
        step = self.unit_examples
        parts = [self._truth(at, min(step, begin + n - at)) for at in range(begin, begin + n, step)]
        return auc_of(np.concatenate([part.logit for part in parts]), np.concatenate([part.clicks for part in parts]))

    def batch(self, start: int, count: int) -> KeyedBatch:
        """Examples start to start + count of the whole stream."""
        truth = self._truth(start, count)
        history = truth.history
        repeat = truth.visit - truth.visit[0]
        lengths = history.lengths[repeat]
        offsets = torch.from_numpy(offsets_of(lengths))
        first = offsets_of(history.lengths)[:-1][repeat]
        chosen = np.repeat(first - offsets_of(lengths)[:-1], lengths) + np.arange(int(lengths.sum()))
        shared = len(history.lengths) < count

        def jagged(values: IntArray) -> Jagged:
            return Jagged(torch.from_numpy(values[chosen] if shared else values), offsets)

        ids = {
            "item": Jagged(torch.from_numpy(self._keys("item", truth.item))),
            "category": Jagged(torch.from_numpy(truth.item % self.categories)),
            "seen_item": jagged(self._keys("item", history.items)),
            "seen_category": jagged(history.items % self.categories),
            "seen_action": jagged(history.actions),
        }
        labels = torch.from_numpy(truth.clicks.astype(np.float32))
        time = torch.from_numpy(START_MS + truth.visit * VISIT_MS)
        return KeyedBatch(ids, None, labels, time, numbers={"seen_time": jagged(history.times)})

    @cached_property
    def _stamp(self) -> str:
        options = {**dataclasses.asdict(self), "examples": 0, "offset": 0, "batch_size": 0}
        return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]

    @cached_property
    def _within(self) -> Zipf:
        """The ranks of items within a category. An item's number modulo `categories` is its category."""
        return Zipf(self.items // self.categories, self.zipf)

    def _bits(self, indices: IntArray, *name: object) -> IntArray:
        return bits(indices.reshape(-1), stream(self.seed, "interests", *name)).reshape(indices.shape)

    def _keys(self, what: str, numbers: IntArray) -> IntArray:
        return hash_ints(numbers, stream(self.seed, "interests", "key", what))

    def _truth(self, start: int, count: int) -> _Truth:
        """The candidates of examples start to start + count, their users' histories and their clicks."""
        examples = np.arange(start, start + count, dtype=np.int64)
        visit = examples // self.candidates
        visits = np.arange(visit[0], visit[-1] + 1) if count else np.zeros(0, np.int64)
        mine = self._interests(visits)
        history = self._history(visits, mine)
        owner = visit - visits[0] if count else visit
        indices = counters(start, count)
        # Half of the candidates have a category of the user's interests, the others any.
        random = self._bits(indices, "candidate").view(np.uint64)
        chosen = mine[owner, (random >> np.uint64(8)).astype(np.int64) % self.interests]
        anything = (random >> np.uint64(32)).astype(np.int64) % self.categories
        category = np.where(random & np.uint64(1), chosen, anything)
        item = self._within.ranks(self._bits(indices, "candidate item")) * self.categories + category
        interested = (mine[owner] == category[:, None]).any(axis=1)
        logit = BIAS + INTEREST * interested + RECENT * history.recent[owner, category] + self._quality(item)
        clicks = logit > logistic(uniforms(self._bits(indices, "click")))
        return _Truth(visit, item, history, logit, clicks)

    def _interests(self, visits: IntArray) -> IntArray:
        """The categories that interest the user of each visit, all different: [visits, interests]."""
        width = self.categories // self.interests
        numbers = self._bits(spread(_pairs(visits, self.interests, self.interests)), "interest").view(np.uint64)
        return np.arange(self.interests) * width + (numbers % np.uint64(width)).astype(np.int64)

    def _history(self, visits: IntArray, mine: IntArray) -> _History:
        """The events of each visit, oldest first."""
        shortest, longest = self._shortest, self.history_length
        random = self._bits(spread(visits), "length").view(np.uint64)
        lengths = shortest + (random % np.uint64(longest - shortest + 1)).astype(np.int64)
        offsets = offsets_of(lengths)
        owners = np.repeat(np.arange(len(visits)), lengths)
        back = offsets[1:][owners] - 1 - np.arange(len(owners))  # 0 is the newest event
        event = self._bits(spread(visits[owners] * (1 << 14) + back), "event")
        wide = event.view(np.uint64)
        category = (wide & np.uint64(0xFFFFF)).astype(np.int64) % self.categories
        actions = ((wide >> np.uint64(20)) & np.uint64(1)).astype(np.int64)
        jitter = (wide >> np.uint64(32)).astype(np.int64) % EVENT_MS
        # Interest j is shown in the j-th part of what is not recent, counted from the newest, at a random place of it.
        room = (lengths - self.recent) // self.interests
        places = self._bits(spread(_pairs(visits, self.interests, self.interests)), "place").view(np.uint64)
        shift = (places % (room - self.shown + 1).astype(np.uint64)[:, None]).astype(np.int64)
        first = self.recent + np.arange(self.interests) * room[:, None] + shift
        at = first[:, :, None] + np.arange(self.shown)  # how far back: [visits, interests, shown]
        bought = (offsets[1:, None, None] - 1 - at).reshape(-1)
        category[bought] = np.repeat(mine.reshape(-1), self.shown)
        actions[bought] = BUY
        items = self._within.ranks(cross(event, event)) * self.categories + category
        times = START_MS + visits[owners] * VISIT_MS - (back + 1) * EVENT_MS + jitter
        recent = np.zeros((len(visits), self.categories), np.bool_)
        newest = (back < self.recent) & (actions == CLICK)
        recent[owners[newest], category[newest]] = True
        return _History(lengths, items, actions, times, recent)

    def _quality(self, items: IntArray) -> FloatArray:
        rank = items // self.categories
        quality: FloatArray = (
            QUALITY * normals(self._bits(spread(items), "quality")) / NORMAL_STD * FADE / (FADE + rank)
        )
        return quality


@dataclass(frozen=True)
class _History:
    lengths: IntArray
    items: IntArray
    actions: IntArray
    times: IntArray
    recent: BoolArray  # [visits, categories]: whether one of the recent events is a click on the category


@dataclass(frozen=True)
class _Truth:
    visit: IntArray
    item: IntArray
    history: _History
    logit: FloatArray
    clicks: BoolArray


def _pairs(first: IntArray, count: int, size: int) -> IntArray:
    """A number for each pair of a first number and 0 to count."""
    return first[:, None] * size + np.arange(count)
