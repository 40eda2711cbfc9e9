"""The oracle of a collection: one torch parameter per table, looked up with torch's own embedding functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotrow.batch import Jagged, KeyedBatch
from hotrow.nn import EmbeddingCollection
from hotrow.table import Table, TableRows


class PlainEmbeddings:
    """The rows of `keys` as they are now, as dense parameters under autograd."""

    def __init__(self, collection: EmbeddingCollection, keys: dict[str, Tensor]) -> None:
        self.tables = {rows.table.name: rows.table for rows in collection.tables}
        self.keys = {name: keys[name].unique() for name in self.tables}
        self.weights = {name: nn.Parameter(collection.table(name).read(self.keys[name])) for name in self.tables}

    def __call__(self, batch: KeyedBatch) -> dict[str, Tensor]:
        vectors: dict[str, Tensor] = {}
        for table in self.tables.values():
            for feature, pooling in table.poolings.items():
                if pooling == "none":
                    vectors[feature], vectors[f"{feature}_mask"] = self._sequence(table, batch.ids[feature])
                else:
                    vectors[feature] = self._bags(table, batch.ids[feature], pooling)
        return vectors

    def _bags(self, table: Table, ids: Jagged, pooling: str) -> Tensor:
        weight = self.weights[table.name]
        offsets = torch.arange(ids.size + 1) if ids.offsets is None else ids.offsets
        weights = torch.ones(ids.values.numel()) if ids.weights is None else ids.weights
        index = torch.searchsorted(self.keys[table.name], ids.values)
        # torch knows no weighted mean: ours is the weighted sum over the number of ids.
        total = nn.functional.embedding_bag(
            index, weight, offsets, mode="sum", include_last_offset=True, per_sample_weights=weights
        )
        return total / ids.lengths().clamp(min=1).unsqueeze(1) if pooling == "mean" else total

    def _sequence(self, table: Table, ids: Jagged) -> tuple[Tensor, Tensor]:
        index = torch.searchsorted(self.keys[table.name], ids.values)
        rows = nn.functional.embedding(index, self.weights[table.name])
        if ids.weights is not None:
            rows = rows * ids.weights.unsqueeze(1)
        pieces = list(rows.split(ids.lengths().tolist()))
        padded = nn.utils.rnn.pad_sequence(pieces, batch_first=True) if pieces else rows.new_zeros(0, 0, table.dim)
        if padded.shape[1] == 0:
            padded = rows.new_zeros(ids.size, 1, table.dim)
        return padded, torch.arange(padded.shape[1]) < ids.lengths().unsqueeze(1)


def change(rows: TableRows, keys: Tensor, before: Tensor) -> Tensor:
    """The gradient of each row: what training with SGD(lr=1) subtracted."""
    return before - rows.read(keys)
