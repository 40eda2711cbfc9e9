"""The shapes of HTTP/1.x that real clients send: chunks, trailers, Expect, HTTP/1.0, HEAD, Upgrade, IPv6."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from fuzz import text
from in_process import Running
from raw_http import chunked, client, connect, until_released
from sums import PATH, Sums, drawn, expected, logits, message, over_grpc, request

from hotrow.serve.frontend.http_connection import HttpConnection
from hotrow.serve.protocol.limits import Limits

LIVE = b"/v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
POST = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode()


def in_chunks(extension: bytes = b"", trailers: bytes = b"", headers: bytes = b"") -> bytes:
    body = text(drawn(50))
    return POST + headers + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(body, [1, 15, 16, 300], extension, trailers)


@pytest.mark.parametrize("extension", [b"", b";a", b";a=b", b';a="b c;d"', b";" + b"x" * 500, b" ; a = b"])
def test_chunk_extensions_are_ignored(sums: Running, extension: bytes) -> None:
    with client(sums) as connection:
        reply = connection.roundtrip(in_chunks(extension))
        if extension.startswith(b" "):
            assert reply.status in (200, 400)  # whitespace before an extension: RFC 9112 lets a server refuse it
        else:
            np.testing.assert_array_equal(logits(reply), expected(drawn(50)))
            assert connection.roundtrip(b"GET " + LIVE + b"\r\n").status == 200


@pytest.mark.parametrize(
    "trailers",
    [
        b"X-Checksum: abc\r\n",
        b"Content-Encoding: br\r\n",
        b"Inference-Header-Content-Length: 3\r\n",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"Host: evil.example\r\n",
        b"Expect: 100-continue\r\n",
    ],
)
def test_trailers_are_no_headers(sums: Running, trailers: bytes) -> None:
    """Bytes after the body do not change how it is read. A server may refuse one that a trailer cannot carry,
    and may close a connection whenever it has answered."""
    with client(sums) as connection:
        reply = connection.roundtrip(in_chunks(trailers=trailers))
        if reply.status == 400 and trailers.startswith((b"Content-Length", b"Transfer", b"Connection", b"Host")):
            assert connection.ended()
            return
        np.testing.assert_array_equal(logits(reply), expected(drawn(50)))
        if reply.headers.get("connection") == "close":
            assert connection.ended()
        else:
            assert connection.roundtrip(b"GET " + LIVE + b"\r\n").status == 200


@pytest.mark.parametrize("form", ["chunks", "length"])
def test_client_that_expects_100_continue_gets_it(sums: Running, form: str) -> None:
    whole = request("binary", drawn(100), [500, 500] if form == "chunks" else None, extra="Expect: 100-continue\r\n")
    head, _, body = whole.partition(b"\r\n\r\n")
    with client(sums) as connection:
        for _ in range(3):
            interim = connection.roundtrip(head + b"\r\n\r\n")
            assert (interim.status, interim.headers, interim.body) == (100, {}, b"")
            np.testing.assert_array_equal(logits(connection.roundtrip(body)), expected(drawn(100)))


def test_client_that_does_not_wait_for_100_continue_is_answered(sums: Running) -> None:
    whole = request("binary", drawn(100), extra="Expect: 100-continue\r\n")
    with client(sums) as connection:
        for _ in range(3):
            reply = connection.roundtrip(whole)
            if reply.status == 100:  # may be left out, once the body has come
                later = connection.reply()
                assert later is not None
                reply = later
            np.testing.assert_array_equal(logits(reply), expected(drawn(100)))


def test_a_body_over_the_limit_is_refused_instead_of_100_continue() -> None:
    with Running(Sums(), limits=Limits(body="1MiB")) as running:
        head = POST + b"Expect: 100-continue\r\nContent-Length: 1048577\r\n\r\n"
        with client(running) as connection:
            reply = connection.roundtrip(head)
            assert reply.status == 413 and "body=1MiB" in reply.error()
            assert connection.ended()


def test_an_unknown_expectation_is_refused(sums: Running) -> None:
    whole = request("json", drawn(1), extra="Expect: a-miracle\r\n")
    with client(sums) as connection:
        assert connection.roundtrip(whole).status == 417


def test_100_continue_comes_behind_the_answers_before_it() -> None:
    backend = Sums()
    whole = request("binary", drawn(9), extra="Expect: 100-continue\r\n")
    head, _, body = whole.partition(b"\r\n\r\n")
    with Running(backend) as running, client(running) as connection:
        infer = backend.infer

        async def slow(call: object) -> object:
            import asyncio

            await asyncio.sleep(0.2)
            return await infer(call)  # type: ignore[arg-type]

        backend.infer = slow  # type: ignore[method-assign,assignment]
        first = connection.roundtrip(request("json", drawn(3)) + head + b"\r\n\r\n")
        np.testing.assert_array_equal(logits(first), expected(drawn(3)))
        interim = connection.reply()
        assert interim is not None and interim.status == 100
        np.testing.assert_array_equal(logits(connection.roundtrip(body)), expected(drawn(9)))


def old(extra: str = "") -> bytes:
    return request("json", drawn(5), extra=extra).replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n")


def test_http_1_0_is_answered_and_closed_unless_keep_alive(sums: Running) -> None:
    with client(sums) as connection:
        reply = connection.roundtrip(old() + b"GET " + LIVE + b"\r\n")
        np.testing.assert_array_equal(logits(reply), expected(drawn(5)))
        assert connection.ended(), "the second request was answered on a connection that HTTP/1.0 ends"
    with client(sums) as connection:
        for _ in range(3):
            reply = connection.roundtrip(old("Connection: keep-alive\r\n"))
            np.testing.assert_array_equal(logits(reply), expected(drawn(5)))
            assert reply.headers["connection"].lower() == "keep-alive"
        connection.roundtrip(old())
        assert connection.ended()


def test_http_1_0_needs_no_host_and_gets_no_interim_answer(sums: Running) -> None:
    with client(sums) as connection:
        reply = connection.roundtrip(old("Expect: 100-continue\r\n").replace(b"Host: localhost\r\n", b""))
        np.testing.assert_array_equal(logits(reply), expected(drawn(5)))


def test_connection_close_is_obeyed_and_announced(sums: Running) -> None:
    for value in ("close", "Close", "keep-alive, close", "x-other,close"):
        with client(sums) as connection:
            reply = connection.roundtrip(
                request("json", drawn(5), extra=f"Connection: {value}\r\n") + b"GET " + LIVE + b"\r\n"
            )
            np.testing.assert_array_equal(logits(reply), expected(drawn(5)))
            assert reply.headers["connection"] == "close" and connection.ended(), value


def test_a_reply_to_head_has_no_body(sums: Running) -> None:
    """Otherwise its body would be read as the next reply."""
    with client(sums) as connection:
        for path in (b"/v2/health/live", b"/v2", b"/v2/models/sums", b"/v2/nothing"):
            connection.roundtrip(b"HEAD " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", "HEAD")
            assert connection.roundtrip(b"GET " + LIVE + b"\r\n").status == 200, path


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_answered_in_http_1_1(sums: Running, upgrade: str) -> None:
    """Java's HttpClient and curl --http2 offer it with every first request, and go on in HTTP/1.1."""
    settings = "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    offer = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {upgrade}\r\n{settings}"
    with client(sums) as connection:
        for sizes in (None, [1, 100]):
            reply = connection.roundtrip(request("json", drawn(5), sizes, extra=offer))
            np.testing.assert_array_equal(logits(reply), expected(drawn(5)))
        assert connection.roundtrip(b"GET " + LIVE + offer.encode() + b"\r\n").status == 200
        assert connection.roundtrip(b"GET " + LIVE + b"\r\n").status == 200


