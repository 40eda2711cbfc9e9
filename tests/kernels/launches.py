"""A launch of every kernel in each of its branches, for compile_only.py.

Rows are those of W-gpu (dim 128, one row a warp) and narrow or wide ones beside them, whose programs hold several rows
or several warps. A new branch or kernel belongs here: tests/kernels/test_compile.py fails for statements that the
compiler has not seen.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hotrow.bench.gpu.hkv_operations import find_rows, insert_and_evict
from hotrow.kernels.attention import backward as attention_backward
from hotrow.kernels.attention import forward as attention_forward
from hotrow.kernels.index.dedup import compact_keys, dedup
from hotrow.kernels.index.find import ScorePolicy, find
from hotrow.kernels.index.insert import choose_slots, erase, insert_keys
from hotrow.kernels.index.launch_arguments import BatchArguments
from hotrow.kernels.index.miss_report import SLOTS, insert_fetched, report_misses, scatter_slots
from hotrow.kernels.index.sets import SetIndex
from hotrow.kernels.index.touch import touch
from hotrow.kernels.rows import finite, transfer
from hotrow.kernels.rows import quantize as quantization
from hotrow.kernels.rows import serving_lookup as serving
from hotrow.kernels.rows.gather import gather
from hotrow.kernels.rows.layout import Items, RowLayout, Source, items_of_positions
from hotrow.kernels.rows.runs import group
from hotrow.kernels.rows.update import Coefficients, RowMetadata, update
from hotrow.optim import FTRL, SGD, Adagrad, Adam, AdamW, Optimizer, RowWiseAdagrad

CPU = torch.device("cpu")
N = 300  # positions of a batch, more than an update's piece
FLAG = torch.zeros(1, dtype=torch.int32)


def launch_all() -> None:
    """Every launch below."""
    searches()
    missing_keys()
    whole_index()
    moves()
    serving_lookups()
    gathers()
    checks()
    updates()
    attention()


def _ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def _zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


KEYS, SLOTS_OF, NUMBER = torch.arange(N), _zeros(N), _ints(N)
TWO_TABLES = _ints(0, 100, N)


def searches() -> None:
    """Keys to slots, for one table and for several, with arguments as numbers and on the device."""
    for index, begins in ((SetIndex([64], CPU), _ints(0, N)), (SetIndex([32, 32], CPU), TWO_TABLES)):
        find(index, KEYS, begins)
        find(index, KEYS, begins, 3, NUMBER)
        find(index, KEYS, begins, 3, NUMBER, ScorePolicy("lru", 512.0))
        find(index, KEYS, begins, BatchArguments(CPU).load(), NUMBER, ScorePolicy("lfu", 512.0))
        rows = torch.zeros(index.capacity, 24)
        find_rows(index, rows, 20, KEYS, torch.zeros(N, 20), begins)


def missing_keys() -> None:
    """Missing keys are deduplicated, get slots, are reported and inserted."""
    index, arguments = SetIndex([32, 32], CPU), BatchArguments(CPU).load()
    hosts, beside = _zeros(index.capacity), _zeros(index.capacity, 2)
    steps, counts = beside.unbind(1)
    compact_keys(SLOTS_OF, 7, KEYS, _ints(0, N))
    positions, keys, tables = compact_keys(SLOTS_OF, 200, KEYS, TWO_TABLES)
    dedup(keys)
    dedup(keys, tables, 2)
    dedup(keys, tables)
    for batch, count in ((3, None), (arguments, NUMBER)):
        unique = dedup(keys, tables, tables_sorted=True, count=count)
        chosen = choose_slots(index, unique.keys, unique.tables, unique.number, batch)
        report = report_misses(unique, chosen, hosts, steps, counts, batch)
        insert_keys(index, report.keys, report.field(SLOTS), None if count is None else unique.number, batch)
        scatter_slots(positions, unique.inverse, report.ranks, report.field(SLOTS), SLOTS_OF, count)
        insert_fetched(index, (hosts, steps, counts), report.keys, report.field(SLOTS), _zeros(3, 200), 3, 0.5)


def whole_index() -> None:
    """insert_and_evict, erase and touch."""
    for index, tables in ((SetIndex([64], CPU), None), (SetIndex([32, 32], CPU), SLOTS_OF)):
        choose_slots(index, KEYS, tables, None, 2)
        for dim in (20, 128):
            rows = torch.zeros(index.capacity, dim)
            insert_and_evict(index, rows, KEYS, torch.zeros(N, dim), tables, batch=3, settled=2)
        erase(index, SLOTS_OF)
        touch(index, SLOTS_OF, None, 3, "lru", 512.0)
        touch(index, SLOTS_OF, NUMBER, 3, "lfu", 512.0)


def moves() -> None:
    """Rows of 129 floats, as row-wise Adagrad's at dim 128 are, and of 2,060."""
    for width in (129, 2060):
        rows = torch.zeros(512, width + 3)
        source = Source(rows, torch.zeros(8, width + 3))
        for slots in (SLOTS_OF, SLOTS_OF[1:]):
            transfer.collect(source, slots, width, torch.zeros(N, width))
            transfer.deliver(source, slots, width, torch.zeros(N, width))
        transfer.HostRowReader(rows, torch.zeros(2, dtype=torch.int64), width, width, N)()
        steps, counts = _zeros(512, 2).unbind(1)
        transfer.FetchedRowWriter(rows, (_zeros(512), steps, counts), width)()
    transfer.copy_to_pinned(NUMBER, _zeros(1))


