"""When a batch is released, which requests are admitted, and which go first: with a simulated clock."""

from __future__ import annotations

import threading

import pytest

from hotrow.serve.batching.tensorbatch import Batch, Group, QueuedRequest, QueueLimits, TensorBatch
from hotrow.serve.protocol.request import RefusedError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A queue whose lanes the test simulates."""

    def __init__(self, lanes: int = 1, **limits: float) -> None:
        self.clock = Clock()
        self.refused: list[tuple[object, int]] = []
        self.queue = TensorBatch(
            QueueLimits(**{"max_rows": 100, "max_wait": 0.002, **limits}),  # type: ignore[arg-type]
            lanes,
            lambda ask, why: self.refused.append((ask.content, why.status)),
            self.clock,
        )
        self.group = self.a_group("ctr")

    def a_group(self, name: str, fixed: float = 0.001, per_row: float = 1e-5) -> Group:
        group = Group(name)
        for rows in (1, 10, 100):
            group.service_time.note(rows, fixed + per_row * rows)
        return group

    def ask(
        self, name: object, rows: int, deadline: float = 1.0, group: Group | None = None, **more: bool
    ) -> QueuedRequest:
        group = group or self.group
        ask = QueuedRequest(name, rows, 8 * rows, self.clock.now + deadline, **more)
        for _, why in self.queue.admit(group, [ask]):
            raise why
        self.queue.enqueue(self.queue.queue_of(group, group.name), [ask])
        return ask

    def take(self) -> Batch | None:
        expired: list[QueuedRequest] = []
        batch, self.until = self.queue.next_batch(self.clock.now, expired)
        self.expired = [ask.content for ask in expired]
        return batch

    def keep_busy(self, seconds: float = 1.0) -> None:
        """All lanes busy for a while, then one is free."""
        for number in range(self.queue.lanes):
            self.ask(("busy", number), 100)
        batches = [self.take() for _ in range(self.queue.lanes)]
        self.clock.now += seconds
        assert batches[0] is not None
        self.queue.finish_pieces(batches[0].pieces, None, [0])
        self.queue.done(batches[0], ok=False)


def names(batch: Batch | None) -> list[object]:
    return [] if batch is None else [piece.request.content for piece in batch.pieces]


def test_idle_server_does_not_wait() -> None:
    bench = Bench()
    bench.ask("a", 5)
    assert names(bench.take()) == ["a"]


def test_server_that_was_idle_does_not_wait_for_a_second_lane_either() -> None:
    bench = Bench(lanes=2)
    bench.ask("a", 5)
    bench.take()
    bench.ask("b", 5)
    assert names(bench.take()) == ["b"]


def test_full_batch_leaves_with_what_fits() -> None:
    bench = Bench()
    for name in "abc":
        bench.ask(name, 40)
    batch = bench.take()
    assert names(batch) == ["a", "b"] and batch is not None and batch.why == "full"
    assert names(bench.take()) == ["c"]


def test_busy_server_waits_for_company_as_long_as_it_saves() -> None:
    bench = Bench(lanes=2)
    bench.keep_busy()
    bench.ask("a", 5)
    assert bench.take() is None
    assert bench.until is not None
    assert bench.until - bench.clock.now == pytest.approx(0.001, rel=0.3)  # the fixed cost, not max_wait
    bench.clock.now += 0.0005
    bench.ask("b", 5)
    assert bench.take() is None
    bench.clock.now = bench.until
    batch = bench.take()
    assert names(batch) == ["a", "b"] and batch is not None and batch.why == "spent"


def test_wait_is_cut_short_by_max_wait_and_by_a_deadline() -> None:
    bench = Bench(lanes=2, max_wait=0.0002)
    bench.keep_busy()
    bench.ask("a", 5)
    bench.take()
    assert bench.until is not None and bench.until - bench.clock.now <= 0.000201
    bench = Bench(lanes=2, deadline_fraction=1.0)
    bench.keep_busy()
    bench.ask("a", 5, deadline=0.0022)
    bench.take()
    assert bench.until is not None and bench.until - bench.clock.now == pytest.approx(0.0022 - 0.0021, abs=1e-6)


def test_no_wait_when_all_recent_clients_have_a_request_queued() -> None:
    bench = Bench()
    for round in range(3):  # a closed loop of four clients
        for name in "abcd":
            bench.ask(name, 5)
        batch = bench.take()
        assert names(batch) == list("abcd"), round
        assert batch is not None
        bench.clock.now += 0.01
        bench.queue.finish_pieces(batch.pieces, None, [0] * 4)
        bench.queue.done(batch, ok=False)
    bench.ask("a", 5)
    assert bench.queue.load.now(bench.clock.now) < 0.5 or bench.take() is None


def test_request_larger_than_a_batch_leaves_in_equal_pieces() -> None:
    bench = Bench()
    big = bench.ask("big", 250)
    pieces = []
    while (batch := bench.take()) is not None:
        pieces += [(piece.first, piece.rows) for piece in batch.pieces]
    assert pieces == [(0, 84), (84, 83), (167, 83)] and big.pieces_left == 3


def test_request_that_cannot_make_its_deadline_is_shed_with_the_time_to_come_again() -> None:
    bench = Bench()
    bench.ask("first", 100, deadline=10)
    bench.take()
    for number in range(20):
        bench.ask(number, 100, deadline=10)  # 2 ms each
    with pytest.raises(RefusedError, match="an answer would take about") as refused:
        bench.ask("hasty", 100, deadline=0.02)
    assert refused.value.status == 429
    assert refused.value.retry_after == pytest.approx(0.042, rel=0.05)
    bench.ask("patient", 100, deadline=0.1)
    assert bench.group.shed["deadline"] == 1


def test_shedding_counts_those_that_came_in_the_same_read() -> None:
    bench = Bench(deadline_fraction=1.0)
    asks = [QueuedRequest(number, 100, 800, bench.clock.now + 0.0105) for number in range(100)]
    refused = bench.queue.admit(bench.group, asks)
    assert len(asks) == 5 and len(refused) == 100 - len(asks)


def test_queue_is_bounded_in_rows_and_bytes() -> None:
    bench = Bench(queue_rows=1000)
    for number in range(10):
        bench.ask(number, 100, deadline=100)
    with pytest.raises(RefusedError, match="full") as refused:
        bench.ask("one more", 1, deadline=100)
    assert refused.value.status == 429 and refused.value.retry_after
    bench = Bench(queue_bytes=1000)
    with pytest.raises(RefusedError, match="full"):
        bench.ask("fat", 200, deadline=100)


def test_room_comes_back_when_a_request_has_ended() -> None:
    bench = Bench(queue_rows=100)
    for _ in range(5):
        bench.ask("a", 100, deadline=100)
        batch = bench.take()
        assert batch is not None
        assert len(bench.queue.finish_pieces(batch.pieces, None, [0])) == 1
        bench.queue.done(batch)
    assert bench.queue.figures()["queue_rows"] == 0


def test_draining_queue_admits_nothing() -> None:
    bench = Bench()
    bench.queue.draining = True
    with pytest.raises(RefusedError) as refused:
        bench.ask("late", 1)
    assert refused.value.status == 503 and refused.value.retry_after


def test_request_whose_deadline_passed_in_line_is_refused_unless_it_is_patient() -> None:
    bench = Bench()
    bench.ask("hasty", 10, deadline=0.05)
    bench.ask("patient", 10, deadline=0.05, patient=True)
    bench.clock.now += 0.1
    assert names(bench.take()) == ["patient"]
    assert bench.expired == ["hasty"] and bench.group.shed["expired"] == 1


def test_rest_of_a_request_that_expired_is_dropped_and_nothing_is_answered_twice() -> None:
    bench = Bench()
    big = bench.ask("big", 200, deadline=0.05)
    first = bench.take()
    bench.clock.now += 0.1
    assert bench.take() is None and bench.expired == ["big"]
    assert first is not None and big.pieces_left == 2
    assert bench.queue.finish_pieces(first.pieces, __import__("numpy").zeros(100, "f4"), [0]) == []


def test_busy_model_does_not_starve_a_quiet_one() -> None:
    bench = Bench()
    quiet = bench.a_group("quiet")
    for number in range(50):
        bench.ask(number, 100, deadline=100)
    bench.take()
    bench.take()
    bench.ask("q", 10, deadline=100, group=quiet)
    order = [batch.queue.group.name for _ in range(3) if (batch := bench.take()) is not None]
    assert "quiet" in order[:2]


def test_idle_time_is_no_credit() -> None:
    bench = Bench()
    quiet = bench.a_group("quiet")
    bench.ask("q", 1, deadline=100, group=quiet)
    bench.take()
    for number in range(60):
        bench.ask(number, 100, deadline=100)
    for _ in range(20):
        bench.take()
    for number in range(60):
        bench.ask(number, 100, deadline=100, group=quiet)
    order = [batch.queue.group.name for _ in range(10) if (batch := bench.take()) is not None]
    assert 4 <= order.count("ctr") <= 6


def test_lane_that_waits_is_woken_by_a_request_and_by_the_end() -> None:
    queue = TensorBatch(QueueLimits(), lanes=1)
    group = Group("ctr")
    taken: list[Batch | None] = []
    lane = threading.Thread(target=lambda: [taken.append(queue.take()) for _ in range(2)])
    lane.start()
    asks = [QueuedRequest("a", 1, 8, queue.clock() + 10)]
    assert queue.admit(group, asks) == []
    queue.enqueue(queue.queue_of(group, "ctr"), asks)
    while not taken:
        pass
    queue.close()
    lane.join(5)
    assert names(taken[0]) == ["a"] and taken[1] is None


def test_line_that_was_forgotten_comes_back_with_its_next_request() -> None:
    bench = Bench()
    bench.ask("a", 5)
    bench.take()
    line = bench.queue.queue_of(bench.group, "ctr")
    bench.queue.drop_empty_queues(lambda key: True)
    asks = [QueuedRequest("b", 5, 40, bench.clock.now + 1)]
    assert bench.queue.admit(bench.group, asks) == []
    bench.queue.enqueue(line, asks)
    assert names(bench.take()) == ["b"]


def test_line_with_requests_is_not_forgotten() -> None:
    bench = Bench()
    bench.ask("a", 5)
    bench.queue.drop_empty_queues(lambda key: True)
    assert names(bench.take()) == ["a"]


def test_group_of_the_same_name_counts_for_itself() -> None:
    bench = Bench()
    bench.ask("a", 5)
    bench.take()
    bench.queue.drop_empty_queues(lambda key: True)
    again = bench.a_group("ctr")  # the model was unloaded and loaded again
    for number in range(20):
        bench.ask(number, 100, deadline=10, group=again)
    with pytest.raises(RefusedError, match="an answer would take"):
        bench.ask("hasty", 100, deadline=0.02, group=again)
