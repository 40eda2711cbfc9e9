"""Jagged attention on a GPU: the Triton kernels of kernels/attention.

Triton is imported at the first call, so that a machine without it can import models. float64 inputs, as of a check of
gradients, go to the reference. Lengths are not checked, because that would wait for the device; the kernels stay within
their tensors whatever the lengths are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.nn.jagged import reference
from hotrow.nn.jagged.input_checks import check_shapes


def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`out` and the log-sums, of the operator's inputs."""
    check_shapes(*inputs)
    q = inputs[0]
    if q.dtype == torch.float64:
        return reference.forward(*inputs)
    _require_triton()
    from hotrow.kernels.attention import forward as kernels

    with torch.cuda.device(q.device):
        return kernels.forward(*inputs)


def backward(gradient: Tensor, out: Tensor, log_sums: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k, v, own_k, own_v, position_bias, time_bias; empty where absent."""
    q = inputs[0]
    if q.dtype == torch.float64:
        return reference.backward(gradient, out, log_sums, *inputs)
    _require_triton()
    from hotrow.kernels.attention import backward as kernels

    with torch.cuda.device(q.device):
        return kernels.backward(gradient, out, log_sums, *inputs)


def _require_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        raise OptionError(
            "jagged_attention on a GPU needs Triton, which is not installed: pip install hotrow[hbm]"
        ) from None
