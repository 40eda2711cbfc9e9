"""A wrong, hostile or slow client gets a status and JSON with the cure, and leaves no state behind."""

from __future__ import annotations

import json
import re
import socket
import time
import zlib
from typing import Any

import numpy as np
import pytest
from fuzz import binary, http_request, text
from in_process import Running, small_backend
from raw_http import connect, exchange, good, infer_status, read_reply

from hotrow.serve.protocol.limits import Limits


@pytest.mark.parametrize(
    ("changes", "error_part"),
    [
        ({"itm": np.arange(4)}, "did you mean 'item'"),
        ({"item": None}, "'item'; send a tensor for each"),
        ({"item": np.arange(3)}, "different numbers of rows"),
        ({"item": np.arange(4, dtype=np.float32)}, "send INT64"),
        ({"item": np.arange(0)}, "at least one row"),
        ({"history.offsets": np.array([0, 3, 2, 5, 6])}, "never fall"),
        ({"history.offsets": np.array([0, 2, 2, 5, 2**40])}, "end at the number of ids, 6"),
        ({"history.offsets": np.array([-5, 2, 2, 5, 6])}, "start at 0"),
        ({"history.offsets": np.array([6])}, "at least one row"),
        ({"history": None}, "has offsets or weights but no ids"),
        ({"history.weights": np.full(6, np.nan, np.float32)}, "finite weights"),
        ({"history.weights": np.ones(5, np.float32)}, "one weight for each id"),
        ({"dense": np.zeros((4, 3), np.float32)}, "the model takes 2"),
        ({"dense": None}, "'dense' is missing"),
        ({"dense": np.array([[0, 0], [0, np.nan], [0, 0], [0, 0]], np.float32)}, "row 1, column 1"),
        ({"dense": np.full((1, 2), np.inf, np.float32)}, "finite numbers"),
        ({"keys": np.zeros((4, 3), np.int64)}, "'keys' has 3 columns"),
    ],
)
def test_a_wrong_tensor_is_named_with_the_cure(running: Running, changes: dict[str, Any], error_part: str) -> None:
    status, error = infer_status(running, **changes)
    assert status == 400 and error_part in error, error


def document(**changes: Any) -> bytes:
    item = {"name": "item", "datatype": "INT64", "shape": [1], "data": [1]}
    return json.dumps({"inputs": [{**item, **changes}]}).encode()


@pytest.mark.parametrize(
    ("body", "error_part"),
    [
        (b"", "no JSON"),
        (b"[1]", "a JSON list"),
        (b'{"inputs": []}', 'no "inputs"'),
        (b'{"inputs": [3]}', "an input is 3"),
        (b'{"input": [3]}', "did you mean 'inputs'"),
        (b'{"inputs": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"inputs": "\xff\xfe"}', "not UTF-8"),
        (b'{"inputs": ' + b"9" * 10_000 + b"}", "number that cannot be read"),
        (document(shape=[2**40, 2**40]), "elements; send at most"),
        (document(shape=[-1]), "whole numbers"),
        (document(shape=[True]), "whole numbers"),
        (document(shape=[1, 1, 1]), "one or two sizes"),
        (document(datatype="INT46"), "did you mean 'INT64'"),
        (document(data=[1, 2]), "2 elements"),
        (document(data=[1.5]), "cannot be read as INT64"),
        (document(data=[2**63]), "leaves INT64's range"),
        (document(data=[2**70]), "cannot be read as INT64"),
        (document(data=[[1], [2, 3]]), "as many elements"),
        (document(data=["x"]), "its elements are strings"),
        (document(data={}), "give a list"),
        (document(name=7), "has the name 7"),
        (document(parameters={"shared_memory_region": "x"}), "only binary_data_size"),
        (document(parameters={"binary_data_size": -1}), "give its number of bytes"),
        (document(datatype="BYTES", data=["\ud800"]), "no Unicode"),
        (b'{"parameters": {"deadline_ms": 1' + b"0" * 400 + b'}, "inputs": [{}]}', "deadline_ms"),
    ],
)
def test_wrong_json_is_named_with_the_cure(running: Running, body: bytes, error_part: str) -> None:
    status, reply = exchange(running, http_request(body, None))
    assert status in (400, 413) and error_part in reply["error"], reply


def test_the_binary_part_must_be_as_long_as_it_says(running: Running) -> None:
    body, header = binary(good())
    for data, length, error_part in [
        (body[:-1], header, "add up to"),
        (body + b"x", header, "add up to"),
        (body, len(body) + 1, "send it whole"),
        (body, None, "no JSON"),
    ]:
        status, reply = exchange(running, http_request(data, length))
        assert status == 400 and error_part in reply["error"], reply
    status, reply = exchange(running, http_request(body, None, "Inference-Header-Content-Length: -3\r\n"))
    assert status == 400 and "-3" in reply["error"]


def test_a_sequence_of_ambiguous_shape_is_refused() -> None:
    from hotrow.serve.protocol.input_layout import Layout
    from hotrow.serve.protocol.request import RefusedError, Signature
    from hotrow.serve.protocol.tensors import declare

    layout = Layout(Signature(("item", "history"), frozenset(["history"]), 0), Limits())
    item = declare("item", "INT64", [4])
    with pytest.raises(RefusedError, match=r"\[1, 4\] or \[4, 1\]"):
        layout.plan([item, declare("history", "INT64", [4])])
    assert layout.plan([item, declare("history", "INT64", [1, 4])]).columns[1].shared
    assert not layout.plan([item, declare("history", "INT64", [4, 1])]).columns[1].shared


