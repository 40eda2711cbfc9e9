"""Requests and answers of every size that the limits allow arrive whole, over HTTP in every form and over gRPC."""

from __future__ import annotations

import gzip
import random
import socket
import threading
import time
import zlib

import numpy as np
import pytest
from in_process import Running
from raw_http import client, connect, pieces, send_slowly, until_released
from sums import PATH, Sums, drawn, expected, logits, message, over_grpc, request

from hotrow.serve.protocol.limits import Limits

FORMS = ("json", "binary", "gzip json", "deflate binary")
ROWS = (1, 2, 999, 3_000, 10_000, 100_000)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_rows_is_answered_over_http(sums: Running, form: str, rows: int) -> None:
    tensors = drawn(rows)
    with client(sums) as connection:
        for sizes in (None, [1, 2, 3, 70_000, 1 << 20]):
            found = logits(connection.roundtrip(request(form, tensors, sizes)))
            np.testing.assert_array_equal(found, expected(tensors))


@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows_is_answered_over_grpc(sums: Running, rows: int) -> None:
    tensors = drawn(rows)
    np.testing.assert_array_equal(over_grpc(sums, message(tensors)), expected(tensors))


def test_a_hundred_thousand_rows_of_the_longest_keys_are_answered_as_json(sums: Running) -> None:
    tensors = {name: -array for name, array in drawn(100_000, top=2**63 - 1).items()}
    with client(sums) as connection:
        np.testing.assert_array_equal(logits(connection.roundtrip(request("json", tensors))), expected(tensors))


def test_bodies_in_random_pieces_and_pauses_arrive_whole(sums: Running) -> None:
    draw = random.Random(7)
    with client(sums) as connection:
        for number in range(60):
            rows = int(10 ** (draw.random() * 3.7))
            tensors = drawn(rows, number, ids=draw.choice([None, None, rows * 3, 0 if rows == 1 else 7]))
            sizes = draw.choice([None, [draw.randint(1, 2_000) for _ in range(draw.randrange(40))]])
            send_slowly(connection.socket, request(draw.choice(FORMS), tensors, sizes), draw)
            reply = connection.reply()
            assert reply is not None, number
            np.testing.assert_array_equal(logits(reply), expected(tensors), err_msg=str(number))
    until_released(sums)


def test_the_smallest_bodies_get_an_answer_and_the_connection_stays(sums: Running) -> None:
    whole = request("json", drawn(1))
    body = whole.partition(b"\r\n\r\n")[2]
    with client(sums) as connection:
        for size in range(70):
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
            reply = connection.roundtrip(head + body[:size])
            assert reply.status == 400 and "no JSON" in reply.error(), (size, reply)
        assert connection.roundtrip(whole).status == 200


def test_every_byte_alone_is_a_request_too(sums: Running) -> None:
    """One byte a segment: every state of the parser meets the end of a read."""
    tensors = drawn(2)
    for whole in (request("binary", tensors), request("json", tensors, [1, 1, 5])):
        with client(sums) as connection:
            for at in range(len(whole)):
                connection.socket.sendall(whole[at : at + 1])
                if at % 16 == 0:
                    time.sleep(0.0002)
            reply = connection.reply()
            assert reply is not None
            np.testing.assert_array_equal(logits(reply), expected(tensors))


def test_thousands_of_requests_on_one_connection(sums: Running) -> None:
    draw = random.Random(3)
    known = []
    for number in range(20):
        tensors = drawn(1 + 7 * number, number)
        whole = request(draw.choice(FORMS), tensors, draw.choice([None, [10, 100]]))
        known.append((whole, expected(tensors)))
    with client(sums) as connection:
        for _ in range(3_000):
            whole, want = draw.choice(known)
            np.testing.assert_array_equal(logits(connection.roundtrip(whole)), want)
    until_released(sums)


def test_pipelined_requests_of_all_sizes_are_answered_in_order(sums: Running) -> None:
    draw = random.Random(5)
    wants, stream = [], []
    for number in range(60):
        rows = draw.choice([1, 2, 50, 999, 3_000, 20_000])
        tensors = drawn(rows, number)
        wants.append(expected(tensors))
        stream.append(request(draw.choice(FORMS), tensors, draw.choice([None, None, [5, 60_000]])))
    data = b"".join(stream)
    with client(sums) as connection:
        sender = threading.Thread(target=connection.send, args=pieces(data, draw, 200))
        sender.start()
        for number, want in enumerate(wants):
            reply = connection.reply()
            assert reply is not None, number
            np.testing.assert_array_equal(logits(reply), want, err_msg=str(number))
        sender.join(20)
        connection.socket.shutdown(socket.SHUT_WR)
        assert connection.ended()
    until_released(sums)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_large_answers_are_compressed_if_accepted(sums: Running, encoding: str) -> None:
    tensors = drawn(100_000)
    with client(sums) as connection:
        reply = connection.roundtrip(request("binary", tensors, extra=f"Accept-Encoding: br, {encoding};q=0.5\r\n"))
    assert reply.headers["content-encoding"] == encoding
    body = gzip.decompress(reply.body) if encoding == "gzip" else zlib.decompress(reply.body)
    headers = {name: value for name, value in reply.headers.items() if name != "content-encoding"}
    np.testing.assert_array_equal(logits(reply._replace(body=body, headers=headers)), expected(tensors))


@pytest.mark.parametrize("form", ["json", "binary"])
def test_slow_reader_gets_the_whole_answer_and_others_do_not_wait(sums: Running, form: str) -> None:
    tensors = drawn(100_000)
    with client(sums) as slow, client(sums) as other:
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        slow.socket.sendall(request(form, tensors) * 3)  # the second and third wait behind an answer that is not read
        time.sleep(0.3)
        began = time.monotonic()
        assert other.roundtrip(request("binary", drawn(3))).status == 200
        assert time.monotonic() - began < 5
        for _ in range(3):
            reply = slow.reply()
            assert reply is not None
            np.testing.assert_array_equal(logits(reply), expected(tensors))


def test_client_that_never_reads_is_closed() -> None:
    with Running(Sums(), limits=Limits(answer_seconds=0.5)) as running:
        with connect(running) as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            whole = request("json", drawn(50_000))
            sender = threading.Thread(target=_send_until_refused, args=(silent, whole, 40))
            sender.start()
            until = time.monotonic() + 30
            while (
                not running.frontend.service.counts.figures().get(("hotrow_connections_refused_total", "slow"))
                and time.monotonic() < until
            ):
                time.sleep(0.05)
            sender.join(20)
            assert not sender.is_alive()
        assert running.frontend.service.counts.figures()["hotrow_connections_refused_total", "slow"] == 1
        until_released(running)


def _send_until_refused(connection: socket.socket, data: bytes, times: int) -> None:
    try:
        for _ in range(times):
            connection.sendall(data)
    except OSError:
        return
