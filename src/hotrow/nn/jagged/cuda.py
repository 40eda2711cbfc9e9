"""Jagged attention on a GPU: the Triton kernels of kernels/attention behind the operators.

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
from hotrow.nn.jagged.attention_op import implement
from hotrow.nn.jagged.input_checks import check_shapes


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    check_shapes(*inputs)
    q = inputs[0]
    if q.dtype == torch.float64:
        return reference.forward(*inputs)
    _require_triton()
    from hotrow.kernels.attention.forward import forward

    with torch.cuda.device(q.device):
        return forward(*inputs)


def _backward(gradient: Tensor, out: Tensor, log_sums: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    if gradient.dtype == torch.float64:
        return reference.backward(gradient, out, log_sums, *inputs)
    _require_triton()
    from hotrow.kernels.attention.backward import backward

    with torch.cuda.device(gradient.device):
        return backward(gradient, out, log_sums, *inputs)


def _require_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError:
        raise OptionError(
            "jagged_attention on a GPU needs Triton, which is not installed: pip install hotrow[hbm]"
        ) from None


implement("CUDA", _forward, _backward)
