"""A server's lookup: keys in, vectors out, and the list of misses, in one launch that a CUDA graph can hold.

Keys come feature by feature, [features, capacity] with one id an example. The first `examples[0]` of each feature are
real, so one captured launch serves any number of examples up to its capacity. A program has R examples of one feature:
it looks up their keys (find.py), copies the rows it finds into the feature's columns of the pooled matrix, and appends
the keys and examples that it does not find to the feature's part of two lists in pinned host memory. The host reads the
lists as soon as the launch is over, without a copy. The order of misses is undefined, and nothing depends on it.
`scatter_staged` copies the rows that the host found to their places in the pooled matrix.

The scores of found slots rise at most once for each tick of `clock` (int32: the tick, and the bits of its score). Other
lanes may write the same word at the same time: all write the value that follows from the same old one.

Bytes a key at dim 128: 8 + 64 (128 where the second set is searched), 512 in and 512 out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.index.find import find_in_set
from hotrow.kernels.index.key_hash import half_of, hash_key, set_of
from hotrow.kernels.index.sets import SetIndex, check_tensor
from hotrow.kernels.index.touch import score_after_use
from hotrow.kernels.launch import cached_launch, cdiv, power_of_2
from hotrow.kernels.rows.layout import RowLayout, loop_range, read_values
from hotrow.kernels.rows.transfer import copy_to_pinned

ELEMENTS, WARPS = 4096, 4
SCATTER_PROGRAMS = 264  # enough to saturate PCIe


@triton.jit
def find_in_table(index_keys, first, count, table, key, real):
    """The slot of each key in its table, or -1: the second set is searched only where the first has not all keys."""
    begin, size, hash = tl.load(first + table), tl.load(count + table), hash_key(key)
    slot = find_in_set(index_keys, set_of(half_of(hash, False), begin, size), key, real)
    left = real & (slot < 0)
    if tl.max(left.to(tl.int32), axis=0) > 0:
        slot = tl.where(left, find_in_set(index_keys, set_of(half_of(hash, True), begin, size), key, left), slot)
    return slot


@triton.jit
def raise_scores(pins_and_scores, slot, found, clock, LFU: tl.constexpr):
    """Raise the scores of found slots, at most once for each tick of `clock`."""
    tick = tl.load(clock)
    word = tl.load(pins_and_scores + slot, mask=found, other=0)
    score = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    score = score_after_use(score, tl.load(clock + 1).to(tl.float32, bitcast=True), LFU).to(tl.int32, bitcast=True)
    tl.store(pins_and_scores + slot, (score.to(tl.int64) << 32) | tick, mask=found & (word.to(tl.int32) < tick))


@cached_launch
@triton.jit(do_not_specialize=["capacity", "list_keys", "list_examples"])
def _lookup_kernel(
    index_keys, pins_and_scores, first, count, rows, keys, tables, columns, examples, clock, out, capacity, counts,
    list_keys, list_examples, DIM: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, STATE: tl.constexpr,
    TYPE: tl.constexpr, OUT_STRIDE: tl.constexpr, LFU: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(capacity, R)
    feature = tl.program_id(0) // parts
    example = (tl.program_id(0) % parts) * R + tl.arange(0, R)
    real = example < tl.load(examples)
    key = tl.load(keys + feature * capacity + example, mask=real, other=0)
    table = tl.load(tables + feature)
    slot = find_in_table(index_keys, first, count, table, key, real)
    found = slot >= 0
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    row = rows + slot.to(tl.int64) * STRIDE
    value = read_values(row, column, found[:, None] & inside[None, :], TYPE, STATE)
    target = out + example.to(tl.int64) * OUT_STRIDE + tl.load(columns + feature)
    tl.store(target[:, None] + column[None, :], value, mask=real[:, None] & inside[None, :])

    raise_scores(pins_and_scores, slot, found, clock, LFU)

    absent = real & (slot < 0)
    if tl.max(absent.to(tl.int32), axis=0) > 0:
        rank = tl.cumsum(absent.to(tl.int32), axis=0)
        at = feature * capacity + tl.atomic_add(counts + feature, tl.max(rank, axis=0), sem="relaxed") + rank - 1
        tl.store(list_keys.to(tl.pointer_type(tl.int64)) + at, key, mask=absent)
        tl.store(list_examples.to(tl.pointer_type(tl.int32)) + at, example, mask=absent)


@cached_launch
@triton.jit(do_not_specialize=["rows", "offsets", "number"])
def _scatter_rows_kernel(
    out, rows, offsets, number, DIM: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    count = tl.load(number.to(tl.pointer_type(tl.int32)))
    column = tl.arange(0, BLOCK)
    for begin in loop_range(tl.program_id(0) * R, count, tl.num_programs(0) * R):
        at = begin + tl.arange(0, R)
        real = at < count
        mask = real[:, None] & (column < DIM)[None, :]
        offset = tl.load(offsets.to(tl.pointer_type(tl.int64)) + at, mask=real, other=0)
        source = rows.to(tl.pointer_type(tl.float32)) + at.to(tl.int64)[:, None] * DIM + column[None, :]
        tl.store(out + offset[:, None] + column[None, :], tl.load(source, mask=mask, other=0.0), mask=mask)


class MissLists:
    """The keys that a lookup did not find, feature by feature, in pinned memory that the host reads too.

    They are counted on the device, because atomic additions in host memory take a microsecond each, one after another;
    the counts are then copied to the host.
    """

    def __init__(self, features: int, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device_counts = torch.zeros(features, dtype=torch.int32, device=device)
        self.counts = torch.zeros(features, dtype=torch.int32, pin_memory=pinned)
        self.keys = torch.empty(features, capacity, dtype=torch.int64, pin_memory=pinned)
        self.examples = torch.empty(features, capacity, dtype=torch.int32, pin_memory=pinned)


def lookup(
    index: SetIndex,
    rows: Tensor,
    layout: RowLayout,
    keys: Tensor,
    features: tuple[Tensor, Tensor],
    examples: Tensor,
    clock: Tensor,
    lists: MissLists,
    out: Tensor,
    policy: str,
) -> None:
    """Rows of keys [features, capacity] into out [capacity, width], float32; zeros where absent. Absent keys go to
    `lists`.

    `features` are two int32 tensors: each feature's table, and its first column in `out`.
    """
    count, capacity = keys.shape
    check_tensor("keys", keys.view(-1), torch.int64, count * capacity, index.device)
    for name, tensor in zip(("tables", "columns"), features, strict=True):
        check_tensor(name, tensor, torch.int32, count, index.device)
    check_tensor("clock", clock, torch.int32, 2, index.device)
    block = max(1, min(64, ELEMENTS // layout.block))
    lists.device_counts.zero_()
    _lookup_kernel[(count * cdiv(capacity, block),)](
        index.keys, index.pins_and_scores, index.first, index.count, rows, keys, *features, examples, clock, out,
        capacity, lists.device_counts, lists.keys.data_ptr(), lists.examples.data_ptr(),
        DIM=layout.dim, BLOCK=layout.block, STRIDE=layout.stride, STATE=layout.state_offset, TYPE=layout.type,
        OUT_STRIDE=out.stride(0), LFU=policy == "lfu", R=power_of_2(block), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    copy_to_pinned(lists.device_counts, lists.counts)


class StagedRows:
    """Staging buffer of rows that a lookup missed: rows [n, dim] (float32), the offset of each in the pooled matrix
    (int64), and how many there are (int32). In pinned memory that the host writes and the device reads."""

    def __init__(self, capacity: int, dim: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.rows = torch.empty(capacity, dim, dtype=torch.float32, pin_memory=pinned)
        self.places = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
        self.count = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)


def scatter_staged(out: Tensor, staging: StagedRows, layout: RowLayout) -> None:
    """Copy the staged rows to their offsets in out, flat. The device reads their number when it reaches this launch."""
    block = max(1, min(32, ELEMENTS // layout.block))
    _scatter_rows_kernel[(min(SCATTER_PROGRAMS, cdiv(staging.rows.shape[0], block)),)](
        out, staging.rows.data_ptr(), staging.places.data_ptr(), staging.count.data_ptr(), DIM=layout.dim,
        BLOCK=layout.block, R=power_of_2(block), num_warps=WARPS,
    )  # fmt: skip
