"""One batch over the rows of all ranks: the calls of tiers/host_plan.HostPlan, with exchanges between them.

    route    deduplicate here; deal the unique keys out to their owners, with how often each was seen
    fetch    owners find the rows that all ranks ask for
    gather   owners send each rank its rows; it pools from what it got
    update   sum gradients by unique key here, in batch order; send the sums to the owners, who add those of several
             ranks in rank order and apply the rule once

Two plans do it: `asking` has this rank's batch, `owning` has what all ranks ask this one for, a feature for each rank,
in rank order. So counts, admission and the order of every sum are those of one process that is given the ranks' batches
one behind the other, with each rank's share of a run added up first; bits depend on the number of ranks, never on
timing. A key travels once a rank and batch, however often it is in it.

A replicated table (`Table(replicate=True)`) is owned by everybody: keys and gradients go to all, rows travel nowhere.

If any rank has a gradient that is not finite, all raise and no row of any has changed: ranks compare before they touch
a row. What travels is measured in Channel.sent: 8 bytes a key, 1 for its sightings (4 where one is beyond 255), and its
row and its gradient in the wire's type.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.errors import GradientError, OptionError
from hotrow.parallel.exchange import Channel
from hotrow.parallel.ranks import Ranks
from hotrow.tiers.host import HostStore
from hotrow.tiers.host_plan import Block, HostPlan, Moved, Summed, Update

Jobs = Sequence[tuple[HostStore, Sequence[tuple[Jagged, str]]]]
HEADER = 2  # numbers in front of a message's counts: examples, bytes of a sighting


class RankPlan:
    """One batch's way through the rows of all ranks."""

    def __init__(self, ranks: Ranks, replicated: frozenset[int] = frozenset()) -> None:
        self.ranks = ranks
        self.parts = [Part(ranks, False)] + ([Part(ranks, True)] if replicated else [])
        self.replicated = replicated  # id() of stores whose rows are everywhere
        self.share, self.over = 1.0, False
        self.examples: int | None = 0
        self.sizes = [0] * ranks.world

    def route(self, jobs: Jobs, ahead: bool = False) -> None:
        """Deduplicate the keys and send each to its owner; receive those that this rank owns."""
        if ahead:
            with self.ranks.routes.one():
                self._route(jobs, self.ranks.route)
        else:
            self._route(jobs, self.ranks.rows)

    def route_nothing(self, jobs: Jobs) -> None:
        """Answer a route of other ranks that this one does not make: `Ranks.routes` has been closed."""
        self._route(jobs, self.ranks.route)

    def _route(self, jobs: Jobs, channel: Channel) -> None:
        size = jobs[0][1][0][0].size
        features = 0
        for part in self.parts:
            part.jobs, part.features, part.numbers = [], [], []
        for number, (store, of_table) in enumerate(jobs):
            part = self._part_of(store)
            part.jobs.append((store, of_table))
            part.numbers.append(number)
            part.features += range(features, features + len(of_table))
            features += len(of_table)
        for part in self.parts:
            self.sizes = part.route(size, channel)
        self.ranks.remote_keys += self.remote
        self.examples = sum(self.sizes)
        self.over = self.examples == 0
        self.share = 0.0 if self.over else size / self.examples

    def _part_of(self, store: HostStore) -> Part:
        return self.parts[id(store) in self.replicated]

    def prefetch(self) -> Moved:
        """Rows that others will ask for come up from SSD."""
        moved = [part.owning.prefetch() for part in self.parts]
        return Moved(sum(m.rows for m in moved), sum(m.bytes for m in moved), any(m.short for m in moved))

    def stage(self) -> Moved:
        """Nothing: these rows are in DRAM."""
        return Moved()

    @property
    def late(self) -> int:
        """Rows that `prefetch` was to have brought and `fetch` had to read after all."""
        return sum(part.owning.late for part in self.parts)

    def fetch(self, step: int = 0) -> None:
        """Find the rows that others ask for; unseen keys get theirs."""
        for part in self.parts:
            part.owning.fetch(step)

    late_ids = 0

    def late_by_example(self, examples: int) -> Tensor:
        """None: ranks wait for their rows."""
        return torch.zeros(examples, dtype=torch.int32)

    def read(self, late: str = "wait") -> None:
        """Copy the rows that others ask for, without creating or counting anything."""
        if late != "wait":
            raise OptionError(f"late={late!r} over ranks: rows of other ranks are waited for; pass late='wait'")
        for part in self.parts:
            part.owning.read()

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Rows to those who asked; then pool what came."""
        for part in self.parts:
            part.gather([outputs[number] for number in part.features])

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
        for part in self.parts:
            summed.append(part.sum([gradients[number] for number in part.features], checked))
            checked = []
        wholes = self._agree(summed)
        for part, one, whole in zip(self.parts, summed, wholes, strict=True):
            part.update(one, whole, [updates[n] for n in part.numbers], step, grad_scale)

    def _agree(self, summed: Sequence[Summed]) -> list[bool]:
        """Whether every key of all ranks had a gradient, by part. Where one is not finite on any rank, all raise.

        A rank that wants to stop says so here, so that all hear of it in the same step.
        """
        spoiled, self.ranks.spoiled = self.ranks.spoiled, False
        finite = all(one.finite for one in summed) and not spoiled
        parts = zip(summed, self.parts, strict=True)
        before = not spoiled and all(one.finite or part.overflowed for one, part in parts)
        wants_to_stop = self.ranks.wants_to_stop()
        said = self.ranks.rows.gather_numbers(finite, before, wants_to_stop, *(one.whole for one in summed))
        self.ranks.stopping |= any(wants for _, _, wants, *_ in said)
        bad = [rank for rank, (was_finite, *_) in enumerate(said) if not was_finite]
        self.ranks.failing = bool(bad)
        if bad:
            raise GradientError(self._why(bad, all(said[rank][1] for rank in bad)))
        return [all(wholes) for wholes in zip(*(words[3:] for words in said), strict=True)]

    def _why(self, bad: Sequence[int], finite_before: bool) -> str:
        """What to say of ranks that have something that is not finite, or was not when it had been rounded."""
        ranks, wire = ", ".join(map(str, bad)), self.ranks.wire
        narrow = wire != torch.float32
        limit = f"{torch.finfo(wire).max:g}, the largest {str(wire).removeprefix('torch.')}"
        if finite_before and narrow:
            return (
                f"a sum of gradients on rank {ranks} is finite but beyond {limit} on the wire; no row was changed. "
                "Pass wire='fp32', or clip gradients"
            )
        also = f", pass wire='fp32' if rows are beyond {limit}" if narrow else ""
        return (
            f"the loss or a gradient is NaN or infinite on rank {ranks}; no row was changed. Lower the learning rate, "
            f"clip gradients{also}, or find the bad input with torch.autograd.set_detect_anomaly(True)"
        )

    def release(self) -> None:
        """Let go of the rows."""
        for part in self.parts:
            part.owning.release()

    @property
    def unique(self) -> int:
        """Unique keys of this rank's batch, table by table."""
        return sum(part.asking.unique for part in self.parts)

    @property
    def remote(self) -> int:
        """Unique keys of this rank's batch whose rows other ranks own."""
        return sum(part.remote for part in self.parts)


