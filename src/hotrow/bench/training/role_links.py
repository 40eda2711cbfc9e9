"""Rows and towers with a network between them: a job that is as fast as its link, and what it sends.

A tower rank on one machine and a row rank on another, with a link of 1 Gbit/s in each direction and 1 ms between them
(servers/network.py). The tower rank pools rows and sends a random gradient back; it computes nothing else, so the link
is the limit. 26 tables of 500,000 keys at dim 128, batch 4,096, one id per table and example, row-wise Adagrad, rows
and gradients in fp32, a lookahead of 2, two threads on two cores.

`roles/link`: the useful bytes that the busier direction carries in a second: to the row rank, 8 for each unique key of
a batch, and its gradient. The peer `link` is the rate. Ids are uniform, so hardly a row is in two batches in flight,
and rows travel ahead while gradients go the other way. `roles/link_zipf` has W-rows' ids: a seventh of a batch's rows
were changed by the batch before, and those travel between that batch's gradients and their own, while the direction
that carries gradients rests.

At the full rate a step takes 55.2 MB / 125 MB/s = 442 ms with uniform ids. What is left of a step is the way from the
last gradient to the next one: update, finding rows, 2 ms of network, pooling, sums.

The processes keep freed memory: a step's arrays have 54 MB, which malloc otherwise gives back, and the virtual machine
that we have takes 90 ms of a step to get it again.

`roles/volume`: the bytes of all IP packets in both directions, beside those that must move: for each unique key of a
batch 8, its row and its gradient. A packet holds up to 65,000 bytes here; with 1,500 headers are 3% more.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from hotrow.bench.harness import Result, higher, lower
from hotrow.bench.servers.network import Network, unavailable
from hotrow.bench.training.rank_processes import Figures, RankProcesses
from hotrow.bench.training.role_rows import RowsJob, prepare_rows

RATE, DELAY = 125e6, 0.001  # bytes a second in each direction, and seconds
QUEUE = 2 << 20  # bytes
DIM, KEYS, THREADS = 128, 500_000, 2
KEY, ROW = 8, 4 * DIM  # bytes
WARMUP, TURNS, STEPS = 1, 5, 32
FILLING = 8  # TCP, too, starts anew after a pause


def results(first: int, second: int) -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line; both ranks use both cores."""
    if (why := unavailable()) is not None:
        yield f"roles/link is left out: {why}"
        return
    for name, uniform in (("roles/link", True), ("roles/link_zipf", False)):
        yield f"{name}: creating {26 * KEYS:,} rows"
        job = RowsJob(DIM, KEYS, STEPS, uniform, FILLING, THREADS, keep_memory=True)
        with (
            Network(["towers", "rows"], rate=RATE, delay=DELAY, queue=QUEUE) as network,
            RankProcesses([[first, second]] * 2, prepare_rows, job, network=network) as ranks,
        ):
            for _ in range(WARMUP):
                ranks.work()
            before = received(network)
            turns: list[Figures] = []
            for turn in range(TURNS):
                yield f"{name}: turn {turn + 1} of {TURNS}"
                turns.append(ranks.work()[0])
            volume = received(network) - before
        useful = [(KEY + ROW) * turn["timed"] / turn["seconds"] for turn in turns]
        middle = statistics.median(useful)
        yield higher(name, "MB/s", middle / 1e6, "link", RATE / 1e6, (max(useful) - min(useful)) / 2 / middle)
        if uniform:
            least = (KEY + 2 * ROW) * sum(turn["rows"] for turn in turns)
            steps = TURNS * STEPS
            yield lower("roles/volume", "MB a step", volume / steps / 1e6, "keys and rows", least / steps / 1e6)


def received(network: Network) -> int:
    """The bytes of IP packets that all machines have received."""
    return sum(counts["received"] for counts in network.counts().values())
