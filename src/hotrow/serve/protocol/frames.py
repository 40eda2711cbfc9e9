"""Frames: requests and answers as flat bytes between a front end and an engine (docs/formats/frames.md).

A front end writes a request's arrays after a small head: one copy, no JSON, no pickle. The engine scans the received
bytes for frames, and joins the requests of a batch into columns, without a Python object for each feature: `scan` and
`join` are one C++ call each (core/serve) and check every length. So a request costs the engine one Python tuple and one
queue entry, whatever its number of features.

Every function here is pure; any thread may call it.

Rejected: an array object per feature and request in the engine (26 features x 20 requests x 1 us per batch took longer
than the tower); msgpack (the engine would still decode each request in Python).
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from hotrow import _core
from hotrow.batch import Jagged, KeyedBatch
from hotrow.serve.protocol.request import POLICIES, Array, Ids, PackedIds, RefusedError, Request, Signature

FrameError = _core.FrameError

REQUEST, ANSWER, REFUSAL, COMMAND, REPLY = 1, 2, 3, 4, 5  # kinds
LONGEST_FRAME = 256 << 20
MOST_IDS = 1 << 27  # in a batch: 1 GiB of keys

_PACKED, _COLUMNS, _DENSE_SHARED = 1, 2, 4  # a request's flags
_COMPILED = 1  # an answer's
UNKNOWN = -(1 << 63)  # a watermark
_ONE, _JAGGED, _SHARED = 0, 1, 2  # kinds of a feature

_FRAME = struct.Struct("<IHBBQ")
_REQUEST = struct.Struct("<IHBBQIIIIqII")
_ANSWER = struct.Struct("<IHBBQIIQQqII")
_REFUSAL = struct.Struct("<IHBBQIIq")  # status, length of the message, retry after in microseconds
HEAD_BYTES = _FRAME.size

Chunk: TypeAlias = bytes | bytearray | memoryview
Piece: TypeAlias = tuple[Chunk, int, int, int, int]  # buffer, offset, length, first row, rows
AnswerPart: TypeAlias = tuple[int, int, int, int]  # id, first row, rows, late


class ScannedRequest(NamedTuple):
    """A request that `scan` found: its head, and its location in the chunk."""

    kind: int
    id: int
    offset: int
    length: int
    model: int
    fingerprint: int
    rows: int
    deadline_left: int  # microseconds; negative: the engine's default
    policy: int
    ids: int  # with shared features counted for each row
    features: int
    dense: int


class AnswerFrame(NamedTuple):
    """An answer from an engine. `version` is the engine's number of the version."""

    logits: Array
    version: int
    publication: int
    late_rows: int
    compiled: bool
    highest: int  # publication
    watermark: int | None  # event time of `publication`, milliseconds


# --- a front end writes requests and reads answers ---


def write_request(request: Request, id: int, number: int, fingerprint: int, now: float) -> bytes:
    """The request as a frame. `number` is the engine's number of the model or version; `now` is time.monotonic()."""
    left = -1 if request.deadline is None else max(0, int((request.deadline - now) * 1e6))
    policy = 0 if request.policy is None else 1 + POLICIES.index(request.policy)
    flags, parts, features = _keys(request)
    dense = request.dense
    width = 0
    if dense is not None and dense.shape[1]:
        width = dense.shape[1]
        parts.append(np.ascontiguousarray(dense, np.float32))
        if dense.size % 2:
            parts.append(b"\0\0\0\0")
        flags |= _DENSE_SHARED if request.dense_shared else 0
    length = _REQUEST.size + sum([part.nbytes if isinstance(part, np.ndarray) else len(part) for part in parts])
    head = _REQUEST.pack(
        length, REQUEST, policy, flags, id, number, fingerprint, request.rows, features, left, width, 0
    )
    return b"".join([head, *parts])


