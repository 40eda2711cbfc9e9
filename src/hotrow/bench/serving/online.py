"""Online learning on a drifting log: its gain in AUC, freshness, and Redis reads.

    online/auc                     the live model's AUC in the last window, against the same model frozen earlier
    online/freshness_p99/<bus>     seconds from event to answer while rows change (where `hotrow serve` follows a bus)
    online/redis_read              rows read from a Redis cluster (remote.py)

The drift depends only on the seed and the event time, and windows are cut by examples, so `online/auc` is the same in
every run on every machine. The frozen model is the live one after `freeze` examples: it is evaluated on the last window
before training continues, which creates no row and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hotrow.bench.harness import Result, higher
from hotrow.data import Drift, Shape
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.models import DLRM
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.optim import RowWiseAdagrad
from hotrow.table import Table
from hotrow.train.trainer import Trainer

if TYPE_CHECKING:
    from hotrow.bench.serving.freshness import LoadSettings

DRIFT = Drift(items=0.9, tastes=0.9, new_items=0.25)
BAR = 0.03


@dataclass(frozen=True)
class Scale:
    """How long the log is, in examples; a day of it has `per_day`."""

    freeze: int = 192_000
    examples: int = 480_000
    window: int = 24_000
    per_day: int = 60_000
    keys: int = 500_000
    batch: int = 1000


@dataclass(frozen=True)
class Curves:
    """AUC by window: the live model's from the start, the frozen one's of the windows after it was frozen."""

    live: list[float]
    frozen: list[float]


def results(scale: Scale | None = None) -> Iterator[Result | str]:
    """The results above."""
    scale = scale or Scale()
    yield from auc(scale)
    try:
        yield from freshness()
    except ImportError as error:
        yield f"no freshness rows: {error}"
    try:
        from hotrow.bench.storage import remote

        yield from remote.results()
    except ImportError as error:
        yield f"no Redis rows: {error}"


def auc(scale: Scale) -> Iterator[Result | str]:
    """The live model against the frozen one."""
    yield f"learning {scale.examples:,} clicks of a drifting log, predicting each first"
    curves = train(scale)
    yield higher("online/auc", "AUC", curves.live[-1], "frozen", curves.frozen[-1])
    yield higher("online/auc_gain", "AUC", curves.live[-1] - curves.frozen[-1], "bar", BAR)


def freshness(pace: LoadSettings | None = None) -> Iterator[Result | str]:
    """The time from event to answer on each bus (freshness.py). The model is trained a little first."""
    from hotrow.bench.serving import freshness as bench
    from hotrow.demo.server import requests

    log = SyntheticClicks(1 << 40, 512, keys=500_000, drift=DRIFT, shape=Shape(history_length=5))

    def served() -> Recommender:
        made = model(log)
        Trainer(made).fit(log, steps=100, progress=False)
        return made

    yield from bench.results(served, replace(log, offset=51_200), requests(log, 51_200), pace)


def train(scale: Scale, frozen_windows: int | None = 1) -> Curves:
    """Both curves. The frozen model is evaluated on the last `frozen_windows` windows (None: all)."""
    log = SyntheticClicks(
        scale.examples, scale.batch, keys=scale.keys, drift=DRIFT, shape=Shape(per_day=scale.per_day, history_length=5)
    )
    trainer = Trainer(model(log), window=scale.window)
    tower = trainer.model.tower
    trainer.dense_optimizer = torch.optim.Adam(tower.parameters(), lr=2e-3)
    report = trainer.fit(log, steps=scale.freeze // scale.batch, progress=False)
    live, cursor = [window.auc for window in report.windows], trainer.cursor
    starts = list(range(scale.freeze, scale.examples, scale.window))
    starts = starts if frozen_windows is None else starts[-frozen_windows:]
    frozen = [
        trainer.evaluate(replace(log, offset=start, examples=scale.window), progress=False)["auc"] for start in starts
    ]
    report = trainer.fit(log, cursor=cursor, progress=False)
    return Curves(live + [window.auc for window in report.windows], frozen)


def model(log: SyntheticClicks) -> Recommender:
    """A small DLRM for the log."""
    tables = [
        Table(name, 16, {"item": "sum", "history": "mean"}) if name == "item" else Table(name, 16)
        for name in log.shape.sparse
    ]
    embeddings = EmbeddingCollection(tables, optimizer=RowWiseAdagrad(lr=0.1), seed=1)
    torch.manual_seed(1)
    return Recommender(embeddings, DLRM(embeddings.features, dense_features=4, bottom=[32], top=[64, 32]))
