"""The operators of jagged attention: schemas, shapes for export, and gradients.

    jagged_attention           out. The one that models call and archives name
    jagged_attention_forward   out and the logarithm of each query's sum of exponentials (float32 `[n, heads]`; zeros
                               for silu), which the backward pass needs
    jagged_attention_backward  the gradients of q, k, v, own_k, own_v, position_bias and time_bias, in this order; an
                               empty tensor for what is not there

`implement` registers a device's forward and backward. Without an own implementation a device runs the reference. The
shapes of the outputs need no comparison of sizes, so export adds no guard: what must hold between sizes is checked when
the operator runs (input_checks.py). The schemas have no defaults, because the dispatcher drops trailing arguments that
equal them.

torch.library.custom_op was not used: its call costs about twice as much, and its backward cannot get the sums of the
forward pass unless the public operator returns them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.nn.jagged import attention_cpu, attention_cuda, reference
from hotrow.undocumented import find

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor q_lengths, Tensor k_lengths, Tensor? own_k, Tensor? own_v, Tensor? visible, "
    "Tensor? q_times, Tensor? k_times, Tensor? position_bias, Tensor? time_bias, "
    "str kind, bool causal, float scale, float divisor"
)
_TENSORS = 12  # the first inputs
_WITH_GRADIENT = (0, 1, 2, 5, 6, 10, 11)  # their places among the inputs

Forward = Callable[..., tuple[Tensor, Tensor]]  # the inputs to out and log-sums
Backward = Callable[..., tuple[Tensor, ...]]  # the gradient of out, out, log-sums, the inputs; to seven gradients

_library = torch.library.Library("hotrow", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"jagged_attention({_INPUTS}) -> Tensor", tags=_tags)
_library.define(f"jagged_attention_forward({_INPUTS}) -> (Tensor, Tensor)", tags=_tags)
_library.define(
    f"jagged_attention_backward(Tensor gradient, Tensor out, Tensor log_sums, {_INPUTS}) -> "
    f"({', '.join(['Tensor'] * len(_WITH_GRADIENT))})",
    tags=_tags,
)
_attention = torch.ops.hotrow.jagged_attention.default
_forward = torch.ops.hotrow.jagged_attention_forward.default
_backward = torch.ops.hotrow.jagged_attention_backward.default


def implement(key: str, forward: Forward, backward: Backward, inference: Callable[..., Tensor] | None = None) -> None:
    """Register an implementation for a dispatch key ("CPU", "CUDA"). `inference` gives `out` alone."""
    _library.impl("jagged_attention", inference or (lambda *inputs: forward(*inputs)[0]), key)
    _library.impl("jagged_attention_forward", forward, key)
    _library.impl("jagged_attention_backward", backward, key)


def _meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


def _meta_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _meta(q, k, v), q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32)


def _meta_backward(gradient: Tensor, out: Tensor, log_sums: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    none = gradient.new_empty(0)
    return tuple(
        none.clone() if inputs[at] is None else torch.empty_like(inputs[at], memory_format=torch.contiguous_format)
        for at in _WITH_GRADIENT
    )


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, log_sums = _forward(*inputs)
        ctx.save_for_backward(out, log_sums, *inputs[:_TENSORS])
        ctx.options = inputs[_TENSORS:]
        return out  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        out, log_sums, *tensors = ctx.saved_tensors
        found = _backward(gradient, out, log_sums, *tensors, *ctx.options)
        gradients: list[Tensor | None] = [None] * (_TENSORS + len(ctx.options))
        for at, value in zip(_WITH_GRADIENT, found, strict=True):
            if ctx.needs_input_grad[at]:
                gradients[at] = value
        return tuple(gradients)


# Skips the bookkeeping of gradients where none is wanted; torch does not document it.
_below_autograd = find("torch._C:_AutoDispatchBelowAutograd", "Attention without gradients runs as with gradients")


def _autograd(*inputs: Any) -> Tensor:
    wanted = torch.is_grad_enabled() and any(
        inputs[at] is not None and inputs[at].requires_grad for at in _WITH_GRADIENT
    )
    if wanted or _below_autograd is None:
        out: Tensor = _Differentiable.apply(*inputs)
        return out
    with _below_autograd():
        return _attention(*inputs)  # type: ignore[no-any-return]


implement("CompositeExplicitAutograd", reference.forward, reference.backward)
implement("CPU", attention_cpu.forward, attention_cpu.backward, attention_cpu.infer)
implement("CUDA", attention_cuda.forward, attention_cuda.backward)
for _name, _shapes in (("", _meta), ("_forward", _meta_forward), ("_backward", _meta_backward)):
    _library.impl(f"jagged_attention{_name}", _shapes, "Meta")
_library.impl("jagged_attention", _autograd, "Autograd")
