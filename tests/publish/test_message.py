"""Encoding: what was sent comes back, and changed bytes are detected."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.errors import PublishError
from hotrow.publish.message import HEADER_BYTES, PART, BadMessage, Message, checksum, note, note_fields, parts
from hotrow.publish.publication import TableChange, decode_body, encode_body, to_wire


def change(count: int = 5, dim: int = 3, gone: int = 2, seed: int = 0) -> TableChange:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.arange(-count, count, 2)[:count]
    return TableChange(keys, torch.randn(count, dim, generator=draw), torch.arange(100, 100 + gone))


@given(st.binary(max_size=5000), st.integers(HEADER_BYTES + 1, 2000))
@settings(max_examples=30, deadline=None)
def test_a_body_is_the_same_in_any_number_of_chunks(body: bytes, limit: int) -> None:
    messages = [Message.decode(one.encode()) for one in parts(7, 1, 2, 3, body, limit)]
    assert all(len(one.encode()) <= limit for one in messages)
    assert b"".join(one.payload for one in messages) == body
    assert {(m.number, m.rank, m.world, m.chunks, m.body_checksum) for m in messages} == {
        (7, 2, 3, len(messages), checksum(body))
    }


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_every_changed_byte_is_detected(place: int, flip: int) -> None:
    data = bytearray(Message(PART, 3, 9, b"some rows", 0, 1, 0, 1, 9, 5).encode())
    data[place % len(data)] ^= flip
    with pytest.raises(BadMessage):
        Message.decode(bytes(data))


def test_every_truncation_is_detected() -> None:
    data = note(4, 1, {"kind": "heartbeat"}).encode()
    for end in range(len(data)):
        with pytest.raises(BadMessage, match="truncated"):
            Message.decode(data[:end])
    assert note_fields(Message.decode(data)) == {"kind": "heartbeat"}


@pytest.mark.parametrize("values", ["fp32", "fp16"])
def test_rows_deletions_and_weights_come_back(values: str) -> None:
    tables = {"user": change(), "item": change(7, 2, 0, seed=1), "none": change(0, 4, 0)}
    dense = {"w": torch.randn(3, 2), "steps": torch.tensor(5)}
    body = encode_body(tables, dense, values)
    found, weights = decode_body(body)
    assert sorted(found) == ["item", "user"]
    for name, one in found.items():
        assert torch.equal(one.keys, tables[name].keys) and torch.equal(one.deleted, tables[name].deleted)
        assert torch.equal(one.values, to_wire(tables[name].values, values))
    assert weights is not None and all(torch.equal(weights[name], dense[name]) for name in dense)
    assert encode_body(dict(reversed(tables.items())), dense, values) == body


def test_values_beyond_fp16_become_its_largest() -> None:
    assert to_wire(torch.tensor([[1e9, -1e9]]), "fp16").tolist() == [[65504.0, -65504.0]]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_bodies_of_any_bytes_are_refused_or_read_and_nothing_else(data: st.DataObject) -> None:
    body = bytearray(encode_body({"t": change()}, {"w": torch.ones(2)}, "fp32"))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    with suppress(PublishError):
        decode_body(bytes(body[:cut]))
