"""The benches of the SSD tier run from front to back, on a few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotrow import _core, child_process
from hotrow.bench.harness import Result
from hotrow.bench.storage import ssd, tiers
from hotrow.bench.training import pipeline
from hotrow.nn import EmbeddingCollection


@pytest.fixture(autouse=True)
def in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOTROW_BENCH_DIR", str(tmp_path))
    threads = _core.threads(), torch.get_num_threads()
    yield
    _core.set_threads(threads[0])
    torch.set_num_threads(threads[1])
    assert not list(tmp_path.iterdir())  # they clean up


def test_the_ssd_bench_stands_beside_raw_reads_and_rocksdb(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rocksdict")
    few = {"ROWS": 60_000, "BATCH": 2000, "BATCHES": 3, "WRITTEN": 65_536, "PAUSE_ROWS": 20_000}
    for name, value in few.items():
        monkeypatch.setattr(ssd, name, value)
    run = child_process.run

    def run_with_few(command: list[str], **options: Any) -> Any:
        """The child that measures RAM, with enough rows that some are cold."""
        return run([*command[:-1], "import hotrow.bench.storage.ssd as s; s.ROWS = 500_000; " + command[-1]], **options)

    monkeypatch.setattr(child_process, "run", run_with_few)
    monkeypatch.setattr(ssd, "collection_in", small_dram(ssd.collection_in))
    rows = [row for row in ssd.results() if isinstance(row, Result)]
    assert [(row.name, row.peer) for row in rows] == [
        ("ssd/read", "raw"),
        ("ssd/read", "rocksdb"),
        ("ssd/write", "rocksdb"),
        ("ssd/ram_per_row", "bar"),
        ("ssd/checkpoint_pause", "bar"),
    ]
    assert all(row.value > 0 and row.peer_value > 0 for row in rows)


def small_dram(make: Callable[[str, str], EmbeddingCollection]) -> Callable[..., EmbeddingCollection]:
    """Fewer bytes of DRAM than of rows, although they are few; the full size if all rows must be in DRAM first."""
    return lambda folder, dram="64MiB": make(folder, "8MiB" if dram == "64MiB" else dram)


def test_the_tiers_bench_trains_in_dram_and_over_ssd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TABLES": 2, "KEYS": 30_000, "BATCH": 256, "STEPS": 5, "WARMUP": 1, "DRAM": 9 << 20}.items():
        monkeypatch.setattr(tiers, name, value)
    rows = {row.name: row for row in tiers.results() if isinstance(row, Result)}
    assert {name: row.peer for name, row in rows.items()} == {
        "tiers/train": "dram",
        "tiers/device": "raw",
        "tiers/hit_rate": "all",
        "tiers/dram": "budget",
    }
    assert 0 < rows["tiers/hit_rate"].value < 100
    assert rows["tiers/dram"].value <= rows["tiers/dram"].peer_value


def test_the_pipeline_bench_stands_beside_dram_the_device_and_one_batch_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"TABLES": 2, "KEYS": 30_000, "BATCH": 256, "DRAM": 9 << 20}.items():
        monkeypatch.setattr(tiers, name, value)
    for name, value in {"BATCHES": 4, "WARMUP": 2, "ROUNDS": 2, "RAW": 2048}.items():
        monkeypatch.setattr(pipeline, name, value)
    rows = [row for row in pipeline.cpu_results() if isinstance(row, Result)]
    assert [(row.name, row.peer) for row in rows] == [
        ("pipeline/tiered", "dram"),
        ("pipeline/device", "raw"),
        ("pipeline/lookahead", "none"),
    ]
    assert all(row.value > 0 and row.peer_value > 0 for row in rows)
