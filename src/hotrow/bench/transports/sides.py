"""The two processes of one transport: a server on one core and a client on another. What a turn measures.

For each batch size a turn has two parts. *Pipelined*: several batches are in flight, so that the server always has a
request waiting; it gives keys per second, and the server's processor time per batch. *Single*: one batch at a time; it
gives the times from send to answer.

The client reads the server's processor clock (all threads, system calls, and the network's work that the kernel does
in their name), which other programs on the machine disturb less than wall time. It is the figure to compare. Each part
also gives `others`, the part of the two cores that other programs took meanwhile, so that the quietest turns count.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotrow.bench.serving.load_client import percentile
from hotrow.bench.training.rank_processes import Figures, RankProcesses, Turn
from hotrow.bench.transports.in_process import InProcess
from hotrow.bench.transports.transport import Connection, Keys, StoredRows, Transport, expected
from hotrow.errors import HotRowError

START_SECONDS = 120.0
COPIED = 128 << 20  # bytes read to measure a copy
ENDED = -1  # in place of a process id


@dataclass(frozen=True)
class Load:
    """Batches of unique keys, uniform over `rows` rows, and how long the parts of a turn are."""

    dim: int
    cores: tuple[int, int]  # of the client and of the server
    rows: int = 1_000_000
    batches: tuple[int, ...] = (8192, 512)
    drawn: int = 64
    pipelined: float = 0.3
    single: float = 0.15


def start(transport: Transport, load: Load) -> RankProcesses:
    """Both processes, pinned to their cores; of the store in process, one on the server's core."""
    pid = multiprocessing.get_context("spawn").Value("i", 0)
    cores = [[core] for core in load.cores]
    if isinstance(transport, InProcess):
        cores = cores[1:]
    return RankProcesses(cores, prepare, transport, load, pid)


def prepare(rank: int, transport: Transport, load: Load, pid: Any) -> Turn:
    """Rank 0 is the client, rank 1 the server. `pid` becomes the server's process id when clients may connect."""
    import torch

    import hotrow as hr
    from hotrow.train.freed_memory import keep_freed_memory

    keep_freed_memory(1 << 30)
    atexit.register(os._exit, 0)  # gRPC, Gloo and ZeroMQ end with threads that still wait; nothing here needs an end
    torch.set_num_threads(1)
    hr.set_threads(1)
    port = int(os.environ["MASTER_PORT"])
    if rank == 1:
        rows = StoredRows(load.rows, load.dim)

        def ready() -> None:
            pid.value = os.getpid()

        def serve() -> None:
            try:
                transport.serve(rows, port, ready)
            finally:
                pid.value = ENDED

        threading.Thread(target=serve, name="serve", daemon=True).start()
        return lambda: {}
    if isinstance(transport, InProcess):
        transport.rows = StoredRows(load.rows, load.dim)
        pid.value = os.getpid()
    until = time.monotonic() + START_SECONDS
    while not pid.value:
        if time.monotonic() > until:
            raise HotRowError(f"the {transport.name} server did not start within {START_SECONDS:.0f} s")
        time.sleep(0.01)
    if pid.value == ENDED:
        raise HotRowError(f"the {transport.name} server ended before it served; its error is above")
    return Client(transport, load, port, pid.value).turn


