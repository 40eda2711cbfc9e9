"""Ranks of one job recognise each other by the job token, and let nobody else in."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
from crew import environment, free_port
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

import hotrow as hr
from hotrow.parallel.exchange import Channel
from hotrow.parallel.health import Health
from hotrow.parallel.job_token import (
    TOKEN_VARIABLE,
    TRUSTED_VARIABLE,
    ForgedEntryError,
    SealedStore,
    job_key,
    prove,
    read_job_token,
)
from hotrow.parallel.launch import Part, part_of
from hotrow.parallel.meeting import Meeting, bind_store
from hotrow.parallel.shared_memory import SWITCH
from hotrow.parallel.sockets import connect_sockets

TOKEN, OTHER = "the token of this job", "the token of another"


# --- the store ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writer", "reader", "why"),
    [
        (job_key(OTHER), job_key(TOKEN), "its writer has another job token"),
        (None, job_key(TOKEN), "its writer has no job token and this rank has one"),
        (job_key(TOKEN), None, "its writer has a job token and this rank has none"),
    ],
)
def test_an_entry_of_another_job_is_an_error(writer: bytes | None, reader: bytes | None, why: str) -> None:
    store = HashStore()
    SealedStore(store, writer).set("hotrow/beat/1", "alive")
    with pytest.raises(ForgedEntryError, match=f"'hotrow/beat/1'.*{why}"):
        SealedStore(store, reader).get("hotrow/beat/1")


def test_an_entry_is_valid_under_its_own_name_and_attempt_only() -> None:
    store, key = HashStore(), job_key(TOKEN)
    SealedStore(store, key, "0").set("address/1", "10.0.0.1")
    assert SealedStore(store, key, "0").get("address/1") == b"10.0.0.1"
    store.set("address/2", store.get("address/1"))
    for context, name in (("0", "address/2"), ("1", "address/1")):
        with pytest.raises(ForgedEntryError):
            SealedStore(store, key, context).get(name)


@pytest.mark.parametrize("garbage", ["", "zz", "00", "01", "01" * 20, "ff" * 100])
def test_garbage_in_the_store_is_an_error(garbage: str) -> None:
    store = HashStore()
    store.set("name", garbage)
    with pytest.raises(ForgedEntryError, match="keep strangers away"):
        SealedStore(store, job_key(TOKEN)).get("name")


def test_a_token_comes_from_a_private_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_job_token(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_job_token(None) == TOKEN
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(hr.OptionError, match=r"HOTROW_JOB_TOKEN: .* at least 16 characters, this one 5; make one"):
        read_job_token(None)
    file = tmp_path / "job.token"
    file.write_text(OTHER + "\n")
    file.chmod(0o644)
    with pytest.raises(hr.OptionError, match="readable by every user"):
        read_job_token(str(file))
    file.chmod(0o600)
    assert read_job_token(str(file)) == OTHER


# --- connecting -----------------------------------------------------------------------------------------------------


class Job:
    """Ranks of one job as threads of this process, with a store each of them reaches."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.store, self.world = HashStore(), len(tokens)
        self.meetings = [
            Meeting(SealedStore(self.store, job_key(token)), self.store, rank, self.world, job_key(token), "127.0.0.1")
            for rank, token in enumerate(tokens)
        ]
        self.channels = [Channel("rows", Health(m.store, m.rank, self.world, 5.0, lambda: 0)) for m in self.meetings]
        self.errors: dict[int, BaseException] = {}
        self.threads = [threading.Thread(target=self._connect, args=(rank,)) for rank in range(self.world)]

    def _connect(self, rank: int) -> None:
        try:
            connect_sockets([self.channels[rank]], self.meetings[rank], [5.0], 30.0)
        except hr.HotRowError as error:
            self.errors[rank] = error

    def address(self, rank: int) -> tuple[str, int]:
        """Where a rank listens, as anybody who reaches the store can read it."""
        raw = bytes.fromhex(self.store.get(f"hotrow/address/1/{rank}").decode())
        host, port = json.loads(raw[1 + 32 :])
        return host, port

    def gathered(self) -> list[list[list[int]]]:
        """What all ranks gather once they are connected."""
        for thread in self.threads:
            thread.join(60)
        assert not self.errors
        results: list[Any] = [None] * self.world

        def gather(rank: int) -> None:
            results[rank] = self.channels[rank].gather_numbers(rank, 7)

        threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
            channel.health.close()


