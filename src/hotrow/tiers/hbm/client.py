"""DeviceClient: the requester's half of a plan, on a GPU. All its tables have one dim.

Deduplication, pooling and gradient sums use the kernels of a batch in one process. Unique keys are copied to the host,
about 9 bytes each. The gather kernel takes the received rows as a table and the positions of the unique keys as its
slots. Gradients are summed by the update kernel: plain SGD from zero with learning rate -1. dedup orders unique keys by
table and hash; one stable sort puts them into the order of owners.

A batch that is routed ahead uses a stream of its own, so its route does not wait for training work on the device. At
the batch's turn the training stream waits for it (`join_route_stream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.device.streams import follow, on, to_host, used_on
from hotrow.kernels.current_stream import current_stream, raw_stream
from hotrow.kernels.index.dedup import dedup, hashes_of
from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.layout import RowLayout, Source, cached_table
from hotrow.kernels.rows.runs import group
from hotrow.kernels.rows.update import Coefficients, update
from hotrow.tiers.batch_values import GradientSums, KeyRequest
from hotrow.tiers.hbm.batch_layout import lay_out
from hotrow.tiers.host.store import SHARDS
from hotrow.tiers.plan import TableInputs

SGD = 0  # the code of kernels/rows/rules.py


class DeviceClient:
    """The requester's half of a plan, on a GPU (hotrow.tiers.plan.RowClient). Batches that are routed ahead
    enqueue their work on `stream`."""

    def __init__(self, device: torch.device, dim: int, stream: Any = None) -> None:
        self.device, self.dim, self.stream = device, dim, stream
        self._layout = RowLayout(dim)
        self._jobs: TableInputs = []
        self._number = 0  # of unique keys
        self._request_done: Any = None  # an event on `stream`: the last `request_keys` there has ended
        self._owners: dict[int, tuple[Tensor, Tensor]] = {}  # by stream: owner_of, and the same on the device

    def request_keys(self, jobs: TableInputs, owner_of: Tensor, owners: int, ahead: bool) -> KeyRequest:
        """The batch's unique keys by owner. Waits for the device."""
        stream = self.stream if ahead else None
        if any(jagged.values.device.type == "cuda" for _, of_table in jobs for jagged, _ in of_table):
            follow(stream)  # which may still be writing the keys
        with on(stream):
            request = self._request_keys(jobs, owner_of, owners)
            self._request_done = None if stream is None else stream.record_event()
        return request

    def _request_keys(self, jobs: TableInputs, owner_of: Tensor, owners: int) -> KeyRequest:
        self._jobs, tables = jobs, len(jobs)
        self._keys, _, self._items = lay_out([of_table for _, of_table in jobs], self.device)
        sizes = tuple(sum(jagged.values.numel() for jagged, _ in of_table) for _, of_table in jobs)
        numbers = torch.arange(tables, dtype=torch.int32, device=self.device)
        of_position = torch.repeat_interleave(numbers, cached_table(sizes, self.device))
        unique = dedup(self._keys, of_position, tables)
        n = self._number = int(unique.number)
        keys = unique.keys[:n]
        kind = unique.tables[:n].long()
        if owners > 1:
            kind = self._on_device(owner_of)[_shards(keys)] * tables + kind
        order = torch.argsort(kind, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(n, device=self.device)
        self._slots = place[unique.inverse.long()].to(torch.int32)
        counts = torch.bincount(kind, minlength=owners * tables).view(owners, tables).cpu().tolist()
        return KeyRequest(counts, to_host(keys[order]), to_host(unique.counts[:n][order]))

    def _on_device(self, owner_of: Tensor) -> Tensor:
        """The owner of each shard, int64. Each stream keeps its own copy: another stream may not have uploaded its copy
        yet."""
        stream = raw_stream(self.device)
        if stream not in self._owners or self._owners[stream][0] is not owner_of:
            self._owners[stream] = owner_of, cached_table(tuple(owner_of.tolist()), self.device)
        return self._owners[stream][1]

    def join_route_stream(self) -> None:
        """Make the current stream wait for the last `request_keys`, and use its results from now on."""
        if self._request_done is not None:
            self._request_done.wait()
            self._request_done = None
            used_on(current_stream(self.device), self._keys, self._slots, *vars(self._items).values())

    def pool(self, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs."""
        gather(Source(self._rows(rows)), self._layout, self._slots, self._items, outputs)

    def sum_gradients(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> GradientSums:
        """Gradients by unique key."""
        finite = all(bool(torch.isfinite(matrix).all()) for matrix in checked)
        rows = self._rows(torch.zeros(floats, device=self.device))
        streams = torch.zeros(len(self._jobs), dtype=torch.int64, device=self.device)
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        update(
            Source(rows), self._layout, SGD, group(self._slots), self._items, gradients, self._keys,
            [Coefficients((-1.0,))], streams, None, 0, 1.0, None, flag,
        )  # fmt: skip
        sums = rows[: self._number, : self.dim].reshape(-1)
        present = self._present(gradients)
        return GradientSums(sums, present, finite, bool(present.all()))

    def _present(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Which unique keys have a gradient."""
        marks = torch.ones(self._number, dtype=torch.uint8, device=self.device)
        if all(gradient is not None for gradient in gradients):
            return marks
        sizes = tuple(jagged.values.numel() for _, of_table in self._jobs for jagged, _ in of_table)
        given = cached_table(tuple(int(gradient is not None) for gradient in gradients), self.device, torch.uint8)
        of_position = torch.repeat_interleave(given, cached_table(sizes, self.device))
        return marks.zero_().scatter_reduce_(0, self._slots.long(), of_position, "amax")

    def _rows(self, flat: Tensor) -> Tensor:
        """Rows of the kernels' stride out of rows without gaps; one at least."""
        stride = self._layout.stride
        rows = flat.view(-1, self.dim)
        if rows.shape[0] == 0:
            return flat.new_zeros(1, stride)
        return rows.contiguous() if self.dim == stride else torch.nn.functional.pad(rows, (0, stride - self.dim))


def _shards(keys: Tensor) -> Tensor:
    """The shard of each key: the top bits of its hash, as unsigned. int64 flips the top bit, hence the offset."""
    return (hashes_of(keys) >> 54) + SHARDS // 2
