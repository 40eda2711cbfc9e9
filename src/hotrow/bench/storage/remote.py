"""Rows read in batches from a Redis cluster of three masters on this machine, against redis-py on the same cluster.

200,000 rows, random keys, one client thread. Masters and client share the machine's cores, so the figure includes the
processor time of both; docs/remote.md splits it. redis-py (with hiredis, its fast parser) sends the same HMGETs in its
own cluster pipeline and joins the values into one array, as a user would write it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from hotrow import _core
from hotrow.bench.harness import Result, alternate, higher
from hotrow.bench.servers.redis_cluster import HOST, RedisServers
from hotrow.errors import OptionError
from hotrow.tiers.remote.redis_store import RedisStore
from hotrow.tiers.remote.store import Keys, TableFormat, open_remote

ROWS, MASTERS, BAR = 200_000, 3, 300_000
DIMS, BATCHES = (16, 64), (1024, 8192, 65_536)
KEY_STEP = 0x9E3779B97F4A7C1


def results() -> Iterator[Result | str]:
    """Rows/s by dim and batch beside redis-py; `online/redis_read` is dim 64 in batches of 8,192 beside the bar."""
    yield f"starting {MASTERS} Redis masters"
    with RedisServers(masters=MASTERS) as servers:
        store = open_remote(servers.url, timeout=10.0)
        assert isinstance(store, RedisStore)
        keys = np.arange(ROWS, dtype=np.int64) * KEY_STEP
        try:
            for dim in DIMS:
                yield f"writing {ROWS:,} rows of dim {dim}"
                store.create(f"t{dim}", TableFormat(dim))
                values = np.random.default_rng(dim).standard_normal((ROWS, dim), dtype=np.float32)
                store.write(f"t{dim}", keys, values, 1)
            peer = redis_py(servers)
            for dim in DIMS:
                for batch in BATCHES:
                    yield f"reading batches of {batch:,} rows of dim {dim}"
                    yield from compare(store, peer, keys, dim, batch)
        finally:
            store.close()


def compare(store: RedisStore, peer: Any, keys: Keys, dim: int, batch: int) -> Iterator[Result]:
    """Time both sides on the same random keys, in turns."""
    generator = np.random.default_rng(batch)
    repeats = max(6, min(40, 200_000 // batch))
    drawn = [keys[generator.integers(0, len(keys), batch)] for _ in range(repeats + 2)]
    table = f"t{dim}"
    plain = redis_py_reader(store, peer, table)

    def ours(i: int) -> None:
        answer = store.read(table, drawn[i], time.monotonic() + 10)
        assert answer.found.all()

    times = alternate([ours, lambda i: plain(drawn[i])], 2, repeats)
    speed, other = (batch / side.median for side in times)
    name = f"online/redis_read/dim{dim}/batch{batch}"
    yield higher(name, "k rows/s", speed / 1e3, "redis-py", other / 1e3, times[0].spread)
    if (dim, batch) == (64, 8192):
        yield higher("online/redis_read", "k rows/s", speed / 1e3, "bar", BAR / 1e3, times[0].spread)


def redis_py(servers: RedisServers) -> Any:
    """redis-py's cluster client."""
    try:
        import hiredis  # noqa: F401
        import redis
    except ImportError:
        raise OptionError("redis-py and hiredis are not installed: pip install 'hotrow[bench]'") from None
    return redis.RedisCluster(host=HOST, port=servers.servers[0].port)


def redis_py_reader(store: RedisStore, client: Any, table: str) -> Callable[[Keys], Any]:
    """A function that reads rows with redis-py, by the same commands as ours."""
    known = store._table(table)
    width = known.form.dim + 2

    def read(keys: Keys) -> Any:
        order = np.empty(len(keys), np.uint32)
        bounds = np.empty((1 << known.form.bits) + 1, np.uint32)
        _core.group_by_partition(keys, known.form.bits, order, bounds)
        flat = keys[order].tobytes()
        fields = [flat[at : at + 8] for at in range(0, len(flat), 8)]
        pipeline = client.pipeline()
        for name, (begin, end) in zip(known.names, pairwise(bounds.tolist()), strict=True):
            if begin < end:
                pipeline.execute_command("HMGET", name, *fields[begin:end])
        joined = b"".join([row for rows in pipeline.execute() for row in rows])
        values = np.empty((len(keys), width - 2), np.float32)
        values[order] = np.frombuffer(joined, np.float32).reshape(-1, width)[:, 2:]
        return values

    return read
