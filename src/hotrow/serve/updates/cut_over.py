"""The cut-over: prepares a publication while batches run, then puts it in service between two batches.

    prepare    while requests run: look tables up, check values, convert them to float32, check the weights' shapes
    cut over   with the engine's reader-writer gate held exclusively: set and remove rows in the host store, refresh
               their copies in HBM, replace the weights, set the publication's number

`follower.py` calls both; `Engine.prepare_update` combines them. A batch holds the gate shared while it reads rows. It
also reads the weights and the publication's number there; both are immutable values. Its tower runs with those weights
after it has left the gate, so a cut-over waits for lookups (fractions of a millisecond) and never for towers. On a GPU,
captured graphs contain the weights' addresses, so there a batch holds the gate to its end. In both cases the rows, the
weights and the number of a batch are those of one publication.

The duration of a cut-over depends on its rows: the core writes 2,000 rows of dim 16 in 26 tables in 0.3 ms at best on
one core. Checks and conversions take five times as long and are in `prepare`. A trainer publishes often, so
publications are small. A rollback to a far older publication stops the lanes for a time proportional to its rows.

A cut-over that fails (no memory for new rows) is undone. For that, `prepare` reads the old rows of every table whose
memory budget could be exceeded: one without an SSD tier. With an SSD tier rows can always be evicted; if the disk fails
there, rows of two publications remain, and on MixedPublicationsError the follower loads everything again.

Rejected: an overlay of changed rows beside the store, switched by one pointer. Every lookup pays for it, and merging it
into the store is the same work under the same lock.

One thread prepares and cuts over; any number of threads run batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotrow.errors import PublishError
from hotrow.nn import EmbeddingCollection
from hotrow.publish.publication import Publication, TableChange
from hotrow.serve.updates.freshness import Freshness
from hotrow.table import TableRows
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import MOST


class MixedPublicationsError(PublishError):
    """A cut-over failed and could not be undone: rows of two publications are in service."""


@dataclass(frozen=True)
class PreparedTable:
    """The changes of one table: rows to set, keys to remove, and the old rows for an undo."""

    rows: TableRows
    keys: Tensor
    values: Tensor  # float32
    deleted: Tensor
    before: tuple[Tensor, Tensor] | None  # of `keys` and then `deleted`: old values, and which keys had a row

    @property
    def changed_keys(self) -> Tensor:
        """Keys that are set or removed."""
        return torch.cat([self.keys, self.deleted])

    def apply(self, number: int) -> None:
        """Change the store; with a remote store, change its cached rows. `prepare` has checked the values."""
        if self.rows.remote is not None:
            self.rows.remote.apply(number, self.keys.numpy(), self.values.numpy(), self.deleted.numpy())
            return
        with core_errors():
            if self.deleted.numel():
                self.rows.store.core.erase(self.deleted)
            if self.keys.numel():
                self.rows.store.core.assign(self.keys, self.values, None, None)

    def undo(self) -> None:
        """Restore the old rows. This needs no more memory than the old rows took."""
        if self.before is None:
            raise MixedPublicationsError(
                f"table {self.rows.table.name!r} is changed in part and its old rows were not kept"
            )
        values, found = self.before
        changed = self.changed_keys
        with core_errors():
            self.rows.store.core.erase(changed[~found].contiguous())
            self.rows.store.core.assign(changed[found].contiguous(), values[found].contiguous(), None, None)


@dataclass(frozen=True)
class PreparedUpdate:
    """A publication that was checked and converted for this engine's tables."""

    fresh: Freshness
    tables: list[PreparedTable]

    @property
    def changed_keys(self) -> Mapping[int, Tensor]:
        """Changed keys by store."""
        return {id(table.rows.store): table.changed_keys for table in self.tables}

    def changes(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """By table: keys that are set, their values, and keys that are removed."""
        return {table.rows.table.name: (table.keys, table.values, table.deleted) for table in self.tables}

    def apply_rows(self) -> None:
        """Change the rows of all tables, or of none. Requires: no batch reads rows."""
        begun: list[PreparedTable] = []
        try:
            for table in self.tables:
                begun.append(table)
                table.apply(self.fresh.publication)
        except Exception as error:
            try:
                for table in begun:
                    table.undo()
            except Exception as undo_error:
                raise MixedPublicationsError(
                    f"publication {self.fresh.publication} is applied in part: {error}; {undo_error}"
                ) from error
            raise


def prepare(publication: Publication, embeddings: EmbeddingCollection) -> PreparedUpdate:
    """Check a publication's rows against the model's tables and convert them. An error changes nothing."""
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
    return PreparedUpdate(Freshness.of(publication.number, publication.watermark), found)


def _table(number: int, rows: TableRows, change: TableChange, limited: bool) -> PreparedTable:
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
    array = values.numpy()
    if not np.isfinite(array).all():
        raise PublishError(f"publication {number} has NaN or infinite values for table {name!r}; roll it back")
    if not _in_range(rows.table.values, array):
        raise PublishError(
            f"publication {number} has values for table {name!r} that are out of range for {rows.table.values}; export "
            'the model with values="fp32"'
        )
    keys, deleted = change.keys.contiguous(), change.deleted.contiguous()
    before = None
    if limited and not rows.store.evicts:
        before = rows.store.read(torch.cat([keys, deleted]))
    return PreparedTable(rows, keys, values, deleted, before)


def _in_range(kind: str | None, values: np.ndarray) -> bool:  # type: ignore[type-arg]
    """Whether the type that rows are stored in can represent these numbers."""
    if not values.size or kind not in ("fp16", "int8"):
        return True
    if kind == "fp16":
        return bool(np.abs(values).max() < MOST[kind])
    with np.errstate(over="ignore"):
        return not math.isinf(float((values.max(axis=1) - values.min(axis=1)).max()))
