"""Our server and h11 find the same requests in the same bytes, or ours closes the connection (h11_oracle.py)."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from desync_cases import CASES, REFUSED, SERVED, Case
from desync_random import drawn_case
from h11_oracle import Seen, found_by_h11
from in_process import Running
from raw_http import Client, Reply, client, pieces
from sums import Sums

from hotrow.serve.frontend.http_connection import HttpConnection
from hotrow.serve.frontend.http_message import HttpRequest

MARKER = b"GET /v2/marker HTTP/1.1\r\nHost: h\r\n\r\n"


class Recording(Running):
    """A front end that notes what it handles."""

    def __init__(self) -> None:
        super().__init__(Sums())
        self.seen: list[Seen] = []
        server = self.frontend._http
        answer = server.handler

        async def noted(call: Any) -> Any:
            self.seen.append(Seen(call.method, call.path, call.body))
            return await answer(call)

        server.handler = noted


@pytest.fixture(scope="module")
def recording() -> Iterator[Recording]:
    with Recording() as running:
        yield running


def like_ours(seen: Seen) -> Seen:
    """HEAD is handled as GET, and an absolute target as its path."""
    target = re.sub(r"^https?://[^/]*", "", seen.target) or "/"
    return Seen("GET" if seen.method == "HEAD" else seen.method, target, seen.body)


def check(running: Recording, case: Case, parts: list[bytes] | None = None) -> None:
    """Send the case and the marker; compare what was handled with what h11 finds, and the replies with both."""
    data = case.data + MARKER
    found, reads_on = found_by_h11((case.data if case.plain is None else case.plain) + MARKER)
    running.seen = []
    with client(running) as connection:
        with contextlib.suppress(OSError):  # it may be refused before its end
            connection.send(*(parts or [data]))
            connection.socket.shutdown(socket.SHUT_WR)
        replies = _replies(running, connection, found)
    handled, wanted = running.seen, [like_ours(seen) for seen in found]
    complete = bool(handled) and handled[-1].target == "/v2/marker"
    story = f"{case.name}: {data!r}\n  handled {handled}\n  h11     {wanted}, reads on: {reads_on}\n  {replies}"
    assert handled == wanted[: len(handled)], f"a request that h11 does not find there: {story}"
    assert len(replies) >= len(handled), f"a request without a reply: {story}"
    refusals = replies[len(handled) :]
    assert len(refusals) <= 1 and all(reply.status >= 400 for reply in refusals), story
    assert all(reply.status != 500 for reply in replies), story
    if case.wanted == SERVED:
        assert complete and not refusals, story
    if case.wanted == REFUSED:
        assert not complete, story
    if len(handled) < len(wanted) or case.wanted == REFUSED:
        assert replies and replies[-1].headers.get("connection") == "close", story


def _replies(running: Recording, connection: Client, found: list[Seen]) -> list[Reply]:
    """The final replies. Those to a HEAD that was handled have no body; refusals have one, and end the connection."""
    replies: list[Reply] = []
    while True:
        handled = connection.has_more() and len(replies) < min(len(running.seen), len(found))
        reply = connection.reply(found[len(replies)].method if handled else "POST")
        if reply is None:
            return replies
        replies += [reply] if reply.status != 100 else []


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_both_parsers_find_the_same_requests(recording: Recording, case: Case) -> None:
    check(recording, case)


def test_it_does_not_matter_where_the_bytes_are_cut(recording: Recording) -> None:
    draw = random.Random(11)
    for case in CASES:
        check(recording, case, pieces(case.data + MARKER, draw, 6))


def test_random_heads_and_bodies_are_found_alike(recording: Recording) -> None:
    for seed in range(1_000):
        check(recording, drawn_case(seed))


def test_the_oracle_finds_requests_itself() -> None:
    """A check against an oracle that finds nothing would pass for nearly everything."""
    known = {case.name: case for case in CASES}
    assert [seen.body for seen in found_by_h11(known["chunked"].data + MARKER)[0]] == [b"abc", b""]
    assert len(found_by_h11(known["ten pipelined"].data + MARKER)[0]) == 31
    assert found_by_h11(known["two lengths"].data + MARKER) == ([], False)
    drawn = [found_by_h11(drawn_case(seed).data + MARKER)[0] for seed in range(600)]
    to_the_end = sum(bool(found) and found[-1].target == "/v2/marker" for found in drawn)
    assert to_the_end > 100 and sum(len(found) > 2 for found in drawn) > 40 and drawn.count([]) > 50


def test_requests_that_are_shed_end_where_h11_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under overload a request to infer is refused without its body being kept (load shedding)."""
    shed: list[Seen] = []
    refuse = HttpConnection._shed

    def noted(connection: HttpConnection, request: HttpRequest) -> None:
        shed.append(Seen(request.method, request.target.decode("latin-1"), b""))
        running.seen.append(shed[-1])
        refuse(connection, request)

    monkeypatch.setattr(HttpConnection, "_shed", noted)
    with Recording() as running:
        load_shedder = running.frontend._http.load_shedder
        load_shedder.should_shed = lambda waited: True  # type: ignore[method-assign]
        for case in [*CASES, *(drawn_case(seed) for seed in range(300))]:
            data, plain = (
                re.sub(rb"(GET|HEAD|PUT|POST)( +)/v2/a ", rb"POST\2/v2/models/m/infer ", one) + MARKER
                for one in (case.data, case.data if case.plain is None else case.plain)
            )
            running.seen = []
            with client(running) as connection, contextlib.suppress(OSError):
                connection.send(data)
                connection.socket.shutdown(socket.SHUT_WR)
                while connection.socket.recv(65536):
                    pass
            found, _ = found_by_h11(plain)
            seen = [(each.method, each.target) for each in running.seen]
            wanted = [(each.method, each.target) for each in map(like_ours, found)]
            assert seen == wanted[: len(seen)], f"{case.name}: {data!r} is {seen}, and {wanted} to h11"
    assert len(shed) > 200
