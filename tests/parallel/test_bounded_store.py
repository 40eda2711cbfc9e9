"""A store that does not answer is an error within its timeout, and none to a rank that may wait longer."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

import hotrow as hr
from hotrow.parallel import bounded_store, health
from hotrow.parallel.bounded_store import BoundedStore
from hotrow.parallel.health import Health, HeartbeatMonitor
from hotrow.parallel.job_token import SealedStore, job_key


class Link:
    """A store behind a link that can be cut: then every call waits, as torch's do."""

    def __init__(self) -> None:
        self._store, self.up = HashStore(), threading.Event()
        self.up.set()

    def clone(self) -> Link:
        return self

    def __getattr__(self, name: str) -> Any:
        self.up.wait(60)
        return getattr(self._store, name)


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    monkeypatch.setattr(bounded_store, "GRACE_SECONDS", 0.0)
    return Link()


def test_a_call_ends_at_the_timeout_and_is_made_when_the_link_is_up_again(link: Link) -> None:
    store = BoundedStore(link)
    store.set_timeout(timedelta(seconds=0.3))
    store.set("rank", "1")
    link.up.clear()
    for _ in range(2):
        with pytest.raises(hr.RankError, match=r"store at which ranks meet has not answered for 0\.3 s"):
            store.set("rank", "2")
    link.up.set()
    store.set_timeout(timedelta(seconds=30))
    assert store.get("rank") == b"2" and store.check(["rank"]) and not store.check(["other"])


def test_the_thread_ends_with_its_store() -> None:
    before = set(threading.enumerate())
    store = BoundedStore(HashStore())
    store.set("name", "value")
    (thread,) = set(threading.enumerate()) - before
    del store
    thread.join(30)
    assert not thread.is_alive()


def test_a_rank_that_waits_long_outlives_a_cut_to_the_store(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "BEAT_SECONDS", 0.05)
    one, other = (Health(BoundedStore(link), rank, 2, 3.0, lambda: 0) for rank in (0, 1))
    one._store.set_timeout(timedelta(seconds=0.2))
    monitor = HeartbeatMonitor(one)
    link.up.clear()
    for _ in range(3):
        time.sleep(0.1)
        monitor.check()
    link.up.set()
    time.sleep(0.2)
    monitor.check()
    link.up.clear()
    deadline = time.monotonic() + 30
    with pytest.raises(RuntimeError, match="the store has not answered for 3 s"):
        while time.monotonic() < deadline:
            time.sleep(0.1)
            monitor.check()
    link.up.set()
    for each in (one, other):
        each.close()


def test_a_heartbeat_that_a_stranger_wrote_counts_as_none() -> None:
    store, key = HashStore(), job_key("the token of this job")
    one, other = (Health(SealedStore(store, key), rank, 2, 4.0, lambda: 0) for rank in (0, 1))
    other.close()
    monitor = HeartbeatMonitor(one)
    for name in ("hotrow/beat/1", "hotrow/words/1"):
        store.set(name, "00" + b'{"beats": 7}'.hex())
    monitor._next = 0.0
    monitor.check()
    assert one.failure_reports() == {}
    assert "rank 1 (it never began) died or was stopped" in str(one.explain("rows", RuntimeError("closed")))
    one.close()