class Client:
    """The client's connections and batches."""

    def __init__(self, transport: Transport, load: Load, port: int, server: int) -> None:
        self._transport, self._load = transport, load
        self._memory: npt.NDArray[np.uint8] | None = None
        self._clock, self._own_clock = processor_clock(server), processor_clock(os.getpid())
        self._cores = load.cores if server != os.getpid() else load.cores[1:]
        draw = np.random.default_rng(0)
        self._batches = {
            size: [draw.choice(load.rows, size, replace=False) for _ in range(load.drawn)] for size in load.batches
        }
        self._connections = {
            size: [transport.connect(port, load.dim, size) for _ in range(transport.connections)]
            for size in load.batches
        }
        for size, connections in self._connections.items():
            check(connections, self._batches[size][: 2 * len(connections)], load.dim)

    def turn(self) -> Figures:
        """Measure each batch size."""
        figures: Figures = {}
        for size in self._load.batches:
            batches, connections = itertools.cycle(self._batches[size]), self._connections[size]
            self._pipelined(connections, batches, 0.03)  # wakes both sides
            part = self._pipelined(connections, batches, self._load.pipelined)
            part |= self._single(connections[0], batches, self._load.single)
            if isinstance(self._transport, InProcess):
                part["copy"] = self._copy(size * (8 + 4 * self._load.dim))
            figures |= {f"{size}/{name}": value for name, value in part.items()}
        return figures

    def _pipelined(self, connections: list[Connection], batches: Iterator[Keys], seconds: float) -> Figures:
        order: deque[Connection] = deque()
        sent = 0
        before, begin = self._used(), time.perf_counter()
        for connection in connections * self._transport.depth:
            connection.send(next(batches))
            order.append(connection)
        while order:
            connection = order.popleft()
            rows = connection.receive()
            sent += 1
            if time.perf_counter() - begin < seconds:
                connection.send(next(batches))
                order.append(connection)
        wall = time.perf_counter() - begin
        used = self._used() - before
        return {
            "keys": sent * len(rows) / wall,
            "core": used.server / sent,
            "busy": used.server / wall,
            "client": used.client / sent,
            "others": used.others / (wall * len(self._cores)),
        }

    def _single(self, connection: Connection, batches: Iterator[Keys], seconds: float) -> Figures:
        times: list[float] = []
        before, until = self._used(), time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            keys = next(batches)
            begin = time.perf_counter()
            connection.send(keys)
            connection.receive()
            times.append(time.perf_counter() - begin)
        others = (self._used() - before).others / (sum(times) * len(self._cores))
        return {"p50": statistics.median(times), "p99": percentile(times, 0.99), "single others": others}

    def _used(self) -> Used:
        server, client = time.clock_gettime(self._clock), time.process_time()
        both = client if self._clock == self._own_clock else server + client
        return Used(server, client, busy_seconds(self._cores) - both)

    def _copy(self, size: int) -> float:
        """Seconds of one copy of `size` bytes, from memory that is in no cache into a buffer that may be."""
        if self._memory is None:
            self._memory = np.ones(COPIED, np.uint8)
        target = np.empty(size, np.uint8)
        begin = time.process_time()
        for first in range(0, COPIED - size + 1, size):
            np.copyto(target, self._memory[first : first + size])
        return (time.process_time() - begin) / (COPIED // size)


def check(connections: list[Connection], batches: list[Keys], dim: int) -> None:
    """Raise unless every connection answers with the right rows."""
    for connection, keys in zip(itertools.cycle(connections), batches, strict=False):
        connection.send(keys)
        if not np.array_equal(connection.receive(), expected(keys, dim)):
            raise HotRowError(f"{type(connection).__name__} answered a batch of {len(keys)} keys with other rows")


@dataclass(frozen=True)
class Used:
    """Processor seconds of the server, of the client, and of all other programs on their cores."""

    server: float
    client: float
    others: float

    def __sub__(self, before: Used) -> Used:
        return Used(self.server - before.server, self.client - before.client, self.others - before.others)


def busy_seconds(cores: Sequence[int]) -> float:
    """Seconds that the cores were busy since the machine started, or were the host's."""
    wanted = {f"cpu{core}" for core in cores}
    with open("/proc/stat") as file:
        lines = [line.split() for line in file if line.startswith("cpu")]
    ticks = [[int(tick) for tick in line[1:9]] for line in lines if line[0] in wanted]
    idle, waiting = 3, 4
    return sum(sum(of_core) - of_core[idle] - of_core[waiting] for of_core in ticks) / os.sysconf("SC_CLK_TCK")


def processor_clock(pid: int) -> int:
    """The clock of a process's processor time, as clock_gettime takes it."""
    clock = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if error:
        raise OSError(error, f"there is no processor clock of process {pid}")
    return clock.value
