"""Serving a tower over histories on a GPU: captured buckets beside the way without lanes, in one engine.

    serve/gpu/histories        ms of a batch: DIN over histories of about 50 events, and a multi-hot feature
    serve/gpu/histories/lanes  thousand rows/s on 4 lanes

A batch without a captured bucket looks up its rows while no other does, and launches each operation of its tower.
Towers run in fp32, and both ways are compared with each other before they are timed. serve_gpu.py yields these rows.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.bench.harness import Result, higher, lower
from hotrow.config import Memory
from hotrow.models import build_tower
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.serve.execution.engine import Engine
from hotrow.serve.repository.export import export
from hotrow.table import Table

KEYS, DIM, DENSE, LONGEST, ROWS, LANES = 200_000, 64, 4, 200, 256, 4
HBM = "64MiB"
TOLERANCE = 1e-4  # of the largest logit, between the two ways
BATCHES, SECONDS = 60, 1.5


def history_rows(folder: str) -> Iterator[Result | str]:
    """The rows of this benchmark."""
    yield "a model over histories"
    path = Path(folder) / "repository" / "histories"
    make_history_model(path)
    engine = Engine(path, memory=Memory(hbm=HBM), ladder=(ROWS,), lanes=LANES)
    try:
        yield from compare(engine, [draw_histories(seed) for seed in range(BATCHES)])
    finally:
        engine.close()


def make_history_model(path: Path, keys: int = KEYS) -> None:
    """DIN over one history, with a multi-hot feature, exported."""
    tables = [
        Table("item", DIM, {"item": "sum", "seen": "none"}, max_length=LONGEST),
        Table("user", DIM, {"user": "sum", "tags": "mean"}),
    ]
    embeddings = EmbeddingCollection(tables, optim.SGD(), seed=1)
    for table in embeddings.tables:
        table.assign(torch.arange(keys), torch.empty(keys, DIM).uniform_(-0.5, 0.5))
    torch.manual_seed(0)
    tower = build_tower(
        "din",
        features=embeddings.features,
        sequences=embeddings.sequences,
        dense_features=DENSE,
        target="item",
        history="seen",
        top=(256, 128),
    )
    export(Recommender(embeddings, tower.eval()), path)


def draw_histories(seed: int, rows: int = ROWS, keys: int = KEYS) -> KeyedBatch:
    """A batch: hot keys more often, lengths log-normal with median 50."""
    draw = np.random.default_rng(seed)

    def jagged(lengths: np.ndarray) -> Jagged:  # type: ignore[type-arg]
        drawn = (draw.random(int(lengths.sum())) ** 4 * keys).astype(np.int64)
        return Jagged(torch.from_numpy(drawn), torch.from_numpy(np.concatenate([[0], lengths.cumsum()])))

    lengths = np.clip(draw.lognormal(np.log(50), 0.8, rows), 1, LONGEST).astype(np.int64)
    ids = {
        "item": Jagged(torch.from_numpy(draw.integers(0, keys, rows))),
        "seen": jagged(lengths),
        "user": Jagged(torch.from_numpy(draw.integers(0, keys, rows))),
        "tags": jagged(draw.integers(0, 8, rows)),
    }
    return KeyedBatch(ids, torch.from_numpy(draw.random((rows, DENSE), dtype=np.float32)))


def compare(engine: Engine, batches: Sequence[KeyedBatch]) -> Iterator[Result]:
    """Both ways in turns, on the same batches."""
    assert engine._lanes is not None
    jagged = engine._lanes.jagged
    for batch in [*batches] * 4:
        engine.answer(batch)
    jagged.relearn_ladder()
    for _ in range(2):  # the second time on the buckets that the first has asked for
        for batch in batches:
            engine.answer(batch)
        if not jagged.wait(120) or jagged.refusal:
            raise AssertionError(f"no bucket of histories was captured: {jagged.refusal or 'out of time'}")

    def with_lanes(on: bool) -> None:
        jagged.refusal = "" if on else "this benchmark measures the way without lanes"

    check(engine, batches[0], with_lanes)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for batch, on in itertools.product(batches, (True, False)):
        with_lanes(on)
        begin = time.perf_counter()
        engine.answer(batch).logits.cpu()
        seconds[on].append(time.perf_counter() - begin)
    captured, without = (np.array(seconds[on]) * 1e3 for on in (True, False))
    spread = float(np.percentile(captured, 75) / np.median(captured) - 1)
    yield lower(
        "serve/gpu/histories", f"ms at {ROWS} rows", float(np.median(captured)), "without a lane",
        float(np.median(without)), spread,
    )  # fmt: skip
    speeds = {}
    for on in (True, False):
        with_lanes(on)
        speeds[on] = rows_a_second(engine, batches) / 1e3
    with_lanes(True)
    yield higher("serve/gpu/histories/lanes", f"k rows/s on {LANES} lanes", speeds[True], "without", speeds[False])


def check(engine: Engine, batch: KeyedBatch, with_lanes: object) -> None:
    """Raise unless a lane answers as the way without."""
    logits = []
    for on in (True, False):
        with_lanes(on)  # type: ignore[operator]
        answered = engine.answer(batch)
        if answered.compiled != on:
            raise AssertionError(f"a batch of {batch.size} rows ran {'without' if on else 'on'} a lane")
        logits.append(answered.logits.cpu())
    apart = float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())
    if apart > TOLERANCE:
        raise AssertionError(f"a lane's logits are {apart:.1e} of the largest from those without a lane")


def rows_a_second(engine: Engine, batches: Sequence[KeyedBatch]) -> float:
    """Rows a second of LANES threads."""
    until = time.perf_counter() + SECONDS
    done = [0] * LANES

    def work(number: int) -> None:
        at = number
        while time.perf_counter() < until:
            batch = batches[at % len(batches)]
            engine.answer(batch).logits.cpu()
            at += LANES
            done[number] += batch.size

    threads = [threading.Thread(target=work, args=(number,)) for number in range(LANES)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - begin)
