"""Frames of lookups: requests for embedding outputs, and their answers (docs/formats/frames.md).

A lookup is a small head, the numbers of the wanted outputs, and a whole request frame (frames.py), which is scanned and
joined like any other. So a request without embedding outputs has no byte more and no check more than before.

Every function here is pure; any thread may call it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotrow.serve.protocol import frames
from hotrow.serve.protocol.frames import AnswerFrame, Chunk, FrameError
from hotrow.serve.protocol.request import Array, Request, Wanted

LOOKUP, VECTORS = 6, 7  # kinds
MOST_OUTPUTS = 1 << 16

_HALF, _LOGITS = 1, 2  # a lookup's flags
_COMPILED, _HAS_LOGITS = 1, 2  # an answer's
_LOOKUP = struct.Struct("<IHBBQQII")  # and: bytes of the answer's vectors, outputs, 0
_VECTORS = struct.Struct("<IHBBQIIQQqIIII")  # the fields of an answer, outputs, 0
_OUTPUT = struct.Struct("<BBHIII")  # type, dimensions, 0, rows, and up to two more sizes
_TYPES = (np.dtype("<f4"), np.dtype("<f2"), np.dtype(np.bool_))


def write_lookup(request: Request, id: int, number: int, fingerprint: int, now: float) -> bytes:
    """A request with `wanted` as a frame; the arguments are those of frames.write_request."""
    wanted = request.wanted
    assert wanted is not None
    inner = frames.write_request(request, id, number, fingerprint, now)
    numbers = struct.pack(f"<{len(wanted.outputs)}H", *wanted.outputs)
    numbers += bytes(-len(numbers) % 8)
    flags = (_HALF if wanted.half else 0) | (_LOGITS if wanted.logits else 0)
    length = _LOOKUP.size + len(numbers) + len(inner)
    head = _LOOKUP.pack(length, LOOKUP, 0, flags, id, wanted.bytes, len(wanted.outputs), 0)
    return b"".join([head, numbers, inner])


def read_lookup(chunk: Chunk, offset: int, length: int) -> tuple[Wanted, tuple[Any, ...]]:
    """What a lookup wants, and its request frame as `frames.scan` describes it."""
    if length < _LOOKUP.size:
        raise FrameError(f"a lookup has {length} bytes; its head has {_LOOKUP.size}")
    _, _, _, flags, _, size, count, _ = _LOOKUP.unpack_from(chunk, offset)
    begin = offset + _LOOKUP.size + 2 * count + -2 * count % 8
    if count > MOST_OUTPUTS or begin > offset + length:
        raise FrameError(f"a lookup of {length} bytes ends before its {count} outputs")
    numbers = struct.unpack_from(f"<{count}H", chunk, offset + _LOOKUP.size)
    found, end, _ = frames.scan(chunk, begin, offset + length)
    if len(found) != 1 or end != offset + length or found[0][0] != frames.REQUEST:
        raise FrameError("a lookup does not hold exactly one request")
    return Wanted(numbers, bool(flags & _LOGITS), bool(flags & _HALF), size), found[0]


def write_vectors(id: int, answer: AnswerFrame, vectors: Sequence[Array]) -> bytes:
    """The answer of a lookup. `answer` has the fields that every answer has; its logits may be empty, [0]."""
    rows, logits = len(vectors[0]), answer.logits
    tasks = 0 if logits.ndim == 1 else logits.shape[1]
    flags = (_COMPILED if answer.compiled else 0) | (_HAS_LOGITS if len(logits) else 0)
    watermark = frames.UNKNOWN if answer.watermark is None else answer.watermark
    parts: list[bytes] = [b""]
    for array in vectors:
        sizes = (*array.shape, 0, 0)[:3]
        parts.append(_OUTPUT.pack(_TYPES.index(array.dtype), array.ndim, 0, *sizes))
    for array in (logits, *vectors):
        data = np.ascontiguousarray(array).tobytes()
        parts += [data, bytes(-len(data) % 8)]
    length = _VECTORS.size + sum(map(len, parts))
    parts[0] = _VECTORS.pack(
        *(length, VECTORS, 0, flags, id, answer.version, answer.late_rows, answer.publication, answer.highest),
        *(watermark, rows, tasks, len(vectors), 0),
    )
    return b"".join(parts)


def read_vectors(chunk: Chunk, offset: int) -> tuple[AnswerFrame, tuple[Array, ...]]:
    """The answer at `offset`, and its vectors. All arrays are views of the chunk."""
    head = _VECTORS.unpack_from(chunk, offset)
    _, _, _, flags, _, version, late, publication, highest, watermark, rows, tasks, count, _ = head
    at = offset + _VECTORS.size + count * _OUTPUT.size
    numbers = rows * max(1, tasks) if flags & _HAS_LOGITS else 0
    logits = np.frombuffer(chunk, np.float32, numbers, at) if numbers else np.empty(0, np.float32)
    at += 4 * numbers + -4 * numbers % 8
    vectors = []
    for number in range(count):
        kind, dimensions, _, *sizes = _OUTPUT.unpack_from(chunk, offset + _VECTORS.size + number * _OUTPUT.size)
        dtype, shape = _TYPES[kind], tuple(sizes[:dimensions])
        elements = int(np.prod(shape))
        array = np.frombuffer(chunk, dtype, elements, at) if elements else np.empty(0, dtype)
        vectors.append(array.reshape(shape))
        size = elements * dtype.itemsize
        at += size + -size % 8
    shaped = logits.reshape(rows, tasks) if tasks and numbers else logits
    known = None if watermark == frames.UNKNOWN else watermark
    answer = AnswerFrame(shaped, version, publication, late, bool(flags & _COMPILED), highest, known)
    return answer, tuple(vectors)
