"""DeviceClient: a batch on a GPU whose rows other objects own. Its tables have one dim.

Duplicates, pooling and sums are on the device, with the kernels that a batch in one process uses. Keys come down when
their duplicates are out: about 9 bytes each. For the gather kernel the rows that came are a table's rows, and the
places of the unique keys its slots. A sum of gradients is the update kernel with plain descent, from zero and with rate
-1. dedup gives unique keys by table and hash; one stable sort brings them into the order of owners.

A batch that is routed ahead has a stream of its own, so that its route waits for nothing that training has asked of the
device. When the batch's turn has come, the training stream waits for it (`take_over`).
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
from hotrow.kernels.rows.layout import RowLayout, Source, small_table
from hotrow.kernels.rows.runs import group
from hotrow.kernels.rows.update import Coefficients, update
from hotrow.tiers.batch_values import Request, Summed
from hotrow.tiers.hbm.batch_layout import lay_out
from hotrow.tiers.host.store import SHARDS
from hotrow.tiers.plan import Jobs

SGD = 0  # the code of kernels/rows/rules.py


class DeviceClient:
    """The batch's half of a plan, on a GPU (hotrow.tiers.plan.RowClient). `stream` is where batches ahead are asked
    for."""

    def __init__(self, device: torch.device, dim: int, stream: Any = None) -> None:
        self.device, self.dim, self.stream = device, dim, stream
        self._layout = RowLayout(dim)
        self._jobs: Jobs = []
        self._number = 0  # of unique keys
        self._asked: Any = None  # an event on `stream`: the last `ask` there is done
        self._owners: dict[int, tuple[Tensor, Tensor]] = {}  # by stream: owner_of, and the same on the device

    def ask(self, jobs: Jobs, owner_of: Tensor, owners: int, ahead: bool) -> Request:
        """The batch's unique keys by owner. Waits for the device."""
        stream = self.stream if ahead else None
        if any(jagged.values.device.type == "cuda" for _, of_table in jobs for jagged, _ in of_table):
            follow(stream)  # keys that were made on this one
        with on(stream):
            request = self._ask(jobs, owner_of, owners)
            self._asked = None if stream is None else stream.record_event()
        return request

    def _ask(self, jobs: Jobs, owner_of: Tensor, owners: int) -> Request:
        self._jobs, tables = jobs, len(jobs)
        self._keys, _, self._items = lay_out([of_table for _, of_table in jobs], self.device)
        sizes = tuple(sum(jagged.values.numel() for jagged, _ in of_table) for _, of_table in jobs)
        numbers = torch.arange(tables, dtype=torch.int32, device=self.device)
        of_position = torch.repeat_interleave(numbers, small_table(sizes, self.device))
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
        return Request(counts, to_host(keys[order]), to_host(unique.counts[:n][order]))

    def _on_device(self, owner_of: Tensor) -> Tensor:
        """The owner of each shard, int64. Each stream has its own copy: another stream's may not be there yet."""
        stream = raw_stream(self.device)
        if stream not in self._owners or self._owners[stream][0] is not owner_of:
            self._owners[stream] = owner_of, small_table(tuple(owner_of.tolist()), self.device)
        return self._owners[stream][1]

    def take_over(self) -> None:
        """What was asked for on another stream is used on this one from now on."""
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
            used_on(current_stream(self.device), self._keys, self._slots, *vars(self._items).values())

    def pool(self, rows: Tensor, outputs: Sequence[Tensor]) -> None:
        """Pool rows into the features' outputs."""
        gather(Source(self._rows(rows)), self._layout, self._slots, self._items, outputs)

    def sum(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor], floats: int) -> Summed:
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
        return Summed(sums, present, finite, bool(present.all()))

    def _present(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Which unique keys have a gradient."""
        marks = torch.ones(self._number, dtype=torch.uint8, device=self.device)
        if all(gradient is not None for gradient in gradients):
            return marks
        sizes = tuple(jagged.values.numel() for _, of_table in self._jobs for jagged, _ in of_table)
        given = small_table(tuple(int(gradient is not None) for gradient in gradients), self.device, torch.uint8)
        of_position = torch.repeat_interleave(given, small_table(sizes, self.device))
        return marks.zero_().scatter_reduce_(0, self._slots.long(), of_position, "amax")

    def _rows(self, flat: Tensor) -> Tensor:
        """Rows of the kernels' stride out of rows without gaps; one at least."""
        stride = self._layout.stride
        rows = flat.view(-1, self.dim)
        if rows.shape[0] == 0:
            return flat.new_zeros(1, stride)
        return rows.contiguous() if self.dim == stride else torch.nn.functional.pad(rows, (0, stride - self.dim))


def _shards(keys: Tensor) -> Tensor:
    """The shard of each key: the top bits of its hash, whose sign is turned here."""
    return (hashes_of(keys) >> 54) + SHARDS // 2
