"""The request of user_once.py at real `hotrow serve` processes: BST, 500 candidates, 1,024 events, one at a time.

Requests come from hotrow.client over HTTP on loopback, from the client's arrays to its answer. Users differ from
request to request (`miss`), or one user asks again (`hit`).

    server/hit/p50, p99     a server with --user-cache, beside its own misses
    server/miss/p50, p99    the same server's misses, beside a server without a cache: what storing encodings costs

Answers of both servers must be those of hr.Engine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

import hotrow as hr
from hotrow.bench.harness import Result, lower
from hotrow.bench.sequences import user_once
from hotrow.bench.sequences.served_tower import Request, check_equal, export
from hotrow.bench.sequences.workload import DIM, LAYERS, device, scaled
from hotrow.bench.serving.serve_process import ServerProcess, hotrow_serve
from hotrow.client import Client

PROBE = b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
USERS, TURNS, WARMUP = 40, 150, 10
KINDS = ("hit", "miss", "no cache")


def results() -> Iterator[Result | str]:
    """The figures of this group."""
    if device().type != "cpu":
        yield "sequences/user_once/server runs on the CPU alone"
        return
    with tempfile.TemporaryDirectory(prefix="hotrow-bench-") as folder, ExitStack() as stack:
        yield "sequences/user_once/server: exporting"
        path = export(user_once.towers()[""](), Path(folder) / "repository" / "ctr")
        users = [Request.drawn(scaled(user_once.EVENTS, 8), seed) for seed in range(USERS)]
        with hr.Engine(path) as engine:
            sent = [one.tensors(engine) for one in users]
            expected = [engine.logits(one.batch(engine)) for one in users[:2]]
        yield "sequences/user_once/server: starting two servers"
        # The cache holds fewer users than take turns, so the user of a miss is always evicted before it asks again.
        cached = stack.enter_context(hotrow_serve(path.parent, PROBE, "--no-compile", "--user-cache", cache_bytes()))
        plain = stack.enter_context(hotrow_serve(path.parent, PROBE, "--no-compile"))
        with_cache, without = (stack.enter_context(client_of(server)) for server in (cached, plain))
        for client in (with_cache, without):
            for tensors, logits in zip(sent, expected, strict=False):
                check_equal("a server", torch.from_numpy(client.predict("ctr", tensors)["logits"].copy()), logits)
        yield "sequences/user_once/server: in turns"
        sides: list[Callable[[int], object]] = [
            lambda i: with_cache.predict("ctr", sent[0]),
            lambda i: with_cache.predict("ctr", sent[1 + i % (USERS - 1)]),
            lambda i: without.predict("ctr", sent[1 + i % (USERS - 1)]),
        ]
        seconds = in_turns(sides, scaled(TURNS, 10))
    for kind, peer in (("hit", "miss"), ("miss", "no cache")):
        for share in (50, 99):
            ours, other = (percentile(seconds[KINDS.index(name)], share) * 1e3 for name in (kind, peer))
            yield lower(f"sequences/user_once/server/{kind}/p{share}", "ms", ours, peer, other)


def cache_bytes() -> str:
    """Room for a third of the users: keys and values of all layers, float32, for each event."""
    encoding = scaled(user_once.EVENTS, 8) * LAYERS * 2 * DIM * 4
    return str(encoding * USERS // 3)


def client_of(server: ServerProcess) -> Client:
    """A client of a server's HTTP port."""
    return Client(f"http://127.0.0.1:{server.port}", timeout=60.0)


def in_turns(sides: Sequence[Callable[[int], object]], turns: int) -> list[list[float]]:
    """Seconds of each side's requests, after WARMUP of each."""
    seconds: list[list[float]] = [[] for _ in sides]
    for i in range(WARMUP + turns):
        for side, step in enumerate(sides):
            begin = time.perf_counter()
            step(i)
            if i >= WARMUP:
                seconds[side].append(time.perf_counter() - begin)
    return seconds


def percentile(seconds: Sequence[float], share: int) -> float:
    """The p50 or p99."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[share - 1]
