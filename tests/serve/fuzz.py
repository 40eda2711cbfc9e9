"""Mutated requests: valid ones over HTTP (JSON and bytes) and gRPC, with bytes flipped, cut, doubled and moved, and
bodies in chunks.

A front end passes when every mutation gets an HTTP status or a closed connection in time, never a 500, and still
answers a valid request afterwards. `seed` and the number of a mutation give it again.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import socket
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

WORDS = [
    b"", b"0", b"-1", b"null", b"true", b'"x"', b"[]", b"{}", b"1e400", b"NaN", b"18446744073709551616", b"\xff\xfe",
    b"9" * 400, b"[" * 200, b'{"a":' * 50, b"INT64", b"FP32", b"BYTES", b"keys", b"dense", b"\x00", b"../..",
    b"%2e%2e%2f",
    b"user.offsets", b"binary_data_size", b"\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
]  # fmt: skip


@functools.cache
def valid_bodies() -> list[tuple[bytes, int | None]]:
    """Bodies that are answered with 200: JSON, bytes, packed, jagged, shared and raw."""
    jagged: dict[str, Any] = {
        "user": np.array([3]),
        "item": np.arange(4),
        "history": np.arange(6),
        "history.offsets": np.array([0, 2, 2, 5, 6]),
        "history.weights": np.ones(6, np.float32),
        "dense": np.zeros((4, 2), np.float32),
    }
    packed = {"keys": np.arange(12).reshape(4, 3), "dense": np.zeros((1, 2), np.float32)}
    bodies = [binary(jagged), binary(packed), (text(jagged), None), (text(packed), None)]
    raw = {
        "inputs": [
            {"name": "user", "datatype": "BYTES", "shape": [1], "data": ["ann"]},
            {"name": "item", "datatype": "BYTES", "shape": [2], "data": ["a", None]},
            {"name": "history", "datatype": "BYTES", "shape": [1, 2], "data": [["a", "b"]]},
            {"name": "price", "datatype": "FP64", "shape": [2], "data": [1.5, 2]},
            {"name": "age", "datatype": "FP32", "shape": [1], "data": [4]},
        ],
        "parameters": {"deadline_ms": 10_000, "policy": "wait"},
        "outputs": [{"name": "logits"}],
    }
    return [*bodies, (json.dumps(raw).encode(), None)]


def entries(tensors: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {"i8": "INT64", "f4": "FP32"}
    return [
        {"name": name, "datatype": kinds[array.dtype.str[1:]], "shape": list(array.shape)}
        for name, array in tensors.items()
    ]


def binary(tensors: dict[str, Any]) -> tuple[bytes, int]:
    """The binary body of these tensors, and its JSON part's length."""
    inputs = entries(tensors)
    for entry, array in zip(inputs, tensors.values(), strict=True):
        entry["parameters"] = {"binary_data_size": array.nbytes}
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return header + b"".join(array.tobytes() for array in tensors.values()), len(header)


def text(tensors: dict[str, Any]) -> bytes:
    """The JSON body of these tensors."""
    inputs = entries(tensors)
    for entry, array in zip(inputs, tensors.values(), strict=True):
        entry["data"] = array.tolist()
    return json.dumps({"inputs": inputs, "id": "7"}).encode()


