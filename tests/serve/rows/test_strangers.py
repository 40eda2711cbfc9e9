"""Peers that break the protocol, read nothing, or are very many: they cost little, and others are answered."""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import time
from pathlib import Path

import psutil
import pytest
import torch
from row_servers import Rows, RowsCommand, Stranger, connected, lookup_payload, model_of, until, where

from hotrow.serve.repository.manifest import open_version
from hotrow.tiers.rows.handshake import ERROR, HEADER, HELLO, MAGIC

LOOKUP, ROWS, PING, PONG = 4, 5, 7, 8
MALFORMED = 3


def frames_of_strangers() -> dict[str, bytes]:
    def header(kind: int, size: int, magic: int = MAGIC) -> bytes:
        return HEADER.pack(magic, kind, 0, 1, size, 0, 0)

    return {
        "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
        "another magic": header(HELLO, 10, 7) + b"x" * 10,
        "a lookup without a hello": header(LOOKUP, 8) + b"x" * 8,
        "a ping without a hello": header(PING, 0),
        "an unknown kind": header(99, 0),
        "a hello that is too long": header(HELLO, 4097),
        "a hello of all memory": header(HELLO, 1 << 62),
        "a hello that is none": header(HELLO, 5) + b"hello",
        "a hello of deep lists": header(HELLO, 4000) + b"[" * 4000,
        "an empty hello": header(HELLO, 0),
    }


@pytest.mark.parametrize("name", frames_of_strangers())
def test_a_stranger_is_closed_and_others_are_answered(repository: Path, rows: Rows, name: str) -> None:
    server = rows.start(repository)
    with connected(repository / "ctr" / "1", where(server, local="off")) as servers:
        servers.wait_until_complete(20)
        for cut in (None, 1, 20):
            stranger = Stranger(server.addresses[0])
            stranger.challenge()
            data = frames_of_strangers()[name]
            stranger.socket.sendall(data if cut is None else data[:cut])
            if cut is not None:
                stranger.socket.shutdown(socket.SHUT_WR)  # ended in the middle
            assert stranger.is_closed()
            stranger.close()
        out = torch.empty(4)
        assert not servers.lookup(servers.topology, [0], [[1]], torch.tensor([1]), 0, 5.0, out).late
    assert (
        server.figures()["server"]["refused"] + server.figures()["server"]["malformed"] > 0
        or "kind" in name
        or ("without a hello" in name)
    )


def malformed_lookups() -> dict[str, bytes]:
    good = lookup_payload([(0, [1, 2]), (1, [3])])
    return {
        "empty": b"",
        "shorter than its head": good[:5],
        "keys missing": good[:-1],
        "keys too many": good + b"x" * 8,
        "an unknown table": lookup_payload([(3, [1])]),
        "a table of the far end": lookup_payload([(2**32 - 1, [1])]),
        "an unknown wire": lookup_payload([(0, [1])], wire=9),
        "all tables": struct.pack("<IHH", 2**32 - 1, 0, 0),
        "too many tables": struct.pack("<IHH", 5000, 0, 0) + struct.pack("<II", 0, 0) * 5000,
        "all keys": struct.pack("<IHHII", 1, 0, 0, 0, 2**32 - 1) + b"x" * 64,
        "an answer of all memory": struct.pack("<IHH", 4096, 0, 0) + struct.pack("<II", 0, 2**32 - 1) * 4096,
    }


@pytest.mark.parametrize("name", malformed_lookups())
def test_a_malformed_lookup_is_answered_by_name_and_closed(repository: Path, rows: Rows, name: str) -> None:
    server = rows.start(repository)
    peer = Stranger(server.addresses[0], model_of(open_version(repository / "ctr" / "1")))
    peer.send(LOOKUP, malformed_lookups()[name])
    kind, error, text = peer.frame()
    assert (kind, error) == (ERROR, MALFORMED) and text
    assert peer.is_closed()
    assert server.figures()["server"]["malformed"] == 1


