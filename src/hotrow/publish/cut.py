"""A cut: the rows and weights that one rank publishes at a step. Also sets of keys that a later cut must publish."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.publish.bus import Bus
from hotrow.publish.history import Commit
from hotrow.publish.publication import TableChange, decode_body, encode_body
from hotrow.publish.spool import EncodedPublication
from hotrow.publish.subscriber import bodies_of

Keys = dict[str, list[Tensor]]


@dataclass
class Cut:
    """Rows and weights as they were at a step, and the fields of the commit."""

    number: int
    fields: dict[str, Any]
    tables: dict[str, TableChange]
    dense: dict[str, Tensor] | None
    values: str

    @property
    def bytes(self) -> int:
        """Its approximate size in memory."""
        tables = sum(8 * c.rows + c.values.numel() * 4 for c in self.tables.values())
        return tables + sum(t.numel() * t.element_size() for t in (self.dense or {}).values())

    def encode(self) -> EncodedPublication:
        """The cut as bytes."""
        return EncodedPublication(self.number, self.fields, encode_body(self.tables, self.dense, self.values))


def keys_of(tables: dict[str, TableChange]) -> Keys:
    """All keys that these changes set or remove."""
    return {name: [torch.cat([change.keys, change.deleted])] for name, change in tables.items()}


def keys_on_bus(bus: Bus, commits: Iterable[Commit]) -> Keys:
    """All keys in publications of another run or a rollback that are on a bus."""
    keys: Keys = {}
    for commit in commits:
        for body in bodies_of(bus, commit):
            for table, tensors in keys_of(decode_body(body)[0]).items():
                keys.setdefault(table, []).extend(tensors)
    return keys
