"""Buses, event streams and remote stores behind a password, which no error, cursor or journal shows."""

from __future__ import annotations

import itertools
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import hotrow as hr
from hotrow import data
from hotrow.bench.servers.redis_cluster import HOST, RedisServers
from hotrow.data.streams.follow import FollowSource, Journal
from hotrow.features import FeatureSpec, Key
from hotrow.publish import kafka_bus
from hotrow.publish.bus import open_bus
from hotrow.tiers.remote.redis_connection import NodeAccess
from hotrow.tiers.remote.store import TableFormat, open_remote

SECRET = "correct horse/battery@staple?"
ENCODED = "correct%20horse%2Fbattery%40staple%3F"
SPEC = FeatureSpec([Key("user", hash="none")], label="click")


@pytest.fixture(scope="module")
def locked(redis_installed: None) -> Iterator[RedisServers]:
    """A Redis that requires the password."""
    pytest.importorskip("redis", reason="pip install hotrow[redis]")
    with RedisServers(options=["--requirepass", SECRET], access=NodeAccess(password=SECRET)) as servers:
        yield servers


@pytest.fixture
def address(locked: RedisServers, tmp_path: Path) -> str:
    """Of the locked Redis, with the password in a file; options may follow."""
    path = tmp_path / "redis-password"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return f"redis://{HOST}:{locked.servers[0].port}/0?password_file={path}"


def test_bus_and_store_are_opened_with_the_password_of_a_file(address: str) -> None:
    with closing(open_bus(f"{address}&stream=ctr")) as bus:
        bus.append(b"a message")
        assert [entry.data for entry in bus.read(0)] == [b"a message"]
    with closing(open_remote(f"{address}&namespace=ctr")) as store:
        store.create("t", TableFormat(4, "fp32", 0))
        assert list(store.tables()) == ["t"]


@pytest.mark.parametrize("login", [":wrong-hunter2@", "me:wrong-hunter2@", ""])
def test_a_refused_login_is_an_error_without_it(locked: RedisServers, login: str) -> None:
    place = f"redis://{login}{HOST}:{locked.servers[0].port}/0"
    with closing(open_bus(f"{place}?stream=ctr")) as bus, pytest.raises(hr.BusError) as caught:
        bus.append(b"a message")
    assert "hunter2" not in str(caught.value) and f"at redis://{HOST}" in str(caught.value)
    with pytest.raises(hr.StorageError, match=r"refuses the login|Authentication required") as refused:
        open_remote(place, write_timeout=0.3)
    assert "hunter2" not in str(refused.value)


def test_a_server_that_repeats_the_password_is_redacted(redis_installed: None) -> None:
    """As one does that has no AUTH any more: unknown command 'AUTH', with args beginning with: 'hunter2'."""
    pytest.importorskip("redis", reason="pip install hotrow[redis]")
    with RedisServers(options=["--rename-command", "AUTH", "", "--rename-command", "HELLO", ""]) as servers:
        place = f"redis://:hunter2@{HOST}:{servers.servers[0].port}/0"
        with closing(open_bus(f"{place}?stream=ctr")) as bus, pytest.raises(hr.BusError, match=r"'\*\*\*'") as caught:
            bus.append(b"a message")
        with pytest.raises(hr.StorageError, match=r"'\*\*\*'") as refused:
            open_remote(place, write_timeout=0.3)
    for error in (caught.value, refused.value):
        assert "hunter2" not in f"{error!r} {error.__cause__!r}"


def take(source: FollowSource, batches: int, cursor: data.Cursor | None = None) -> tuple[list[int], data.Cursor]:
    with closing(source.batches(cursor)) as passing:  # type: ignore[type-var]
        taken = list(itertools.islice(passing, batches))
    return [user for batch, _ in taken for user in batch.ids["user"].values.tolist()], taken[-1][1]


