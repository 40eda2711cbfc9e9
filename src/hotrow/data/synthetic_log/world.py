"""World: the ground truth of a synthetic click log.

Users see items in contexts. Whether user u clicks item i is drawn with the logit

    bias + an effect of every key + taste(u) · style(i) + dense features + items seen lately

Every number in it is a hash of (seed, feature, rank), so a world of a billion keys takes no memory. Effects fade with a
key's rank, by 200 / (200 + rank): hot keys, which a model can learn in a short run, carry most of the signal, and the
long tail only exercises the table. Each term's share of the logit's variance is fixed, so the best reachable AUC is
near 0.80 (0.77 to 0.83 over seeds) for any shape and number of keys.

With a Drift the truth changes from day to day. A part of each item's quality and of each user's taste interpolates
between random draws, one for every midnight. Items leave and are replaced by items with new keys. So a model that
stopped learning gets worse while the best reachable AUC stays. Drift is a function of the seed and the event time.
"""

from __future__ import annotations

import decimal
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache

import numpy as np

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
from hotrow.data.synthetic_log.shape import Shape
from hotrow.data.synthetic_log.zipf import Zipf
from hotrow.errors import DataError, OptionError
from hotrow.features.hashing import BoolArray, IntArray, cross, hash_ints
from hotrow.features.times import DAY_MS, HOUR_MS

START_MS = 1_704_067_200_000
"""The event time of example 0: 2024-01-01 00:00 UTC, a Monday."""

BIAS = -1.1
LOGIT_STD = 1.42
FADE = 200
TASTES = 4
SHARES = {"user": 0.10, "item": 0.25, "taste": 0.15, "contexts": 0.20, "dense": 0.20, "history": 0.10}
"""Each term's share of the logit's variance. If a shape lacks a term, the others take over its share."""

_CELLS = 1024


@dataclass(frozen=True)
class Drift:
    """How fast a world changes.

    items, tastes: the part of every item's quality and every user's taste that is new every day, 0 to 1. new_items: the
    share of the items that leave every day, each replaced by one with a new key, 0 to 1.

    >>> Drift(items=0.8, new_items=0.2)
    Drift(items=0.8, tastes=0.0, new_items=0.2)
    """

    items: float = 0.0
    tastes: float = 0.0
    new_items: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1:
                raise OptionError(f"Drift({name}={value!r}); give a number from 0 (stays) to 1 (all new every day)")


@dataclass(frozen=True)
class Examples:
    """Some examples of a world, column by column."""

    ids: dict[str, IntArray]
    dense: FloatArray
    history: IntArray
    history_lengths: IntArray
    time: IntArray
    logit: FloatArray
    clicks: BoolArray


