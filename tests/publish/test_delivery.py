"""A bus that does not answer: training continues; publications wait on disk and are sent later, in order, none lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import forked
import pytest
from readers import Reader, assert_same, publishing
from runs import clicks

import hotrow as hr
from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.publish import delivery, publisher
from hotrow.publish.bus import Bus, open_bus
from hotrow.publish.history import commits_after


class Connection:
    """A connection to a bus that can be cut."""

    def __init__(self) -> None:
        self.down = False
        self.appends_left: int | None = None

    def open(self, address: str) -> Bus:
        self._check()
        return _CutBus(open_bus(address), self)  # type: ignore[return-value]

    def _check(self, appends: bool = False) -> None:
        if appends and self.appends_left is not None:
            self.appends_left -= 1
            if self.appends_left < 0:
                self.down = True
        if self.down:
            raise hr.BusError("the line is cut")


class _CutBus:
    def __init__(self, bus: Bus, line: Connection) -> None:
        self.bus, self.line = bus, line

    def __getattr__(self, name: str) -> Any:
        self.line._check(appends=name == "append")
        return getattr(self.bus, name)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Connection:
    line = Connection()
    monkeypatch.setattr(publisher, "open_bus", line.open)
    monkeypatch.setattr(delivery, "_LONGEST_PAUSE", 0.1)  # retry often, so that a test need not wait
    return line


@pytest.mark.parametrize("appends", [0, 1, 3])
def test_publications_wait_on_disk_while_the_bus_does_not_answer(
    folder_bus: str, line: Connection, appends: int
) -> None:
    trainer = publishing(folder_bus, every=1)
    trainer.fit(clicks(), steps=2, progress=False)
    assert trainer.publisher is not None
    line.appends_left = appends  # cut between the messages of a publication, too
    for _ in range(3):
        trainer.fit(clicks(), steps=2, cursor=trainer.cursor, progress=False)
        trainer.publisher.delivery.flush(0.3)
    counters = trainer.publisher.counters
    assert counters.committed <= 3 and counters.spooled > 0 and "cut" in counters.last_error
    line.down, line.appends_left = False, None
    assert trainer.publisher.delivery.flush(30)
    assert (counters.committed, counters.spooled) == (8, 0)
    reader = Reader(folder_bus)
    reader.catch_up(8)
    assert reader.numbers == list(range(1, 9))
    assert_same(reader, trainer)


def test_a_full_spool_loses_no_row(folder_bus: str, line: Connection) -> None:
    trainer = publishing(folder_bus, every=1, publish_spool_size="8KiB")
    trainer.fit(clicks(), steps=1, progress=False)
    assert trainer.publisher is not None
    line.down = True
    trainer.fit(clicks(), steps=12, cursor=trainer.cursor, progress=False)
    counters = trainer.publisher.counters
    deadline = time.monotonic() + 20
    while not counters.withdrawn and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counters.withdrawn and counters.spooled <= 8192
    line.down = False
    trainer.fit(clicks(), steps=1, cursor=trainer.cursor, progress=False)
    assert trainer.publisher.delivery.flush(30)
    reader = Reader(folder_bus)
    reader.catch_up(counters.committed)
    assert reader.numbers == list(range(1, counters.committed + 1))
    assert counters.committed < 14
    assert_same(reader, trainer)


def test_what_waited_when_a_run_ended_is_sent_by_the_next(folder_bus: str, line: Connection, tmp_path: Path) -> None:
    trainer = publishing(folder_bus, tmp_path / "a", every=1)
    trainer.fit(clicks(), steps=2, progress=False)
    line.down = True
    trainer.fit(clicks(), steps=2, cursor=trainer.cursor, progress=False)
    trainer.save()
    assert trainer.publisher is not None
    trainer.publisher.delivery.close(0.1)
    line.down = False
    again = publishing(folder_bus, tmp_path / "a", every=1)
    again.fit(clicks(), steps=6, resume=True, progress=False)
    reader = Reader(folder_bus)
    assert again.publisher is not None and again.publisher.delivery.flush(30)
    reader.catch_up(again.publisher.counters.committed)
    assert [one.step for one in reader.read] == list(range(1, again.steps + 1))
    assert_same(reader, again)


def test_a_redis_that_is_restarted_is_found_again(redis: RedisServers) -> None:
    pytest.importorskip("redis", reason="pip install hotrow[redis]")
    address = f"{redis.url}/0?stream=restarted"
    trainer = publishing(address, every=1)
    trainer.fit(clicks(), steps=2, progress=False)
    reader = Reader(address)
    reader.catch_up(2)
    redis.servers[0].kill()
    try:
        trainer.fit(clicks(), steps=3, cursor=trainer.cursor, progress=False)
        with pytest.raises(hr.BusError):
            reader.take()
    finally:
        redis.servers[0].start()
    assert trainer.publisher is not None and trainer.publisher.delivery.flush(60)
    reader.catch_up(5)
    assert reader.numbers == [1, 2, 3, 4, 5]
    assert_same(reader, trainer)
    trainer.publisher.close()


KILLED = """
import os, sys
sys.path[:0] = sys.argv[3:]
from readers import publishing
from runs import CrashAfter, clicks
class Kill(CrashAfter):
    def batches(self, cursor=None):
        for item in self.source.batches(cursor):
            if self.left == 0:
                os.kill(os.getpid(), 9)
            self.left -= 1
            yield item
publishing(sys.argv[1], sys.argv[2], checkpoint_every=4, lookahead=0).fit(
    Kill(clicks(), 11), resume=True, progress=False)
"""


def test_a_trainer_killed_between_publications_goes_on(folder_bus: str, tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "train")]
    process = forked.python(KILLED, folder_bus, str(tmp_path / "a"), *paths, log=tmp_path / "log")
    assert process.wait(300) == -9, process.text()
    before = {n: c.fields["checksum"] for n, c in commits_after(open_bus(folder_bus), 0).items()}
    assert before
    resumed = publishing(folder_bus, tmp_path / "a", checkpoint_every=4, lookahead=0)
    report = resumed.fit(clicks(), steps=14, resume=True, progress=False)
    assert report.resumed_from in (4, 8)
    assert resumed.publisher is not None and resumed.publisher.delivery.flush(30)
    after = {n: c.fields["checksum"] for n, c in commits_after(open_bus(folder_bus), 0).items()}
    assert before.items() <= after.items() and sorted(after) == list(range(1, 8))
    assert resumed.publisher.counters.differed == 0
    reader = Reader(folder_bus)
    reader.catch_up(7)
    assert [one.step for one in reader.read] == [2, 4, 6, 8, 10, 12, 14]
    assert reader.subscriber.counters.duplicates <= 2  # parts of a publication whose commit was not sent
    assert_same(reader, resumed)
