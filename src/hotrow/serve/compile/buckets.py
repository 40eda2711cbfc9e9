"""Buckets: which padded shapes are worth compiling, and how a batch is cut over those that have been.

A `Ladder` says which shapes we want: sizes for the rows, and for each sequence its lengths. It is learned from
traffic by least padded work: `least_padding` is an exact dynamic programme over the sizes seen (O(buckets *
sizes^2), sizes thinned to at most 256), rows and lengths each by themselves. `Traffic` counts what comes and
proposes a new ladder; it keeps the old one until the new would save `GAIN` of its work, because every new bucket
costs a compilation.

A `Plan` says how one batch runs on what is compiled now: parts, each on a bucket or (bucket None) on the original
graph. It is the cheapest by measured seconds among: pad to one bucket, buckets then a rest, or the original graph
for all. A batch of more rows than the largest bucket is split into largest buckets and a rest.

All values here are frozen but `Traffic`, which has a lock.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hotrow.errors import OptionError
from hotrow.serve.graph.tower_graph import Shape

SIZES = 256  # distinct sizes that the dynamic programme looks at
GAIN = 0.1  # a new ladder must save this part of the work
PART_SECONDS = 30e-6  # what one more part costs beside its run: slices of every input, one concatenation
MOST_PARTS = 4  # beside the largest bucket's
Cost = Callable[[int], float]


@dataclass(frozen=True)
class Ladder:
    """The shapes we want compiled: every size of rows with every length.

    >>> Ladder((64, 256)).cover(Shape(100))
    Shape(rows=256, lengths=())
    >>> Ladder((64, 256)).cover(Shape(1000))
    Shape(rows=256, lengths=())
    """

    rows: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, sizes in (("rows", self.rows), *((f"lengths[{i}]", s) for i, s in enumerate(self.lengths))):
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise OptionError(f"a ladder's {name} are {sizes!r}; give sizes of at least 1, rising, each once")

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All buckets."""
        return tuple(Shape(r, lengths) for r in self.rows for lengths in itertools.product(*self.lengths))

    def cover(self, shape: Shape) -> Shape | None:
        """The bucket that a batch should have: the smallest that holds it, the largest for more rows than that.

        None when a sequence is longer than all lengths: that one stays with the original graph.
        """
        lengths = []
        for sizes, length in zip(self.lengths, shape.lengths, strict=True):
            at = bisect.bisect_left(sizes, length)
            if at == len(sizes):
                return None
            lengths.append(sizes[at])
        at = min(bisect.bisect_left(self.rows, shape.rows), len(self.rows) - 1)
        return Shape(self.rows[at], tuple(lengths))

    @classmethod
    def doubling(cls, rows: int, lengths: Sequence[int] = ()) -> Ladder:
        """Powers of two from 16 up to at least `rows`: what one starts with, before traffic says better.

        >>> Ladder.doubling(100).rows
        (16, 32, 64, 128)
        """
        return cls(_doubling(16, rows), tuple(_doubling(8, length) for length in lengths))


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def least_padding(
    counts: Mapping[int, float], most: int, cost: Cost | None = None, quantum: int = 1
) -> tuple[tuple[int, ...], float]:
    """At most `most` sizes such that padding every size seen up to the next of them costs least, and that cost.

    `counts` is size → how often. `cost` gives what one run of a size costs; without it, its size. Sizes are
    multiples of `quantum`. Exact among those: f(k, j) = the least cost of the j smallest sizes with k buckets, the
    last one at the j-th.

    >>> least_padding({1: 10, 100: 10, 101: 1}, 2)
    ((1, 101), 1121.0)
    """
    if most < 1:
        raise OptionError(f"buckets={most}; give at least 1")
    thinned = _thin(counts, quantum)
    if not thinned:
        raise OptionError("no traffic was seen; a ladder cannot be learned from nothing")
    sizes = sorted(thinned)
    price = [float(size) if cost is None else cost(size) for size in sizes]
    before = [0.0, *itertools.accumulate(float(thinned[size]) for size in sizes)]  # how many of the first j
    best = [price[j] * before[j + 1] for j in range(len(sizes))]  # one bucket
    came: list[list[int]] = [[-1] * len(sizes)]
    for _ in range(1, min(most, len(sizes))):
        row, back = list(best), [-2] * len(sizes)  # -2: one bucket fewer is as good
        for j in range(len(sizes)):
            for i in range(j):
                through = best[i] + price[j] * (before[j + 1] - before[i + 1])
                if through < row[j]:
                    row[j], back[j] = through, i
        best = row
        came.append(back)
    chosen, j = [], len(sizes) - 1
    level = len(came) - 1
    while j >= 0:
        if came[level][j] == -2:
            level -= 1
            continue
        chosen.append(sizes[j])
        j, level = came[level][j], level - 1
    return tuple(reversed(chosen)), best[-1]


def padded_cost(counts: Mapping[int, float], sizes: Sequence[int], cost: Cost | None = None) -> float:
    """What the sizes seen cost on these buckets; more than the largest runs on several of it and a rest."""
    total = 0.0
    for size, count in counts.items():
        whole, rest = divmod(size, sizes[-1])
        price = [float(s) if cost is None else cost(s) for s in (sizes[-1], sizes[bisect.bisect_left(sizes, rest)])]
        total += count * (whole * price[0] + (price[1] if rest else 0.0))
    return total


