"""Transports for batched row lookups: a row server on one core, a client on another, loopback TCP.

A table of a million float32 rows of dim 16 or 64 in DRAM; batches of 8,192 unique keys, and of 512. All transports are
up during the whole benchmark and take turns of a second. Their settings are the best of those that we tried
(docs/decisions/0011-row-transport.md lists them).

    keys     keys per second with several batches in flight, by the wall clock
    core     the server's processor time per batch in these turns: all threads, system calls, the kernel's network work
    busy     this processor time as a part of the wall time: near 100% the server is the limit, and nobody else is there
    client   the client's processor time per batch
    p50, p99 one batch at a time, from send to answer

The peer of these rows is `sockets`, plain blocking sockets in Python: what a protocol of our own could reach with one
copy on each side. `in process` is the store without a transport. Of each transport's turns the half counts in which
other programs took least of the two cores; a figure is their median. Other programs disturb `core` least.
`others` is the largest part of the cores that they took in a turn that counts.

`choice` compares a protocol of our own (OWN, or `sockets` while there is none) with the best ready-made transport of
the same turns, in keys per second of the server's processor time. The bar to keep it is 1.5.
`memory` is what `sockets` adds to the store, beside one copy of the same bytes at this core's speed of copying.

HOTROW_BENCH_ONLY=plain_sockets,flight measures these modules alone (plain_sockets and in_process are always there).
"""

from __future__ import annotations

import importlib
import os
import statistics
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack

from hotrow.bench.harness import Result, higher, lower, timing
from hotrow.bench.training.rank_processes import Figures
from hotrow.bench.training.ranks import two_cores
from hotrow.bench.transports.sides import Load, start
from hotrow.bench.transports.transport import Transport
from hotrow.errors import OptionError, choices

NEEDED = ("in_process", "plain_sockets")
MODULES = (*NEEDED, "own", "flight", "grpc_calls", "gloo", "zeromq")
LIMIT, FLOOR = "in process", "sockets"
OWN = "own"  # the name of our own protocol's transport, when there is one
DIMS, TURNS = (16, 64), 12
OTHERS_BAR = 10.0
ONLY = "HOTROW_BENCH_ONLY"
MEASURES = {  # name: its unit, what one unit is of the figure, and whether higher is better
    "keys": ("M keys/s", 1e6, True),
    "core": ("us a batch", 1e-6, False),
    "busy": ("% of a core", 1e-2, True),
    "client": ("us a batch", 1e-6, False),
    "p50": ("us", 1e-6, False),
    "p99": ("us", 1e-6, False),
}

Turns = dict[str, list[Figures]]  # the figures of each transport, turn by turn


def results() -> Iterator[Result | str]:
    """The rows of this benchmark, each after a status line."""
    client, server = two_cores("transports")
    transports = []
    for module in wanted():
        try:
            transports += importlib.import_module(f"hotrow.bench.transports.{module}").TRANSPORTS
        except ImportError as error:
            yield f"transports: {module} is left out: {error}"
    for dim in DIMS:
        load = Load(dim, (client, server))
        yield f"transports/dim{dim}: starting {len(transports)} servers"
        turns = yield from in_turns(transports, load)
        for batch in load.batches:
            yield from figures(f"transports/dim{dim}/{batch}", turns, batch)
            yield choice(f"transports/dim{dim}/{batch}/choice", turns, batch)
            yield memory(f"transports/dim{dim}/{batch}/memory", turns, batch)


def wanted() -> list[str]:
    """The modules of HOTROW_BENCH_ONLY, or all."""
    only = [name for name in os.environ.get(ONLY, "").split(",") if name]
    for name in only:
        if name not in MODULES:
            raise OptionError(f"{ONLY} names {name!r}; {choices(name, MODULES)}")
    return [name for name in MODULES if not only or name in only or name in NEEDED]


def in_turns(transports: Sequence[Transport], load: Load) -> Generator[str, None, Turns]:
    """Run all transports in turns. Returns the figures of each; the first turn does not count."""
    turns: Turns = {transport.name: [] for transport in transports}
    with ExitStack() as stack:
        sides = [(one.name, stack.enter_context(start(one, load))) for one in transports]
        for turn in range(TURNS + 1):
            for name, side in sides:
                yield f"transports/dim{load.dim}: turn {turn} of {TURNS}, {name}"
                measured = side.work()[0]
                if turn:
                    turns[name].append(measured)
    return turns


def figures(name: str, turns: Turns, batch: int) -> Iterator[Result]:
    """Every measure of every transport beside plain sockets."""
    for measure, (unit, scale, higher_is_better) in MEASURES.items():
        for transport in turns:
            if transport != FLOOR and (transport != LIMIT or measure == "core"):
                ours, floor = (quietest(turns[one], batch, measure) for one in (transport, FLOOR))
                yield compare(f"{name}/{measure}/{transport}", unit, ours, FLOOR, floor, scale, higher_is_better)
    others = max(max(quietest(of_one, batch, "others")) for of_one in turns.values())
    yield lower(f"{name}/others", "% of the cores", 100 * max(others, 0.001), "bar", OTHERS_BAR)


def choice(name: str, turns: Turns, batch: int) -> Result:
    """Our own protocol beside the ready-made transport that takes the least of the server's processor time."""
    own = OWN if OWN in turns else FLOOR
    ready_made = [transport for transport in turns if transport not in (OWN, FLOOR, LIMIT)] or [LIMIT]
    best = min(ready_made, key=lambda one: statistics.median(quietest(turns[one], batch, "core")))
    ours, theirs = ([batch / core for core in quietest(turns[one], batch, "core")] for one in (own, best))
    return compare(f"{name}/{own}", "M keys/s of a core", ours, best, theirs, 1e6, True)


def memory(name: str, turns: Turns, batch: int) -> Result:
    """What plain sockets add to the store, beside one copy of the bytes of a batch."""
    store = statistics.median(quietest(turns[LIMIT], batch, "core"))
    added = [core - store for core in quietest(turns[FLOOR], batch, "core")]
    return compare(name, "us a batch", added, "one copy", quietest(turns[LIMIT], batch, "copy"), 1e-6, False)


def quietest(turns: Sequence[Figures], batch: int, measure: str) -> list[float]:
    """One measure in the half of the turns in which other programs took least."""
    others = f"{batch}/single others" if measure in ("p50", "p99") else f"{batch}/others"
    order = sorted(turns, key=lambda turn: turn[others])
    return [turn[f"{batch}/{measure}"] for turn in order[: (len(order) + 1) // 2]]


def compare(
    name: str, unit: str, ours: list[float], peer: str, theirs: list[float], scale: float, higher_is_better: bool
) -> Result:
    """Medians in the unit of `scale`, and the spread of ours."""
    side = higher if higher_is_better else lower
    median = timing(ours)
    return side(name, unit, median.median / scale, peer, statistics.median(theirs) / scale, median.spread)
