"""Reading on a Ray cluster against reading in the trainer: Criteo's columns with their default features.

Three logs of the same rows: tab separated text, Parquet in row groups of one chunk, and Parquet in a single row group,
which every worker has to decode from its start. In-process reading uses Arrow's threads for decoding and one thread for
features; a Ray worker has one thread. The Ray cluster runs on this machine, so workers and trainer share its cores, and
examples/s do not predict a real cluster. Two other figures do: the CPU time of the trainer for reading, and the total
CPU time of all workers, for four workers beside one. If four use no more in total than one, four machines are four
times as fast.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq

from hotrow import data
from hotrow.bench.harness import Result, alternate, higher, lower
from hotrow.data.files.file_source import FileSource
from hotrow.data.files.parquet import CHUNK_ROWS
from hotrow.data.files.text_layouts import CRITEO_TSV

ROWS, BATCH, REPEATS = 8 * CHUNK_ROWS, 4096, 5
COUNTS = (1, 2, 4)


def results() -> Iterator[Result | str]:
    """Examples/s of one worker beside in-process reading, and of two beside one; CPU seconds of workers and trainer."""
    with tempfile.TemporaryDirectory() as folder:
        yield "writing a log"
        for name, source in logs(Path(folder)).items():
            yield f"reading {name}"
            yield from compare(name, source)


def logs(folder: Path) -> dict[str, FileSource]:
    """The same rows in three file layouts."""
    rng = np.random.default_rng(0)
    words = pa.array([f"{word:08x}" for word in rng.integers(0, 2**32, 50_000)])
    columns = {"label": pa.array(rng.integers(0, 2, ROWS))}
    columns |= {f"I{i}": pa.array(rng.integers(0, 1000, ROWS)) for i in range(1, 14)}
    columns |= {f"C{i}": words.take(pa.array(rng.zipf(1.3, ROWS) % len(words))) for i in range(1, 27)}
    table = pa.table(columns)
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    csv.write_csv(table, folder / "log.txt", options)
    pq.write_table(table, folder / "groups.parquet", row_group_size=CHUNK_ROWS)
    pq.write_table(table, folder / "one.parquet", row_group_size=ROWS)
    spec = CRITEO_TSV.default_spec()
    return {
        "text": data.text(folder / "log.txt", CRITEO_TSV, batch_size=BATCH),
        "parquet": data.parquet(folder / "groups.parquet", spec, batch_size=BATCH),
        "parquet_one_group": data.parquet(folder / "one.parquet", spec, batch_size=BATCH),
    }


def compare(name: str, source: FileSource) -> Iterator[Result]:
    """Read one log in-process and with every number of workers, in turns."""
    there = {count: data.on_ray(source, "local", workers=count, ahead=8) for count in COUNTS}
    sides: dict[int, data.Source] = {0: source, **there}
    trainer: dict[int, list[float]] = {count: [] for count in sides}
    workers: dict[int, list[float]] = {count: [] for count in there}

    def read(count: int) -> None:
        before = there[count].worker_seconds if count else 0.0
        start = time.process_time()
        rows = sum(batch.size for batch, _ in sides[count].batches())
        assert rows == ROWS
        trainer[count].append(time.process_time() - start)
        if count:
            workers[count].append(there[count].worker_seconds - before)

    steps = [lambda _, count=count: read(count) for count in sides]
    times = dict(zip(sides, alternate(steps, 1, REPEATS), strict=True))
    speed = {count: ROWS / timing.median / 1e3 for count, timing in times.items()}
    yield higher(f"read/{name}/ray_1", "k examples/s", speed[1], "in-process", speed[0], times[1].spread)
    yield higher(f"read/{name}/ray_2", "k examples/s", speed[2], "ray_1", speed[1], times[2].spread)
    seconds = "CPU s per M examples"
    yield lower(f"read/{name}/workers_4", seconds, per_million(workers[4]), "ray_1", per_million(workers[1]))
    yield lower(f"read/{name}/trainer", seconds, per_million(trainer[2]), "in-process", per_million(trainer[0]))


def per_million(seconds: list[float]) -> float:
    """The median for a million examples, without the warm-up."""
    return float(np.median(seconds[1:])) * 1e6 / ROWS
