"""Every kernel of the HBM tier by itself, at W-gpu's sizes: its time beside the time that its bytes take at full speed.

A million ids of ten tables (Zipf 1.05) of a million rows, dim 128, row-wise Adagrad's state; a tenth of the ids is
missing. insert_and_evict is timed in hbm_find.py. Kernels that only copy a number to the host take as long as a launch.
The bytes are those that must move: each input once, each output once, a randomly read row once for every read. `memory`
is their time at the rate of a copy on this GPU, `wire` at that of a copy from pinned memory, both measured in the same
run; a ratio of 1 is the limit. Kernels that sort have `torch` as peer: torch.unique or torch.sort of the same ids.
Inputs are fresh for every call where a cache could help.

HOTROW_BENCH_SCALE below 1 makes everything smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow import optim
from hotrow.bench.gpu.device_clock import bench_device, memory_rate, pcie_rate, timed
from hotrow.bench.gpu.hbm import DIM, IDS, TABLES, Ids, scale
from hotrow.bench.harness import Result, lower
from hotrow.errors import OptionError
from hotrow.kernels.index.dedup import compact_keys, dedup
from hotrow.kernels.index.find import ScorePolicy, find
from hotrow.kernels.index.insert import choose_slots, insert_keys
from hotrow.kernels.index.miss_report import FIELDS, SLOTS, insert_fetched, report_misses, scatter_slots
from hotrow.kernels.index.sets import WAYS, SetIndex
from hotrow.kernels.index.touch import touch
from hotrow.kernels.launch import INTERPRETED
from hotrow.kernels.rows.finite import check_finite
from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.layout import Items, RowLayout, Source, items_of_positions
from hotrow.kernels.rows.quantize import quantize, quantized
from hotrow.kernels.rows.runs import group
from hotrow.kernels.rows.serving_lookup import MissLists, StagedRows, lookup, scatter_staged
from hotrow.kernels.rows.transfer import (
    FetchedRowWriter,
    HostRowReader,
    collect,
    deliver,
    register_host_memory,
    unregister_host_memory,
)
from hotrow.kernels.rows.update import Coefficients, RowMetadata, update

ROWS, BAG, MISSING, WARMUP, REPEATS, FILLED = 1_000_000, 20, 10, 3, 15, 100_000
RULES = {
    "sgd": optim.SGD(lr=0.01),
    "adagrad": optim.Adagrad(lr=0.01),
    "rowwise_adagrad": optim.RowWiseAdagrad(lr=0.01),
    "adam": optim.Adam(lr=0.001),
    "adamw": optim.AdamW(lr=0.001),
    "ftrl": optim.FTRL(lr=0.01),
}
TYPES = ("fp32", "fp16", "bf16")


class Kernel(NamedTuple):
    """A kernel to time: `call` with each of the inputs. `bound` is the bytes that must move, over `memory` or the
    `wire`; or a function that computes the same in torch."""

    name: str
    call: Callable[[Any], Any]
    inputs: Sequence[Any]
    bound: int | Callable[[Any], Any]
    over: str = "memory"


def results() -> Iterator[Result | str]:
    """The benchmark's figures."""
    device = bench_device()
    if device.type != "cuda" and not INTERPRETED:
        raise OptionError("hotrow bench kernels needs a GPU, and torch sees none")
    yield "the rates of this GPU's memory and of PCIe"
    rates = {"memory": memory_rate(device), "wire": pcie_rate(device)}
    for kernel in kernels(device):
        yield kernel.name
        took = timed(device, kernel.call, kernel.inputs, WARMUP)
        if callable(kernel.bound):
            peer, bound = "torch", timed(device, kernel.bound, kernel.inputs, WARMUP).median
        else:
            peer, bound = kernel.over, kernel.bound / rates[kernel.over]
        yield lower(f"kernels/{kernel.name}", "ms", took.median * 1e3, peer, bound * 1e3, took.spread)


def kernels(device: torch.device) -> Iterator[Kernel]:
    """All of them, in the order of a step."""
    batch = Batch(device)
    yield from finding(batch)
    yield from missing(batch)
    yield from moving(batch)
    for dtype in (*TYPES, "int8"):
        yield from gathering(batch, dtype)
    yield Kernel("finite", lambda gradients: check_finite(gradients, batch.flag), batch.gradients, batch.n * DIM * 4)
    yield Kernel("group", group, batch.slots, lambda slots: torch.sort(slots, stable=True))
    for name, rule in RULES.items():
        yield from updating(batch, name, rule, "fp32")
    for dtype in TYPES[1:]:
        yield from updating(batch, "rowwise_adagrad", RULES["rowwise_adagrad"], dtype)
    yield from serving(batch)


