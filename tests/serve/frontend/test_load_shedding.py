"""The door: a flood is turned away unread, and the limit follows what the engine can do."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from fuzz import binary, http_request, text
from in_process import Running, small_backend
from raw_http import asking, connect, good, read_reply

from hotrow.serve.frontend.load_shedding import LEAST, Door
from hotrow.serve.protocol.request import RefusedError, Request


def flood(door: Door, capacity: int, seconds: int) -> list[int]:
    """An engine that has time for `capacity` at once, asked by ten times as many; how many it refused, by second."""
    refused = []
    for _ in range(seconds):
        refused.append(0)
        for _ in range(50):
            inside: list[int] = []
            while not door.shut and len(inside) < 10 * capacity:
                inside.append(door.entered())
            for entered in inside:
                if entered <= capacity:
                    door.answered()
                else:
                    door.refused(entered)
                    refused[-1] += 1
    return refused


def test_a_flood_ends_at_the_door_and_the_engine_stays_busy() -> None:
    door = Door(4096)
    refused = flood(door, 200, 3)
    assert 0 < refused[-1] < 0.2 * 50 * 200  # a few still ask the engine
    assert 180 <= door.limit <= 300
    assert door.inside == 0


def test_after_a_flood_the_limit_comes_back_with_the_answers() -> None:
    door = Door(4096)
    for _ in range(100):
        door.refused(door.entered())
    assert door.limit == LEAST
    for _ in range(14):
        while not door.shut:
            door.entered()
        while door.inside:
            door.answered()
    assert door.limit > 1000


def test_a_quiet_server_keeps_its_limit_whatever_single_requests_do() -> None:
    door = Door(4096)
    for _ in range(1000):
        door.entered()
        door.answered()
    assert door.limit == 4096
    door.entered()
    door.left()
    assert door.limit == 4096


def test_long_turns_are_taken_from_a_request_s_time() -> None:
    door = Door(10)

    async def turns() -> None:
        loop = asyncio.get_running_loop()
        door.read(loop)
        loop.call_soon(time.sleep, 0.02)
        door.read(loop)
        await asyncio.sleep(0.05)

    asyncio.run(turns())
    assert 0.02 <= door.turn < 0.045
    deadline = time.monotonic() + 100
    assert door.hastened(Request("ctr", 1, (), deadline=deadline)).deadline == deadline - door.turn
    assert door.hastened(Request("ctr", 1, (), deadline=deadline), 7.0).deadline == deadline - 7.0 - door.turn
    with pytest.raises(RefusedError, match="deadline would pass"):
        door.hastened(Request("ctr", 1, (), deadline=time.monotonic() + 0.01))
    assert door.hastened(Request("ctr", 1, ())).deadline is None


def test_one_that_lay_for_most_of_its_time_is_turned_away_in_a_flood_alone() -> None:
    door = Door(4096)
    assert not door.shut_for(0.9)
    door.refused(door.entered())
    assert door.limit == LEAST and not door.shut
    assert door.shut_for(0.9) and not door.shut_for(0.1)


@pytest.mark.parametrize(("deadline_ms", "status"), [(150, 429), (5000, 200)])
def test_the_time_that_a_request_lay_in_its_socket_is_taken_from_its_deadline(deadline_ms: int, status: int) -> None:
    with Running(small_backend()) as running:
        connection = connect(running)
        body = json.loads(text(good()))
        body["parameters"] = {"deadline_ms": deadline_ms}
        running.loop.call_soon_threadsafe(time.sleep, 0.4)
        time.sleep(0.1)
        connection.sendall(http_request(json.dumps(body).encode(), None))
        assert read_reply(connection)[0] == status


def test_one_in_a_hurry_does_not_shut_the_door_for_others() -> None:
    door = Door(4096)
    for seconds, ordinary in ((1.0, True), (0.001, False), (0.7, True), (0.1, False)):
        assert door.ordinary(Request("ctr", 1, (), deadline=time.monotonic() + seconds)) is ordinary
    assert door.ordinary(Request("ctr", 1, ()))


def test_requests_are_turned_away_unread_while_everything_else_is_answered() -> None:
    backend = small_backend()
    with Running(backend) as running:
        door = running.frontend.service.door
        backend.refuse = RefusedError(429, "no time", 0.1)
        assert asking(running)[0] == 429
        assert door.limit == LEAST
        backend.refuse, backend.seconds = None, 0.5
        waiting = [connect(running) for _ in range(LEAST)]
        for connection in waiting:
            connection.sendall(http_request(*binary(good())))
        time.sleep(0.2)
        late = connect(running)
        for _ in range(2):  # and its connection stays
            late.sendall(http_request(b"no tensor at all", None))
            status, reply = read_reply(late)
            assert status == 429 and b"Retry-After: 1" in reply["head"]
        late.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_reply(late)[0] == 200
        assert {read_reply(connection)[0] for connection in waiting} == {200}
        assert door.turned_away == 2 and door.limit > LEAST
        assert asking(running)[0] == 200
