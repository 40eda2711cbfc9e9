"""What every bus does: the same tests for a folder, a real Redis and librdkafka's mock cluster in another process."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import forked
import pytest

import hotrow as hr
from hotrow.publish.bus import open_bus


def test_messages_come_back_in_order_from_any_offset(address: str) -> None:
    bus = open_bus(address)
    sent = [b"%d" % i * (i + 1) for i in range(20)]
    offsets = [bus.append(data) for data in sent]
    assert offsets == sorted(set(offsets))
    assert bus.tail() == offsets[0] and bus.head() > offsets[-1]
    read = []
    at = 0
    while len(read) < 20:
        entries = bus.read(at, wait=5)
        assert entries
        read += entries
        at = entries[-1].offset + 1
    assert [entry.data for entry in read] == sent
    assert [entry.offset for entry in read] == offsets
    assert bus.read(offsets[7], most_bytes=1, wait=5)[0].data == sent[7]
    assert [e.data for e in bus.newest(3)] == sent[-3:]
    assert bus.read(bus.head(), wait=0) == []
    bus.close()


def test_an_empty_bus_has_nothing(address: str) -> None:
    bus = open_bus(address)
    assert (bus.read(0), bus.newest(5), bus.head() - bus.tail(), bus.mark("hold")) == ([], [], 0, None)
    bus.close()


def test_a_reader_gets_a_message_at_once(address: str) -> None:
    reader, writer = open_bus(address), open_bus(address)
    writer.append(b"warm up")
    at = reader.read(0, wait=10)[-1].offset + 1
    times = []
    for _ in range(5):
        got: list[float] = []

        def listen(at: int = at, got: list[float] = got) -> None:
            got.extend([time.monotonic()] * len(reader.read(at, wait=10)))

        thread = threading.Thread(target=listen)
        thread.start()
        time.sleep(0.05)
        sent = time.monotonic()
        at_new = writer.append(b"news")
        thread.join(15)
        assert got
        times.append(got[0] - sent)
        at = at_new + 1
    assert min(times) < 0.5, times
    reader.close()
    writer.close()


def test_a_message_above_the_limit_is_refused_and_one_at_it_is_not(address: str) -> None:
    bus = open_bus(address + ("&" if "?" in address else "?") + "max_message=64KiB")
    assert bus.limit == 65536
    with pytest.raises(hr.BusError, match="max_message=65536"):
        bus.append(bytes(65537))
    bus.append(bytes(65536))
    assert [len(entry.data) for entry in bus.read(0, wait=10)] == [65536]
    bus.close()


def test_marks_are_what_they_were_last_set_to(address: str) -> None:
    bus, other = open_bus(address), open_bus(address)
    bus.set_mark("hold", b"first")
    bus.set_mark("hold", b"second")
    bus.set_mark("held", b"yes")
    bus.append(b"a message")
    assert (other.mark("hold"), other.mark("held")) == (b"second", b"yes")
    bus.set_mark("hold", None)
    assert (other.mark("hold"), other.mark("held")) == (None, b"yes")
    assert [entry.data for entry in other.read(0, wait=5)] == [b"a message"]
    bus.close()
    other.close()


WRITER = """
import sys
from hotrow.publish.bus import open_bus
bus = open_bus(sys.argv[1])
for i in range(40):
    bus.append(f"{sys.argv[2]}-{i}".encode())
"""


def test_several_processes_append_at_once(address: str, tmp_path: Path) -> None:
    bus = open_bus(address)
    bus.append(b"first")
    other = forked.python(WRITER, address, "a", log=tmp_path / "a.log")  # b is this process
    begun = bus.head()
    while bus.head() == begun and other.poll() is None:  # until it writes too
        time.sleep(0.005)
    for i in range(40):
        bus.append(f"b-{i}".encode())
    assert other.wait(300) == 0, other.text()
    bus.close()
    bus = open_bus(address)
    read: list[bytes] = []
    at = 0
    while entries := bus.read(at, wait=1):
        read += [entry.data for entry in entries]
        at = entries[-1].offset + 1
    assert len(read) == 81
    for name in ("a", "b"):
        assert [m for m in read if m.startswith(name.encode())] == [f"{name}-{i}".encode() for i in range(40)]
    bus.close()


def test_retention_removes_the_oldest_and_readers_see_where_it_begins(address: str) -> None:
    if address.startswith("kafka"):
        size = 900_000  # the mock cluster keeps 5 MiB of a partition, as a broker with retention.bytes would
        bus = open_bus(address)
    else:
        size = 50_000
        bus = open_bus(address + ("&" if "?" in address else "?") + "size=1MiB")
    offsets = [bus.append(bytes([i]) * size) for i in range(70 if size < 900_000 else 12)]
    assert bus.tail() > offsets[0]
    first = bus.read(0, most_bytes=1, wait=5)[0]
    assert first.offset == bus.tail() and first.offset in offsets
    assert bus.newest(1)[0].offset == offsets[-1]
    bus.close()


def test_wrong_addresses_are_errors_with_a_cure(tmp_path: Path) -> None:
    for address, fields in (
        ("ftp://x", "dir:/path"),
        ("dir:", "give the folder"),
        (f"dir:{tmp_path}?keeep=1d", "no option"),
        (f"dir:{tmp_path}?keep=soon", "span of time"),
        ("kafka://host:9092", "topic"),
        (f"dir:{tmp_path}?max_message=10B", "1KiB or more"),
    ):
        with pytest.raises(hr.OptionError, match=fields):
            open_bus(address)


def test_a_bus_that_is_away_is_a_bus_error() -> None:
    pytest.importorskip("redis")
    with pytest.raises(hr.BusError, match=r"127\.0\.0\.1:9"):
        open_bus("redis://:secret@127.0.0.1:9/0").append(b"x")


def test_a_full_disk_leaves_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = open_bus(f"dir:{tmp_path}")
    bus.append(b"before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(hr.BusError, match="No space left"):
            bus.append(b"too much")
    assert [entry.data for entry in open_bus(f"dir:{tmp_path}").read(0)] == [b"before"]
    assert not list(tmp_path.glob(".*.tmp"))
    bus.append(b"after")
    assert [entry.data for entry in bus.read(0)] == [b"before", b"after"]
