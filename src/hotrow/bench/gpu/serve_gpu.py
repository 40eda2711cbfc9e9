"""Serving on a GPU: W-dlrm at dim 128, rows on a host table with a tenth of them in HBM, inside hr.Engine.

    serve/gpu/batch/N      ms of a batch of N rows, beside the same model in plain PyTorch on this machine's cores
    serve/gpu/p99          ms of a batch of 1,024 rows at the 99th percentile, beside the bar of 1 ms
    serve/gpu/rows         million rows/s in batches of 16,384 on several lanes, beside MLPerf's one H100 (65,981
                           samples/s of 270 rows)
    serve/gpu/histories    a tower over histories, in serve_histories_gpu.py
    serve/gpu/graphs, lanes, join, mps    the gain of each, against the same without it

Keys are drawn with Zipf 1.05, a fresh batch every time, once the cache is warm. Towers run in tf32, as the peer of
`rows` runs in half precision; `serve/gpu/fp32` is a batch of 1,024 rows in fp32.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotrow import child_process, optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.bench.gpu.hbm import Ids, scale
from hotrow.bench.gpu.serve_histories_gpu import history_rows
from hotrow.bench.harness import Result, higher, lower
from hotrow.config import Memory
from hotrow.errors import OptionError
from hotrow.kernels.rows.layout import RowLayout
from hotrow.models import DLRM
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.serve.execution.device_lane import DeviceLane
from hotrow.serve.execution.engine import Engine
from hotrow.serve.processes.gpus import usable_gpus
from hotrow.serve.processes.mps import Mps
from hotrow.serve.repository.export import export
from hotrow.table import Table
from hotrow.tiers.hbm.group_cache import slot_bytes

TABLES, ROWS, DIM, DENSE, SHARE = 26, 400_000, 128, 13, 0.1
SIZES = (32, 128, 1024, 4096, 16_384, 131_072)
MLPERF = 65_981 * 270 / 1e6
PRECISION = "tf32"


def results() -> Iterator[Result | str]:
    """The rows of this benchmark."""
    if not torch.cuda.is_available():
        raise OptionError("hotrow bench serve_gpu needs a GPU, and torch sees none")
    folder = tempfile.mkdtemp(prefix="hotrow-bench-", dir=os.environ.get("HOTROW_BENCH_DIR"))
    sys.setswitchinterval(0.0005)  # as an engine process does
    try:
        yield "exporting the model"
        torch_model = make_model(Path(folder) / "repository" / "dlrm")
        yield "loading it"
        engine = open_engine(folder)
        draw = Draw()
        check(engine, torch_model, draw)
        warm_up_cache(engine, draw)
        yield from by_size(engine, torch_model, draw)
        yield from additions(engine, draw, folder)
        yield from history_rows(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Draw:
    """Fresh batches of W-dlrm."""

    def __init__(self, seed: int = 0) -> None:
        self.ids = Ids(rows_of_a_table(), 1, torch.device("cuda"))
        self.ids.generator.manual_seed(seed)

    def __call__(self, size: int) -> KeyedBatch:
        self.ids.ids = size * TABLES
        keys = self.ids._draw().cpu().view(TABLES, size)
        return KeyedBatch({f"f{t}": Jagged(keys[t]) for t in range(TABLES)}, torch.rand(size, DENSE))


class TorchModel(nn.Module):
    """The same model in plain PyTorch."""

    def __init__(self, weights: list[Tensor], tower: nn.Module) -> None:
        super().__init__()
        self.bags = [nn.Embedding.from_pretrained(weight) for weight in weights]
        self.tower = tower

    @torch.inference_mode()
    def forward(self, batch: KeyedBatch) -> Tensor:
        """Logits."""
        vectors = {f"f{t}": bag(batch.ids[f"f{t}"].values) for t, bag in enumerate(self.bags)}
        logits: Tensor = self.tower(vectors, batch.dense)
        return logits


def rows_of_a_table() -> int:
    """Rows of each table."""
    return int(ROWS * scale())


def make_model(path: Path) -> TorchModel:
    """Rows and tower, exported; and the same model in plain PyTorch."""
    rows = rows_of_a_table()
    embeddings = EmbeddingCollection([Table(f"t{t}", DIM, [f"f{t}"]) for t in range(TABLES)], optim.SGD(), seed=1)
    weights = []
    for table in embeddings.tables:
        weights.append(torch.empty(rows, DIM).uniform_(-0.05, 0.05))
        table.assign(torch.arange(rows), weights[-1])
    torch.manual_seed(0)
    tower = DLRM(embeddings.features, dense_features=DENSE, bottom=(512, 256), top=(1024, 1024, 512, 256)).eval()
    export(Recommender(embeddings, tower), path)
    return TorchModel(weights, tower)


def open_engine(folder: str, sizes: Sequence[int] = SIZES, lanes: int = 1) -> Engine:
    """The exported model with a tenth of its rows in HBM."""
    size = int(TABLES * rows_of_a_table() * SHARE) * slot_bytes(RowLayout(DIM)) + (1 << 20)
    path = Path(folder) / "repository" / "dlrm"
    return Engine(path, memory=Memory(hbm=size), precision=PRECISION, ladder=sizes, lanes=lanes)


def check(engine: Engine, torch_model: TorchModel, draw: Draw) -> None:
    """Raise unless the engine's logits equal the torch model's, within the precision."""
    batch = draw(777)
    expected = torch_model(batch)
    apart = float((engine.answer(batch)[0] - expected).abs().max() / expected.abs().max())
    if apart > 0.02:
        raise AssertionError(f"the engine's logits are {apart:.1e} of the largest from the torch model's")


def warm_up_cache(engine: Engine, draw: Draw, seconds: float = 8.0) -> None:
    """Run until the cache holds the hot rows."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        engine.answer(draw(4096))