def test_a_proven_peer_may_send_frames_in_any_pieces(repository: Path, rows: Rows) -> None:
    server = rows.start(repository)
    peer = Stranger(server.addresses[0], model_of(open_version(repository / "ctr" / "1")))
    payload = lookup_payload([(0, [1, 2]), (2, [3])], flags=1)
    frame = HEADER.pack(MAGIC, LOOKUP, 0, 7, len(payload), 0, 0) + payload
    for byte in frame:
        peer.socket.sendall(bytes([byte]))
    one = peer.frame()
    assert one[0] == ROWS and len(one[2]) == 3 * 4 * 4 + 3
    odd = HEADER.pack(MAGIC, PING, 0, 7, 3, 0, 0) + b"abc"  # the next frame begins at an odd address
    peer.socket.sendall(frame * 50 + odd + frame * 50)
    assert [peer.frame() == one for _ in range(50)] == [True] * 50
    assert peer.frame()[0] == PONG
    assert [peer.frame() == one for _ in range(50)] == [True] * 50
    peer.send(LOOKUP, b"", size=(256 << 20) + 1)
    assert peer.is_closed()


def test_a_peer_that_reads_nothing_holds_up_no_other_and_takes_bounded_memory(repository: Path, rows: Rows) -> None:
    server = rows.start(repository)
    peer = Stranger(server.addresses[0], model_of(open_version(repository / "ctr" / "1")))
    payload = lookup_payload([(0, list(range(50_000)))])  # answers of 800 KB
    before = psutil.Process().memory_info().rss
    peer.socket.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        for _ in range(1000):
            peer.send(LOOKUP, payload)
    with connected(repository / "ctr" / "1", where(server, local="off")) as servers:
        servers.wait_until_complete(20)
        assert not servers.lookup(servers.topology, [0], [[1]], torch.tensor([1]), 0, 5.0, torch.empty(4)).late
    assert psutil.Process().memory_info().rss - before < 200 << 20
    peer.close()


def test_a_thousand_connections_cost_little_and_end(repository: Path, rows: Rows, tmp_path: Path) -> None:
    crowd(repository, tmp_path, 1000, proven=True)
    crowd(repository, tmp_path, 1000, proven=False)


@pytest.mark.soak
def test_ten_thousand_connections_cost_little_and_end(repository: Path, rows: Rows, tmp_path: Path) -> None:
    crowd(repository, tmp_path, 10_000, proven=True)
    crowd(repository, tmp_path, 10_000, proven=False)


def crowd(repository: Path, folder: Path, count: int, proven: bool) -> None:
    """Many connections to a row server of its own process: strangers, of which it keeps 1,024, or proven ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 200:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = RowsCommand(folder / f"crowd-{proven}.log", repository)
    try:
        process = psutil.Process(command.process.pid)
        model = model_of(open_version(repository / "ctr" / "1"))
        with connected(repository / "ctr" / "1", f"{command.address}?local=off") as servers:
            servers.wait_until_complete(30)
            figures = [process.memory_info().rss]
            for _ in range(4 if count > 1000 else 2):
                peers = [Stranger(command.address, model if proven else None) for _ in range(count)]
                began = time.monotonic()
                assert not servers.lookup(servers.topology, [0], [[1]], torch.tensor([1]), 0, 5.0, torch.empty(4)).late
                assert time.monotonic() - began < 2.0
                if not proven and count > 1024:
                    assert peers[0].challenge() and peers[0].is_closed()  # the oldest gave way
                figures.append(process.memory_info().rss)
                for peer in peers:
                    peer.close()
                until(lambda: process.num_fds() < 100, "the connections to end")
            assert figures[-1] - figures[0] < (10 << 20) + (20 << 10) * count  # 20 KiB for each of them
            assert figures[-1] - figures[-2] < max(10 << 20, count * (3 << 10))  # and hardly any growth
            assert servers.counters["late"] == 0 and servers.client.server(0)["errors"] == 0
            began_seconds = sum(process.cpu_times()[:2])
            time.sleep(0.3)
            assert sum(process.cpu_times()[:2]) - began_seconds < 0.2  # nothing spins
    finally:
        command.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