def test_header_names_and_codings_are_found_in_any_case(sums: Running) -> None:
    whole = request("deflate binary", drawn(9), extra="x-other: 1\r\n")
    for name in (b"Content-Length", b"Content-Encoding", b"Inference-Header-Content-Length", b"Host"):
        whole = whole.replace(b"\r\n" + name + b":", b"\r\n" + name.upper() + b": \t ")
    with client(sums) as connection:
        np.testing.assert_array_equal(
            logits(connection.roundtrip(whole.replace(b"deflate", b"Deflate"))), expected(drawn(9))
        )


@pytest.mark.parametrize(
    ("accepts", "wanted"),
    [("gzip", "gzip"), ("GZip", "gzip"), ("gzip;q=0, deflate", "deflate"), ("gzip; q=0.0", None), ("identity", None)],
)
def test_answers_are_compressed_by_accept_encoding(sums: Running, accepts: str, wanted: str | None) -> None:
    with client(sums) as connection:
        reply = connection.roundtrip(request("json", drawn(999), extra=f"Accept-Encoding: {accepts}\r\n"))
    assert reply.status == 200 and reply.headers.get("content-encoding") == wanted


@pytest.fixture(scope="module")
def six() -> Iterator[Running]:
    try:
        with socket.socket(socket.AF_INET6) as tried:
            tried.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")
    with Running(Sums(), host="::1") as running:
        yield running


