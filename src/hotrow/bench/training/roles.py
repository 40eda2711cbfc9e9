"""Rows and towers on ranks of their own: what a row rank serves, and what a tower gains from one.

`roles/rows/dim16`, `dim64`: W-rows' batches (26 tables of a million keys, batch 4,096, one Zipf 1.1 id per table and
example, row-wise Adagrad). A tower rank on the first core pools the rows and sends a random gradient back; it computes
nothing else. The row rank has the second core. The peer `local` calls the same store in one process on the second core:
deduplicate, find, pool, sum gradients, update. The sides run in turns.

A row counts when it is served and updated: once for each unique key of a batch. The unit is rows per second of
*processor time* of the whole process, all threads, system calls and network included (time.process_time). Wall time
would measure the tower rank too: it pools and sums for every id, and the row rank sleeps while it waits for it. Waits
for other ranks spin at most 200 times, and that counts. `local` never waits, so its processor time is its wall time.

The row rank runs as in training: with a lookahead of 2, so rows are sent ahead of their batch's turn.

`roles/split`: W-dlrm's tower with one tower rank and one row rank, a core each, beside one process on one core
(`together`). In memory the rows are too little work to gain from a second core: finding, pooling, summing and updating
53,248 ids take 3 ms of the 285 ms of a step, or of 87 ms in bf16. So the gain can be at most 1% (3% in bf16), and the
rows that this row is about lie on SSD: Adam, 26 tables of 200,000 keys, a tenth of their bytes in DRAM (tiers.py), and
the tower in bf16. `roles/split_dram` has the rows in memory, and says that the split costs little.

`roles/busy` is the processor time of the busier rank in `roles/split`, of its core's time.

`roles/link`, `roles/link_zipf` and `roles/volume` are in role_links.py.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence

from hotrow.bench.harness import Result, Timing, higher, timing
from hotrow.bench.storage import tiers
from hotrow.bench.training import ranks as two_ranks
from hotrow.bench.training import role_links
from hotrow.bench.training.rank_processes import Figures, RankProcesses
from hotrow.bench.training.role_rows import RowsJob, prepare_local, prepare_rows

DIMS, STEPS, WARMUP, TURNS = (16, 64), 48, 2, 9
KEYS = 1_000_000
BUSY_BAR = 90.0
SPLIT_STEPS = 24


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line."""
    first, second = two_ranks.two_cores("roles")
    for dim in DIMS:
        yield from rows(dim, first, second)
    yield from split(first, second)
    yield from role_links.results(first, second)


def rows(dim: int, first: int, second: int) -> Iterator[Result | str]:
    """What a row rank serves, beside the store in one process."""
    name = f"roles/rows/dim{dim}"
    yield f"{name}: creating {26 * KEYS:,} rows on both sides"
    job = RowsJob(dim, KEYS, STEPS)
    with (
        RankProcesses([[second]], prepare_local, job) as local,
        RankProcesses([[first], [second]], prepare_rows, job) as apart,
    ):
        for _ in range(WARMUP):
            local.work(), apart.work()
        served: list[Figures] = []
        called: list[Figures] = []
        for turn in range(TURNS):
            yield f"{name}: turn {turn + 1} of {TURNS}"
            called += local.work()
            served.append(apart.work()[1])
    ours, theirs = per_core_second(served), per_core_second(called)
    yield higher(name, "M rows/s a core", 1 / ours.median / 1e6, "local", 1 / theirs.median / 1e6, ours.spread)


def per_core_second(turns: Sequence[Figures]) -> Timing:
    """The processor seconds of a row: their median over turns, and spread."""
    return timing([turn["core"] / turn["rows"] for turn in turns])


def split(first: int, second: int) -> Iterator[Result | str]:
    """A tower rank and a row rank beside one process."""
    folder = tempfile.mkdtemp(prefix="hotrow-bench-", dir=os.environ.get("HOTROW_BENCH_DIR"))
    tower = two_ranks.TOWERS["scaling"]
    try:
        for name in ("split", "split_dram"):
            in_dram = name == "split_dram"
            yield f"roles/{name}: setting up one process and two"
            jobs = [
                two_ranks.TrainingJob(tower, SPLIT_STEPS, 0 if alone else 1)
                if in_dram
                else two_ranks.TrainingJob(
                    tower, SPLIT_STEPS, 0 if alone else 1, "bf16", tiers.DRAM, os.path.join(folder, str(alone))
                )
                for alone in (True, False)
            ]
            with (
                RankProcesses([[first]], two_ranks.prepare, jobs[0]) as one,
                RankProcesses([[first], [second]], two_ranks.prepare, jobs[1]) as apart,
            ):
                alone, both = yield from two_ranks.in_turns(f"roles/{name}", one, apart)
            turns = two_ranks.counted(alone)
            speeds = [both[turn][0]["speed"] for turn in turns]
            speed, spread = statistics.median(speeds), (max(speeds) - min(speeds)) / 2 / statistics.median(speeds)
            peer = two_ranks.peer_speed(alone, turns)
            yield higher(f"roles/{name}", "k examples/s", speed / 1e3, "together", peer / 1e3, spread)
            if not in_dram:
                busy = statistics.median(max(rank["busy"] for rank in both[turn]) for turn in turns)
                yield higher("roles/busy", "% of time", 100 * busy, "bar", BUSY_BAR)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
