"""Buckets: which padded shapes are worth compiling, and how a batch is split over those that have been compiled.

A `Ladder` lists the wanted shapes: sizes for the rows, and lengths for each sequence. It is chosen to minimise the
padded work of the traffic seen. `least_padding` is an exact dynamic program over these sizes (O(buckets * sizes^2),
with at most 256 sizes), separately for rows and lengths. `Traffic` counts shapes and proposes a new ladder only if it
saves GAIN of the work, because every new bucket costs a compilation.

`plan` splits one batch into parts, each on a bucket that is compiled now or (bucket None) on the original graph. It
chooses the cheapest by measured seconds of: one padded bucket, several buckets and a remainder, or the original graph
for all. A batch with more rows than the largest bucket is split into parts of that bucket and a remainder.

All values are frozen except `Traffic`, which has a lock.
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

SIZES = 256  # the most distinct sizes in the dynamic program
GAIN = 0.1  # a new ladder must save this fraction of the work
PART_SECONDS = 30e-6  # cost of one more part besides its run: slicing every input, one concatenation
MOST_PARTS = 4  # besides those on the largest bucket
Cost = Callable[[int], float]


@dataclass(frozen=True)
class Ladder:
    """The shapes that should be compiled: every number of rows with every length.

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
                raise OptionError(
                    f"a ladder's {name} are {sizes!r}; give sizes of at least 1 in increasing order, each once"
                )

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All buckets."""
        return tuple(Shape(r, lengths) for r in self.rows for lengths in itertools.product(*self.lengths))

    def cover(self, shape: Shape) -> Shape | None:
        """The bucket for a batch: the smallest that it can be padded to, or the largest if it has more rows than that.

        None if a sequence is longer than all lengths; the original graph runs such a batch.
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
        """Powers of two from 16 up to at least `rows`: the ladder to start with, before any traffic.

        >>> Ladder.doubling(100).rows
        (16, 32, 64, 128)
        """
        return cls(_doubling(16, rows), tuple(_doubling(8, length) for length in lengths))

    @classmethod
    def of_totals(cls, rows: int, lengths: Sequence[int]) -> Ladder:
        """As `doubling`, for graphs whose lengths are totals of a batch: steps of four from 1 user or event.

        >>> Ladder.of_totals(100, [1000]).lengths
        ((1, 4, 16, 64, 256, 1024),)
        """
        return cls(_steps(1, rows, 4), tuple(_steps(1, length, 4) for length in lengths))


def _doubling(first: int, last: int) -> tuple[int, ...]:
    return _steps(first, last, 2)


def _steps(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def least_padding(
    counts: Mapping[int, float], most: int, cost: Cost | None = None, quantum: int = 1
) -> tuple[tuple[int, ...], float]:
    """At most `most` bucket sizes to which the sizes in `counts` are padded at the least total cost, and that cost.

    `counts` maps a size to its frequency. `cost` is the cost of one run at a size; by default the size itself.
    Bucket sizes are multiples of `quantum`. The result is exact among those, by dynamic programming: f(k, j) = the
    least cost of the j smallest sizes with k buckets, the last one at the j-th.

    >>> least_padding({1: 10, 100: 10, 101: 1}, 2)
    ((1, 101), 1121.0)
    """
    if most < 1:
        raise OptionError(f"buckets={most}; give at least 1")
    thinned = _thin(counts, quantum)
    if not thinned:
        raise OptionError("no traffic was counted, so no ladder can be chosen; count() batches first")
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
    """The cost of the counted sizes on these buckets. A size above the largest is split into it and a remainder."""
    total = 0.0
    for size, count in counts.items():
        whole, rest = divmod(size, sizes[-1])
        price = [float(s) if cost is None else cost(s) for s in (sizes[-1], sizes[bisect.bisect_left(sizes, rest)])]
        total += count * (whole * price[0] + (price[1] if rest else 0.0))
    return total


def _thin(counts: Mapping[int, float], quantum: int) -> Counter[int]:
    """Round sizes up to multiples of the quantum, which is doubled until there are at most SIZES of them."""
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
    """Counts the shapes of batches and learns a ladder from them. Any thread may call it."""

    totals: bool = False  # lengths are totals of a batch (events, users), not of each row
    buckets: int = 8  # of rows
    lengths: int = 3  # of each sequence
    quantum: int = 8
    decay: float = 0.5  # each proposal multiplies the counts by this, so older traffic weighs less
    min_batches: int = 200  # before a proposal
    seen: Counter[Shape] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, shape: Shape) -> None:
        """Count a batch of this shape."""
        with self._lock:
            self.seen[shape] += 1

    def propose(self, current: Ladder, cost: Cost | None = None) -> Ladder:
        """The ladder to use from now on: `current`, unless another one saves enough work."""
        with self._lock:
            seen = Counter(self.seen)
            if seen.total() < self.min_batches:
                return current
            for shape in list(self.seen):
                self.seen[shape] = int(self.seen[shape] * self.decay)
            self.seen = +self.seen
        lengths = []
        for axis, sizes in enumerate(current.lengths):
            work: Counter[int] = Counter()
            for shape, count in seen.items():
                work[shape.lengths[axis]] += count * (1 if self.totals else shape.rows)
            lengths.append(_better(work, sizes, self.lengths, None, 1))
        rows: Counter[int] = Counter()
        for shape, count in seen.items():
            rows[shape.rows] += count
        return Ladder(_better(rows, current.rows, self.buckets, cost, self.quantum), tuple(lengths))