@dataclass(frozen=True)
class World:
    """The ground truth of one synthetic log: example i is a function of the world and of i."""

    seed: int
    keys: int
    drift: float | Drift
    shape: Shape

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise OptionError(f"seed={self.seed!r}; give an integer from 0 to 2**64 - 1")
        if not isinstance(self.keys, int) or isinstance(self.keys, bool) or self.keys >= 1 << 53:
            raise OptionError(f"keys={self.keys!r}; give an integer below 2**53")
        if not isinstance(self.drift, Drift) and (not isinstance(self.drift, (int, float)) or not 0 <= self.drift <= 1):
            raise OptionError(
                f"drift={self.drift!r}; give a number from 0 (none) to 1 (new item effects every day), or a Drift"
            )
        self.shape.sizes(self.keys)

    @cached_property
    def moves(self) -> Drift:
        """The drift as a Drift."""
        return self.drift if isinstance(self.drift, Drift) else Drift(items=self.drift)

    @cached_property
    def zipfs(self) -> dict[str, Zipf]:
        """The distribution of each sparse feature's ranks."""
        return {name: Zipf(size, self.shape.zipf) for name, size in self.shape.sizes(self.keys).items()}

    def examples(self, start: int, count: int) -> Examples:
        """Examples start to start + count."""
        indices = counters(start, count)
        ranks = {name: zipf.ranks(bits(indices, self._stream("draw", name))) for name, zipf in self.zipfs.items()}
        time = START_MS + np.arange(start, start + count, dtype=np.int64) * DAY_MS // self.shape.per_day
        dense = [normals(bits(indices, self._stream("dense", j))) / NORMAL_STD for j in range(self.shape.dense)]
        user, item = self.shape.roles
        items = self._present(ranks[item], time)
        history, seen, lengths = self._history(ranks[user], time)
        logit = self._logit(ranks, items, dense, (history, seen, lengths), time)
        noise = logistic(uniforms(bits(indices, self._stream("click"))))
        return Examples(
            ids={name: self._keys(name, items if name == item else values) for name, values in ranks.items()},
            dense=np.stack(dense, axis=1) if dense else np.zeros((count, 0)),
            history=self._keys(item, seen),
            history_lengths=lengths,
            time=time,
            logit=logit,
            clicks=logit > noise,
        )

    def _stream(self, *name: object) -> int:
        return stream(self.seed, *name)

    def _keys(self, feature: str, ranks: IntArray) -> IntArray:
        """The key of each rank. The hash is a bijection, so hot keys are spread over all 64 bits."""
        return hash_ints(ranks, self._stream("key", feature))

    def _present(self, ranks: IntArray, time: IntArray) -> IntArray:
        """The item at each rank at a time: the rank in the lower bits and a generation in the upper ones.

        Each rank's item is replaced at its own hour, so new items appear all day long.
        """
        share = self.moves.new_items
        if share == 0:
            return ranks
        phase = uniforms(self._hashes(self.shape.roles[1], ranks, "phase"))
        generation = ((time - START_MS) / DAY_MS * share + phase).astype(np.int64) & 1023
        return ranks + (generation << 53)

    def _logit(
        self,
        ranks: dict[str, IntArray],
        items: IntArray,
        dense: list[FloatArray],
        histories: tuple[IntArray, IntArray, IntArray],
        time: IntArray,
    ) -> FloatArray:
        """The logit. Terms are added in a fixed order, because a float sum's last bit depends on it."""
        user, item = self.shape.roles
        scale = self._scales
        contexts = [name for name in ranks if name not in (user, item)]
        logit = np.full(len(time), BIAS)
        logit += scale["user"] * self._effect(user, normals(self._hashes(user, ranks[user])), ranks[user])
        logit += scale["item"] * self._effect(item, self._item_effects(items, time), ranks[item])
        logit += scale["taste"] * self._taste(ranks[user], ranks[item], items, time)
        for number, name in enumerate(contexts):
            weight = scale["contexts"] * math.sqrt(_falling(number, len(contexts)))
            logit += weight * self._effect(name, normals(self._hashes(name, ranks[name])), ranks[name])
        if dense:
            logit += scale["dense"] * self._dense_effect(dense)
        if self.shape.history_length:
            logit += scale["history"] * self._history_effect(*histories)
        return logit

    @cached_property
    def _scales(self) -> dict[str, float]:
        absent = {
            "contexts": len(self.shape.sparse) == 2,
            "dense": self.shape.dense == 0,
            "history": self.shape.history_length == 0,
        }
        shares = {part: share for part, share in SHARES.items() if not absent.get(part, False)}
        return {part: LOGIT_STD * math.sqrt(share / sum(shares.values())) for part, share in shares.items()}

    def _hashes(self, feature: str, ranks: IntArray, what: object = "effect") -> IntArray:
        return bits(spread(ranks), self._stream(what, feature))

    def _effect(self, feature: str, numbers: IntArray | FloatArray, ranks: IntArray) -> FloatArray:
        """Numbers of standard deviation NORMAL_STD, faded by rank, scaled to variance 1 over the feature's draws."""
        norm = NORMAL_STD * math.sqrt(_mean_square(self.zipfs[feature]))
        return numbers * (FADE / norm) / (FADE + ranks)

    def _item_effects(self, items: IntArray, time: IntArray) -> IntArray | FloatArray:
        """The items' numbers, which drift from midnight to midnight if the world drifts."""
        item = self.shape.roles[1]
        return self._moving(item, items, time, self.moves.items, "effect", "drift")

    def _moving(
        self, feature: str, ids: IntArray, time: IntArray, part_new: float, still: str, drift: str
    ) -> IntArray | FloatArray:
        """Numbers of standard deviation NORMAL_STD; the part `part_new` of each is drawn anew every day."""
        fixed = normals(self._hashes(feature, ids, still))
        if part_new == 0:
            return fixed
        day, part = time // DAY_MS, (time % DAY_MS) / DAY_MS
        hashes = self._hashes(feature, ids, drift)
        today, tomorrow = (normals(cross(hashes, day + ahead)) for ahead in (0, 1))
        moving = ((1 - part) * today + part * tomorrow) / np.sqrt((1 - part) * (1 - part) + part * part)
        return math.sqrt(1 - part_new * part_new) * fixed + part_new * moving

    def _taste(self, users: IntArray, ranks: IntArray, items: IntArray, time: IntArray) -> FloatArray:
        """Taste · style, a dot product over four numbers each, scaled to variance 1."""
        user, item = self.shape.roles
        total = np.zeros(len(users))
        for k in range(TASTES):
            taste = self._moving(user, users, time, self.moves.tastes, f"taste {k}", f"drift {k}") / NORMAL_STD
            total += taste * (normals(self._hashes(item, items, f"style {k}")) / NORMAL_STD)
        seen = _mean_square(self.zipfs[user]) * _mean_square(self.zipfs[item])
        return total * (FADE / math.sqrt(TASTES * seen)) / (FADE + users) * FADE / (FADE + ranks)

    def _dense_effect(self, dense: list[FloatArray]) -> FloatArray:
        """Mostly linear, plus a square of the first feature, so that a tower learns more than a linear model."""
        weights = (normals(bits(counters(0, len(dense)), self._stream("weights"))) / NORMAL_STD).tolist()
        norm = math.sqrt(math.fsum(weight * weight for weight in weights))
        total = np.zeros(len(dense[0]))
        for column, weight in zip(dense, weights, strict=True):
            total += column * (weight / norm)
        # 1.7 is the variance of the square of a sum of four uniform numbers, scaled to variance 1.
        return total * math.sqrt(0.8) + (dense[0] * dense[0] - 1) * math.sqrt(0.2 / 1.7)

    def _history(self, users: IntArray, time: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The items that each user saw last, oldest first: their ranks, their ids, and how many for each user.

        A user sees one item an hour; the item of hour h is a hash of (user, h). So histories need no storage, and a
        user's history one hour later is the same shifted by one.
        """
        if self.shape.history_length == 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(len(users), np.int64)
        hashes = self._hashes("history", users, "user")
        lengths = (hashes.view(np.uint64) % np.uint64(self.shape.history_length + 1)).view(np.int64)
        owners = np.repeat(np.arange(len(users)), lengths)
        back = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(owners))
        hours = (time + (hashes >> 33 & 0xFFFFF)) // HOUR_MS
        item = self.shape.roles[1]
        seen_at = hours[owners] - back
        ranks = self.zipfs[item].ranks(cross(hashes[owners], seen_at))
        return ranks, self._present(ranks, np.maximum(seen_at * HOUR_MS, START_MS)), lengths

    def _history_effect(self, history: IntArray, seen: IntArray, lengths: IntArray) -> FloatArray:
        """The sum of the items' history numbers. They are integers, so the order of addition does not matter."""
        item = self.shape.roles[1]
        numbers = normals(self._hashes(item, seen, "seen"))
        faded = np.rint(numbers * FADE / (FADE + history)).astype(np.int64)
        ends = np.cumsum(lengths)
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(faded)])
        total = sums[ends] - sums[ends - lengths]
        norm = NORMAL_STD * math.sqrt(_mean_square(self.zipfs[item]) * self.shape.history_length / 2)
        effect: FloatArray = total / norm
        return effect