def says(place: tuple[str, int], data: bytes) -> bytes:
    """What a listener answers to a stranger who says this, until it closes the connection or waits."""
    with socket.create_connection(place, timeout=10) as stranger:
        stranger.settimeout(2)
        answer = b""
        try:
            stranger.sendall(data)
            while part := stranger.recv(4096):
                answer += part
        except OSError:
            pass
        return answer


def wrong_proof(place: tuple[str, int], echo: bool = False) -> bytes:
    """A stranger takes the place of rank 1. It proves another token, or sends back the proof that it was sent."""
    hello = {"job": "round 1", "from": 1, "to": 0, "channel": "rows", "random": "00"}
    line = json.dumps(hello).encode() + b"\n"
    with socket.create_connection(place, timeout=10) as stranger:
        stranger.settimeout(10)
        stranger.sendall(line)
        reply = stranger.makefile("rb").readline()
        proof = json.loads(reply)["proof"] if echo else prove(job_key(OTHER), b"connector", line, reply).hex()
        stranger.sendall(json.dumps({"proof": proof}).encode() + b"\n")
        return stranger.recv(4096)


GARBAGE = [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 1000 + b"\n", b"x" * 5000, b'{"job": 1e999, "from": []}\n{}\n']


def test_strangers_are_refused_and_ranks_connect_all_the_same() -> None:
    job = Job([TOKEN] * 3)
    job.threads[0].start()  # and waits for the others, as long as strangers like
    place = job.address(0)
    assert not any(b"ok" in says(place, data) for data in GARBAGE)
    assert wrong_proof(place, echo=True) == b"" and wrong_proof(place, echo=False) == b""
    idle = [socket.create_connection(place, timeout=10) for _ in range(50)]
    for thread in job.threads[1:]:
        thread.start()
    assert job.gathered() == [[[rank, 7] for rank in range(3)]] * 3
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(place, timeout=2)  # nobody listens any more
    for connection in idle:
        connection.close()
    job.close()


def test_a_rank_connects_to_no_stranger() -> None:
    """Somebody listens at the address where rank 0 was: an entry of an earlier start with the same token, say."""
    job = Job([TOKEN] * 2)
    listener = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = listener.accept()
        connection.makefile("rb").readline()
        connection.sendall(json.dumps({"random": "00", "proof": prove(job_key(OTHER)).hex()}).encode() + b"\n")

    threading.Thread(target=pretend, daemon=True).start()
    job.meetings[0].store.set("hotrow/address/1/0", json.dumps(listener.getsockname()))
    job.threads[1].start()
    job.threads[1].join(60)
    assert "where rank 0 should listen, does not have this job's token" in str(job.errors[1])
    listener.close()
    job.close()


def test_an_address_written_by_a_stranger_is_an_error() -> None:
    job = Job([TOKEN] * 2)
    job.store.set("hotrow/address/1/0", "00" + b'["127.0.0.1", 1]'.hex())
    job.threads[1].start()
    job.threads[1].join(60)
    assert "the entry 'hotrow/address/1/0' of the store at which ranks meet is not from this job" in str(job.errors[1])
    job.close()


# --- whole jobs -----------------------------------------------------------------------------------------------------

JOINS = """
import sys
import hotrow as hr
if sys.argv[1]:
    hr.__version__ = sys.argv[1]
if sys.argv[2]:
    from hotrow.parallel import meeting
    meeting.machine = lambda: sys.argv[2]
ranks = hr.join_ranks(timeout=20)
print("gathered", ranks.rows.gather_numbers(ranks.rank))
"""
Change = Callable[[int], dict[str, str]]


def join(
    home: Path, world: int, env: Change, version: Change | None = None, machine: Change | None = None
) -> list[str]:
    """What ranks say that join with these environments, once they have ended."""
    port = free_port()
    ranks = [
        forked.python(
            JOINS,
            *((change(rank)["value"] if change else "") for change in (version, machine)),
            log=home / f"rank-{rank}.log",
            env=environment(rank, world, port) | {"COLUMNS": "400"} | env(rank),
        )
        for rank in range(world)
    ]
    begin = time.monotonic()
    for rank in ranks:
        rank.wait(50)
    assert time.monotonic() - begin < 45
    return [re.sub(r"\s+", " ", rank.text()) for rank in ranks]