def _keys(request: Request) -> tuple[int, list[Any], int]:
    """The flags, the parts of the body, and the number of features."""
    matrix = request.ids.matrix.T if isinstance(request.ids, PackedIds) else request.matrix
    if matrix is not None:
        return _PACKED, [np.ascontiguousarray(matrix, np.int64)], matrix.shape[1]
    if all(ids.offsets is None and ids.weights is None and not ids.shared for ids in request.ids):
        return _PACKED | _COLUMNS, [np.ascontiguousarray(ids.values) for ids in request.ids], len(request.ids)
    heads: list[int] = []
    parts: list[Any] = []
    for ids in request.ids:
        kind = _SHARED if ids.shared else _ONE if ids.offsets is None else _JAGGED
        heads += (len(ids.values), kind, ids.weights is not None, 0)
        parts.append(np.ascontiguousarray(ids.values))
        if kind == _JAGGED:
            parts.append(np.ascontiguousarray(ids.offsets))
        if ids.weights is not None:
            parts.append(np.ascontiguousarray(ids.weights, np.float32))
            if ids.weights.size % 2:
                parts.append(b"\0\0\0\0")
    return 0, [_feature_heads(len(request.ids)).pack(*heads), *parts], len(request.ids)


@functools.cache
def _feature_heads(features: int) -> struct.Struct:
    return struct.Struct("<" + "IBBH" * features)


def read_answer(chunk: Chunk, offset: int) -> AnswerFrame:
    """The answer at `offset`. Its logits are a view of the chunk."""
    head = _ANSWER.unpack_from(chunk, offset)
    _, _, _, flags, _, version, late, publication, highest, watermark, rows, tasks = head
    logits = np.frombuffer(chunk, np.float32, rows * max(1, tasks), offset + _ANSWER.size)
    shaped = logits.reshape(rows, tasks) if tasks else logits
    known = None if watermark == UNKNOWN else watermark
    return AnswerFrame(shaped, version, publication, late, bool(flags & _COMPILED), highest, known)


# --- an engine reads requests and writes answers ---


def scan(chunk: Chunk, begin: int, end: int, longest: int = LONGEST_FRAME) -> tuple[list[tuple[Any, ...]], int, int]:
    """The complete frames between begin and end: (kind, id, offset, length); for requests all fields of ScannedRequest,
    for a malformed frame the reason as the fifth. Then the start of the unread bytes, and the next frame's length."""
    found: tuple[list[tuple[Any, ...]], int, int] = _core.scan_frames(chunk, begin, end, longest)
    return found


class RequestColumns(NamedTuple):
    """The columns of a request's frame, as views of its bytes."""

    fingerprint: int
    rows: int
    ids: Sequence[Ids]
    dense: Array | None  # [rows, columns], or [1, columns]


def read_request(chunk: Chunk, offset: int, length: int) -> RequestColumns:
    """The request at `offset`. Requires: `scan` has found it there, and so has checked its bytes."""
    head = _REQUEST.unpack_from(chunk, offset)
    flags, fingerprint, rows, features, width = head[3], head[6], head[7], head[8], head[10]
    at, end = offset + _REQUEST.size, offset + length

    def take(kind: type[np.generic], count: int) -> Array:
        nonlocal at
        size = count * np.dtype(kind).itemsize
        if at + size > end:
            raise FrameError(f"frame ends {at + size - end} bytes before its columns")
        begin, at = at, at + size + -size % 8
        return np.frombuffer(chunk, kind, count, begin) if count else np.empty(0, kind)

    ids: Sequence[Ids]
    if flags & _PACKED:
        keys = take(np.int64, rows * features)
        ids = PackedIds(keys.reshape(features, rows) if flags & _COLUMNS else keys.reshape(rows, features).T)
    else:
        heads = _feature_heads(features)
        fields = heads.unpack_from(chunk, at)
        at += heads.size
        ids = []
        for count, kind, weighted, _ in zip(*[iter(fields)] * 4, strict=True):
            values = take(np.int64, count)
            places = take(np.int64, rows + 1) if kind == _JAGGED else None
            ids.append(Ids(values, places, take(np.float32, count) if weighted else None, kind == _SHARED))
    dense = None
    if width:
        shape = (1 if flags & _DENSE_SHARED else rows, width)
        dense = take(np.float32, shape[0] * width).reshape(shape)
    return RequestColumns(fingerprint, rows, ids, dense)