def serving_lookups() -> None:
    """A server's rows of every type, gathered and read; int8 ones are made of others first."""
    index = SetIndex([32, 32], CPU)
    for dtype, policy in (("fp32", "lru"), ("fp16", "lfu"), ("bf16", "lfu"), ("int8", "lru")):
        layout = RowLayout(20, (2,) if dtype == "int8" else (), dtype)
        rows, lists = torch.zeros(index.capacity, layout.stride), serving.MissLists(3, 100, CPU)
        if dtype != "int8":
            quantization.quantize(rows, layout)
        serving.lookup(
            index, rows, layout, KEYS.view(3, 100), (_ints(0, 1, 1), _ints(0, 20, 40)), _ints(90), _ints(5, 0), lists,
            torch.zeros(100, 60), policy,
        )  # fmt: skip
    serving.scatter_staged(torch.zeros(100, 60), serving.StagedRows(50, 20, CPU), RowLayout(20))


BEGINS, TABLES = _ints(0, 100, 200, N), _ints(0, 1, 1)
OFFSETS = torch.arange(0, 2 * N + 1, 2, dtype=torch.int32) // 2
ONE_EACH = Items(BEGINS, TABLES)
SCALED = replace(ONE_EACH, scales=torch.zeros(N))
BAGS = Items(BEGINS, TABLES, OFFSETS, None, items_of_positions(OFFSETS, N, N))
WEIGHTED_BAGS = replace(BAGS, scales=torch.zeros(N))


def _matrices(dim: int, dtype: torch.dtype = torch.float32, aligned: bool = True) -> list[Tensor]:
    """One a feature; not aligned: columns of a wider one."""
    if aligned:
        return [torch.zeros(100, dim, dtype=dtype) for _ in range(3)]
    return list(torch.zeros(100, 3 * dim + 1, dtype=dtype)[:, 1:].split(dim, dim=1))


def gathers() -> None:
    """Rows of every type to outputs of every type, with and without bags and rows of a batch's own."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for dim, dtype, items, out, own, aligned in (
        (128, "fp32", ONE_EACH, fp32, "none", True),
        (128, "fp32", ONE_EACH, bf16, "same", True),
        (128, "bf16", BAGS, fp32, "same", True),
        (128, "fp16", WEIGHTED_BAGS, fp16, "fp32", True),
        (20, "fp32", WEIGHTED_BAGS, fp32, "fp32", True),
        (17, "bf16", SCALED, bf16, "fp32", False),
        (20, "int8", ONE_EACH, fp16, "fp32", True),
        (17, "int8", BAGS, fp32, "none", False),
        (2000, "fp16", BAGS, fp32, "none", True),
    ):
        layout = RowLayout(dim, (2,), dtype)
        beside = RowLayout(dim) if own == "fp32" else None
        extra = None if own == "none" else torch.zeros(8, (beside or layout).stride)
        source = Source(torch.zeros(64, layout.stride), extra, beside)
        gather(source, layout, SLOTS_OF, items, _matrices(dim, out, aligned), past_cache=out is bf16)


def checks() -> None:
    """Gradients of every type, without gaps and with."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        finite.check_finite(_matrices(128, dtype), FLAG)
        finite.check_finite(_matrices(17, dtype, aligned=False), FLAG)