def _better(
    counts: Mapping[int, float], current: tuple[int, ...], most: int, cost: Cost | None, quantum: int
) -> tuple[int, ...]:
    if not +Counter(counts):  # type: ignore[type-var]
        return current
    proposed, _ = least_padding(counts, most, cost, quantum)
    new_cost, old_cost = padded_cost(counts, proposed, cost), padded_cost(counts, current, cost)
    return proposed if new_cost < old_cost * (1 - GAIN) else current


@dataclass(frozen=True)
class Part:
    """The next rows of a batch, and the bucket that runs them (None: the original graph)."""

    rows: int
    bucket: Shape | None


@dataclass(frozen=True)
class Costs:
    """Measured seconds of each bucket's artifact, and of the original graph at some shapes."""

    buckets: Mapping[Shape, float] = field(default_factory=dict)
    original: Mapping[Shape, float] = field(default_factory=dict)
    totals: bool = False  # lengths are totals of a batch (events, users), not of each row

    def work(self, shape: Shape) -> int:
        """The cost of a run in rows and positions, or rows and events."""
        return shape.rows + sum(shape.lengths) if self.totals else shape.work

    def of_original(self, shape: Shape) -> float:
        """Estimated seconds of the original graph, on the line through the two nearest measurements; inf without
        any."""
        points = sorted((self.work(at), seconds) for at, seconds in self.original.items())
        work = self.work(shape)
        if not points:
            return float("inf")
        if len(points) == 1 or points[0][0] == points[-1][0]:
            return points[0][1] * max(0.5, work / points[0][0])  # small batches cost more per row
        high = min(max(bisect.bisect_left(points, (work, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[high - 1], points[high]
        line = y0 + (y1 - y0) * (work - x0) / max(1, x1 - x0)
        return max(line, 0.5 * min(y0, y1) if work < x0 else y1 if work > x1 else 0.0)


def plan(shape: Shape, live: Iterable[Shape], costs: Costs, splits: bool = True) -> tuple[Part, ...]:
    """The cheapest way to run a batch on the buckets that are compiled, or on the original graph. Without `splits` the
    batch runs whole.

    >>> costs = Costs({Shape(64): 1.0, Shape(256): 3.0}, {Shape(64): 1.5, Shape(256): 6.0})
    >>> plan(Shape(200), costs.buckets, costs)
    (Part(rows=200, bucket=Shape(rows=256, lengths=())),)
    >>> [part.rows for part in plan(Shape(300), costs.buckets, costs)]
    [256, 44]
    """
    usable: dict[int, Shape] = {}  # rows → the cheapest bucket with that many rows whose lengths suffice
    for found in live:
        if found.covers_lengths(shape.lengths):
            best = usable.get(found.rows)
            if best is None or costs.buckets[found] < costs.buckets[best]:
                usable[found.rows] = found
    if not usable:
        return (Part(shape.rows, None),)
    if not splits:
        whole_buckets = [bucket for bucket in usable.values() if bucket.covers(shape)]
        bucket = min(whole_buckets, key=costs.buckets.__getitem__, default=None)
        slower = bucket is None or costs.of_original(shape) <= costs.buckets[bucket]
        return (Part(shape.rows, None if slower else bucket),)
    sizes = sorted(usable)
    whole, rest = divmod(shape.rows, sizes[-1])
    largest = usable[sizes[-1]]
    parts = [Part(sizes[-1], largest)] * whole
    seconds = whole * (costs.buckets[largest] + PART_SECONDS)
    if rest:
        more, tail = _cheapest(rest, MOST_PARTS, sizes, usable, costs, shape.lengths)
        seconds, parts = seconds + more, parts + tail
    if costs.of_original(shape) <= seconds - PART_SECONDS * bool(whole):
        return (Part(shape.rows, None),)
    return tuple(parts)


def _cheapest(
    rows: int, most: int, sizes: list[int], usable: Mapping[int, Shape], costs: Costs, lengths: tuple[int, ...]
) -> tuple[float, list[Part]]:
    """Seconds and parts of the cheapest plan for a remainder that is smaller than the largest bucket."""
    padded = usable[sizes[bisect.bisect_left(sizes, rows)]]
    best, parts = costs.buckets[padded], [Part(rows, padded)]
    eager = costs.of_original(Shape(rows, lengths))
    if eager < best:
        best, parts = eager, [Part(rows, None)]
    if most > 1:
        for size in sizes[: bisect.bisect_left(sizes, rows)]:
            begin = costs.buckets[usable[size]] + PART_SECONDS
            if begin < best:
                tail, more = _cheapest(rows - size, most - 1, sizes, usable, costs, lengths)
                if begin + tail < best:
                    best, parts = begin + tail, [Part(size, usable[size]), *more]
    return best, parts
