"""RankPlan with rows in HBM: duplicates, pooling and sums on the device, with the kernels that one process uses.

Keys come down when their duplicates are out and travel over Gloo: about 9 bytes each. The owning plan, a HotPlan over
all tables, is given those that came as one process gives it a batch's, on the host, and brings their rows up ahead of
their turn as it does there. Rows and gradients are exchanged from where they are: NCCL takes them, for Gloo they are
copied down and up. The asking parts are one for each dim, because what is pooled on the device is a matrix. For the
gather kernel the rows that came are a table's rows, and the places of the unique keys its slots; a sum of gradients is
the update kernel with plain descent, from zero and with rate -1. dedup gives unique keys by table and hash, and an
owner's shards are a range of hashes: one stable sort brings them into the order in which they are sent.

A route that runs ahead has a stream of its own (`stream`), so that it waits for nothing that training has asked of the
device; when the batch's turn has come, the training stream waits for it (`_take_over`).

One thing is less than on the CPU: where some keys of a table have a gradient and others have none on the same rank (a
table with two features, of which no loss uses one), it is an error. Give such a feature a table of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.errors import GradientError, OptionError
from hotrow.kernels.current import current_stream
from hotrow.kernels.dedup import dedup, hashes_of
from hotrow.kernels.gather import gather
from hotrow.kernels.layout import RowLayout, Source
from hotrow.kernels.runs import group
from hotrow.kernels.update import Coefficients, update
from hotrow.parallel.exchange import Channel
from hotrow.parallel.ownership import owner_of
from hotrow.parallel.plan import Jobs, Part, RankPlan
from hotrow.parallel.ranks import Ranks
from hotrow.table.batch_layout import lay_out
from hotrow.table.hot import HotRows
from hotrow.table.hot_plan import HotPlan
from hotrow.table.streams import follow, on, to_host, used_on
from hotrow.tiers.host import SHARDS, HostStore
from hotrow.tiers.host_plan import Moved, Summed, Update

SGD = 0  # the code of kernels/rules.py


class DeviceRankPlan(RankPlan):
    """One batch's way through the rows of all ranks, in HBM."""

    def __init__(
        self, ranks: Ranks, hot: HotRows, replicated: frozenset[int] = frozenset(), stream: Any = None
    ) -> None:
        super().__init__(ranks, replicated)
        self.owning = HotPlan(hot)
        self.stream = stream  # of all routes that run ahead
        self._routed: Any = None  # when such a route is done
        self.by_kind = {
            (store.dim, id(store) in replicated): DevicePart(ranks, id(store) in replicated, device=hot.device)
            for store in hot.stores
        }
        self.parts: list[Part] = list(self.by_kind.values())

    def _part_of(self, store: HostStore) -> Part:
        return self.by_kind[store.dim, id(store) in self.replicated]

    def _route(self, jobs: Jobs, channel: Channel) -> None:
        stream = self.stream if channel is self.ranks.route else None
        if any(jagged.values.device.type == "cuda" for _, of_table in jobs for jagged, _ in of_table):
            follow(stream)  # keys that were made on this one
        with on(stream):
            super()._route(jobs, channel)
            self._routed = None if stream is None else stream.record_event()
        asked: list[list[tuple[Tensor, Tensor]]] = [[] for _ in jobs]
        for part in self.by_kind.values():
            for number, of_table in zip(part.numbers, part.asked, strict=True):
                asked[number] = of_table
        wanted = [
            (store, [(Jagged(keys), "none") for keys, _ in of_table])
            for (store, _), of_table in zip(jobs, asked, strict=True)
        ]
        self.owning.route_seen(wanted, [seen for of_table in asked for _, seen in of_table])

    def _take_over(self) -> None:
        """What was routed on another stream is used on this one from now on."""
        if self._routed is not None:
            self._routed.wait()
            self._routed = None
            for part in self.by_kind.values():
                used_on(current_stream(part.device), part.keys, part.slots, *vars(part.items).values())

    def prefetch(self) -> Moved:
        """Rows that others will ask for come up from SSD, or are looked for in HBM."""
        return self.owning.prefetch()

    def stage(self) -> Moved:
        """Rows that others will ask for, exist and find room come up to HBM."""
        return self.owning.stage()

    @property
    def late(self) -> int:
        """Rows that found no room ahead of the batch's turn."""
        return self.owning.late

    def fetch(self, step: int = 0) -> None:
        """Find the rows that others ask for; unseen keys get theirs."""
        self._take_over()
        self.owning.fetch(step)

    late_ids = 0

    def late_by_example(self, examples: int) -> Tensor:
        """None: ranks wait for their rows."""
        return torch.zeros(examples, dtype=torch.int32)

    def read(self, late: str = "wait") -> None:
        """Find the rows that others ask for, without creating or counting anything."""
        if late != "wait":
            raise OptionError(f"late={late!r} over ranks: rows of other ranks are waited for; pass late='wait'")
        self._take_over()
        self.owning.read()

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Rows to those who asked; then pool what came."""
        blocks: dict[int, list[Tensor]] = {}
        for part in self.by_kind.values():
            blocks |= zip(part.numbers, part.make_room(), strict=True)
        self.owning.gather([block for number in sorted(blocks) for block in blocks[number]])
        for part in self.by_kind.values():
            part.pool([outputs[number] for number in part.features])

    def update(
        self,
        gradients: Sequence[Tensor | None],
        checked: Sequence[Tensor],
        updates: Sequence[Update],
        step: int,
        grad_scale: float,
    ) -> None:
        """Gradients to the owners, who apply them. Where one is NaN or infinite on any rank, all raise."""
        summed = []
        for part in self.by_kind.values():
            summed.append(part.sum([gradients[number] for number in part.features], checked))
            checked = []
        arrived: dict[int, list[Tensor | None]] = {}
        for part, one, whole in zip(self.by_kind.values(), summed, self._agree(summed), strict=True):
            arrived |= zip(part.numbers, part.send(one, whole), strict=True)
        blocks = [block for number in sorted(arrived) for block in arrived[number]]
        self.owning.update(blocks, [], updates, step, grad_scale)

    def release(self) -> None:
        """Let go of the rows."""
        self.owning.release()

    @property
    def unique(self) -> int:
        """Unique keys of this rank's batch, table by table."""
        return sum(part.number for part in self.by_kind.values())


