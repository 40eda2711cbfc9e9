"""Jagged attention on the CPU: the core's kernel (core/attention/).

The kernel computes in float32. bfloat16 and float16 are converted on the way in and out; float64 runs the reference.
Rows may have strides, so the chunks of a joint projection of q, k and v are not copied. Results do not depend on the
number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow import _core
from hotrow.nn.jagged import reference
from hotrow.nn.jagged.input_checks import check_lengths, check_shapes

_Rows = tuple[int, int, int]  # address, strides of a row and of a head


def infer(*inputs: Any) -> Tensor:
    """`out` alone, of the operator's inputs."""
    if inputs[0].dtype == torch.float64:
        return reference.forward(*inputs)[0]
    return _run(inputs, None)


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`out` and the log-sums, of the operator's inputs."""
    q = inputs[0]
    if q.dtype == torch.float64:
        return reference.forward(*inputs)
    log_sums = q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)
    return _run(inputs, log_sums), log_sums


def backward(gradient: Tensor, out: Tensor, log_sums: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, own_k, own_v, position_bias, time_bias; empty where absent."""
    q = inputs[0]
    if q.dtype == torch.float64:
        return reference.backward(gradient, out, log_sums, *inputs)
    kept, arguments = _arguments(inputs)
    gradient, out, log_sums = _rows_ready(gradient), _rows_ready(out), log_sums.contiguous()
    to = [
        q.new_empty(tensor.shape, dtype=torch.float32) if tensor is not None else q.new_empty(0)
        for tensor in (*inputs[:3], *inputs[5:7], *inputs[10:12])
    ]
    _core.attention_backward(
        *arguments, _rows(gradient), _rows(out), log_sums.data_ptr(), [tensor.data_ptr() for tensor in to]
    )
    del kept
    given = (*inputs[:3], *inputs[5:7], *inputs[10:12])
    return tuple(tensor if like is None else tensor.to(like.dtype) for tensor, like in zip(to, given, strict=True))


def _run(inputs: tuple[Any, ...], log_sums: Tensor | None) -> Tensor:
    q, v = inputs[0], inputs[2]
    kept, arguments = _arguments(inputs)
    out: Tensor = q.new_empty((q.shape[0], q.shape[1], v.shape[2]), dtype=torch.float32)
    try:
        _core.attention_forward(*arguments, out.data_ptr(), 0 if log_sums is None else log_sums.data_ptr())
    except ValueError:
        check_lengths(q, inputs[1], inputs[3], inputs[4], inputs[13])  # says which length is wrong, and the cure
        raise
    del kept
    return out if q.dtype == torch.float32 else out.to(q.dtype)


def _arguments(inputs: tuple[Any, ...]) -> tuple[object, tuple[Any, ...]]:
    """Tensors to keep alive during the call, and the core's arguments, in the order of core/bindings/attention.cpp."""
    check_shapes(*inputs)
    q, k, v, q_lengths, k_lengths, own_k, own_v, visible, q_times, k_times, position_bias, time_bias = inputs[:12]
    kind, causal, scale, divisor = inputs[12:]
    rows = [None if tensor is None else _rows_ready(tensor) for tensor in (q, k, v, own_k, own_v)]
    whole = [
        tensor if tensor is None else tensor.contiguous()
        for tensor in (q_lengths, k_lengths, visible, q_times, k_times, _float(position_bias), _float(time_bias))
    ]
    sizes = [
        q_lengths.shape[0], q.shape[0], k.shape[0], q.shape[1], q.shape[2], v.shape[2],
        0 if position_bias is None else position_bias.shape[1], 0 if time_bias is None else time_bias.shape[1],
    ]  # fmt: skip
    arguments = (
        [_rows(tensor) for tensor in rows],
        [0 if tensor is None else tensor.data_ptr() for tensor in whole],
        sizes, kind == "softmax", causal, scale, divisor,
    )  # fmt: skip
    return (rows, whole), arguments


def _float(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype == torch.float32 else tensor.float()


def _rows_ready(tensor: Tensor) -> Tensor:
    """float32 with adjacent floats and strides that the core takes."""
    if tensor.dtype != torch.float32:
        tensor = tensor.float()
    return tensor if tensor.stride(2) == 1 or tensor.shape[2] == 1 else tensor.contiguous()


def _rows(tensor: Tensor | None) -> _Rows:
    return (0, 0, 0) if tensor is None else (tensor.data_ptr(), tensor.stride(0), tensor.stride(1))
