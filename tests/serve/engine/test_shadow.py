"""The shadow's queue: what it drops, when a lane may run copies, and its counts."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hotrow.serve.batching import shadow as shadow_module
from hotrow.serve.batching.shadow import ShadowCounts, ShadowQueue
from hotrow.serve.batching.tensorbatch import Group, Piece, QueuedRequest, QueueLimits, TensorBatch


class Clock:
    """A time that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_model(share: float = 1.0, seconds: float = 0.0) -> Any:
    """A model with a shadow, whose batches take `seconds` for each row."""
    group = Group("ctr")
    for rows in (1, 100):
        group.service_time.note(rows, max(1e-9, seconds * rows))
    version = SimpleNamespace(shadow=ShadowCounts(), can_be_cold=False, name="2")
    return SimpleNamespace(group=group, shadow=(version, share), name="ctr")


def pieces(count: int, rows: int = 10, size: int = 80) -> list[Piece]:
    contents = [SimpleNamespace(id=number, chunk=bytes(size), offset=0, length=size) for number in range(count)]
    return [Piece(QueuedRequest(content, rows, size, 0.0), 0, rows) for content in contents]


def offer(queue: ShadowQueue, model: Any, count: int, load: float = 0.0, rows: int = 10, size: int = 80) -> None:
    queue.offer(model, pieces(count, rows, size), np.zeros(count * rows, np.float32), [0] * count, load)


def dropped(model: Any) -> dict[str, int]:
    return {why: count for why, count in model.shadow[0].shadow.dropped.items() if count}


def test_copies_are_dropped_while_lanes_are_busy_with_answers(clock: Clock) -> None:
    queue, model = ShadowQueue(clock=clock), make_model()
    offer(queue, model, 3, load=shadow_module.LOAD + 0.01)
    assert not queue and dropped(model) == {"busy": 3}
    offer(queue, model, 3)
    assert queue.take(load=shadow_module.LOAD + 0.01) == []  # it became busy meanwhile
    assert not queue and dropped(model) == {"busy": 6}


def test_rows_bytes_and_age_of_copies_are_bounded(clock: Clock) -> None:
    queue, model = ShadowQueue(clock=clock), make_model()
    most = shadow_module.MAX_ROWS // 1000
    offer(queue, model, most + 5, rows=1000)
    assert dropped(model) == {"busy": 5}
    clock.now += shadow_module.MAX_SECONDS + 0.1
    assert queue.take(0.0) == [] and dropped(model) == {"busy": most + 5}
    offer(queue, model, 3, size=shadow_module.MAX_BYTES // 2)  # what was dropped has made room
    assert dropped(model) == {"busy": most + 6}


def test_late_rows_are_not_compared(clock: Clock) -> None:
    queue, model = ShadowQueue(clock=clock), make_model()
    queue.offer(model, pieces(2), np.zeros(20, np.float32), [0, 4], 0.0)
    assert len(queue.take(0.0)) == 1 and dropped(model) == {"late": 1}


def test_lane_takes_copies_for_a_slice_of_time_and_at_least_one(clock: Clock) -> None:
    quick, slow = make_model(seconds=shadow_module.SLICE_SECONDS / 45), make_model(seconds=1.0)
    queue = ShadowQueue(clock=clock)
    offer(queue, quick, 10)  # of 10 rows: four in a slice
    assert [len(queue.take(0.0)) for _ in range(3)] == [4, 4, 2]
    offer(queue, slow, 2)
    assert [len(queue.take(0.0)) for _ in range(3)] == [1, 1, 0]


def test_share_is_that_of_the_requests(clock: Clock) -> None:
    queue, model = ShadowQueue(clock=clock), make_model(share=0.25)
    offer(queue, model, 1000, rows=1)
    taken = len(queue._copies)
    assert 200 < taken < 300 and not dropped(model)


def test_copies_for_a_version_that_is_no_shadow_any_more_are_dropped(clock: Clock) -> None:
    queue, model = ShadowQueue(clock=clock), make_model()
    offer(queue, model, 3)
    model.shadow = None
    assert queue.take(0.0) == [] and not queue


def test_lane_runs_background_work_only_when_no_request_waits_and_another_lane_is_free() -> None:
    ran: list[float] = []
    batch = TensorBatch(QueueLimits(max_rows=8), lanes=2)
    batch.background = lambda load: lambda: ran.append(load)
    group = Group("ctr")
    queue = batch.queue_of(group, "ctr")
    assert batch._background_work(0.0) is not None  # this one runs now
    assert batch._background_work(0.0) is None  # the other lane stays free for requests
    batch._do(lambda: None)
    requests = [QueuedRequest("a", 4, 100, time.monotonic() + 10)]
    assert batch.admit(group, requests) == []
    batch.enqueue(queue, requests)
    assert batch._background_work(0.0) is None  # a request waits
    taken = batch.take()
    assert taken is not None and not ran
    assert batch._background_work(0.0) is None  # one lane runs a batch
    batch.finish_pieces(taken.pieces, np.zeros(4, np.float32), [0])
    batch.done(taken)
    batch.draining = True
    assert batch._background_work(0.0) is None
    batch.draining = False
    assert batch._background_work(0.0) is not None


def test_lane_survives_background_work_that_fails() -> None:
    batch = TensorBatch(QueueLimits(), lanes=1)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise ValueError("a bug")

    batch.background = lambda load: None if failed.is_set() else fail
    group, taken = Group("ctr"), []
    lane = threading.Thread(target=lambda: taken.append(batch.take()))
    lane.start()
    assert failed.wait(10)
    requests = [QueuedRequest("a", 4, 100, time.monotonic() + 10)]
    assert batch.admit(group, requests) == []
    batch.enqueue(batch.queue_of(group, "ctr"), requests)
    lane.join(10)
    assert taken and taken[0].rows == 4 and batch._in_background == 0


def test_counts_are_those_of_the_differences() -> None:
    counts = ShadowCounts()
    counts.note(np.array([0.5, 0.5, 0.5], np.float32), np.array([0.5, 0.75, np.nan], np.float32), now=100.0)
    assert (counts.values, counts.total, counts.dropped["not finite"]) == (2, 0.25, 1)
    assert sum(counts.buckets) == 2 and counts.buckets[0] == 1
    assert counts.figures(101.0)["max"] == 0.25
    counts.note(np.array([0.5], np.float32), np.array([0.625], np.float32), now=131.0)
    assert counts.figures(132.0)["max"] == 0.25  # of the window before
    assert counts.figures(165.0)["max"] == 0.125
    assert counts.figures(300.0)["max"] == 0.0
