"""A fuzz campaign: mutated requests against a running server, from several processes.

Work is cut into blocks, which the processes take in turn; a number and the seed give a request again. In a block one
request in ten goes over gRPC, one in `large_every` is large (up to a little over the limit of bodies), and the rest
are small: those whose framing is intact are pipelined on kept connections, the others have a connection each. After
each block valid requests must be answered.

A process that finds a fault sends it and ends; the one that started it stops all.
"""

from __future__ import annotations

import functools
import gzip
import math
import queue
import random
import socket
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import forked
import numpy as np
from fuzz import binary, http_request, mutated, mutation, run_grpc, valid_bodies
from raw_http import Client, Reply, chunked

PIPELINED = 24
_SMALLEST, _JSON_LIMIT = 10_000, 32 << 20


def connect(address: str) -> Client:
    """A connection to host:port."""
    host, _, port = address.rpartition(":")
    return Client(socket.create_connection((host, int(port)), timeout=120))


class Campaign(NamedTuple):
    """Where the mutations go, and which they are."""

    http: str
    grpc: str
    seed: int
    limit: int  # of bodies
    large_every: int = 250
    block: int = 1_000


def run(campaign: Campaign, count: int, processes: int, report_progress: Callable[[int, Any], None]) -> Counter[str]:
    """Send `count` mutations; returns how often each status came. Twice a second `report_progress` gets the number
    sent."""
    blocks, done = forked.Queue(), forked.Queue()
    for first in range(0, count, campaign.block):
        blocks.put((first, min(campaign.block, count - first)))
    workers = []
    for _ in range(processes):
        blocks.put(None)
        work = forked.Process(target=_work, args=(campaign, blocks, done), daemon=True)
        work.start()
        workers.append(work)
    seen: Counter[str] = Counter()
    sent = ended = 0
    try:
        while ended < processes:
            try:
                block, found = done.get(timeout=0.5)
            except queue.Empty:
                assert all(worker.is_alive() or worker.exitcode == 0 for worker in workers), "a client process died"
                report_progress(sent, seen)
                continue
            assert not isinstance(found, str), found
            ended += block is None
            sent += block or 0
            seen.update(found)
            report_progress(sent, seen)
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return seen


def _work(campaign: Campaign, blocks: Any, done: Any) -> None:
    try:
        while (block := blocks.get()) is not None:
            done.put((block[1], _block(campaign, *block)))
        done.put((None, Counter()))
    except BaseException:
        done.put((0, traceback.format_exc()))
        raise


def _block(campaign: Campaign, first: int, count: int) -> Counter[str]:
    http, grpc, seed, limit, large_every, _ = campaign
    over_grpc = count // 10
    seen = run_grpc(grpc, over_grpc, seed, first)
    waiting: list[tuple[int, bytes]] = []
    for number in range(first + over_grpc, first + count):
        if number % large_every == 0:
            seen["large " + _on_own_connection(http, number, seed, large(number, seed, limit))] += 1
            continue
        made = mutation(number, seed)
        if made.framed:
            waiting.append((number, made.data))
        else:
            seen[_on_own_connection(http, number, seed, [made.data])] += 1
        if len(waiting) == PIPELINED:
            seen.update(_pipelined(http, seed, waiting))
            waiting = []
    seen.update(_pipelined(http, seed, waiting))
    with connect(http) as client:
        for body, header in valid_bodies():
            reply = client.roundtrip(http_request(body, header))
            assert reply.status == 200, (first, seed, reply)
    return seen


def _pipelined(http: str, seed: int, waiting: list[tuple[int, bytes]]) -> Counter[str]:
    """Send requests with intact framing, pipelined; on a new connection if the server has closed one."""
    seen: Counter[str] = Counter()
    while waiting:
        with connect(http) as client:
            client.send(b"".join(data for _, data in waiting))
            closed = False
            while waiting and not closed:
                reply = client.reply()
                assert reply is not None, (waiting[0][0], seed, "the connection was closed without a reply")
                seen[_checked(reply, waiting.pop(0)[0], seed)] += 1
                closed = reply.headers.get("connection") == "close"
    return seen


def _on_own_connection(http: str, number: int, seed: int, parts: list[bytes]) -> str:
    """The status of a request on a connection of its own; "closed" without a reply."""
    with connect(http) as client:
        try:
            client.send(*parts)
            client.socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was refused before its end; the reply may be there
        status = "closed"
        while (reply := client.reply()) is not None:  # a mutation may have made several requests of one
            status = _checked(reply, number, seed)
        return status


def _checked(reply: Reply, number: int, seed: int) -> str:
    assert reply.status != 500, (number, seed, reply)
    return str(reply.status)


# --- large requests ---


@functools.cache
def _noise(size: int) -> bytes:
    return np.random.default_rng(1).integers(0, 1 << 20, size // 8).tobytes()


@functools.cache
def _digits(size: int) -> bytes:
    return b",".join(b"%d" % number for number in np.random.default_rng(2).integers(0, 10**7, size // 8))


def large(number: int, seed: int, limit: int) -> list[bytes]:
    """A request whose body has from 10 KB to a little more than the limit, in parts; three in four are mutated."""
    draw = random.Random(f"large/{seed}/{number}")
    size = int(math.exp(draw.uniform(math.log(_SMALLEST), math.log(1.01 * limit))))
    form, extra, header = draw.choice(("bytes", "bytes", "bytes", "json", "gzip", "spaces", "bomb")), "", None
    if form in ("bytes", "gzip"):
        body, header = _tensors(size, limit, draw)
        if draw.random() < 0.5:
            text = mutated(body[:header], draw)
            body, header = text + body[header:], len(text)
    elif form == "json":
        text = _digits(_JSON_LIMIT + (1 << 20))[: min(size, _JSON_LIMIT)].rpartition(b",")[0]
        body = b'{"inputs":[{"name":"history","datatype":"INT64","shape":[1,%d],"data":[%b]}]}' % (
            text.count(b",") + draw.randrange(3),
            text,
        )
    elif form == "spaces":
        body = b" " * size + draw.choice(valid_bodies())[0]
    else:
        body, extra = _bomb(limit), "Content-Encoding: gzip\r\n"
    if form == "gzip":
        body, extra = gzip.compress(body, 1), "Content-Encoding: gzip\r\n"
    if draw.random() < 0.4:
        changed = bytearray(body)
        for _ in range(draw.choice((1, 10))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        body = bytes(changed)[: draw.choice((len(body), len(body), draw.randrange(len(body) + 1)))]
    whole = http_request(body, header, extra)
    head = whole[: len(whole) - len(body)]
    if draw.random() < 0.3:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked", 1)
        body = chunked(body, [draw.choice((1, 100, 70_000, 1 << 22)) for _ in range(20)])
    return [head, body] if draw.random() < 0.5 else [head + body]


def _tensors(size: int, limit: int, draw: random.Random) -> tuple[bytes, int]:
    rows = draw.choice((1, 10, 4_000, 131_072))
    ids = max(1, (size - 16 * rows) // 8)
    at = draw.randrange(8)
    noise = np.frombuffer(_noise(2 * limit), np.int64)
    return binary(
        {
            "user": noise[at : at + 1],
            "item": noise[at : at + rows],
            "history": noise[at : at + ids],
            "history.offsets": np.linspace(0, ids, rows + 1).astype(np.int64),
            "dense": np.zeros((1, 2), np.float32),
        }
    )


@functools.cache
def _bomb(limit: int) -> bytes:
    return gzip.compress(bytes(2 * limit), 9)
