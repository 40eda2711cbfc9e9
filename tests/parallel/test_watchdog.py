"""Exchanges that a device waits for, here one whose events are reached when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crew import Crew
from torch.distributed import HashStore  # type: ignore[attr-defined]

import hotrow as hr
from hotrow.parallel import health as health_module
from hotrow.parallel import watchdog as watch_module
from hotrow.parallel.health import Health
from hotrow.parallel.watchdog import Watchdog


class Event:
    def __init__(self, reached: bool = False) -> None:
        self.reached = reached

    def query(self) -> bool:
        return self.reached


class Pair:
    """Rank 0 with a watchdog, and rank 1 that it watches."""

    def __init__(self, timeout: float) -> None:
        store = HashStore()
        self.mine, self.theirs = (
            Health(store, rank, 2, timeout, lambda begun=begun: begun) for rank, begun in ((0, 5), (1, 3))
        )
        self.ended: list[hr.RankError] = []
        self._done = threading.Event()
        self.watch = Watchdog(self.mine, self._end)

    def _end(self, error: hr.RankError) -> None:
        self.ended.append(error)
        self._done.set()

    def words(self, within: float = 10.0) -> str:
        """Rank 0's last error."""
        assert self._done.wait(within), "the process did not end"
        return str(self.ended[0])

    def close(self) -> None:
        self.watch.close()
        self.mine.close()
        self.theirs.close()


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for module, name, seconds in (
        (health_module, "BEAT_SECONDS", 0.02), (health_module, "CHECK_SECONDS", 0.8),
        (health_module, "REPORT_SECONDS", 0.05), (watch_module, "BEAT_SECONDS", 0.02),
        (watch_module, "CHECK_SECONDS", 0.1), (watch_module, "GRACE_SECONDS", 0.1),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    made: list[Pair] = []

    def pair(timeout: float = 0.3) -> Pair:
        made.append(Pair(timeout))
        return made[-1]

    yield pair
    for one in made:
        one.close()


def test_a_rank_that_hangs_is_named_after_the_timeout(pairs: Any) -> None:
    pair = pairs()
    begin = time.monotonic()
    pair.watch.issued("rows", Event())
    assert "rank 0 stops, because rank 1 (process" in pair.words()
    assert "hangs: it lives but has not come" in pair.words()
    assert "(exchange 'rows': no end after 0.3 s)" in pair.words()
    assert time.monotonic() - begin > 0.3


def test_a_rank_that_died_is_named(pairs: Any) -> None:
    pair = pairs()
    pair.theirs.close()
    pair.watch.issued("dense", Event())
    assert "died or was stopped" in pair.words()


def test_so_is_one_that_did_not_come_to_make_the_connections(pairs: Any) -> None:
    pair = pairs()
    with pair.watch.issuing("rows"):
        assert "hangs: it lives but has not come" in pair.words()


def test_last_words_are_told_long_before_the_timeout(pairs: Any) -> None:
    pair = pairs(timeout=600.0)
    pair.theirs.report_failure(hr.DataError("clicks.csv has no line 7"))
    pair.watch.issued("rows", Event())
    assert "rank 1 failed: DataError: clicks.csv has no line 7" in pair.words()


def test_what_another_channel_has_found_is_told_when_nobody_could_raise_it(pairs: Any) -> None:
    """Gloo notices at once that a rank is gone; the route thread has the error, and training waits for the device."""
    pair = pairs(timeout=600.0)
    pair.theirs.close()
    pair.watch.issued("rows", Event())
    found = pair.mine.explain("route", RuntimeError("connection closed by peer"))
    assert pair.words() == str(found)
    assert "(exchange 'route': connection closed by peer)" in pair.words()


def test_exchanges_that_come_to_their_end_are_let_be(pairs: Any) -> None:
    pair = pairs()
    late = Event()
    for _ in range(40):
        with pair.watch.issuing("rows"):
            pass
        pair.watch.issued("rows", late)
        late.reached, late = True, Event()
        time.sleep(0.02)
    assert not pair.ended
    assert len(pair.watch._issued) <= 1


def watched(ranks: hr.Ranks) -> list[str]:
    """Exchanges of a channel whose device is the CPU; returns the calls to its watchdog, and sums of received data."""
    seen: list[str] = []

    class Noting(Watchdog):
        def issuing(self, channel: str) -> Any:
            seen.append(channel)
            return super().issuing(channel)

    watch = Noting(ranks._health)
    ranks.rows.use_device_group("cpu", dist.new_group(backend="gloo"), watch)
    try:
        came = ranks.rows.all_to_all(torch.full((2 * ranks.world,), ranks.rank), [2] * ranks.world, [2] * ranks.world)
        assert came.tolist() == [rank for rank in range(ranks.world) for _ in range(2)]
        ranks.route.gather_numbers(1)
    finally:
        ranks.rows.carries = None
        watch.close()
    return seen


def test_what_a_device_carries_is_watched_while_it_is_asked_and_waited_for(crews: dict[int, Crew]) -> None:
    assert crews[2].run(watched) == [["rows", "rows"]] * 2