def test_ipv6_works_on_every_port(six: Running) -> None:
    tensors = drawn(3_000)
    with client(six) as connection:
        assert connection.socket.family == socket.AF_INET6
        found = logits(
            connection.roundtrip(request("binary", tensors).replace(b"localhost", six.address("http").encode()))
        )
        np.testing.assert_array_equal(found, expected(tensors))
    np.testing.assert_array_equal(over_grpc(six, message(tensors)), expected(tensors))
    with client(six, "metrics") as connection:
        assert connection.roundtrip(b"GET /metrics HTTP/1.1\r\nHost: [::1]\r\n\r\n").status == 200


def test_many_clients_at_once_each_get_their_own_answer(sums: Running) -> None:
    failed: list[str] = []

    def work(number: int) -> None:
        with client(sums) as connection:
            for turn in range(20):
                tensors = drawn(1 + (number * 31 + turn * 97) % 2_000, number * 100 + turn)
                reply = connection.roundtrip(request(["json", "binary", "gzip json"][turn % 3], tensors))
                if not np.array_equal(logits(reply), expected(tensors)):
                    failed.append(f"client {number}, request {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)


def test_a_client_that_goes_away_in_the_middle_leaves_nothing(sums: Running) -> None:
    whole = request("binary", drawn(20_000))
    for share in (0.001, 0.01, 0.5, 0.999, 1.0):
        for linger in (False, True):
            connection = connect(sums)
            if linger:  # closed with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.sendall(whole[: int(share * len(whole))])
            connection.close()
    until_released(sums)


def test_connections_that_have_ended_are_freed_at_once(sums: Running) -> None:
    """A front end rarely collects garbage (freeze_garbage_collector), so a connection must be freed without it."""
    kinds = (b"GET " + LIVE + b"\r\n", b"GET x\r\n\r\n", POST + b"Content-Length: 9\r\n\r\nabc", b"GET", b"")
    before = {id(each) for each in _connections()}  # of other tests
    gc.disable()
    try:
        for data in kinds * 10:
            with client(sums) as connection:
                connection.send(data)
                connection.socket.shutdown(socket.SHUT_WR)
                connection.replies()
        until = time.monotonic() + 10
        while (left := sum(id(each) not in before for each in _connections())) > 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert left <= 2  # the loop may hold the last one's callbacks
    finally:
        gc.enable()


def _connections() -> list[HttpConnection]:
    return [each for each in gc.get_objects() if type(each) is HttpConnection]