@dataclass
class Part:
    """The tables of a batch that are spread over ranks, or those that are replicated."""

    ranks: Ranks
    replicated: bool
    jobs: list[tuple[HostStore, Sequence[tuple[Jagged, str]]]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of its tables, among all
    features: list[int] = field(default_factory=list)  # of its features, among all
    overflowed: bool = False  # whether sums were finite before they were rounded for the wire, and are not now

    def __post_init__(self) -> None:
        self.asking, self.owning = HostPlan(), HostPlan()
        self.everywhere = torch.zeros_like(self.ranks.owner_of)

    def route(self, size: int, channel: Channel) -> list[int]:
        """Returns every rank's number of examples."""
        world, tables = self.ranks.world, len(self.jobs)
        self.dims = [store.dim for store, _ in self.jobs]
        counts, keys, seen = self._deal(1 if self.replicated else world)
        if self.replicated:
            counts, keys, seen = counts.expand(world, -1), keys.repeat(world), seen.repeat(world)
        narrow = seen.numel() == 0 or int(seen.max()) < 256
        seen = seen.to(torch.uint8) if narrow else seen
        headers = torch.empty(world, HEADER + tables, dtype=torch.int64)
        headers[:, 0], headers[:, 1], headers[:, HEADER:] = size, seen.element_size(), counts
        row = [headers.shape[1]] * world
        came = channel.all_to_all(headers.view(-1), row, row, what="counts").view(world, -1).tolist()
        self.mine = counts.tolist()  # [rank][table]: how many keys this rank asks that one for
        self.theirs = [header[HEADER:] for header in came]  # how many that one asks this rank for
        self._own(self._exchange(keys, seen, [header[1] for header in came], channel))
        return [header[0] for header in came]

    def _deal(self, world: int) -> tuple[Tensor, Tensor, Tensor]:
        """Unique keys for so many owners: how many for each, [world, tables]; the keys so; how often each was seen. On
        the CPU."""
        self.asking.route(self.jobs)
        return self.asking.deal(self.ranks.owner_of if world > 1 else self.everywhere, world, len(self.jobs))

    def _exchange(self, keys: Tensor, seen: Tensor, widths: list[int], channel: Channel) -> list[tuple[Tensor, Tensor]]:
        """Send keys with their sightings; those that came, by rank."""
        amounts = [sum(of_rank) for of_rank in self.mine]
        asked = [sum(of_rank) for of_rank in self.theirs]
        send = _pack(keys, seen, amounts)
        came = [_bytes(n, width) for n, width in zip(asked, widths, strict=True)]
        received = channel.all_to_all(send, [_bytes(n, seen.element_size()) for n in amounts], came, what="keys")
        return _unpack(received, asked, widths, came)

    def _own(self, arrays: list[tuple[Tensor, Tensor]]) -> None:
        """Look up what all ranks ask for."""
        wanted: list[list[tuple[int, int, int]]] = [[] for _ in self.jobs]
        for (some_keys, some_seen), of_rank in zip(arrays, self.theirs, strict=True):
            at = 0
            for table, count in enumerate(of_rank):
                wanted[table].append((some_keys.data_ptr() + 8 * at, some_seen.data_ptr() + 4 * at, count))
                at += count
        self.owning.route_seen([store for store, _ in self.jobs], wanted)

    def gather(self, outputs: Sequence[Tensor]) -> None:
        """Rows of the owner's plan to those who asked, pooled there."""
        if self.replicated:
            rows = torch.empty(self._floats(self.mine[:1])[0], dtype=torch.float32)
            here = self.ranks.rank
            blocks = self._blocks(rows, [counts if rank == here else None for rank, counts in enumerate(self.theirs)])
            self.owning.gather_blocks(blocks)
        else:
            give, take = self._floats(self.theirs), self._floats(self.mine)
            send = torch.empty(sum(give), dtype=torch.float32)
            self.owning.gather_blocks(self._blocks(send, self.theirs))
            rows = self.ranks.rows.all_to_all(send.to(self.ranks.wire), give, take, what="rows").float()
        self.asking.take_rows(rows)
        self.asking.gather(outputs)

    def sum(self, gradients: Sequence[Tensor | None], checked: Sequence[Tensor]) -> Summed:
        """This rank's gradients by unique key, as they will travel."""
        summed = self.asking.sum(gradients, checked, sum(self._floats(self.mine[:1] if self.replicated else self.mine)))
        self.overflowed = False
        if not summed.finite or self.ranks.wire == torch.float32:
            return summed
        sums = summed.sums.to(self.ranks.wire)
        finite = bool(torch.isfinite(sums).all())
        self.overflowed = not finite and bool(torch.isfinite(summed.sums).all())
        return Summed(sums, summed.present, finite, summed.whole)

    def update(self, summed: Summed, whole: bool, updates: Sequence[Update], step: int, grad_scale: float) -> None:
        """Sums to the owners; those that came, applied."""
        world, channel = self.ranks.world, self.ranks.rows
        sums = summed.sums.repeat(world) if self.replicated else summed.sums
        arrived = channel.all_to_all(sums, self._floats(self.mine), self._floats(self.theirs), what="gradients").float()
        present: list[int] = []
        if not whole:
            marks = summed.present.repeat(world) if self.replicated else summed.present
            came = channel.all_to_all(marks, *([sum(of_rank) for of_rank in c] for c in (self.mine, self.theirs)))
            present = [address for address, *_ in self._blocks(came, self.theirs, dims=[1] * len(self.dims), width=1)]
        self.owning.update_blocks(self._blocks(arrived, self.theirs), present, updates, step, grad_scale)

    @property
    def remote(self) -> int:
        """Unique keys that other ranks own."""
        return 0 if self.replicated else sum(sum(c) for r, c in enumerate(self.mine) if r != self.ranks.rank)

    def _floats(self, counts: Sequence[Sequence[int]]) -> list[int]:
        """Floats of so many rows of each table, by rank."""
        return [sum(n * dim for n, dim in zip(of_rank, self.dims, strict=True)) for of_rank in counts]

    def _blocks(
        self, buffer: Tensor, counts: Sequence[Sequence[int] | None], dims: list[int] | None = None, width: int = 4
    ) -> list[Block]:
        """Blocks of a buffer that has rank after rank, there table after table; listed by table, there by rank.

        A rank without counts has no place in the buffer.
        """
        dims, address = dims or self.dims, buffer.data_ptr()
        by_rank: list[list[Block]] = []
        for of_rank in counts:
            blocks = []
            for n, dim in zip(of_rank if of_rank is not None else itertools.repeat(0), dims, strict=False):
                blocks.append((address if n else 0, n, dim, dim))
                address += n * dim * width
            by_rank.append(blocks)
        return [block for of_table in zip(*by_rank, strict=True) for block in of_table]


def _bytes(count: int, width: int) -> int:
    """Of a message with so many keys and their sightings of `width` bytes, up to a multiple of 8."""
    return count * 8 + -(-count * width // 8) * 8


def _pack(keys: Tensor, seen: Tensor, counts: Sequence[int]) -> Tensor:
    """For each rank its keys, then their sightings, as bytes."""
    width = seen.element_size()
    send = torch.zeros(sum(_bytes(n, width) for n in counts), dtype=torch.uint8)
    at = taken = 0
    for n in counts:
        send[at : at + 8 * n] = keys[taken : taken + n].view(torch.uint8)
        send[at + 8 * n : at + (8 + width) * n] = seen[taken : taken + n].view(torch.uint8)
        at, taken = at + _bytes(n, width), taken + n
    return send


def _unpack(
    received: Tensor, counts: Sequence[int], widths: Sequence[int], sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Keys and sightings (int32) from each rank."""
    arrays = []
    for message, n, width in zip(received.split(list(sizes)), counts, widths, strict=True):
        seen = message[8 * n : (8 + width) * n]
        arrays.append((message[: 8 * n].view(torch.int64), seen.view(torch.int32) if width == 4 else seen.int()))
    return arrays
