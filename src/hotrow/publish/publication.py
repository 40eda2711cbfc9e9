"""A publication: a numbered set of changed rows, removed keys and dense weights, as values and as bytes.

`encode_body` encodes one rank's part (message.py splits the bytes). `decode_body` checks the bytes and returns views
into them: sorted keys, values in the sent precision, no optimizer state. The same content always has the same encoding,
whatever tier a row was in, so a resumed trainer can compare its publications with those on the bus.

Heartbeats and snapshot paths are notes about the newest publication: they carry its number and change no row.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from hotrow.errors import PublishError
from hotrow.publish.message import checksum

DELTA, HEARTBEAT, ROLLBACK, SNAPSHOT = "delta", "heartbeat", "rollback", "snapshot"
KINDS = (DELTA, HEARTBEAT, ROLLBACK, SNAPSHOT)
VALUES = {"fp32": torch.float32, "fp16": torch.float16}
FORMAT = 1
_LENGTH = struct.Struct("<I")
_ALIGN = 16


@dataclass(frozen=True)
class TableChange:
    """One table's changes: rows to set and keys to remove. Keys are sorted and unique; no key is in both."""

    keys: Tensor
    values: Tensor
    deleted: Tensor

    @property
    def rows(self) -> int:
        """Rows set and removed."""
        return self.keys.numel() + self.deleted.numel()


@dataclass(frozen=True)
class SnapshotPlace:
    """The path of a snapshot: all rows as of a publication."""

    number: int
    path: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"number": self.number, "path": self.path}

    @staticmethod
    def of(fields: Mapping[str, Any] | None) -> SnapshotPlace | None:
        """From a note's fields."""
        return None if fields is None else SnapshotPlace(int(fields["number"]), str(fields["path"]))


@dataclass(frozen=True)
class Publication:
    """One publication, complete and checked.

    `step` is the last training step in it, `watermark` its newest event time (milliseconds), `cut` the time when it was
    made. `resume` is the position from which a reader that has applied it continues: `Subscriber(position=)`.
    """

    kind: str
    number: int
    previous: int
    run: str
    step: int
    watermark: int | None
    cut: float
    tables: dict[str, TableChange] = field(default_factory=dict)
    dense: dict[str, Tensor] | None = None
    snapshot: SnapshotPlace | None = None
    restores: int | None = None  # of a rollback: the number of the restored publication
    checksum: int = 0
    resume: tuple[int, int] = (0, 0)  # number, offset

    @property
    def rows(self) -> int:
        """Rows set and removed, all tables together."""
        return sum(change.rows for change in self.tables.values())


def encode_body(tables: Mapping[str, TableChange], dense: Mapping[str, Tensor] | None, values: str) -> bytes:
    """The bytes of one rank's part."""
    blocks: list[bytes] = []
    heads = []
    for name, change in sorted(tables.items()):
        if not change.rows:
            continue
        dim = int(change.values.shape[1])
        heads.append({"name": name, "dim": dim, "rows": change.keys.numel(), "deleted": change.deleted.numel()})
        wire = to_wire(change.values, values)
        blocks += [_bytes(change.keys), _bytes(wire), _bytes(change.deleted)]
    weights = b"" if dense is None else save({name: tensor.contiguous() for name, tensor in dense.items()})
    head = {"format": FORMAT, "values": values, "tables": heads, "dense": None if dense is None else len(weights)}
    fields = json.dumps(head, separators=(",", ":"), sort_keys=True).encode()
    start = _LENGTH.pack(len(fields)) + fields
    return b"".join(block + bytes(-len(block) % _ALIGN) for block in (start, *blocks, weights))


def to_wire(rows: Tensor, values: str) -> Tensor:
    """Values in the precision that is sent: rounded to nearest and clamped to the range of fp16."""
    return rows.clamp(-65504.0, 65504.0).to(torch.float16) if values == "fp16" else rows


def decode_body(body: bytes) -> tuple[dict[str, TableChange], dict[str, Tensor] | None]:
    """The reverse of `encode_body`; raises PublishError for malformed bytes."""
    try:
        (length,) = _LENGTH.unpack_from(body)
        head = json.loads(body[_LENGTH.size : _LENGTH.size + length])
        if head["format"] != FORMAT or head["values"] not in VALUES:
            raise PublishError(f"a body of format {head['format']} with values {head['values']}; use the same version")
        reader = _Blocks(body, _padded(_LENGTH.size + length))
        tables = {}
        for table in head["tables"]:
            rows, dim = _count(table["rows"]), _count(table["dim"])
            keys = reader.take(np.dtype("<i8"), rows)
            wire = np.dtype("<f2" if head["values"] == "fp16" else "<f4")
            values = reader.take(wire, rows * dim).reshape(rows, dim)
            tables[str(table["name"])] = TableChange(
                keys, values, reader.take(np.dtype("<i8"), _count(table["deleted"]))
            )
        dense = None
        if head["dense"] is not None:
            dense = load(reader.take(np.dtype("u1"), _count(head["dense"])).numpy().tobytes())
        if reader.at != len(body):
            raise PublishError(f"a body has {len(body) - reader.at} bytes too many")
        return tables, dense
    except PublishError:
        raise
    except Exception as error:  # from json, struct, numpy or safetensors
        raise PublishError(f"a body cannot be read: {type(error).__name__}: {error}") from error


def join_tables(parts: Iterable[Mapping[str, TableChange]]) -> dict[str, TableChange]:
    """Join the changes of several ranks. Ranks own different keys, so each key is in one part."""
    found: dict[str, list[TableChange]] = {}
    for part in parts:
        for name, change in part.items():
            found.setdefault(name, []).append(change)
    return {name: changes[0] if len(changes) == 1 else _join(changes) for name, changes in found.items()}


def _join(changes: Sequence[TableChange]) -> TableChange:
    keys = torch.cat([change.keys for change in changes])
    order = torch.argsort(keys)
    values = torch.cat([change.values for change in changes])
    deleted = torch.cat([change.deleted for change in changes])
    return TableChange(keys[order], values[order], deleted.sort().values)


def content_checksum(number: int, fields: Mapping[str, Any]) -> int:
    """The checksum of the fields that a replay must reproduce, so without the time and the sender."""
    same = {name: fields[name] for name in ("kind", "previous", "step", "watermark", "parts")}
    return checksum(json.dumps([number, same], separators=(",", ":"), sort_keys=True).encode())


class _Blocks:
    """Reads a body's arrays one after another."""

    def __init__(self, body: bytes, at: int) -> None:
        self.body, self.at = bytearray(body), at  # torch wants memory that may be written

    def take(self, dtype: np.dtype[Any], count: int) -> Tensor:
        """The next array."""
        end = self.at + count * dtype.itemsize
        if end > len(self.body):
            raise PublishError(f"a body is too short: {len(self.body)} bytes, and an array ends at {end}")
        array = np.frombuffer(self.body, dtype, count, self.at) if count else np.empty(0, dtype)
        self.at = _padded(end)
        return torch.from_numpy(array)


def _padded(length: int) -> int:
    return length + -length % _ALIGN


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise PublishError(f"a body has a count of {value!r}")
    return value


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
