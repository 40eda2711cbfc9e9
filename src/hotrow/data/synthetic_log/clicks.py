"""SyntheticClicks: a click log that is generated while it is read.

It has any number of keys, a ground truth that a model can learn (world.py), and the best AUC that any model could
reach. Example i depends only on the options and on i, so the stream can be read from any example on: training and test
data are two ranges of one stream, and a cursor is the number of the next example. The same options give the same bits
on every machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from hotrow.batch import Jagged, KeyedBatch
from hotrow.data.source import Cursor, check_batch_size, cursor_number, match_cursor
from hotrow.data.split import DecodedUnit, DecodedUnits, Unit, finished_batches
from hotrow.data.strided import Steps, finished_steps
from hotrow.data.synthetic_log.shape import CRITEO_SHAPE, Shape
from hotrow.data.synthetic_log.world import Drift, Examples, World
from hotrow.errors import DataError, OptionError
from hotrow.features.keys import offsets_of

UNIT_EXAMPLES = 16_384


@dataclass(frozen=True)
class SyntheticClicks:
    """A source of `examples` synthetic examples, beginning with example number `offset` of the stream.

    keys: how many distinct keys there are, over all features. drift: 0 for a ground truth that never changes, up to 1
    for item effects that are new every day; a `Drift` also moves users' tastes and replaces items. shape: names, sizes
    and counts of the features.

    >>> train = SyntheticClicks(examples=10_000, keys=1_000_000_000)
    >>> test = SyntheticClicks(examples=2_000, offset=10_000, keys=1_000_000_000)
    >>> batch, cursor = next(train.batches())
    >>> batch.size, list(batch.ids)[:2], cursor["next"]
    (4096, ['user', 'item'], 4096)
    """

    examples: int = 1_000_000
    batch_size: int = 4096
    offset: int = 0
    seed: int = 0
    keys: int = 10_000_000
    drift: float | Drift = 0.0
    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        check_batch_size(self.batch_size)
        for name in ("examples", "offset"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"{name}={value!r}; give a whole number, 0 or more")
        if not isinstance(self.shape, Shape):
            raise OptionError(f"shape={self.shape!r}; give a hotrow.data.Shape")
        World(self.seed, self.keys, self.drift, self.shape)

    @staticmethod
    def criteo_like(
        examples: int = 1_000_000,
        batch_size: int = 4096,
        offset: int = 0,
        seed: int = 0,
        keys: int = 10_000_000,
        drift: float | Drift = 0.0,
    ) -> SyntheticClicks:
        """The same in Criteo's shape: 13 dense features and 26 sparse ones, C1 to C26.

        >>> next(SyntheticClicks.criteo_like(examples=10).batches())[0].dense.shape
        torch.Size([10, 13])
        """
        return SyntheticClicks(examples, batch_size, offset, seed, keys, drift, CRITEO_SHAPE)

    @cached_property
    def world(self) -> World:
        """The ground truth behind the clicks."""
        return World(self.seed, self.keys, self.drift, self.shape)

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """Batches from example `offset` on, or after the batch that came with `cursor`."""
        return self._stream(self._find_start(cursor), self.offset + self.examples)

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit]:
        """Units of some batches each."""
        step = self.batch_size * max(1, UNIT_EXAMPLES // self.batch_size)
        end = self.offset + self.examples
        return ({"start": at, "end": min(at + step, end)} for at in range(self._find_start(cursor), end, step))

    def decoder(self) -> SyntheticClicks:
        """This source itself."""
        return self

    def decode(self, unit: Unit) -> DecodedUnit:
        """The batches of one unit."""
        made = list(self._stream(unit["start"], unit["end"]))
        return DecodedUnit([batch for batch, _ in made], notes={"cursors": [cursor for _, cursor in made]})

    def assemble(
        self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]
    ) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """The batches of all units."""
        return finished_batches(parts)

    def every(self, number: int, of: int, cursor: Cursor | None = None) -> Steps:
        """Batch `number` of every `of` batches, None where the stream has ended before it, with the cursor after all.

        >>> [b and b.size for b, _ in SyntheticClicks(examples=10, batch_size=4).every(1, 2)]
        [4, None]
        """
        return self._steps(number, of, self._find_start(cursor), self.offset + self.examples)

    def strided(self, number: int, of: int) -> StridedSynthetic:
        """Batch `number` of every `of` batches, as units that any worker can generate."""
        return StridedSynthetic(self, number, of)

    def batch(self, start: int, count: int) -> KeyedBatch:
        """Examples start to start + count of the whole stream, also outside this source's range.

        >>> SyntheticClicks(examples=0).batch(1_000_000_000_000, 3).size
        3
        """
        return _to_batch(self.world.examples(start, count), self.shape)

    def describe(self) -> str:
        """One line for a log."""
        ends = f"{self.offset:,} to {self.offset + self.examples:,}"
        return f"synthetic: examples {ends} of seed {self.seed}, {self.keys:,} keys, batches of {self.batch_size}"

    def best_auc(self, n: int = 200_000, start: int | None = None) -> float:
        """The AUC of the true probability on n examples: no model can be expected to do better.

        By default these are the n examples after this source's range, which a model trained on it has not seen; `start`
        selects others.
        """
        begin = self.offset + self.examples if start is None else start
        step = 16_384
        parts = [self.world.examples(at, min(step, begin + n - at)) for at in range(begin, begin + n, step)]
        return auc(np.concatenate([part.logit for part in parts]), np.concatenate([part.clicks for part in parts]))

    def distinct_keys(self, examples: int | None = None) -> int:
        """The expected number of distinct keys in `examples` examples (default: this source's).

        Items that appear only in histories are not counted, so with histories there are more.

        >>> SyntheticClicks.criteo_like(keys=100_000_000).distinct_keys(1_500_000) > 1_000_000
        True
        """
        count = self.examples if examples is None else examples
        return round(sum(zipf.distinct(count) for zipf in self.world.zipfs.values()))

    def _stream(self, start: int, end: int) -> Iterator[tuple[KeyedBatch, Cursor]]:
        for at in range(start, end, self.batch_size):
            count = min(self.batch_size, end - at)
            yield self.batch(at, count), self._cursor(at + count)

    def _steps(self, number: int, of: int, start: int, end: int) -> Steps:
        for first in range(start, end, self.batch_size * of):
            at = first + number * self.batch_size
            batch = self.batch(at, min(self.batch_size, end - at)) if at < end else None
            yield batch, self._cursor(min(end, first + self.batch_size * of))

    def _cursor(self, following: int) -> Cursor:
        return {
            "source": "synthetic",
            "batch_size": self.batch_size,
            "offset": self.offset,
            "world": self._stamp,
            "next": following,
        }

    @cached_property
    def _stamp(self) -> str:
        drift = dataclasses.asdict(self.drift) if isinstance(self.drift, Drift) else float(self.drift)
        text = json.dumps([self.seed, self.keys, drift, dataclasses.asdict(self.shape)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _find_start(self, cursor: Cursor | None) -> int:
        if cursor is None:
            return self.offset
        cures = {
            "source": "resume with the kind of source that made the cursor",
            "batch_size": f"pass batch_size={cursor.get('batch_size')}",
            "offset": f"pass offset={cursor.get('offset')}",
            "world": "pass the same seed, keys, drift and shape",
        }
        mine = self._cursor(0)
        match_cursor(cursor, {name: mine[name] for name in cures}, cures)
        start, end = cursor_number(cursor, "next"), self.offset + self.examples
        if start > end or (start < end and (start - self.offset) % self.batch_size):
            raise DataError(
                f"the cursor does not fit this source: it stands before example {start}, where no batch of this source "
                f"begins (examples {self.offset} to {end}); pass the same examples= as before"
            )
        return start


@dataclass(frozen=True)
class StridedSynthetic:
    """Batch `number` of every `of` batches of a synthetic source. A unit is a range of steps."""

    source: SyntheticClicks
    number: int
    of: int

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit]:
        """Units of some steps each."""
        source = self.source
        step = source.batch_size * self.of * max(1, UNIT_EXAMPLES // source.batch_size)
        start, end = source._find_start(cursor), source.offset + source.examples
        return ({"start": at, "end": min(at + step, end)} for at in range(start, end, step))

    def decoder(self) -> StridedSynthetic:
        """This object itself."""
        return self

    def decode(self, unit: Unit) -> DecodedUnit:
        """The own batches of one unit."""
        made = list(self.source._steps(self.number, self.of, unit["start"], unit["end"]))
        own = [batch for batch, _ in made if batch is not None]
        return DecodedUnit(own, notes={"cursors": [cursor for _, cursor in made]})

    def assemble(self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]) -> Steps:
        """The own batches of all units."""
        return finished_steps(parts)


def auc(scores: npt.NDArray[np.float64], clicks: npt.NDArray[np.bool_]) -> float:
    """The chance that a clicked example scores higher than one that was not; ties count half.

    >>> auc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, True, False, True]))
    0.875
    """
    positive = int(clicks.sum())
    negative = len(clicks) - positive
    if not positive or not negative:
        raise DataError(f"no AUC: {positive} clicks among {len(clicks)} examples; take more examples")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[inverse][clicks].sum() - positive * (positive + 1) / 2) / (positive * negative))


def _to_batch(examples: Examples, shape: Shape) -> KeyedBatch:
    ids = {name: Jagged(torch.from_numpy(keys)) for name, keys in examples.ids.items()}
    if shape.history_length:
        offsets = torch.from_numpy(offsets_of(examples.history_lengths))
        ids["history"] = Jagged(torch.from_numpy(examples.history), offsets)
    return KeyedBatch(
        ids,
        dense=torch.from_numpy(examples.dense.astype(np.float32)) if shape.dense else None,
        labels=torch.from_numpy(examples.clicks.astype(np.float32)),
        time=torch.from_numpy(examples.time),
    )
