"""A server's lookup: keys in, vectors out, and the list of what was not there, in one launch that a graph can hold.

Keys come feature by feature, [features, room] with one id an example; the first `examples[0]` of each are real, so that
one captured launch serves any number of examples up to its room. A program has R examples of one feature. It looks
their keys up (find.py), copies the rows it finds into the features' columns of the pooled matrix, and writes keys and
examples it does not find behind each other into the feature's part of two lists that lie in pinned host memory: the
host reads them as soon as the launch is over, without a copy. Which of them comes first is not defined, and nothing
depends on it. `put` brings the rows that the host found into their places.

Slots that were found get warmer, at most once for each tick of `clock` (int32: the tick, and the bits of its score).
Readers of other lanes may write the same word: both write what the same old one gives.

Bytes a key at dim 128: 8 + 64 (128 where the second set is looked at), 512 in and 512 out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.index.find import way_of
from hotrow.kernels.index.key_hash import half_of, hash_key, set_of
from hotrow.kernels.index.sets import SetIndex, check
from hotrow.kernels.index.touch import warmed
from hotrow.kernels.launch import cdiv, fast, power_of_2
from hotrow.kernels.rows.layout import RowLayout, read_values, steps
from hotrow.kernels.rows.move import tell

ELEMENTS, WARPS = 4096, 4
PUTTERS = 264  # programs: enough for what the wire takes


@fast
@triton.jit(do_not_specialize=["room", "list_keys", "list_examples"])
def _read_kernel(
    index_keys, held, first, count, rows, keys, tables, columns, examples, clock, out, room, numbers, list_keys,
    list_examples, DIM: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, STATE: tl.constexpr,
    TYPE: tl.constexpr, OUT_STRIDE: tl.constexpr, LFU: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(room, R)
    feature = tl.program_id(0) // parts
    example = (tl.program_id(0) % parts) * R + tl.arange(0, R)
    real = example < tl.load(examples)
    key = tl.load(keys + feature * room + example, mask=real, other=0)
    table = tl.load(tables + feature)
    begin, size, hash = tl.load(first + table), tl.load(count + table), hash_key(key)
    slot = way_of(index_keys, set_of(half_of(hash, False), begin, size), key, real)
    left = real & (slot < 0)
    if tl.max(left.to(tl.int32), axis=0) > 0:
        slot = tl.where(left, way_of(index_keys, set_of(half_of(hash, True), begin, size), key, left), slot)
    found = slot >= 0
    column = tl.arange(0, BLOCK)
    wanted = column < DIM
    place = rows + slot.to(tl.int64) * STRIDE
    value = read_values(place, column, found[:, None] & wanted[None, :], TYPE, STATE)
    target = out + example.to(tl.int64) * OUT_STRIDE + tl.load(columns + feature)
    tl.store(target[:, None] + column[None, :], value, mask=real[:, None] & wanted[None, :])

    tick = tl.load(clock)
    word = tl.load(held + slot, mask=found, other=0)
    score = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    score = warmed(score, tl.load(clock + 1).to(tl.float32, bitcast=True), LFU).to(tl.int32, bitcast=True)
    tl.store(held + slot, (score.to(tl.int64) << 32) | tick, mask=found & (word.to(tl.int32) < tick))

    absent = real & (slot < 0)
    if tl.max(absent.to(tl.int32), axis=0) > 0:
        rank = tl.cumsum(absent.to(tl.int32), axis=0)
        at = feature * room + tl.atomic_add(numbers + feature, tl.max(rank, axis=0), sem="relaxed") + rank - 1
        tl.store(list_keys.to(tl.pointer_type(tl.int64)) + at, key, mask=absent)
        tl.store(list_examples.to(tl.pointer_type(tl.int32)) + at, example, mask=absent)


@fast
@triton.jit(do_not_specialize=["rows", "places", "number"])
def _put_kernel(
    out, rows, places, number, DIM: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    count = tl.load(number.to(tl.pointer_type(tl.int32)))
    column = tl.arange(0, BLOCK)
    for begin in steps(tl.program_id(0) * R, count, tl.num_programs(0) * R):
        at = begin + tl.arange(0, R)
        real = at < count
        mask = real[:, None] & (column < DIM)[None, :]
        place = tl.load(places.to(tl.pointer_type(tl.int64)) + at, mask=real, other=0)
        source = rows.to(tl.pointer_type(tl.float32)) + at.to(tl.int64)[:, None] * DIM + column[None, :]
        tl.store(out + place[:, None] + column[None, :], tl.load(source, mask=mask, other=0.0), mask=mask)


class Lists:
    """What a lookup did not find, feature by feature, in memory that the host and the device read.

    It is counted on the device (an atomic addition in host memory takes a microsecond, one after another), and told.
    """

    def __init__(self, features: int, room: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.counted = torch.zeros(features, dtype=torch.int32, device=device)
        self.numbers = torch.zeros(features, dtype=torch.int32, pin_memory=pinned)
        self.keys = torch.empty(features, room, dtype=torch.int64, pin_memory=pinned)
        self.examples = torch.empty(features, room, dtype=torch.int32, pin_memory=pinned)


def read(
    index: SetIndex,
    rows: Tensor,
    layout: RowLayout,
    keys: Tensor,
    features: tuple[Tensor, Tensor],
    examples: Tensor,
    clock: Tensor,
    lists: Lists,
    out: Tensor,
    policy: str,
) -> None:
    """Rows of keys [features, room] into out [room, width], float32; zeros where absent, which go to the lists.

    `features` are int32: each one's table, and its first column in `out`.
    """
    count, room = keys.shape
    check("keys", keys.view(-1), torch.int64, count * room, index.device)
    for name, tensor in zip(("tables", "columns"), features, strict=True):
        check(name, tensor, torch.int32, count, index.device)
    check("clock", clock, torch.int32, 2, index.device)
    block = max(1, min(64, ELEMENTS // layout.block))
    lists.counted.zero_()
    _read_kernel[(count * cdiv(room, block),)](
        index.keys, index.held, index.first, index.count, rows, keys, *features, examples, clock, out, room,
        lists.counted, lists.keys.data_ptr(), lists.examples.data_ptr(),
        DIM=layout.dim, BLOCK=layout.block, STRIDE=layout.stride, STATE=layout.state_offset, TYPE=layout.type,
        OUT_STRIDE=out.stride(0), LFU=policy == "lfu", R=power_of_2(block), num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    tell(lists.counted, lists.numbers)


class Staging:
    """Rows that a lookup missed, on their way to it: rows [n, dim] (float32), where each begins in the pooled matrix
    (int64), and how many there are (int32). In memory that the host and the device read."""

    def __init__(self, room: int, dim: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.rows = torch.empty(room, dim, dtype=torch.float32, pin_memory=pinned)
        self.places = torch.empty(room, dtype=torch.int64, pin_memory=pinned)
        self.number = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)


def put(out: Tensor, staging: Staging, layout: RowLayout) -> None:
    """The staged rows to out, flat. How many they are is read by the device when it comes to it."""
    block = max(1, min(32, ELEMENTS // layout.block))
    _put_kernel[(min(PUTTERS, cdiv(staging.rows.shape[0], block)),)](
        out, staging.rows.data_ptr(), staging.places.data_ptr(), staging.number.data_ptr(), DIM=layout.dim,
        BLOCK=layout.block, R=power_of_2(block), num_warps=WARPS,
    )  # fmt: skip