def times(run: Callable[[KeyedBatch], Any], batches: list[KeyedBatch]) -> Any:
    """Milliseconds of each."""
    found = []
    for batch in batches:
        begin = time.perf_counter()
        run(batch)
        found.append((time.perf_counter() - begin) * 1e3)
    return np.array(found)


def by_size(engine: Engine, torch_model: TorchModel, draw: Draw) -> Iterator[Result | str]:
    """Batches of every size, beside torch on the CPU."""
    for size in SIZES:
        yield f"batches of {size:,}"
        count = 1000 if size == 1024 else 200 if size < 1024 else 30 if size < 100_000 else 6
        batches = [draw(size) for _ in range(count)]
        engine.answer(batches[0])
        ours = times(engine.answer, batches)
        theirs = times(torch_model, batches[: max(3, count // 20)])
        spread = float(np.percentile(ours, 75) / np.median(ours) - 1)
        median = float(np.median(ours))
        yield lower(f"serve/gpu/batch/{size}", "ms", median, "torch on the cores", float(np.median(theirs)), spread)
        if size == 1024:
            yield lower("serve/gpu/p99", "ms", float(np.percentile(ours, 99)), "bar", 1.0)


def additions(engine: Engine, draw: Draw, folder: str) -> Iterator[Result | str]:
    """The gain of graphs, lanes, joining and MPS, each against the same without it."""
    yield "what each part adds"
    batches = [draw(1024) for _ in range(200)]
    with_graphs = float(np.median(times(engine.answer, batches)))
    lanes = engine._lanes
    assert lanes is not None
    bare = DeviceLane(lanes.reader, lanes.tower.run, DENSE, (1024,), PRECISION, graphs=False)
    without = float(np.median(times(lambda batch: bare.run(batch, "wait"), batches)))
    yield lower("serve/gpu/graphs", "ms at 1,024 rows", with_graphs, "without graphs", without)
    exact = DeviceLane(lanes.reader, lanes.tower.run, DENSE, (1024,), "fp32")
    yield lower(
        "serve/gpu/fp32", "ms at 1,024 rows",
        float(np.median(times(lambda batch: exact.run(batch, "wait"), batches))), "tf32", with_graphs,
    )  # fmt: skip
    small = [draw(16) for _ in range(256)]
    alone = times(engine.answer, small).sum()
    joined = times(engine.answer, [join(small[at : at + 64]) for at in range(0, 256, 64)]).sum()
    yield higher("serve/gpu/join", "k requests/s of 16 rows", 256 / joined, "one at a time", 256 / alone)
    more = open_engine(folder, sizes=(1024, 16_384), lanes=4)
    warm_up_cache(more, draw)
    speeds = {(size, count): parallel(more, draw, size, count) for size in (1024, 16_384) for count in (1, 2, 4)}
    more.close()
    for size in (1024, 16_384):
        best = max((2, 4), key=lambda count: speeds[size, count])
        name = f"serve/gpu/lanes/{size}"
        yield higher(name, f"M rows/s on {best} lanes", speeds[size, best], "one lane", speeds[size, 1])
    yield higher("serve/gpu/rows", "M rows/s", max(speeds.values()), "MLPerf, one H100", MLPERF)
    one, taking_turns, shared = (
        processes(folder, 1, None),
        processes(folder, 2, None),
        processes(folder, 2, Mps(folder, usable_gpus().usable[0].uuid)),
    )
    yield higher("serve/gpu/processes", "M rows/s of two, taking turns", taking_turns, "one", one)
    yield higher("serve/gpu/mps", "M rows/s of two under MPS", shared, "taking turns", taking_turns)


def join(batches: list[KeyedBatch]) -> KeyedBatch:
    """Join batches, as TensorBatch does."""
    ids = {f"f{t}": Jagged(torch.cat([b.ids[f"f{t}"].values for b in batches])) for t in range(TABLES)}
    return KeyedBatch(ids, torch.cat([b.dense for b in batches if b.dense is not None]))


def parallel(engine: Engine, draw: Draw, size: int, count: int, seconds: float = 1.5) -> float:
    """Million rows a second of `count` threads, each with its lane."""
    batches = [draw(size) for _ in range(400 if size < 4096 else 48)]
    ready, done = threading.Barrier(count + 1), [0] * count
    until = [0.0]

    def work(number: int) -> None:
        ready.wait()
        at = number
        while time.perf_counter() < until[0]:
            engine.answer(batches[at % len(batches)])
            at += count
            done[number] += size

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    until[0] = time.perf_counter() + 3600
    while ready.n_waiting < count:
        time.sleep(0.01)
    begin = time.perf_counter()
    until[0] = begin + seconds
    ready.wait()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - begin) / 1e6


def processes(folder: str, count: int, mps: Mps | None) -> float:
    """Million rows a second, in batches of 1,024, of `count` processes with an engine each."""
    environment = dict(os.environ)
    if mps is not None:
        mps.start()
        environment.update(mps.environment)
    try:
        command = [sys.executable, "-m", "hotrow.bench.gpu.serve_gpu", folder]
        workers = [
            child_process.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            for _ in range(count)
        ]
        for worker in workers:
            assert worker.stdout is not None and worker.stdin is not None
            worker.stdout.readline()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return sum(float(worker.communicate()[0].split()[-1]) for worker in workers)
    finally:
        if mps is not None:
            mps.stop()


def worker(folder: str) -> None:
    """One of the processes: prints when it is ready, and starts on a line from stdin."""
    engine, draw = open_engine(folder, sizes=(1024, 4096)), Draw(os.getpid())
    warm_up_cache(engine, draw, 3.0)
    print("ready", flush=True)
    sys.stdin.readline()
    print(parallel(engine, draw, 1024, 1, 3.0), flush=True)
    os._exit(0)


if __name__ == "__main__":
    worker(sys.argv[1])