def test_cursor_and_journal_of_a_stream_have_no_login(locked: RedisServers, address: str, tmp_path: Path) -> None:
    """A password may be changed, or moved to a file, between two runs."""
    for user in range(8):
        locked.servers[0].call("XADD", "clicks", "*", "value", json.dumps({"user": user, "click": 0}))
    inline = f"redis://:{ENCODED}@{HOST}:{locked.servers[0].port}/0?stream=clicks"
    first = data.follow(inline, SPEC, batch_size=5, flush=0.1, journal=tmp_path / "journal")
    users, cursor = take(first, 1)
    take(first, 2)  # the second is short, so it is in the journal
    assert users == [0, 1, 2, 3, 4]
    shown = [json.dumps(cursor), (tmp_path / "journal").read_text(), first.describe()]
    assert all(f"redis://{HOST}" in text and "horse" not in text and "@" not in text for text in shown), shown
    second = data.follow(f"{address}&stream=clicks", SPEC, batch_size=5, flush=0.1, journal=tmp_path / "journal")
    assert take(second, 1, cursor)[0] == [5, 6, 7]
    older = {**cursor, "address": inline}  # of a release that wrote it whole
    assert take(second, 1, older)[0] == [5, 6, 7]
    with pytest.raises(hr.DataError, match="follow 'redis://elsewhere' again") as caught:
        take(second, 1, {**cursor, "address": f"redis://:{ENCODED}@elsewhere"})
    assert "horse" not in str(caught.value)


def test_a_journal_that_named_its_stream_with_the_login_is_still_its_own(tmp_path: Path) -> None:
    Journal(tmp_path / "j", f"redis redis://me:{ENCODED}@{HOST}/0?stream=a 10").add(3)
    assert Journal(tmp_path / "j", f"redis redis://{HOST}/0?stream=a 10").after(0) == [3]
    with pytest.raises(hr.DataError, match="journal of another stream") as caught:
        Journal(tmp_path / "j", f"redis redis://{HOST}/0?stream=b 10").after(0)
    assert "horse" not in str(caught.value)


class LockedBroker:
    """A Kafka broker that requests a login, and refuses each with an error that contains what it received."""

    def __init__(self) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.tokens: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(line,), daemon=True).start()

    def _serve(self, line: socket.socket) -> None:
        with line, line.makefile("rb") as sent, suppress(OSError):
            while size := sent.read(4):
                asked = sent.read(struct.unpack(">i", size)[0])
                call, _, number = struct.unpack(">hhi", asked[:8])
                reply = struct.pack(">i", number) + self._answer(call, asked)
                line.sendall(struct.pack(">i", len(reply)) + reply)

    def _answer(self, call: int, asked: bytes) -> bytes:
        if call == 18:  # ApiVersions: itself, Metadata, SaslHandshake, SaslAuthenticate
            calls = b"".join(struct.pack(">hhhx", *known) for known in [(18, 0, 3), (3, 0, 1), (17, 0, 1), (36, 0, 0)])
            return struct.pack(">hB", 0, 5) + calls + struct.pack(">ix", 0)
        if call == 17:
            return struct.pack(">hih", 0, 1, 5) + b"PLAIN"
        token = asked[14 + struct.unpack(">h", asked[8:10])[0] :]
        self.tokens.append(token)
        why = b"no entry for " + token.replace(b"\0", b" ")
        return struct.pack(">hh", 58, len(why)) + why + struct.pack(">i", 0)


def test_kafka_is_sent_the_login_and_its_refusal_is_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("confluent_kafka", reason="pip install hotrow[kafka]")
    monkeypatch.setattr(kafka_bus, "_TIMEOUT", 1.0)
    monkeypatch.setattr("hotrow.data.streams.kafka.SECONDS", 1.0)
    (tmp_path / "password").write_text(SECRET)
    (tmp_path / "password").chmod(0o600)
    broker = LockedBroker()
    with closing(broker.listener):
        port = broker.listener.getsockname()[1]
        place = f"kafka://me@{HOST}:{port}/clicks?tls=no&password_file={tmp_path / 'password'}"
        with pytest.raises(hr.BusError, match=r"authentication error.*check user, password") as caught:
            open_bus(place).append(b"a message")
        with pytest.raises(hr.DataError, match="cannot be read") as refused:
            next(data.follow(place, SPEC).batches())
    assert set(broker.tokens) == {b"\0me\0" + SECRET.encode()}
    assert "horse" not in str(caught.value) + str(refused.value)
