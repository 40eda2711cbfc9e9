"""The hash functions are a format: golden values that never change, and a plain oracle of docs/formats/hashing.md."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotrow.features import hashing

GOLDEN = json.loads((Path(__file__).parent / "golden" / "hashing.json").read_text())
MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
P1, P2, P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
P4, P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5

seeds = st.integers(0, MASK)
keys = st.integers(-(1 << 63), (1 << 63) - 1)


# The oracle: docs/formats/hashing.md in plain Python.


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def rotl(x: int, r: int) -> int:
    return (x << r | x >> (64 - r)) & MASK


def mix64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def xxh64(data: bytes, seed: int) -> int:
    def step(lane: int, word: int) -> int:
        return rotl((lane + word * P2) & MASK, 31) * P1 & MASK

    def word(at: int, size: int) -> int:
        return int.from_bytes(data[at : at + size], "little")

    at = 0
    if len(data) >= 32:
        lanes = [(seed + P1 + P2) & MASK, (seed + P2) & MASK, seed, (seed - P1) & MASK]
        while at + 32 <= len(data):
            lanes = [step(lane, word(at + 8 * i, 8)) for i, lane in enumerate(lanes)]
            at += 32
        h = sum(rotl(lane, r) for lane, r in zip(lanes, (1, 7, 12, 18), strict=True)) & MASK
        for lane in lanes:
            h = ((h ^ step(0, lane)) * P1 + P4) & MASK
    else:
        h = (seed + P5) & MASK
    h = (h + len(data)) & MASK
    while at + 8 <= len(data):
        h = (rotl(h ^ step(0, word(at, 8)), 27) * P1 + P4) & MASK
        at += 8
    if at + 4 <= len(data):
        h = (rotl(h ^ (word(at, 4) * P1 & MASK), 23) * P2 + P3) & MASK
        at += 4
    for byte in data[at:]:
        h = rotl(h ^ (byte * P5 & MASK), 11) * P1 & MASK
    h = (h ^ h >> 33) * P2 & MASK
    h = (h ^ h >> 29) * P3 & MASK
    return h ^ h >> 32


def hash_int(x: int, seed: int) -> int:
    return signed(mix64((x + seed * GAMMA) & MASK))


def cross(a: int, b: int) -> int:
    return signed(mix64((a & MASK) ^ rotl(b * GAMMA & MASK, 31)))


def shard(key: int) -> int:
    return mix64((key + GAMMA) & MASK) >> 54


# Golden values.


@pytest.mark.parametrize(
    ("text", "expected"), [(b"", 0xEF46DB3751D8E999), (b"abc", 0x44BC2CF5AD770999), (b"a", 0xD24EC4F1A98C6E5B)]
)
def test_hash_bytes_gives_the_published_xxh64(text: bytes, expected: int) -> None:
    assert hashing.hash_bytes(text) & MASK == expected == xxh64(text, 0)


def test_hash_bytes_gives_the_golden_values_for_every_length_and_seed() -> None:
    data = bytes((i * 37 + 11) % 256 for i in range(70))
    for seed, by_length in GOLDEN["bytes"].items():
        assert [hashing.hash_bytes(data[:n], int(seed)) for n in range(71)] == by_length


def test_hash_ints_gives_the_golden_values() -> None:
    for seed, expected in GOLDEN["ints"].items():
        assert hashing.hash_ints(np.array(GOLDEN["values"]), int(seed)).tolist() == expected


def test_cross_gives_the_golden_values() -> None:
    values = np.array(GOLDEN["values"])
    assert hashing.cross(values, values[::-1].copy()).tolist() == GOLDEN["cross"]


def test_shards_give_the_golden_values() -> None:
    assert hashing.shards(np.array(GOLDEN["values"])).tolist() == GOLDEN["shards"]


def test_the_missing_key_gives_the_golden_values() -> None:
    assert {seed: hashing.missing_key(int(seed)) for seed in GOLDEN["missing"]} == GOLDEN["missing"]


# The oracle over random inputs.


@given(st.binary(max_size=200), seeds)
def test_hash_bytes_equals_the_oracle(data: bytes, seed: int) -> None:
    assert hashing.hash_bytes(data, seed) == signed(xxh64(data, seed))


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=30), seeds, st.integers(0, 5), st.booleans())
def test_hash_strings_equals_the_oracle_on_slices_with_nulls(
    rows: list[bytes | None], seed: int, start: int, wide: bool
) -> None:
    array = pa.array(rows, pa.large_binary() if wide else pa.binary()).slice(start)
    found = hashing.hash_strings(array, seed).tolist()
    for row, key in zip(rows[start:], found, strict=True):
        assert row is None or key == signed(xxh64(row, seed))


@given(st.lists(keys, max_size=20), seeds)
def test_hash_ints_equals_the_oracle(values: list[int], seed: int) -> None:
    assert hashing.hash_ints(np.array(values, np.int64), seed).tolist() == [hash_int(x, seed) for x in values]


@given(st.lists(st.tuples(keys, keys), max_size=20))
def test_cross_equals_the_oracle(pairs: list[tuple[int, int]]) -> None:
    left, right = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    assert hashing.cross(left, right).tolist() == [cross(a, b) for a, b in pairs]


@given(st.lists(keys, max_size=20))
def test_shards_equal_the_oracle(values: list[int]) -> None:
    assert hashing.shards(np.array(values, np.int64)).tolist() == [shard(key) for key in values]


@settings(max_examples=200)
@given(st.lists(st.one_of(st.text("0123456789abcdefABCDEF", max_size=18), st.text(max_size=4)), max_size=20))
@example(["05db9164", "1fbe01fe", "0", "ffffffffffffffff", "FFFFFFFFFFFFFFFFF", "", " 1", "0x1", "é"])
def test_parse_hex_equals_the_oracle(texts: list[str]) -> None:
    digits = set("0123456789abcdefABCDEF")
    good = [1 <= len(text) <= 16 and set(text) <= digits for text in texts]
    found, bad = hashing.parse_hex(pa.array(texts, pa.string()))
    assert (~bad).tolist() == good
    assert found.tolist() == [signed(int(text, 16)) if ok else 0 for text, ok in zip(texts, good, strict=True)]


def test_hash_ints_is_a_bijection_and_cross_is_not_symmetric() -> None:
    values = np.arange(-50_000, 50_000)
    assert len(np.unique(hashing.hash_ints(values, 3))) == len(values)
    assert not (hashing.cross(values, values + 1) == hashing.cross(values + 1, values)).any()


def test_shards_are_filled_evenly() -> None:
    counts = np.bincount(hashing.shards(np.arange(1_024_000)), minlength=1024)
    assert counts.size == 1024 and counts.min() > 850 and counts.max() < 1150
