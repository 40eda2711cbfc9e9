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
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from hotrow.batch import Jagged, KeyedBatch
from hotrow.data.source import check_batch_size
from hotrow.data.synthetic_log.generated import GeneratedStream
from hotrow.data.synthetic_log.shape import CRITEO_SHAPE, Shape
from hotrow.data.synthetic_log.world import Drift, Examples, World, auc_of
from hotrow.errors import OptionError
from hotrow.features.keys import offsets_of


@dataclass(frozen=True)
class SyntheticClicks(GeneratedStream):
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
        return auc_of(np.concatenate([part.logit for part in parts]), np.concatenate([part.clicks for part in parts]))

    def distinct_keys(self, examples: int | None = None) -> int:
        """The expected number of distinct keys in `examples` examples (default: this source's).

        Items that appear only in histories are not counted, so with histories there are more.

        >>> SyntheticClicks.criteo_like(keys=100_000_000).distinct_keys(1_500_000) > 1_000_000
        True
        """
        count = self.examples if examples is None else examples
        return round(sum(zipf.distinct(count) for zipf in self.world.zipfs.values()))

    kind = "synthetic"
    same = "pass the same seed, keys, drift and shape"

    @cached_property
    def _stamp(self) -> str:
        drift = dataclasses.asdict(self.drift) if isinstance(self.drift, Drift) else float(self.drift)
        text = json.dumps([self.seed, self.keys, drift, dataclasses.asdict(self.shape)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


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
