"""RowServerClient: the requester's half of a plan over row servers. It chooses what the servers pool.

Rows travel for unique keys, or a server pools a feature and its vectors travel. A feature is pooled there if one range
of servers has all shards, its pooling is a sum or a mean without weights, and its vectors are fewer bytes than its rows
would be. The unique keys are not counted for that: they are estimated from a sample of the ids. Servers pool with the
same kernel and in the same order, so the bits are the same.

As HostClient, one belongs to each plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.tiers.batch_values import GradientSums, KeyRequest
from hotrow.tiers.host.client import HostClient
from hotrow.tiers.host.store import HostStore
from hotrow.tiers.plan import TableInputs

POOLINGS = {"sum": 1, "mean": 2}  # core/kernels/row_kernels.h
LEAST_IDS = 256  # of a feature in a batch: below, choosing costs more than it saves
SAMPLE = 512
KEY_BYTES, FLOAT_BYTES = 8, 4


class PooledFeature(NamedTuple):
    """A feature whose vectors a server sends."""

    position: int  # among the plan's features
    table: int
    store: HostStore
    ids: Jagged
    pooling: str
    vectors: Tensor  # [bags, dim], filled by the owner


class RowServerClient:
    """A batch whose rows are on row servers (hotrow.tiers.plan.RowClient)."""

    def __init__(self) -> None:
        self._host = HostClient()
        self.pooled: list[PooledFeature] = []

    def request_keys(self, inputs: TableInputs, owner_of: Tensor, owners: int, ahead: bool) -> KeyRequest:
        """The batch's unique keys, sorted by owner, without those of features that a server pools."""
        self.pooled = []
        left: list[tuple[HostStore, list[tuple[Jagged, str]]]] = []
        position = 0
        for table, (store, features) in enumerate(inputs):
            kept: list[tuple[Jagged, str]] = []
            for ids, pooling in features:
                if owners == 1 and is_smaller_pooled(ids, pooling, store.dim):
                    vectors = torch.empty(ids.size, store.dim)
                    self.pooled.append(PooledFeature(position, table, store, ids, pooling, vectors))
                    ids = Jagged(ids.values[:0], torch.zeros_like(ids.offsets))  # type: ignore[arg-type]
                kept.append((ids, pooling))
                position += 1
            left.append((store, kept))
        return self._host.request_keys(left if self.pooled else inputs, owner_of, owners, ahead)

    def join_route_stream(self) -> None:
        """Do nothing: the CPU has no streams."""

    def pool(self, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs, and copy the vectors that servers pooled."""
        self._host.pool(rows, outputs)
        for feature in self.pooled:
            outputs[feature.position].copy_(feature.vectors)

    def sum_gradients(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> GradientSums:
        """Gradients summed by unique key; not used, because rows of row servers are only read."""
        return self._host.sum_gradients(gradients, checked, floats)


def is_smaller_pooled(ids: Jagged, pooling: str, dim: int) -> bool:
    """Whether a feature's vectors, with the ids to pool, are fewer bytes than its unique keys and their rows."""
    if pooling not in POOLINGS or ids.offsets is None or ids.weights is not None:
        return False
    count = ids.values.numel()
    if count < LEAST_IDS or count <= 2 * ids.size:
        return False
    sample = ids.values[:: -(-count // SAMPLE)]
    unique = count * torch.unique(sample).numel() / sample.numel()
    pooled_bytes = count * KEY_BYTES + ids.size * dim * FLOAT_BYTES
    return bool(pooled_bytes < unique * (KEY_BYTES + dim * FLOAT_BYTES))
