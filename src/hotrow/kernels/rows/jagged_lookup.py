"""A server's lookup of any number of ids per feature: one value per id, and the list of misses, in one launch.

The ids of a group's features lie in one array of fixed capacity, feature by feature, with gaps. Feature f has the
positions from `starts[f]` to before `ends[f]`; both are on the device, so one captured launch serves batches of any
lengths that fit. Row i of the output is the value of id i; positions in gaps keep old contents. Keys that are not found
are appended, in no order, to their feature's list, which begins at `starts[f]` too. gather.py pools the values after
the host has filled in the missing ones (serving_lookup.scatter_staged).

A program has R ids, perhaps of several features, and finds each id's feature by counting the features that start
before it. Scores rise as in serving_lookup.py.

Bytes a key at dim 128: 8 + 64 (128 where the second set is searched), 512 in and 512 out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrow.kernels.index.sets import SetIndex, check_tensor
from hotrow.kernels.launch import cached_launch, cdiv, power_of_2
from hotrow.kernels.rows.layout import RowLayout, read_values
from hotrow.kernels.rows.serving_lookup import find_in_table, raise_scores
from hotrow.kernels.rows.transfer import copy_to_pinned

ELEMENTS, WARPS = 4096, 4


@cached_launch
@triton.jit(do_not_specialize=["list_keys", "list_positions"])
def _lookup_ids_kernel(
    index_keys, pins_and_scores, first, count, rows, keys, tables, starts, ends, clock, out, counts, list_keys,
    list_positions, DIM: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, STATE: tl.constexpr,
    TYPE: tl.constexpr, OUT_STRIDE: tl.constexpr, LFU: tl.constexpr, FEATURES: tl.constexpr,
    FEATURES_PADDED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * R + tl.arange(0, R)
    other = tl.arange(0, FEATURES_PADDED)
    begins = tl.load(starts + other, mask=other < FEATURES, other=2147483647)
    feature = tl.sum((begins[None, :] <= position[:, None]).to(tl.int32), axis=1) - 1
    real = position < tl.load(ends + feature)
    key = tl.load(keys + position, mask=real, other=0)
    table = tl.load(tables + feature)
    slot = find_in_table(index_keys, first, count, table, key, real)
    found = slot >= 0
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    value = read_values(
        rows + slot.to(tl.int64) * STRIDE, column, found[:, None] & inside[None, :], TYPE, STATE
    )  # fmt: skip
    target = out + position.to(tl.int64) * OUT_STRIDE
    tl.store(target[:, None] + column[None, :], value, mask=real[:, None] & inside[None, :])

    raise_scores(pins_and_scores, slot, found, clock, LFU)

    absent = real & (slot < 0)
    if tl.max(absent.to(tl.int32), axis=0) > 0:
        rank = tl.atomic_add(counts + feature, tl.full([R], 1, tl.int32), mask=absent, sem="relaxed")
        at = tl.load(starts + feature) + rank
        tl.store(list_keys.to(tl.pointer_type(tl.int64)) + at, key, mask=absent)
        tl.store(list_positions.to(tl.pointer_type(tl.int32)) + at, position, mask=absent)


class IdFeatures(NamedTuple):
    """Of each feature, int32 on the device: its table, and where its ids start and end. `starts[0]` is 0 and starts
    never decrease."""

    tables: Tensor
    starts: Tensor
    ends: Tensor


class IdMissLists:
    """The keys that a lookup did not find and their positions, feature by feature, in pinned memory that the host reads
    too. The list of feature f begins at its first position. They are counted on the device (MissLists says why)."""

    def __init__(self, features: int, capacity: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device_counts = torch.zeros(features, dtype=torch.int32, device=device)
        self.counts = torch.zeros(features, dtype=torch.int32, pin_memory=pinned)
        self.keys = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
        self.positions = torch.empty(capacity, dtype=torch.int32, pin_memory=pinned)


def lookup_ids(
    index: SetIndex,
    rows: Tensor,
    layout: RowLayout,
    keys: Tensor,
    features: IdFeatures,
    clock: Tensor,
    lists: IdMissLists,
    out: Tensor,
    policy: str,
) -> None:
    """Rows of keys [capacity] into out [capacity, stride], float32; zeros where absent. Absent keys go to `lists`."""
    count, capacity = features.tables.numel(), keys.numel()
    check_tensor("keys", keys, torch.int64, capacity, index.device)
    for name, tensor in features._asdict().items():
        check_tensor(name, tensor, torch.int32, count, index.device)
    check_tensor("clock", clock, torch.int32, 2, index.device)
    block = power_of_2(max(1, min(64, ELEMENTS // layout.block)))
    lists.device_counts.zero_()
    _lookup_ids_kernel[(cdiv(capacity, block),)](
        index.keys, index.pins_and_scores, index.first, index.count, rows, keys, *features, clock, out,
        lists.device_counts, lists.keys.data_ptr(), lists.positions.data_ptr(), DIM=layout.dim, BLOCK=layout.block,
        STRIDE=layout.stride, STATE=layout.state_offset, TYPE=layout.type, OUT_STRIDE=out.stride(0),
        LFU=policy == "lfu", FEATURES=count, FEATURES_PADDED=power_of_2(count), R=block, num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    copy_to_pinned(lists.device_counts, lists.counts)
