"""At a limit a request is answered; one byte, row or id over it is refused, and the refusal names the limit."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from in_process import Running
from raw_http import Client, client, until_released
from sums import MESSAGES, PATH, SERVICE, Sums, drawn, expected, logits, message, over_grpc, request

from hotrow.serve.protocol.limits import Limits

BODY, JSON, HEADERS, ROWS, IDS = 256 << 10, 64 << 10, 4 << 10, 3_000, 30_000
GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n"
TOO_LARGE = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    limits = Limits(body="256KiB", json="64KiB", headers="4KiB", rows=ROWS, ids=IDS, read_seconds=5.0)
    with Running(Sums(), limits=limits) as server:
        yield server


def refused(connection: Client, data: bytes, status: int, name: str) -> None:
    """The request is refused with this status and the limit's name."""
    reply = connection.roundtrip(data)
    assert reply.status == status and f"{name}=" in reply.error(), (reply.status, reply.body[:300])


@pytest.mark.parametrize("sizes", [None, [1] * 300 + [100_000]], ids=["length", "chunks"])
@pytest.mark.parametrize("form", ["binary", "gzip binary", "deflate binary"])
def test_a_body_at_the_limit_is_answered_and_one_byte_more_is_not(small: Running, form: str, sizes: list[int]) -> None:
    tensors = drawn(1_000, ids=27_000)
    with client(small) as connection:
        found = logits(connection.roundtrip(request(form, tensors, sizes, BODY)))
        np.testing.assert_array_equal(found, expected(tensors))
        refused(connection, request(form, tensors, sizes, BODY + 1), 413, "body")
    with client(small) as connection:
        assert connection.roundtrip(request(form, tensors, sizes, BODY)).status == 200
    until_released(small)


@pytest.mark.parametrize("sizes", [None, [1] * 300 + [30_000]], ids=["length", "chunks"])
@pytest.mark.parametrize("form", ["json", "gzip json"])
def test_json_at_the_limit_is_answered_and_one_byte_more_is_not(small: Running, form: str, sizes: list[int]) -> None:
    tensors = drawn(1_000)
    with client(small) as connection:
        found = logits(connection.roundtrip(request(form, tensors, sizes, JSON)))
        np.testing.assert_array_equal(found, expected(tensors))
        refused(connection, request(form, tensors, sizes, JSON + 1), 413, "json")


def test_the_body_limit_counts_bytes_of_the_body_and_not_of_its_chunks(small: Running) -> None:
    """In chunks of one byte a body takes six bytes for each on the wire."""
    tensors = drawn(500)
    with client(small) as connection:
        found = logits(connection.roundtrip(request("json", tensors, [1] * JSON, JSON)))
    np.testing.assert_array_equal(found, expected(tensors))