@pytest.mark.parametrize(("token", "why"), [(OTHER, "another job token"), ("", "no job token")])
def test_a_rank_with_the_wrong_token_is_an_error_on_every_rank(tmp_path: Path, token: str, why: str) -> None:
    said = join(tmp_path, 3, lambda rank: {TOKEN_VARIABLE: token if rank == 2 else TOKEN})
    assert "rank 2 cannot be let in: the entry 'hotrow/world/2' of the store at which ranks meet is not from" in said[0]
    assert why in said[0] and "rank 2 cannot be let in" in said[1]
    assert "cannot be let in" in said[2] and "start all ranks with the same job token" in said[2]
    assert not any(TOKEN in words or OTHER in words for words in said)


def test_another_version_is_an_error_on_every_rank(tmp_path: Path) -> None:
    versions = {0: "", 1: "0.1.9"}
    said = join(tmp_path, 2, lambda _: {TOKEN_VARIABLE: TOKEN}, lambda rank: {"value": versions[rank]})
    assert f"rank 0 runs HotRow {hr.__version__} and rank 1 HotRow 0.1.9; install one version" in said[0]
    assert f"rank 1 runs HotRow 0.1.9 and rank 0 HotRow {hr.__version__}; install one version" in said[1]


def test_ranks_of_several_machines_need_a_token(tmp_path: Path) -> None:
    def on_two(rank: int) -> dict[str, str]:
        return {"value": f"machine {rank}"}

    for words in join(tmp_path, 2, lambda _: {}, machine=on_two):
        assert "the ranks are on 2 machines and have no job token" in words and "openssl rand" in words
    for env in ({TRUSTED_VARIABLE: "1"}, {TOKEN_VARIABLE: TOKEN, SWITCH: "0"}):
        assert join(tmp_path, 2, lambda _, env=env: env, machine=on_two) == ["gathered [[0], [1]] "] * 2  # type: ignore[misc]


# --- starting a part of the ranks -----------------------------------------------------------------------------------


def test_a_machine_starts_its_part_of_the_ranks() -> None:
    where = "10.0.0.1:29500"
    assert part_of(6, 2, None, None, None).ranks == range(6)
    assert part_of(6, 2, "towers", where, TOKEN).ranks == range(2)
    assert part_of(6, 2, "rows", where, TOKEN).ranks == range(2, 6)
    part = part_of(6, 2, "3:5", "[fd00::1]:29500", TOKEN)
    assert part.ranks == range(3, 5) and part.meet == ("fd00::1", 29500) and not part.is_whole


@pytest.mark.parametrize(
    ("start", "meet", "token", "error"),
    [
        ("rows", None, TOKEN, "--start without --meet"),
        ("rows", "10.0.0.1", TOKEN, "give HOST:PORT"),
        ("rows", "10.0.0.1:99999", TOKEN, "give HOST:PORT"),
        ("rows", "10.0.0.1:29500", None, "--start needs a job token"),
        ("4:3", "10.0.0.1:29500", TOKEN, "--start 4:3 of 6 ranks"),
        ("0:7", "10.0.0.1:29500", TOKEN, "within 0:6"),
        ("machines", "10.0.0.1:29500", TOKEN, "give towers, rows, or FIRST:END"),
    ],
)
def test_a_wrong_part_is_an_error(start: str, meet: str | None, token: str | None, error: str) -> None:
    with pytest.raises(hr.OptionError, match=error):
        part_of(6, 2, start, meet, token)


def test_towers_and_rows_are_parts_only_of_a_job_with_row_ranks() -> None:
    with pytest.raises(hr.OptionError, match="without row ranks"):
        part_of(6, 6, "rows", "10.0.0.1:29500", TOKEN)


def test_a_store_listens_on_its_address_alone() -> None:
    store = bind_store("127.0.0.1", 0, 5)
    assert isinstance(store, TCPStore)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=2)
    with pytest.raises(hr.OptionError, match=r"cannot listen on 127\.0\.0\.1:.*MASTER_ADDR"):
        bind_store("127.0.0.1", store.port, 5)
    assert Part(2).ranks == range(2)