def http_request(body: bytes, header: int | None, extra: str = "", path: str = "/v2/models/ctr/infer") -> bytes:
    """A whole HTTP request."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    if header is not None:
        lines.append(f"Inference-Header-Content-Length: {header}")
    return ("\r\n".join(lines) + "\r\n" + extra + "\r\n").encode() + body


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The data with one to four changes."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, to = sorted((draw.randrange(len(data) + 1), draw.randrange(len(data) + 1)))
        match draw.randrange(6):
            case 0 if data:
                at = min(at, len(data) - 1)
                data = data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + data[to:]
            case 3:
                data = data[:at] + draw.choice(WORDS) + data[at:]
            case 4:
                data = data[:to] + data[at : min(to, at + 400)] + data[to:]
            case _:
                word = draw.choice(WORDS)
                data = data[:at] + word + data[at + len(word) :]
    return data


VALUES: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 7, 2**31, 2**62, 2**64, 1.5, "", "x", "INT64", "INT32", "FP32", "FP64", "BYTES", "BOOL",
    "keys", "item", "history", "user.offsets", "dense", "wait", [], {}, [0], [4], [1, 4], [4, 1], [0, 0], [2**40],
    {"binary_data_size": 8},
]  # fmt: skip


def other_values(text: bytes, draw: random.Random) -> bytes:
    """The JSON with one to three of its values replaced, removed or doubled: it stays JSON."""
    document = json.loads(text)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _walk(document, places)
        if not places:
            break
        inside, key = draw.choice(places)
        match draw.randrange(5):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, list):
                inside.insert(key, copy.deepcopy(inside[key]))
            case _:
                inside[key] = copy.deepcopy(draw.choice(VALUES))
    return json.dumps(document).encode()


def _walk(node: Any, places: list[tuple[Any, Any]]) -> None:
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        places.append((node, key))
        _walk(node[key], places)


class Mutation(NamedTuple):
    """A mutated request. A `framed` one has intact framing, so another may follow on the connection."""

    data: bytes
    framed: bool


def mutation(number: int, seed: int) -> Mutation:
    """Mutation `number`: other values in the JSON, other bytes in the tensors, or anywhere."""
    draw = random.Random(f"{seed}/{number}")
    body, header = draw.choice(valid_bodies())
    kind = draw.random()
    if kind < 0.4:
        changed = other_values(body[:header], draw)
        body, header = changed + (b"" if header is None else body[header:]), header and len(changed)
    elif kind < 0.5 and header is not None:
        at = draw.randrange(header, len(body))
        body = body[:at] + draw.randbytes(1) + body[at + 1 :]
    elif kind < 0.8:
        changed = mutated(body, draw)
        if header is not None and draw.random() < 0.5:
            changed = mutated(body[:header], draw)
            header, changed = len(changed), changed + body[header:]
        body = changed
    else:
        whole = http_request(body, header)
        if draw.random() < 0.3:
            whole = in_chunks(whole, body, draw)
        return Mutation(mutated(whole, draw), False)
    whole = http_request(body, header)
    return Mutation(in_chunks(whole, body, draw) if draw.random() < 0.2 else whole, True)


def in_chunks(whole: bytes, body: bytes, draw: random.Random) -> bytes:
    """The same request with its body in chunks."""
    head = whole[: len(whole) - len(body)].replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked", 1)
    parts = [head]
    while body:
        piece, body = body[: (size := draw.choice((1, 7, 64, 1000)))], body[size:]
        parts.append(b"%x\r\n%b\r\n" % (len(piece), piece))
    return b"".join([*parts, b"0\r\n\r\n"])


def run_http(address: str, count: int, seed: int) -> Counter[str]:
    """Send mutations; how often each status came ("closed": none)."""
    host, _, port = address.partition(":")
    seen: Counter[str] = Counter()
    for number in range(count):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            try:
                connection.sendall(mutation(number, seed).data)
                connection.shutdown(socket.SHUT_WR)
                reply = connection.recv(65536)
            except (ConnectionResetError, BrokenPipeError):
                reply = b""
        status = reply[9:12].decode() if reply.startswith(b"HTTP/1.1 ") else "closed"
        assert not reply or reply.startswith(b"HTTP/1.1 "), (number, seed, reply[:80])
        assert status != "500", (number, seed, reply)
        seen[status] += 1
    return seen


@functools.cache
def valid_messages() -> list[bytes]:
    """ModelInferRequests that are answered: raw and typed."""
    from hotrow.serve.frontend.grpc_messages import build

    make = build()["ModelInferRequest"]
    message = make(model_name="ctr")
    tensors = {"keys": np.arange(12).reshape(4, 3), "dense": np.zeros((4, 2), np.float32)}
    for entry, array in zip(entries(tensors), tensors.values(), strict=True):
        message.inputs.add(**entry)
        message.raw_input_contents.append(array.tobytes())
    typed = make(model_name="ctr")
    for entry, array in zip(entries(tensors), tensors.values(), strict=True):
        field = "int64_contents" if array.dtype == np.int64 else "fp32_contents"
        typed.inputs.add(**entry, contents={field: array.reshape(-1).tolist()})
    return [message.SerializeToString(), typed.SerializeToString()]


def run_grpc(address: str, count: int, seed: int, first: int = 0) -> Counter[str]:
    """The same over gRPC: mutated bytes of a ModelInferRequest."""
    import grpc

    from hotrow.serve.frontend.grpc_messages import SERVICE

    seen: Counter[str] = Counter()
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for number in range(first, first + count):
            draw = random.Random(f"{seed}/{number}")
            try:
                call(mutated(draw.choice(valid_messages()), draw), timeout=60)
                seen["OK"] += 1
            except grpc.RpcError as error:
                seen[error.code().name] += 1
                bad = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
                assert error.code() not in bad, (number, seed, error)
    return seen