def _thin(counts: Mapping[int, float], quantum: int) -> Counter[int]:
    """Sizes up to a multiple of the quantum; the quantum doubles until there are few enough of them."""
    while True:
        thinned: Counter[int] = Counter()
        for size, count in counts.items():
            if size > 0 and count > 0:
                thinned[-(-size // quantum) * quantum] += count  # type: ignore[assignment]
        if len(thinned) <= SIZES:
            return thinned
        quantum *= 2


@dataclass
class Traffic:
    """Counts the shapes that come, and learns a ladder from them. Any thread may call it."""

    buckets: int = 8  # of rows
    lengths: int = 3  # of each sequence
    quantum: int = 8
    fade: float = 0.5  # what is left of a count after each proposal: old traffic matters less and less
    least: int = 200  # batches before a proposal
    seen: Counter[Shape] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, shape: Shape) -> None:
        """One batch of that shape came."""
        with self._lock:
            self.seen[shape] += 1

    def propose(self, now: Ladder, cost: Cost | None = None) -> Ladder:
        """The ladder to have from here on: `now`, unless another saves enough of its work."""
        with self._lock:
            seen = Counter(self.seen)
            if seen.total() < self.least:
                return now
            for shape in list(self.seen):
                self.seen[shape] = int(self.seen[shape] * self.fade)
            self.seen = +self.seen
        lengths = []
        for axis, sizes in enumerate(now.lengths):
            work: Counter[int] = Counter()
            for shape, count in seen.items():
                work[shape.lengths[axis]] += count * shape.rows
            lengths.append(_better(work, sizes, self.lengths, None, 1))
        rows: Counter[int] = Counter()
        for shape, count in seen.items():
            rows[shape.rows] += count
        return Ladder(_better(rows, now.rows, self.buckets, cost, self.quantum), tuple(lengths))


def _better(
    counts: Mapping[int, float], now: tuple[int, ...], most: int, cost: Cost | None, quantum: int
) -> tuple[int, ...]:
    if not +Counter(counts):  # type: ignore[type-var]
        return now
    proposed, _ = least_padding(counts, most, cost, quantum)
    would, does = padded_cost(counts, proposed, cost), padded_cost(counts, now, cost)
    return proposed if would < does * (1 - GAIN) else now


@dataclass(frozen=True)
class Part:
    """Some rows of a batch, in order: on a bucket, or (None) on the original graph."""

    rows: int
    bucket: Shape | None


@dataclass(frozen=True)
class Costs:
    """Measured seconds: of each bucket's artifact, and of the original graph at some shapes."""

    buckets: Mapping[Shape, float] = field(default_factory=dict)
    original: Mapping[Shape, float] = field(default_factory=dict)

    def of_original(self, shape: Shape) -> float:
        """Seconds of the original graph, on the line through the two nearest measurements; inf without any."""
        points = sorted((at.work, seconds) for at, seconds in self.original.items())
        if not points:
            return float("inf")
        if len(points) == 1 or points[0][0] == points[-1][0]:
            return points[0][1] * max(0.5, shape.work / points[0][0])  # small batches cost more than their share
        high = min(max(bisect.bisect_left(points, (shape.work, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[high - 1], points[high]
        line = y0 + (y1 - y0) * (shape.work - x0) / max(1, x1 - x0)
        return max(line, 0.5 * min(y0, y1) if shape.work < x0 else y1 if shape.work > x1 else 0.0)


def plan(shape: Shape, live: Iterable[Shape], costs: Costs) -> tuple[Part, ...]:
    """The cheapest way to run a batch on the buckets that are compiled, or on the original graph.

    >>> costs = Costs({Shape(64): 1.0, Shape(256): 3.0}, {Shape(64): 1.5, Shape(256): 6.0})
    >>> plan(Shape(200), costs.buckets, costs)
    (Part(rows=200, bucket=Shape(rows=256, lengths=())),)
    >>> [part.rows for part in plan(Shape(300), costs.buckets, costs)]
    [256, 44]
    """
    fitting: dict[int, Shape] = {}  # rows → the cheapest bucket of so many rows whose lengths are enough
    for bucket in live:
        if bucket.covers_lengths(shape.lengths):
            best = fitting.get(bucket.rows)
            if best is None or costs.buckets[bucket] < costs.buckets[best]:
                fitting[bucket.rows] = bucket
    if not fitting:
        return (Part(shape.rows, None),)
    sizes = sorted(fitting)
    whole, rest = divmod(shape.rows, sizes[-1])
    largest = fitting[sizes[-1]]
    parts = [Part(sizes[-1], largest)] * whole
    seconds = whole * (costs.buckets[largest] + PART_SECONDS)
    if rest:
        more, tail = _cheapest(rest, MOST_PARTS, sizes, fitting, costs, shape.lengths)
        seconds, parts = seconds + more, parts + tail
    if costs.of_original(shape) <= seconds - PART_SECONDS * bool(whole):
        return (Part(shape.rows, None),)
    return tuple(parts)


def _cheapest(
    rows: int, most: int, sizes: list[int], fitting: Mapping[int, Shape], costs: Costs, lengths: tuple[int, ...]
) -> tuple[float, list[Part]]:
    """Seconds and parts of a rest that is smaller than the largest bucket."""
    padded = fitting[sizes[bisect.bisect_left(sizes, rows)]]
    best, parts = costs.buckets[padded], [Part(rows, padded)]
    eager = costs.of_original(Shape(rows, lengths))
    if eager < best:
        best, parts = eager, [Part(rows, None)]
    if most > 1:
        for size in sizes[: bisect.bisect_left(sizes, rows)]:
            begin = costs.buckets[fitting[size]] + PART_SECONDS
            if begin < best:
                tail, more = _cheapest(rows - size, most - 1, sizes, fitting, costs, lengths)
                if begin + tail < best:
                    best, parts = begin + tail, [Part(size, fitting[size]), *more]
    return best, parts