@lru_cache(maxsize=256)
def _mean_square(zipf: Zipf) -> float:
    """The mean square of the fading factor over the feature's draws."""
    fading = FADE / (FADE + zipf.middles())
    return zipf.mean(fading * fading)


def _falling(number: int, count: int) -> float:
    """The share of number `number` among `count` shares that fall as 1, 1/2, 1/3 ... and add up to 1."""
    return 1 / (1 + number) / math.fsum(1 / (1 + k) for k in range(count))


def logistic(uniform: FloatArray) -> FloatArray:
    """Logistic noise from uniform numbers: log(u / (1 - u)), interpolated linearly between 1,024 exact points."""
    points = _logistic_points()
    place = uniform * _CELLS
    cell = place.astype(np.int64)
    low = points[cell]
    return low + (points[cell + 1] - low) * (place - cell)


@lru_cache(maxsize=1)
def _logistic_points() -> FloatArray:
    """log(u / (1 - u)) for u = k / 1024. The two ends are infinite and are replaced by the value a quarter cell
    inside."""
    with decimal.localcontext(decimal.Context(prec=30)):
        inner = [float((Decimal(k) / (_CELLS - k)).ln()) for k in range(1, _CELLS)]
        end = float((4 * Decimal(_CELLS) - 1).ln())
    return np.array([-end, *inner, end])


def auc_of(scores: FloatArray, clicks: BoolArray) -> float:
    """The chance that a clicked example scores higher than one that was not; ties count half.

    >>> auc_of(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True]))
    0.875
    """
    positive = int(clicks.sum())
    negative = len(clicks) - positive
    if not positive or not negative:
        raise DataError(f"no AUC: {positive} clicks among {len(clicks)} examples; take more examples")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[inverse][clicks].sum() - positive * (positive + 1) / 2) / (positive * negative))