class DevicePart(Part):
    """The tables of one dim that are spread over ranks, or those that are replicated."""

    def __init__(self, ranks: Ranks, replicated: bool, device: torch.device) -> None:
        super().__init__(ranks, replicated)
        self.device = device
        self.number = 0
        self.asked: list[list[tuple[Tensor, Tensor]]] = []  # by table, there by rank: keys and sightings

    def _deal(self, world: int) -> tuple[Tensor, Tensor, Tensor]:
        tables = len(self.jobs)
        self.keys, _, self.items = lay_out([of_table for _, of_table in self.jobs], self.device)
        sizes = [sum(jagged.values.numel() for jagged, _ in of_table) for _, of_table in self.jobs]
        numbers = torch.arange(tables, dtype=torch.int32, device=self.device)
        of_position = torch.repeat_interleave(numbers, torch.tensor(sizes, device=self.device))
        unique = dedup(self.keys, of_position, tables)
        n = self.number = int(unique.number)
        keys = unique.keys[:n]
        kind = owner_of(_shards(keys), world) * tables + unique.tables[:n].long()
        order = torch.argsort(kind, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(n, device=self.device)
        self.slots = place[unique.inverse.long()].to(torch.int32)
        counts = torch.bincount(kind, minlength=world * tables).view(world, tables).cpu()
        return counts, to_host(keys[order]), to_host(unique.counts[:n][order])

    def _own(self, arrays: list[tuple[Tensor, Tensor]]) -> None:
        self.asked = [[] for _ in self.jobs]
        for (keys, seen), of_rank in zip(arrays, self.theirs, strict=True):
            parts = zip(keys.split(of_rank), seen.split(of_rank), strict=True)
            for table, (some_keys, some_seen) in enumerate(parts):
                self.asked[table].append((some_keys, some_seen))

    def make_room(self) -> list[list[Tensor]]:
        """Where the rows that others ask for go: by table, there by rank."""
        self.room = torch.empty(sum(self._floats(self.theirs)), dtype=torch.float32, device=self.device)
        return self._matrices(self.room)

    def pool(self, outputs: Sequence[Tensor]) -> None:
        """Send the rows of `make_room`, and pool those that came."""
        if self.replicated:  # every rank has looked up everybody's; its own are what it needs
            mine = self._floats(self.theirs)
            rows = self.room.split(mine)[self.ranks.rank]
        else:
            give, take = self._floats(self.theirs), self._floats(self.mine)
            rows = self.ranks.rows.all_to_all(self.room.to(self.ranks.wire), give, take, what="rows").float()
        gather(Source(self._rows(rows)), self._layout, self.slots, self.items, outputs)

    def sum(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor]) -> Summed:
        """This rank's gradients by unique key, as they will travel."""
        finite = all(bool(torch.isfinite(matrix).all()) for matrix in checked)
        rows = self._rows(torch.zeros(self.number * self.dims[0], device=self.device))
        streams = torch.zeros(len(self.jobs), dtype=torch.int64, device=self.device)
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        update(
            Source(rows), self._layout, SGD, group(self.slots), self.items, gradients, self.keys,
            [Coefficients((-1.0,))], streams, None, 0, 1.0, None, flag,
        )  # fmt: skip
        exact = rows[: self.number, : self.dims[0]].reshape(-1)
        sums, self.overflowed = exact.to(self.ranks.wire), False
        if finite and self.ranks.wire != torch.float32:
            finite = bool(torch.isfinite(sums).all())
            self.overflowed = not finite and bool(torch.isfinite(exact).all())
        present = self._present(gradients)
        return Summed(sums, present, finite, bool(present.all()))

    def send(self, summed: Summed, whole: bool) -> list[list[Tensor | None]]:
        """Sums to the owners; those that came, by table, there by rank; None where there is no gradient."""
        world, channel = self.ranks.world, self.ranks.rows
        sums = summed.sums.repeat(world) if self.replicated else summed.sums
        arrived = channel.all_to_all(sums, self._floats(self.mine), self._floats(self.theirs), what="gradients").float()
        blocks: list[list[Tensor | None]] = [list(of_table) for of_table in self._matrices(arrived)]
        if whole:
            return blocks
        marks = summed.present.repeat(world) if self.replicated else summed.present
        came = channel.all_to_all(marks, *([sum(of_rank) for of_rank in c] for c in (self.mine, self.theirs)))
        for rank, (of_rank, some) in enumerate(
            zip(self.theirs, came.split([sum(c) for c in self.theirs]), strict=True)
        ):
            for table, of_table in enumerate(some.split(of_rank)):
                if not bool(of_table.any()):
                    blocks[table][rank] = None
                elif not bool(of_table.all()):
                    raise GradientError(
                        "a table in HBM over ranks has a feature with gradients and one without; no row was changed. "
                        "Give the feature that no loss uses a table of its own, or leave hbm= out"
                    )
        return blocks

    def _present(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Which unique keys have a gradient."""
        marks = torch.ones(self.number, dtype=torch.uint8, device=self.device)
        if all(gradient is not None for gradient in gradients):
            return marks
        sizes = [jagged.values.numel() for _, of_table in self.jobs for jagged, _ in of_table]
        given = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8, device=self.device)
        of_position = torch.repeat_interleave(given, torch.tensor(sizes, device=self.device))
        return marks.zero_().scatter_reduce_(0, self.slots.long(), of_position, "amax")

    @property
    def _layout(self) -> RowLayout:
        return RowLayout(self.dims[0])

    def _rows(self, flat: Tensor) -> Tensor:
        """Rows of the kernels' stride out of rows without gaps; one at least."""
        dim, stride = self.dims[0], self._layout.stride
        rows = flat.view(-1, dim)
        if rows.shape[0] == 0:
            return flat.new_zeros(1, stride)
        return rows.contiguous() if dim == stride else torch.nn.functional.pad(rows, (0, stride - dim))

    def _matrices(self, flat: Tensor) -> list[list[Tensor]]:
        """A buffer that has rank after rank, there table after table, by table and there by rank."""
        dim, tables = self.dims[0], len(self.jobs)
        sizes = [n for of_rank in self.theirs for n in of_rank]
        blocks = flat.view(-1, dim).split(sizes)
        return [[blocks[rank * tables + table] for rank in range(self.ranks.world)] for table in range(tables)]


def _shards(keys: Tensor) -> Tensor:
    """The shard of each key: the top bits of its hash, whose sign is turned here."""
    return (hashes_of(keys) >> 54) + SHARDS // 2
