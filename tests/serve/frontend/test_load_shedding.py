"""Load shedding: an overload is refused unread, and the limit follows the engine's capacity."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from fuzz import binary, http_request, text
from in_process import Running, small_backend
from raw_http import connect, good, infer_status, read_reply

from hotrow.serve.frontend.load_shedding import MIN_LIMIT, LoadShedder
from hotrow.serve.protocol.request import RefusedError, Request


def overload(shedder: LoadShedder, capacity: int, seconds: int) -> list[int]:
    """Ten times as many requests as the engine's `capacity`; returns how many the engine refused, by second."""
    refused = []
    for _ in range(seconds):
        refused.append(0)
        for _ in range(50):
            begun: list[int] = []
            while not shedder.at_limit and len(begun) < 10 * capacity:
                begun.append(shedder.begin())
            for in_flight in begun:
                if in_flight <= capacity:
                    shedder.end_answered()
                else:
                    shedder.end_refused(in_flight)
                    refused[-1] += 1
    return refused


def test_an_overload_is_shed_and_the_engine_stays_busy() -> None:
    shedder = LoadShedder(4096)
    refused = overload(shedder, 200, 3)
    assert 0 < refused[-1] < 0.2 * 50 * 200  # a few still reach the engine
    assert 180 <= shedder.limit <= 300
    assert shedder.in_flight == 0


def test_after_an_overload_answers_raise_the_limit_again() -> None:
    shedder = LoadShedder(4096)
    for _ in range(100):
        shedder.end_refused(shedder.begin())
    assert shedder.limit == MIN_LIMIT
    for _ in range(14):
        while not shedder.at_limit:
            shedder.begin()
        while shedder.in_flight:
            shedder.end_answered()
    assert shedder.limit > 1000


def test_single_requests_leave_the_limit_of_an_idle_server() -> None:
    shedder = LoadShedder(4096)
    for _ in range(1000):
        shedder.begin()
        shedder.end_answered()
    assert shedder.limit == 4096
    shedder.begin()
    shedder.end()
    assert shedder.limit == 4096


def test_long_turns_of_the_loop_are_deducted_from_the_deadline() -> None:
    shedder = LoadShedder(10)

    async def turns() -> None:
        loop = asyncio.get_running_loop()
        shedder.time_turn(loop)
        loop.call_soon(time.sleep, 0.02)
        shedder.time_turn(loop)
        await asyncio.sleep(0.05)

    asyncio.run(turns())
    assert 0.02 <= shedder.turn_seconds < 0.045
    deadline = time.monotonic() + 100
    assert shedder.deduct_waiting(Request("ctr", 1, (), deadline=deadline)).deadline == deadline - shedder.turn_seconds
    assert (
        shedder.deduct_waiting(Request("ctr", 1, (), deadline=deadline), 7.0).deadline
        == deadline - 7.0 - shedder.turn_seconds
    )
    with pytest.raises(RefusedError, match="deadline would pass"):
        shedder.deduct_waiting(Request("ctr", 1, (), deadline=time.monotonic() + 0.01))
    assert shedder.deduct_waiting(Request("ctr", 1, ())).deadline is None


def test_request_that_waited_for_most_of_its_time_is_shed_only_during_an_overload() -> None:
    shedder = LoadShedder(4096)
    assert not shedder.should_shed(0.9)
    shedder.end_refused(shedder.begin())
    assert shedder.limit == MIN_LIMIT and not shedder.at_limit
    assert shedder.should_shed(0.9) and not shedder.should_shed(0.1)


@pytest.mark.parametrize(("deadline_ms", "status"), [(150, 429), (5000, 200)])
def test_time_in_the_socket_is_deducted_from_the_deadline(deadline_ms: int, status: int) -> None:
    with Running(small_backend()) as running:
        connection = connect(running)
        body = json.loads(text(good()))
        body["parameters"] = {"deadline_ms": deadline_ms}
        running.loop.call_soon_threadsafe(time.sleep, 0.4)
        time.sleep(0.1)
        connection.sendall(http_request(json.dumps(body).encode(), None))
        assert read_reply(connection)[0] == status


def test_refused_requests_with_short_deadlines_do_not_lower_the_limit() -> None:
    shedder = LoadShedder(4096)
    for seconds, usual in ((1.0, True), (0.001, False), (0.7, True), (0.1, False)):
        assert shedder.has_usual_deadline(Request("ctr", 1, (), deadline=time.monotonic() + seconds)) is usual
    assert shedder.has_usual_deadline(Request("ctr", 1, ()))


def test_inference_is_shed_unread_while_other_calls_are_answered() -> None:
    backend = small_backend()
    with Running(backend) as running:
        shedder = running.frontend.service.load_shedder
        backend.refuse = RefusedError(429, "no time", 0.1)
        assert infer_status(running)[0] == 429
        assert shedder.limit == MIN_LIMIT
        backend.refuse, backend.seconds = None, 0.5
        waiting = [connect(running) for _ in range(MIN_LIMIT)]
        for connection in waiting:
            connection.sendall(http_request(*binary(good())))
        time.sleep(0.2)
        late = connect(running)
        for _ in range(2):  # and the connection stays open
            late.sendall(http_request(b"no tensor at all", None))
            status, reply = read_reply(late)
            assert status == 429 and b"Retry-After: 1" in reply["head"]
        late.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_reply(late)[0] == 200
        assert {read_reply(connection)[0] for connection in waiting} == {200}
        assert shedder.shed_total == 2 and shedder.limit > MIN_LIMIT
        assert infer_status(running)[0] == 200
