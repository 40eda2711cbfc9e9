"""Frames of lookups: they come back as they were written, and a malformed one is an error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.serve.protocol import frames, lookup_frames
from hotrow.serve.protocol.embedding_outputs import EmbeddingOutputs, known_outputs, longest
from hotrow.serve.protocol.frames import AnswerFrame, FrameError
from hotrow.serve.protocol.request import Ids, Request, Signature, Wanted

SIGNATURE = Signature(("user", "seen"), frozenset(["seen"]), 0)
WANTED = Wanted((1, 3, 4), True, True, 96)
REQUEST = Request("ctr", 2, (Ids(np.array([1, 2])), Ids(np.array([3]), np.array([0, 0, 1]))), wanted=WANTED)


def test_a_lookup_comes_back_as_it_was_written() -> None:
    frame = lookup_frames.write_lookup(REQUEST, 9, 5, 6, 0.0)
    (found,), end, _ = frames.scan(frame, 0, len(frame))
    assert found == (lookup_frames.LOOKUP, 9, 0, len(frame)) and end == len(frame)
    wanted, scanned = lookup_frames.read_lookup(frame, 0, len(frame))
    assert wanted == WANTED
    request = frames.ScannedRequest(*scanned)
    assert (request.id, request.model, request.fingerprint, request.rows, request.ids) == (9, 5, 6, 2, 3)
    piece = (frame, request.offset, request.length, 0, 2)
    batch = frames.join([piece], SIGNATURE, 6)
    assert batch.ids["user"].values.tolist() == [1, 2] and batch.ids["seen"].lengths().tolist() == [0, 1]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_an_answer_comes_back_as_it_was_written(data: st.DataObject) -> None:
    rows, length, tasks = (data.draw(st.integers(*bounds)) for bounds in ((1, 5), (1, 4), (0, 3)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    half = np.float16 if data.draw(st.booleans()) else np.float32
    vectors = [
        rng.random((rows, 3)).astype(half),
        rng.random((rows, length, 3)).astype(half),
        rng.random((rows, length)) < 0.5,
    ]
    logits = rng.random((rows, tasks) if tasks else rows).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.empty(0, np.float32)
    answer = AnswerFrame(logits, 3, 7, 2, data.draw(st.booleans()), 8, data.draw(st.sampled_from([None, -5, 1000])))
    pad = data.draw(st.integers(0, 7))  # frames need not be aligned
    chunk = bytes(pad) + lookup_frames.write_vectors(4, answer, vectors)
    (found,), _, _ = frames.scan(chunk, pad, len(chunk))
    assert found[:2] == (lookup_frames.VECTORS, 4)
    read, arrays = lookup_frames.read_vectors(chunk, pad)
    assert read[1:] == answer[1:] and np.array_equal(read.logits, logits)
    for array, vector in zip(arrays, vectors, strict=True):
        assert array.dtype == vector.dtype and np.array_equal(array, vector)


@pytest.mark.parametrize("cut", [8, 16, 40, 48])
def test_a_lookup_that_is_cut_off_is_an_error(cut: int) -> None:
    frame = lookup_frames.write_lookup(REQUEST, 9, 5, 6, 0.0)
    with pytest.raises(FrameError):
        lookup_frames.read_lookup(frame[:-cut], 0, len(frame) - cut)
    with pytest.raises(FrameError):
        lookup_frames.read_lookup(frame[:cut], 0, cut)


def test_a_lookup_with_too_many_outputs_or_two_requests_is_an_error() -> None:
    frame = bytearray(lookup_frames.write_lookup(REQUEST, 9, 5, 6, 0.0))
    inner = frames.write_request(REQUEST, 9, 5, 6, 0.0)
    with pytest.raises(FrameError, match="exactly one request"):
        lookup_frames.read_lookup(frame + inner, 0, len(frame) + len(inner))
    frame[24:28] = (1 << 20).to_bytes(4, "little")
    with pytest.raises(FrameError, match="ends before its 1048576 outputs"):
        lookup_frames.read_lookup(frame, 0, len(frame))


def test_only_outputs_of_the_signature_are_known() -> None:
    assert [known_outputs(SIGNATURE, [number]) for number in range(6)] == [True, True, False, True, True, False]
    assert not known_outputs(SIGNATURE, [])
    assert not known_outputs(Signature(("seen",), frozenset(["seen"]), 0), [0])  # nothing is pooled
    outputs = EmbeddingOutputs(SIGNATURE, (4, 8))
    assert all(known_outputs(SIGNATURE, [output.number]) for output in outputs.by_name.values())


def test_the_size_of_an_answer_is_that_of_its_arrays() -> None:
    outputs = EmbeddingOutputs(SIGNATURE, (4, 8))
    assert outputs.answer_bytes(Wanted((0, 1), False), 2, REQUEST.ids) == 2 * 2 * 4 * 4
    assert outputs.answer_bytes(Wanted((3, 4), False, half=True), 2, REQUEST.ids) == 2 * 1 * 8 * 2 + 2
    assert [longest(ids) for ids in (Ids(np.arange(5), shared=True), Ids(np.arange(0), np.zeros(3, np.int64)))] == [
        5,
        1,
    ]