class Batch:
    """An index with all rows, batches of ids with their slots, and gradients."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rows = device, max(100, int(ROWS * scale()))
        ids = max(2 * BAG, int(IDS * scale()))
        self.n, self.times = TABLES * ids, WARMUP + REPEATS
        self.begins = torch.arange(TABLES + 1, dtype=torch.int32, device=device) * ids
        self.items = Items(self.begins, torch.arange(TABLES, dtype=torch.int32, device=device))
        self.index = SetIndex([int(self.rows / 0.6) // WAYS] * TABLES, device)
        self._fill()
        drawn = Ids(self.rows, ids, device)
        self.keys = [torch.cat([feature.values for feature in drawn.batch().ids.values()]) for _ in range(self.times)]
        self.slots = [find(self.index, keys, self.begins) for keys in self.keys]
        generator = torch.Generator(device=device).manual_seed(2)
        gradients = [torch.randn(ids, DIM, device=device, generator=generator) for _ in range(TABLES)]
        self.gradients = [gradients] * self.times  # half a gigabyte, of which a cache holds little
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)

    def _fill(self) -> None:
        everything = torch.arange(self.rows, device=self.device)
        for begin in range(0, self.rows, FILLED):
            keys = everything[begin : begin + FILLED].repeat(TABLES)
            tables = torch.arange(TABLES, dtype=torch.int32, device=self.device).repeat_interleave(
                keys.numel() // TABLES
            )
            slots = choose_slots(self.index, keys, tables, None, 0).slots
            insert_keys(self.index, keys, slots, None, 1, 1.0)

    @property
    def capacity(self) -> int:
        return self.index.capacity

    def unique(self, i: int) -> int:
        """Unique rows of a batch."""
        return int(self.slots[i].unique().numel())

    def table(self, layout: RowLayout) -> Tensor:
        """Rows for all slots."""
        return torch.zeros(self.capacity, layout.stride, device=self.device)


def finding(batch: Batch) -> Iterator[Kernel]:
    """Keys to slots, with pins and scores."""
    scoring, numbers = ScorePolicy("lfu", 512.0), iter(range(2, 1 << 30))
    yield Kernel(
        "find", lambda keys: find(batch.index, keys, batch.begins, next(numbers), batch.flag.zero_(), scoring),
        batch.keys, batch.n * (8 + 64 + 4 + 16),
    )  # fmt: skip
    yield Kernel(
        "touch", lambda slots: touch(batch.index, slots, None, 9, "lfu", 512.0), [s.unique() for s in batch.slots],
        batch.unique(0) * (4 + 8),
    )  # fmt: skip


def missing(batch: Batch) -> Iterator[Kernel]:
    """The steps after a search in which a tenth of the ids is missing."""
    n, count = batch.n, batch.n // MISSING
    absent = [
        torch.where(torch.arange(n, device=batch.device) % MISSING == 0, -1, slots).int() for slots in batch.slots
    ]
    count = int((absent[0] < 0).sum())
    pairs = list(zip(absent, batch.keys, strict=True))
    yield Kernel(
        "compact", lambda given: compact_keys(given[0], count, given[1], batch.begins), pairs, 8 * n + count * 24,
    )  # fmt: skip
    few = [compact_keys(slots, count, keys, batch.begins) for slots, keys in pairs]

    def torch_unique(given: Any) -> Any:
        return torch.unique(torch.stack([given[2].long(), given[1]]), dim=1, return_inverse=True, return_counts=True)

    yield Kernel("dedup", lambda given: dedup(given[1], given[2], TABLES, tables_sorted=True), few, torch_unique)
    # New keys, so that sets are full of others; nothing is placed, so the load stays.
    unique = [dedup(keys + (1 << 40), tables, TABLES) for _, keys, tables in few]
    real = int(unique[0].number)
    hosts = torch.zeros(batch.capacity, dtype=torch.int32, device=batch.device)
    marks = torch.zeros(batch.capacity, 2, dtype=torch.int32, device=batch.device)

    def choose(new: Any) -> Any:
        return choose_slots(batch.index, new.keys, new.tables, new.number, 1 << 30, "lfu")

    yield Kernel("choose", choose, unique, real * (8 + 64 + 64 + 4))
    chosen = [(new, choose(new)) for new in unique]
    yield Kernel(
        "describe", lambda given: report_misses(given[0], given[1], hosts, marks[:, 0], marks[:, 1], 0), chosen,
        real * (40 + 4 * FIELDS),
    )  # fmt: skip
    reports = [(new, report_misses(new, some, hosts, marks[:, 0], marks[:, 1], 0)) for new, some in chosen]

    def scatter(given: Any) -> None:
        (positions, _, _), (new, report), out = given
        scatter_slots(positions, new.inverse, report.ranks, report.field(SLOTS), out)

    yield Kernel("answer", scatter, list(zip(few, reports, absent, strict=True)), count * (4 * 5))
    spare = SetIndex(batch.index.counts, batch.device)  # so that the batches' own index keeps its keys
    fetched = []
    for new, report in reports:
        number = int(new.number)
        values = torch.zeros(3, number, dtype=torch.int32, device=batch.device)
        fetched.append((report.keys[:number], report.field(SLOTS)[:number], values))
    metadata = hosts, marks[:, 0], marks[:, 1]
    yield Kernel(
        "admit",
        lambda given: insert_fetched(spare, metadata, given[0], given[1], given[2], 3, 1.0),
        fetched,
        real * (8 + 4 + 12 + 8 + 8 + 12),
    )


def moving(batch: Batch) -> Iterator[Kernel]:
    """Rows between slots, buffers and host memory."""
    layout, device = RowLayout(DIM, (1,)), batch.device
    source, count = Source(batch.table(layout)), batch.n // MISSING
    generator = torch.Generator(device=device).manual_seed(3)
    sides = [torch.randperm(batch.capacity, generator=generator, device=device)[:count].int() for _ in range(5)]
    slots = [sides[i % 5] for i in range(batch.times)]
    buffer = torch.zeros(count, layout.width, device=device)
    both = 2 * count * (layout.width * 4) + 4 * count
    yield Kernel("collect", lambda some: collect(source, some, layout.width, buffer), slots, both)
    yield Kernel("deliver", lambda some: deliver(source, some, layout.width, buffer), slots, both)
    cuda = device.type == "cuda"
    metadata = [torch.zeros(batch.capacity, dtype=torch.int32, device=device) for _ in range(3)]
    fetched = torch.zeros(3, count, dtype=torch.int32, pin_memory=cuda)
    writer = FetchedRowWriter(source.rows, (metadata[0], metadata[1], metadata[2]), layout.width)

    def finish_fetch(some: Tensor) -> None:
        writer.set_request(some, fetched, 0, buffer)
        writer()

    yield Kernel("land", finish_fetch, slots, both + 24 * count)
    host = torch.zeros(batch.rows, layout.width)
    register_host_memory(host.data_ptr(), host.nbytes, device)
    try:
        bases = torch.full((TABLES,), host.data_ptr(), device=device)
        reader = HostRowReader(source.rows, bases, layout.width, layout.width, count)
        host_slots = [torch.randint(batch.rows, (count,), dtype=torch.int32, pin_memory=cuda) for _ in range(5)]
        tables = torch.zeros(count, dtype=torch.int32, device=device)

        def pull(given: tuple[Tensor, Tensor]) -> None:
            reader.set_request(given[0], tables, given[1])
            reader()

        requests = [(sides[i % 5], host_slots[i % 5]) for i in range(batch.times)]
        yield Kernel("pull", pull, requests, count * layout.width * 4, "wire")
        if cuda:
            torch.cuda.synchronize()
    finally:
        unregister_host_memory(host.data_ptr(), device)


def gathering(batch: Batch, dtype: str) -> Iterator[Kernel]:
    """Gather rows: one per position, and pooled in bags of twenty."""
    layout = RowLayout(DIM, (1,), dtype) if dtype != "int8" else quantized(RowLayout(DIM))
    source, n = Source(batch.table(layout)), batch.n
    ids, bags = n // TABLES, n // TABLES // BAG
    row = layout.value_floats * 4 + (8 if dtype == "int8" else 0)
    outputs = [torch.empty(ids, DIM, device=batch.device) for _ in range(TABLES)]
    distinct = batch.unique(0)
    yield Kernel(
        f"gather/none/{dtype}", lambda slots: gather(source, layout, slots, batch.items, outputs), batch.slots,
        n * 4 + distinct * row + n * DIM * 4,
    )  # fmt: skip
    if dtype != "fp32":
        return
    begins = torch.arange(TABLES + 1, dtype=torch.int32, device=batch.device) * bags
    used = [torch.cat([part[: bags * BAG] for part in slots.split(ids)]) for slots in batch.slots]
    offsets = torch.arange(TABLES * bags + 1, dtype=torch.int32, device=batch.device) * BAG
    scales = {
        "sum": None,
        "mean": torch.full((TABLES * bags * BAG,), 1 / BAG, device=batch.device),
        "weighted": torch.rand(TABLES * bags * BAG, device=batch.device),
    }
    pooled = [torch.empty(bags, DIM, device=batch.device) for _ in range(TABLES)]
    for how, scale_of in scales.items():
        items = Items(begins, batch.items.tables, offsets, scale_of)
        yield Kernel(
            f"gather/{how}/{dtype}",
            lambda slots, items=items: gather(source, layout, slots, items, pooled),  # type: ignore[misc]
            used, used[0].numel() * (4 if scale_of is None else 8) + distinct * row + TABLES * bags * (DIM * 4 + 4),
        )  # fmt: skip


def updating(batch: Batch, name: str, rule: Any, dtype: str) -> Iterator[Kernel]:
    """Sum gradients by row and apply the rule, in one call; for row-wise Adagrad in fp32 also with bags."""
    layout = RowLayout(DIM, tuple(part.width for part in rule.state(DIM)), dtype)
    source = Source(batch.table(layout))
    marks = torch.zeros(batch.capacity, 2, dtype=torch.int32, device=batch.device)
    streams = torch.arange(TABLES, device=batch.device)
    given = [(keys, group(slots)) for keys, slots in zip(batch.keys, batch.slots, strict=True)]
    coefficients = [Coefficients(rule.coefficients(7))]

    def apply(some: Any, items: Items, gradients: Sequence[Tensor]) -> None:
        keys, runs = some
        update(
            source, layout, rule.code, runs, items, gradients, keys, coefficients, streams, streams, 7, 1.0,
            RowMetadata(marks[:, 0], marks[:, 1]), batch.flag.zero_(),
        )  # fmt: skip

    distinct, n = batch.unique(0), batch.n
    rows = distinct * (2 * layout.width * 4 + 16 + 8)
    yield Kernel(
        f"update/{name}/{dtype}", lambda some: apply(some, batch.items, batch.gradients[0]), given,
        n * (DIM * 4 + 8) + rows,
    )  # fmt: skip
    if name != "rowwise_adagrad" or dtype != "fp32":
        return
    ids, bags = n // TABLES, n // TABLES // BAG
    begins = torch.arange(TABLES + 1, dtype=torch.int32, device=batch.device) * bags
    offsets = torch.arange(TABLES * bags + 1, dtype=torch.int32, device=batch.device) * BAG
    items = Items(
        begins, batch.items.tables, offsets, None, items_of_positions(offsets, TABLES * bags, TABLES * bags * BAG)
    )
    cut = [
        tuple(torch.cat([part[: bags * BAG] for part in whole.split(ids)]) for whole in (keys, slots))
        for keys, slots in zip(batch.keys, batch.slots, strict=True)
    ]
    pooled = [gradient[:bags] for gradient in batch.gradients[0]]
    yield Kernel(
        f"update/{name}/bags", lambda some: apply(some, items, pooled), [(keys, group(slots)) for keys, slots in cut],
        TABLES * bags * (DIM * 4 + BAG * 16) + rows,
    )  # fmt: skip


def serving(batch: Batch) -> Iterator[Kernel]:
    """A serving lane: the lookup of 1,024 examples of ten features, and the copy of rows that were missing."""
    layout, device, capacity = RowLayout(DIM), batch.device, min(1024, batch.n // TABLES)
    rows = batch.table(layout)
    lists, out = MissLists(TABLES, capacity, device), torch.empty(capacity, TABLES * DIM, device=device)
    columns = torch.arange(TABLES, dtype=torch.int32, device=device) * DIM
    examples = torch.full((1,), capacity, dtype=torch.int32, device=device)
    clock = torch.zeros(2, dtype=torch.int32, device=device)
    keys = [torch.stack([part[:capacity] for part in one.split(batch.n // TABLES)]) for one in batch.keys]
    yield Kernel(
        "read",
        lambda some: lookup(
            batch.index, rows, layout, some, (batch.items.tables, columns), examples, clock, lists, out, "lfu"
        ),
        keys, TABLES * capacity * (8 + 64 + 2 * DIM * 4),
    )  # fmt: skip
    staging = StagedRows(capacity, DIM, device)
    staging.places.copy_(torch.arange(capacity) * DIM)
    staging.count.fill_(capacity)
    yield Kernel("put", lambda _: scatter_staged(out.view(-1), staging, layout), keys, capacity * (DIM * 4 + 8), "wire")
    some = rows[: batch.n]
    yield Kernel(
        "quantize", lambda _: quantize(some, layout), keys,
        some.shape[0] * (layout.stride + quantized(layout).stride) * 4,
    )  # fmt: skip