def test_a_small_body_cannot_become_many_ids() -> None:
    with Running(small_backend(), limits=Limits(ids=10_000, rows=500)) as running:
        status, error = infer_status(
            running, item=np.arange(4), history=np.arange(3000).reshape(1, 3000), **{"history.offsets": None}
        )
        assert status == 413 and "limit is ids=10000" in error
        status, reply = exchange(
            running,
            http_request(*binary({"keys": np.zeros((501, 3), np.int64), "dense": np.zeros((1, 2), np.float32)})),
        )
        assert status == 413 and "limit rows=500" in reply["error"]


def test_bodies_over_the_limit_are_refused_before_they_are_read() -> None:
    with Running(small_backend(), limits=Limits(body="100KiB", json="10KiB", headers="4KiB")) as running:
        head = b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: a\r\n"
        status, reply = exchange(running, head + b"Content-Length: 99999999999\r\n\r\n")
        assert status == 413 and "body=100KiB" in reply["error"]
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        status, _ = exchange(running, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 4)
        assert status == 413
        bomb = zlib.compress(b"\0" * 10_000_000)
        status, reply = exchange(running, http_request(bomb, None, "Content-Encoding: deflate\r\n"))
        assert status == 413, reply
        status, reply = exchange(running, http_request(b" " * 11_000, None))
        assert status == 413 and "binary tensor data" in reply["error"]
        status, _ = exchange(running, head + b"X-Long: " + b"x" * 5000 + b"\r\n\r\n")
        assert status == 431
        status, _ = exchange(
            running, head + b"".join(b"X-%d: yyyyyyyyyyyyyyyyyyyyy\r\n" % i for i in range(300)) + b"\r\n"
        )
        assert status in (400, 431)
        assert running.frontend._http.held == 0
        assert infer_status(running)[0] == 200


@pytest.mark.parametrize(
    ("extra", "status"),
    [("Content-Encoding: br\r\n", 415), ("Content-Encoding: gzip\r\n", 400), ("Content-Encoding: deflate\r\n", 400)],
)
def test_encodings_that_are_none(running: Running, extra: str, status: int) -> None:
    body, header = binary(good())
    assert exchange(running, http_request(body, header, extra))[0] == status


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /v2/models/ctr/infer", 405),
        ("POST /v2/health/live", 405),
        ("GET /", 404),
        ("GET /v2/nothing", 404),
        ("GET /v2/models/..%2F..%2Fetc", 404),
        ("GET /v2/models/%00", 404),
        ("GET /v2/models/ctr/versions", 404),
        ("GET /v2/models/ctr/versions/9", 404),
        ("GET /v2/models/ctr/a/b", 404),
        ("POST /v2/repository/models/../load", 400),
        ("POST /v2/repository/models/..%2Fsecret/load", 400),
        ("POST /v2/repository/models/.hidden/unload", 400),
        ("POST /v2/repository/models/%FF/load", 400),
        ("CONNECT example.org:1", 501),
        ("nonsense", 400),
    ],
)
def test_paths_and_methods_that_are_not_there(running: Running, request_line: str, status: int) -> None:
    found, reply = exchange(
        running, f"{request_line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
    )
    assert found == status and reply["error"], reply


def test_two_lengths_or_a_length_and_chunks_are_refused(running: Running) -> None:
    head = b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n"
    assert exchange(running, head + b"Content-Length: 4\r\n\r\nabcd")[0] == 400
    assert exchange(running, head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")[0] == 400


def test_pipelined_requests_are_answered_in_order(running: Running) -> None:
    inputs = json.loads(text(good()))["inputs"]
    bodies = [json.dumps({"inputs": inputs, "id": f"number {number}"}).encode() for number in range(40)]
    with connect(running) as connection:
        connection.sendall(b"".join(http_request(body, None) for body in bodies))
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while part := connection.recv(65536):
            data += part
    assert data.count(b"HTTP/1.1 200") == 40
    assert re.findall(rb"number (\d+)", data) == [str(number).encode() for number in range(40)]
    assert running.frontend._http.held == 0


def test_slow_and_silent_clients_are_closed() -> None:
    with Running(small_backend(), limits=Limits(read_seconds=0.4, idle_seconds=0.8)) as running:
        with connect(running) as slow, connect(running) as silent:
            began = time.monotonic()
            slow.sendall(b"POST /v2/models/ctr/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc")
            assert read_reply(slow)[0] == 408
            assert silent.recv(10) == b""
            assert time.monotonic() - began < 10


def test_a_half_closed_client_still_gets_its_answer(running: Running) -> None:
    body, header = binary(good())
    with connect(running) as connection:
        connection.sendall(http_request(body, header))
        connection.shutdown(socket.SHUT_WR)
        assert read_reply(connection)[0] == 200
    with connect(running) as connection:
        connection.sendall(http_request(body, header)[:-10])
        connection.shutdown(socket.SHUT_WR)
        status, reply = read_reply(connection)
        assert status == 400 and "ended before" in reply["error"]


def test_idle_connections_cost_no_answers_and_too_many_are_told() -> None:
    with Running(small_backend(), limits=Limits(connections=300)) as running:
        idle = [connect(running) for _ in range(299)]
        try:
            assert infer_status(running)[0] == 200
            time.sleep(0.05)
            one_more = connect(running)
            idle.append(one_more)
            status, reply = exchange(running, b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
            assert status == 503 and "connections=" in reply["error"] and b"Retry-After: 1" in reply["head"]
        finally:
            for connection in idle:
                connection.close()