def updates() -> None:
    """Every rule on every type of rows, with gradients of every type. The first are those of W-gpu."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    row_wise, adam, clipped = RowWiseAdagrad(lr=0.1), Adam(lr=0.1), Adam(lr=0.2, clip_norm=1.0)
    _update(128, [row_wise], "fp32", fp32)
    _update(128, [SGD(lr=0.1)], "fp32", fp32)
    _update(128, [adam], "fp32", fp32)
    _update(128, [Adagrad(lr=0.1)], "bf16", bf16, BAGS, own=True)
    _update(128, [adam, clipped], "bf16", fp32, seen=True)
    _update(128, [FTRL(lr=0.1, clip_value=0.5)], "fp16", fp16, SCALED, own=True)
    _update(300, [row_wise], "bf16", fp32)
    _update(20, [row_wise, RowWiseAdagrad(lr=0.2)], "bf16", bf16, WEIGHTED_BAGS, missing=True)
    _update(17, [AdamW(lr=0.1)], "fp16", fp32, BAGS, aligned=False, own=True, seen=True)
    _update(8, [SGD(lr=0.1)], "fp32", fp16, missing=True, meta=False)


def _update(
    dim: int,
    optimizers: list[Optimizer],
    dtype: str,
    gradient: torch.dtype,
    items: Items = ONE_EACH,
    aligned: bool = True,
    missing: bool = False,
    own: bool = False,
    meta: bool = True,
    seen: bool = False,
) -> None:
    """`own`: some rows are the batch's own; `seen`: rows were seen more often than they have positions."""
    layout = RowLayout(dim, tuple(part.width for part in optimizers[0].state(dim)), dtype)
    gradients: list[Tensor | None] = list(_matrices(dim, gradient, aligned))
    if missing:
        gradients[1] = None
    source = Source(torch.zeros(64, layout.stride), torch.zeros(8, layout.stride) if own else None)
    coefficients = [Coefficients(o.coefficients(7), o.clip_value or 0.0, o.clip_norm or 0.0) for o in optimizers]
    beside, more, streams = _zeros(64, 2), _zeros(8, 2), torch.zeros(2, dtype=torch.int64)
    columns = RowMetadata(*beside.unbind(1), *(more.unbind(1) if own else (None, None))) if meta else None
    update(
        source, layout, optimizers[0].code, group(SLOTS_OF), items, gradients, KEYS, coefficients, streams, streams, 7,
        1.0, columns, FLAG, seen=SLOTS_OF if seen else None,
    )  # fmt: skip


def attention() -> None:
    """Jagged attention of every layer, kind and type, with tiles of each size."""
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    _attend(64, bf16, 20_000, causal=True)
    _attend(128, fp16, 20_000)
    _attend(20, fp32, 300, kind="silu", visible=True, own=True)
    _attend(64, fp32, 20_000, own=True)
    _attend(256, bf16, 300, causal=True, biases=False)


def _attend(
    dim: int,
    dtype: torch.dtype,
    n: int,
    kind: str = "softmax",
    causal: bool = False,
    visible: bool = False,
    own: bool = False,
    biases: bool = True,
) -> None:
    """Forward and backward of a user with n queries and keys."""
    q, times, lengths = _zeros(n, 4, dim, dtype=dtype), _zeros(n, dtype=torch.int64), torch.tensor([n])
    tables = (times, times, torch.zeros(4, 100), torch.zeros(4, 32)) if biases else (None, None, None, None)
    beside = (q, q) if own else (None, None)
    inputs = (q, q, q, lengths, lengths, *beside, times if visible else None, *tables, kind, causal, 0.5, 1.0)
    out, log_sums = attention_forward.forward(*inputs)
    attention_backward.backward(out, out, log_sums, *inputs)
