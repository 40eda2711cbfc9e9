"""Checksummed JSON: the bytes that releases have written, and every damage refused."""

from __future__ import annotations

import json
import math

import pytest

from hotrow.checksummed_json import FileFormat, OtherFormatError, fingerprint

NOTE = FileFormat("note", (1, 2))
BYTES = b"""{
 "format": "note",
 "version": 1,
 "rows": 3,
 "checksum": "%s"
}"""


def test_the_bytes_are_those_of_earlier_releases() -> None:
    covered = b'{"format":"note","rows":3,"version":1}'
    assert NOTE.dump({"rows": 3}) == BYTES % fingerprint(covered)["blake2b"].encode()


def test_every_damaged_byte_is_refused() -> None:
    data = NOTE.dump({"rows": 3, "name": "user"})
    assert NOTE.load(data)["name"] == "user"
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            assert json.loads(damaged) == json.loads(data)  # a space for another one
        except (AssertionError, ValueError):
            with pytest.raises(ValueError):
                NOTE.load(damaged)


@pytest.mark.parametrize(("name", "version"), [("other", 1), ("note", 3)])
def test_another_format_or_version_is_named(name: str, version: int) -> None:
    with pytest.raises(OtherFormatError, match=f"{name!r} version {version}"):
        NOTE.load(FileFormat(name, (version,)).dump({}))


def test_what_is_not_a_document_is_refused() -> None:
    for data in (b"", b"[]", b"[" * 100_000, b'{"format": "note", "version": 1, "x": NaN}'):
        with pytest.raises(ValueError):
            NOTE.load(data)
    with pytest.raises(ValueError):
        NOTE.dump({"loss": math.nan})
