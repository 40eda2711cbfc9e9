"""Checks of jagged attention's inputs. They run when the operator runs, so that export records no guard.

`check_shapes` reads shapes and dtypes alone. `check_lengths` reads the lengths, so it waits for a device: it is for the
CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.errors import BatchError, OptionError, choices

KINDS = ("softmax", "silu")


def check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    visible: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    kind: str,
    causal: bool,
    scale: float,
    divisor: float,
) -> None:
    """Raises BatchError for tensors whose shapes or dtypes do not fit together, OptionError for a wrong option."""
    if kind not in KINDS:
        raise OptionError(f"jagged_attention: kind is {kind!r}; {choices(kind, KINDS)}")
    if kind == "silu" and not divisor > 0:
        raise OptionError(f"jagged_attention: divisor is {divisor}; give a number above 0, such as the longest length")
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise BatchError(
            f"jagged_attention: q, k and v have shapes {_shape(q)}, {_shape(k)}, {_shape(v)}; give [events, heads, "
            "dim], without a batch dimension, and the users' lengths in q_lengths and k_lengths"
        )
    n, heads, dim = q.shape
    m, width = k.shape[0], v.shape[2]
    _expect("k", k, (m, heads, dim), "as many heads and floats as q has")
    _expect("v", v, (m, heads, width), "a row and a head for each of k's")
    if (own_k is None) != (own_v is None):
        raise BatchError("jagged_attention: own_k and own_v belong together; give both or neither")
    if own_k is not None and own_v is not None:
        _expect("own_k", own_k, (n, heads, dim), "a key for each query")
        _expect("own_v", own_v, (n, heads, width), "a value for each query")
    for name, tensor in (("k", k), ("v", v), ("own_k", own_k), ("own_v", own_v)):
        if tensor is not None and tensor.dtype != q.dtype:
            raise BatchError(
                f"jagged_attention: {name} is {tensor.dtype} but q is {q.dtype}; convert {name} with .to(q.dtype)"
            )
    _expect_int64("q_lengths", q_lengths, q_lengths.shape[0] if q_lengths.dim() else 0, "a length for each user")
    _expect_int64("k_lengths", k_lengths, q_lengths.shape[0], "a length for each user of q_lengths")
    _expect_int64("visible", visible, n, "a number of keys for each query")
    _expect_int64("q_times", q_times, n, "a time for each query")
    _expect_int64("k_times", k_times, m, "a time for each key")
    if time_bias is not None and (q_times is None or k_times is None):
        raise BatchError("jagged_attention: time_bias needs the times of queries and keys; pass q_times and k_times")
    for name, table in (("position_bias", position_bias), ("time_bias", time_bias)):
        if table is not None and (table.dim() != 2 or table.shape[0] != heads or table.shape[1] < 1):
            raise BatchError(f"jagged_attention: {name} has shape {_shape(table)}; give [{heads} heads, buckets >= 1]")
    if visible is not None and causal:
        raise BatchError("jagged_attention: causal and visible both limit what a query sees; give one of them")


def check_lengths(q: Tensor, k: Tensor, q_lengths: Tensor, k_lengths: Tensor, causal: bool) -> tuple[int, int]:
    """The sums of the lengths. Raises BatchError for lengths that do not fit the rows."""
    sums = []
    for name, rows, lengths in (("q", q, q_lengths), ("k", k, k_lengths)):
        smallest = int(lengths.min()) if lengths.numel() else 0
        if smallest < 0:
            raise BatchError(f"jagged_attention: {name}_lengths has {smallest}; give lengths of at least 0")
        total = int(lengths.sum())
        if total > rows.shape[0]:
            raise BatchError(
                f"jagged_attention: {name}_lengths sum to {total} but {name} has {rows.shape[0]} rows; "
                f"give lengths of this {name}, one for each user"
            )
        sums.append(total)
    if causal and not torch.equal(q_lengths, k_lengths):
        user = int((q_lengths != k_lengths).nonzero()[0])
        raise BatchError(
            f"jagged_attention: causal needs a key for each query, but user {user} has {int(q_lengths[user])} queries "
            f"and {int(k_lengths[user])} keys; pass equal lengths, or `visible`, the number of keys a query sees"
        )
    return sums[0], sums[1]


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tensor.shape != shape:
        raise BatchError(f"jagged_attention: {name} has shape {_shape(tensor)}; give {list(shape)}, {meaning}")


def _expect_int64(name: str, tensor: Tensor | None, size: int, meaning: str) -> None:
    if tensor is not None and (tensor.shape != (size,) or tensor.dtype != torch.int64):
        raise BatchError(f"jagged_attention: {name} is {tensor.dtype} {_shape(tensor)}; give int64 [{size}], {meaning}")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
