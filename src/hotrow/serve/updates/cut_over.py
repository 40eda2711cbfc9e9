"""Switch: a publication made ready beside what serves, then put in service between two batches.

    prepare   outside, while requests run: tables found, values checked and made float32, weights fitted to the graph
    switch    alone (towers.Crossing): rows set and removed in the store below, the rows of those keys that are in HBM
              brought up to date, weights swapped, the publication's number set

A batch holds the crossing together with others for as long as it reads rows; there it also takes the weights and the
publication's number, which are values that are replaced whole. Its tower runs afterwards with what it took, so a switch
waits for lookups (fractions of a millisecond), never for towers. On a GPU graphs know the weights' addresses, so there
a batch holds the crossing to its end. Either way a batch's rows, weights and number are one publication's.

What a switch costs is its rows: the core writes 2,000 of them in 26 tables of dim 16 in 0.3 ms at best on one core;
checks and conversions, which take five times as long, are in `prepare`. Publications come in step with the traffic of a
trainer, so they are small; a rollback far back holds the lanes in proportion to its rows.

A switch that fails (no memory for new rows) is undone: the old rows are read in `prepare` wherever a budget without an
SSD below could be exceeded, and put back. Over an SSD rows can always leave; a disk that fails there leaves rows of two
publications, and `torn` tells the owner to load everything anew.

Tried and dropped: an overlay of changed rows beside the store, switched by one pointer. Every lookup would pay for it,
and merging it into the store is the same work again, under the same lock.

One thread applies; any number run batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.errors import PublishError
from hotrow.nn import EmbeddingCollection
from hotrow.publish.publication import Publication, TableChange
from hotrow.table import TableRows
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import MOST


class Fresh(NamedTuple):
    """What a batch was answered from: a publication and its event-time watermark (milliseconds). `highest` is the
    newest that any of its rows may be from: another one only with a remote store."""

    publication: int = 0
    watermark: int | None = None
    highest: int = 0

    @staticmethod
    def of(publication: int, watermark: int | None) -> Fresh:
        """With rows of that publication alone."""
        return Fresh(publication, watermark, publication)

    def merged(self, other: Fresh) -> Fresh:
        """Of an answer with parts from both.

        >>> Fresh.of(7, 100).merged(Fresh.of(8, 200))
        Fresh(publication=7, watermark=100, highest=8)
        """
        older = self if self.publication <= other.publication else other
        return older._replace(highest=max(self.highest, other.highest))

    def age(self, now: float) -> float | None:
        """Seconds from its watermark to `now` (time.time()); None where events have no time."""
        return None if self.watermark is None else max(0.0, now - self.watermark / 1000)


class TornError(PublishError):
    """A switch failed and could not be undone: rows of two publications are in service."""


@dataclass(frozen=True)
class TableSwitch:
    """One table's part: what to set and remove, and what was there where that may be needed again."""

    rows: TableRows
    keys: Tensor
    values: Tensor  # float32
    deleted: Tensor
    before: tuple[Tensor, Tensor] | None  # values and which keys had any, of `keys` and then `deleted`

    @property
    def touched(self) -> Tensor:
        """Every key that changes."""
        return torch.cat([self.keys, self.deleted])

    def run(self, number: int) -> None:
        """Change the store. The core takes what `prepare` has checked. Over a remote store: what is cached of it."""
        if self.rows.remote is not None:
            self.rows.remote.apply(number, self.keys.numpy(), self.values.numpy(), self.deleted.numpy())
            return
        with core_errors():
            if self.deleted.numel():
                self.rows.store.core.erase(self.deleted)
            if self.keys.numel():
                self.rows.store.core.assign(self.keys, self.values, None, None)

    def undo(self) -> None:
        """What was there before. It takes no memory that was not taken then."""
        if self.before is None:
            raise TornError(f"table {self.rows.table.name!r} is half changed")
        values, found = self.before
        touched = self.touched
        with core_errors():
            self.rows.store.core.erase(touched[~found].contiguous())
            self.rows.store.core.assign(touched[found].contiguous(), values[found].contiguous(), None, None)


@dataclass(frozen=True)
class Switch:
    """A publication, ready for this engine."""

    fresh: Fresh
    tables: list[TableSwitch]

    @property
    def touched(self) -> Mapping[int, Tensor]:
        """Changed keys by store."""
        return {id(table.rows.store): table.touched for table in self.tables}

    def changes(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """By table: keys and values that are set, and keys that are removed."""
        return {table.rows.table.name: (table.keys, table.values, table.deleted) for table in self.tables}

    def rows(self) -> None:
        """Change the rows of all tables, or of none. Requires: nobody reads."""
        begun: list[TableSwitch] = []
        try:
            for table in self.tables:
                begun.append(table)
                table.run(self.fresh.publication)
        except Exception as error:
            try:
                for table in begun:
                    table.undo()
            except Exception as worse:
                raise TornError(f"publication {self.fresh.publication} is applied in part: {error}; {worse}") from error
            raise


def prepare(publication: Publication, embeddings: EmbeddingCollection) -> Switch:
    """Check a publication's rows against the model and make them ready; what does not fit changes nothing."""
    tables = {rows.table.name: rows for rows in embeddings.tables}
    limited = embeddings.budget.limit > 0
    found = []
    for name, change in publication.tables.items():
        if name not in tables:
            raise PublishError(
                f"publication {publication.number} has table {name!r}, which this model lacks; serve the version that "
                "the trainer trains"
            )
        if change.rows:
            found.append(_table(publication.number, tables[name], change, limited))
    return Switch(Fresh.of(publication.number, publication.watermark), found)


def _table(number: int, rows: TableRows, change: TableChange, limited: bool) -> TableSwitch:
    dim, name = rows.table.dim, rows.table.name
    if change.keys.numel() and change.values.shape[1] != dim:
        raise PublishError(
            f"publication {number} has rows of dim {change.values.shape[1]} for table {name!r}, which has dim {dim}; "
            "serve the version that the trainer trains"
        )
    for given in (change.keys.numpy(), change.deleted.numpy()):
        if not (given[1:] > given[:-1]).all():
            raise PublishError(f"publication {number} has keys of table {name!r} twice or out of order")
    values = change.values.to(torch.float32).contiguous()
    plain = values.numpy()
    if not np.isfinite(plain).all():
        raise PublishError(f"publication {number} has NaN or infinite values for table {name!r}; roll it back")
    if not _fits(rows.table.values, plain):
        raise PublishError(
            f"publication {number} has values for table {name!r} that {rows.table.values} does not reach; export the "
            'model with values="fp32"'
        )
    keys, deleted = change.keys.contiguous(), change.deleted.contiguous()
    before = None
    if limited and not rows.store.evicts:
        before = rows.store.read(torch.cat([keys, deleted]))
    return TableSwitch(rows, keys, values, deleted, before)


def _fits(kind: str | None, values: np.ndarray) -> bool:  # type: ignore[type-arg]
    """Whether the type in which rows are kept has these numbers."""
    if not values.size or kind not in ("fp16", "int8"):
        return True
    if kind == "fp16":
        return bool(np.abs(values).max() < MOST[kind])
    with np.errstate(over="ignore"):
        return not math.isinf(float((values.max(axis=1) - values.min(axis=1)).max()))