def test_a_body_that_announces_too_much_is_refused_before_it_comes(small: Running) -> None:
    for announced in (f"Content-Length: {BODY + 1}", "Content-Length: 99999999999", f"Content-Length: {2**63}"):
        with client(small) as connection:
            reply = connection.roundtrip(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{announced}\r\n\r\n".encode())
            assert reply.status == 413 and "body=256KiB" in reply.error(), (announced, reply)
            assert connection.ended()


def test_headers_at_the_limit_are_taken_and_one_byte_more_are_not(small: Running) -> None:
    """The limit is for the request line and all headers, with the empty line behind them."""
    for header in (b"X-Long: %b\r\n", b"X-%b: y\r\n"):
        spare = HEADERS - len(GET + header % b"" + b"\r\n")
        with client(small) as connection:
            assert connection.roundtrip(GET + header % (b"x" * spare) + b"\r\n").status == 200
            refused(connection, GET + header % (b"x" * (spare + 1)) + b"\r\n", 431, "headers")
            assert connection.ended()


def test_the_header_limit_holds_for_the_request_line_and_for_many_headers(small: Running) -> None:
    many = b"".join(b"X-%d: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" % number for number in range(200))
    path = b"GET /v2/health/live?%b HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for data in (GET + many + b"\r\n", path % (b"x" * HEADERS)):
        with client(small) as connection:
            refused(connection, data, 431, "headers")
            assert connection.ended()
    with client(small) as connection:
        assert connection.roundtrip(path % (b"x" * (HEADERS - len(path) + 2))).status == 200


@pytest.mark.parametrize("start", [b"GET /", b"GET / HTTP/1.1\r\nX-Long: ", b"GET / HTTP/1.1\r\nX"])
def test_a_head_without_an_end_is_refused_while_it_comes(small: Running, start: bytes) -> None:
    with client(small) as connection:
        for part in (start, b"x" * HEADERS):
            connection.send(part)
            time.sleep(0.01)
        refused(connection, b"x" * HEADERS, 431, "headers")
        assert connection.ended()


def test_one_header_may_take_most_of_the_default_limit(sums: Running) -> None:
    with client(sums) as connection:
        assert connection.roundtrip(GET + b"Cookie: " + b"x" * 30_000 + b"\r\n\r\n").status == 200


@pytest.mark.parametrize("where", ["extension", "trailer"])
def test_what_surrounds_chunks_is_limited_too(small: Running, where: str) -> None:
    """Bytes that are no body and no header, and that a client could send for ever."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    endless = {
        "extension": b"1;" + b"e" * 4 * BODY,
        "trailer": b"0\r\n" + b"X-Trailer: yyyyyyyyyyyyyyyyyyyy\r\n" * 40_000,
    }
    with client(small) as connection:
        reply = connection.roundtrip(head + endless[where])
        assert reply.status in (400, 413, 431), reply
        assert connection.ended()
    until_released(small)


@pytest.mark.parametrize("form", ["json", "binary", "deflate binary"])
def test_rows_and_ids_at_the_limit_are_answered_and_one_more_is_not(small: Running, form: str) -> None:
    ids = {"rows": (drawn(ROWS, top=99), drawn(ROWS + 1, top=99))}
    if form != "json":
        ids["ids"] = (drawn(9, ids=IDS - 27), drawn(9, ids=IDS - 26))
    with client(small) as connection:
        for name, (most, over) in ids.items():
            np.testing.assert_array_equal(logits(connection.roundtrip(request(form, most))), expected(most))
            refused(connection, request(form, over), 413, name)


def test_the_same_limits_hold_over_grpc(small: Running) -> None:
    for most, over, name in [
        (message(drawn(1_000, ids=27_000), pad=BODY), message(drawn(1_000, ids=27_000), pad=BODY + 1), "body=256KiB"),
        (message(drawn(ROWS)), message(drawn(ROWS + 1)), f"rows={ROWS}"),
        (message(drawn(9, ids=IDS - 27)), message(drawn(9, ids=IDS - 26)), f"ids={IDS}"),
    ]:
        assert len(over_grpc(small, most))
        with pytest.raises(grpc.RpcError) as error:
            over_grpc(small, over)
        assert error.value.code() in TOO_LARGE and name in error.value.details(), error.value
    with pytest.raises(grpc.RpcError) as error:  # grpc itself stops reading far above the limit
        over_grpc(small, message(drawn(3), pad=4 * BODY))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as error:
        over_grpc(small, message(drawn(3)), metadata=[("x-long", "x" * 4 * HEADERS)])
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_message_over_the_limit_does_not_end_a_stream(small: Running) -> None:
    tensors = drawn(1_000, ids=27_000)
    sent = [message(tensors), message(tensors, pad=BODY + 1), message(tensors)]
    with grpc.insecure_channel(small.address("grpc")) as channel:
        answers = list(channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(iter(sent), timeout=60))
    errors = [MESSAGES["ModelStreamInferResponse"].FromString(answer).error_message for answer in answers]
    assert errors[0] == errors[2] == "" and "body=256KiB" in errors[1], errors


def test_the_default_body_limit_is_reached_and_not_passed(sums: Running) -> None:
    limit = Limits().body_bytes
    tensors = drawn(131_072, ids=7_800_000)
    want = expected(tensors)
    with client(sums) as connection:
        np.testing.assert_array_equal(
            logits(connection.roundtrip(request("binary", tensors, [1 << 24] * 3, limit))), want
        )
        refused(connection, request("binary", tensors, pad=limit + 1)[: 1 << 20], 413, "body")
    whole = message(tensors, pad=limit)
    np.testing.assert_array_equal(over_grpc(sums, whole), want)
    with pytest.raises(grpc.RpcError, match="body=64MiB"):
        over_grpc(sums, whole + b"\xf8\x07\x00")  # and a field that no client has
    until_released(sums)
