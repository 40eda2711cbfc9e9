"""Lookups from one row server on one core, over TCP and over shared memory.

    split/lookup/dim16, /dim64     M keys/s in batches of 8,192 over loopback TCP, beside the remote tier over a Redis
                                   cluster of three masters
    split/shared/dim16, /dim64     the same over shared memory, beside the store called in this process
    split/wire/...                 the same over TCP with fp16 and int8 rows, beside fp32

The row server has core 1 and the client core 0. The client keeps `IN_FLIGHT` batches in flight from as many threads, so
that the server's core works all the time. Redis gets the same core for its masters, and one client thread, which is the
fastest. Sides are measured in turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hotrow as hr
from hotrow._core import set_threads, threads
from hotrow.bench.harness import Result, alternate, higher
from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.bench.serving.row_server_process import RowServer
from hotrow.serve.repository.manifest import Repository
from hotrow.tiers.remote.store import TableFormat, open_remote
from hotrow.tiers.rows.cluster_file import RowsAddress
from hotrow.tiers.rows.handshake import Model, fingerprint
from hotrow.tiers.rows.row_servers import RowServers

ROWS, BATCH, IN_FLIGHT = 1_000_000, 8192, 3
DIMS = (16, 64)
PART, REDIS_PART, REPEATS = 60, 4, 15  # batches of a turn, turns
MASTERS = 3
CLIENT_CORE, SERVER_CORE = 0, 1


class OneTower(torch.nn.Module):
    """A tower that is never run here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(width, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """The sum of all vectors' weights."""
        logits: Tensor = self.out(torch.cat(list(vectors.values()), dim=1)).squeeze(1)
        return logits


def results(folder: Path, rows: int = ROWS, with_redis: bool = True) -> Iterator[Result | str]:
    """All figures of lookups."""
    yield f"exporting {rows:,} rows of dim 16 and of dim 64"
    repository = export_tables(folder, rows)
    with ExitStack() as stack:
        server = stack.enter_context(RowServer(repository, core=SERVER_CORE))
        stack.enter_context(pinned(CLIENT_CORE))
        engine = stack.enter_context(hr.Engine(repository / "ctr"))
        over = {
            name: stack.enter_context(connected(repository, f"{server.address}?{options}"))
            for name, options in (
                ("tcp", "local=off&hedge=off"),
                ("shared", "hedge=off"),
                ("fp16", "local=off&hedge=off&wire=fp16"),
                ("int8", "local=off&hedge=off&wire=int8"),
            )
        }
        redis = stack.enter_context(filled_redis(engine)) if with_redis else None
        for number, dim in enumerate(DIMS):
            yield f"lookups at dim {dim}"
            keys = draw_keys(rows)
            store = engine.embeddings.tables[number].store
            values, found = torch.empty(BATCH, dim), torch.empty(BATCH, dtype=torch.bool)

            def in_process(turn: int, store: Any = store, values: Tensor = values, found: Tensor = found) -> None:
                for batch in keys[:PART]:  # noqa: B023
                    store.read_into(batch, values, found)

            sides = [reader(over[name], number, dim, keys) for name in over]
            timings = alternate([*sides, in_process], 2, REPEATS)
            speeds = [PART * BATCH / timing.median / 1e6 for timing in timings]
            tcp, shared, fp16, int8, local = speeds
            if redis is not None:
                read = redis_reader(redis, dim, keys)
                (redis_time, tcp_time) = alternate([read, sides[0]], 1, max(3, REPEATS // 3))
                theirs, tcp = REDIS_PART * BATCH / redis_time.median / 1e6, PART * BATCH / tcp_time.median / 1e6
                yield higher(f"split/lookup/dim{dim}", "M keys/s", tcp, "redis", theirs, tcp_time.spread)
            yield higher(f"split/shared/dim{dim}", "M keys/s", shared, "in process", local, timings[1].spread)
            for name, speed in (("fp16", fp16), ("int8", int8)):
                yield higher(f"split/wire/{name}/dim{dim}", "M keys/s", speed, "fp32", speeds[0])


def export_tables(folder: Path, rows: int) -> Path:
    """A repository with a model of two tables of `rows` rows."""
    tables = [hr.Table(f"t{dim}", dim=dim) for dim in DIMS]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.SGD(lr=0.1))
    for of_table in embeddings.tables:
        drawn = torch.randn(rows, of_table.table.dim, generator=torch.Generator().manual_seed(of_table.table.dim))
        of_table.store.assign(torch.arange(rows), drawn)
    repository = folder / "lookups"
    hr.export(hr.Recommender(embeddings, OneTower(sum(DIMS))), repository / "ctr")
    return repository


def draw_keys(rows: int) -> list[Tensor]:
    """Random keys of some batches."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, rows, (BATCH,), generator=generator) for _ in range(PART)]


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """This process on one core, with one thread in torch and in the core."""
    before, torch_threads, core_threads = os.sched_getaffinity(0), torch.get_num_threads(), threads()
    os.sched_setaffinity(0, {core if core in before else min(before)})
    torch.set_num_threads(1)
    set_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(torch_threads)
        set_threads(core_threads)


@contextmanager
def connected(repository: Path, address: str) -> Iterator[RowServers]:
    """Connections to a row server."""
    version = Repository(repository).open("ctr")
    tables, seed = [on_disk.table for on_disk in version.tables], int(version.manifest["seed"])
    model = Model("ctr", version.number, fingerprint(tables, seed))
    servers = RowServers(RowsAddress.parse(address), model, [table.dim for table in tables])
    try:
        servers.wait_until_complete(60.0)
        yield servers
    finally:
        servers.close()


def reader(servers: RowServers, table: int, dim: int, keys: list[Tensor]) -> Callable[[int], None]:
    """A turn: PART batches, IN_FLIGHT of them at a time."""
    pool = ThreadPoolExecutor(IN_FLIGHT)
    topology = servers.topology

    def some(first: int) -> None:
        out = torch.empty(BATCH, dim)
        for batch in keys[first:PART:IN_FLIGHT]:
            if servers.lookup(topology, [table], [[BATCH]], batch, 0, 10.0, out).late:
                raise RuntimeError("a lookup of the benchmark was late")

    def turn(number: int) -> None:
        list(pool.map(some, range(IN_FLIGHT)))

    return turn


@contextmanager
def filled_redis(engine: hr.Engine) -> Iterator[Any]:
    """The remote tier over three masters on the server's core, with the rows of the engine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {SERVER_CORE})
    try:
        servers = RedisServers(masters=MASTERS)
        started = servers.__enter__()
    finally:
        os.sched_setaffinity(0, before)
    try:
        store = open_remote(started.url, timeout=30.0)
        for rows in engine.embeddings.tables:
            store.create(rows.table.name, TableFormat(rows.table.dim))
            for begin in range(0, len(rows), 50_000):
                keys = torch.arange(begin, min(begin + 50_000, len(rows)))
                store.write(rows.table.name, keys.numpy(), rows.store.read(keys)[0].numpy(), 1)
        yield store
        store.close()
    finally:
        servers.__exit__(None, None, None)


def redis_reader(store: Any, dim: int, keys: list[Tensor]) -> Callable[[int], None]:
    """A turn: REDIS_PART batches."""
    arrays = [np.ascontiguousarray(batch.numpy()) for batch in keys]

    def turn(number: int) -> None:
        for at in range(REDIS_PART):
            answer = store.read(f"t{dim}", arrays[(number * REDIS_PART + at) % len(arrays)], time.monotonic() + 30)
            if not answer.found.all():
                raise RuntimeError("a row of the benchmark is not in Redis")

    return turn