def join(pieces: Sequence[Piece], signature: Signature, fingerprint: int) -> KeyedBatch:
    """Join rows of several requests into one batch without users, in order. Shared features are repeated for each row.
    A frame that does not match is a FrameError."""
    rows, values, offsets, weights, dense, columns = _core.join_frames(
        pieces if isinstance(pieces, list) else list(pieces),
        len(signature.columns),
        signature.dense,
        fingerprint,
        MOST_IDS,
    )
    ids = torch.from_numpy(values).split([end - begin for begin, end, _, _ in columns])
    starts = torch.from_numpy(offsets)
    heavy = None if weights is None else torch.from_numpy(weights)
    jagged: dict[str, Jagged] = {}
    for name, keys, (begin, end, at, weighted) in zip(signature.columns, ids, columns, strict=True):
        places = None if at < 0 else starts[at : at + rows + 1]
        if weighted and heavy is not None:
            jagged[name] = Jagged(keys, places, heavy[begin:end])  # checks that they are finite
        else:
            jagged[name] = _checked(Jagged, values=keys, offsets=places, weights=None)
    matrix = torch.from_numpy(dense) if signature.dense else None
    if signature.numbers:
        return KeyedBatch(
            {name: jagged[name] for name in signature.features}, matrix, numbers=_numbers(jagged, signature)
        )
    return _checked(KeyedBatch, ids=jagged, dense=matrix, labels=None, time=None, **_NO_USERS, size=rows)


def _numbers(columns: Mapping[str, Jagged], signature: Signature) -> dict[str, Jagged]:
    return {name: columns[name] for name in signature.numbers}


_NO_USERS: dict[str, Any] = {"numbers": {}, "user_of": None, "user_features": frozenset(), "visible": {}}


_T = TypeVar("_T")


def _checked(kind: type[_T], **fields: Any) -> _T:
    """Create a frozen dataclass without its checks, because the core has made the same checks (saves 40 us per batch of
    26 features)."""
    made = object.__new__(kind)
    made.__dict__.update(fields)
    return made


def write_answers(
    parts: list[AnswerPart],
    logits: Array,
    version: int,
    publication: int = 0,
    compiled: bool = False,
    highest: int | None = None,
    watermark: int | None = None,
) -> bytes:
    """Frames for the answers of several requests of one batch; logits are [rows] or [rows, tasks] float32."""
    newest, known = publication if highest is None else highest, UNKNOWN if watermark is None else watermark
    tasks = 0 if logits.ndim == 1 else logits.shape[1]
    flat = np.ascontiguousarray(logits, np.float32).reshape(len(logits), max(1, tasks))
    answers: bytes = _core.make_answers(parts, flat, tasks, version, publication, newest, known, compiled)
    return answers


def write_refusal(id: int, refused: RefusedError) -> bytes:
    """A frame that refuses a request."""
    message = str(refused.message).encode()[:4096]
    body = message + bytes(-len(message) % 8)
    retry = -1 if refused.retry_after is None else int(refused.retry_after * 1e6)
    return _REFUSAL.pack(_REFUSAL.size + len(body), REFUSAL, 0, 0, id, refused.status, len(message), retry) + body


def read_refusal(chunk: Chunk, offset: int) -> RefusedError:
    """The error in a frame of write_refusal."""
    *_, status, length, retry = _REFUSAL.unpack_from(chunk, offset)
    begin = offset + _REFUSAL.size
    message = bytes(memoryview(chunk)[begin : begin + length]).decode(errors="replace")
    return RefusedError(status, message, None if retry < 0 else retry / 1e6)


# --- commands and replies as JSON ---


def write_json(kind: int, id: int, content: Any) -> bytes:
    """A frame for a command or a reply."""
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return _FRAME.pack(HEAD_BYTES + len(text), kind, 0, 0, id) + text


def read_json(chunk: Chunk, offset: int, length: int) -> Any:
    """The content of a frame of write_json."""
    return json.loads(bytes(memoryview(chunk)[offset + HEAD_BYTES : offset + length]))
