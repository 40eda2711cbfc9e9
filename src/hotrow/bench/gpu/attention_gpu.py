"""Jagged attention on a GPU beside FlexAttention over packed users, SDPA over padded ones, and its limits.

Lengths are log-normal (sigma 1): median 50 and at most 1,024 for 1,024 users, median 1,000 and at most 10,000 for 256.
Four heads, causal, bf16 where the name has no other dtype. `forward` is the operation's forward pass, `backward` its
backward pass alone. Peers:

    FlexAttention  torch's, compiled, with a block mask of packed users; creating the mask is not timed
    padded SDPA    torch's, causal over [users, longest]; padding lies behind every query, so it needs no mask
    bytes          the time of the bytes that must move (inputs once, outputs once) at the rate of a copy
    flops          the time of the products that must be made at the rate of a large matrix product of that dtype
    no biases      the same kind without tables of positions and times

Outputs are compared with SDPA's before anything is timed. HOTROW_BENCH_SCALE below 1 takes fewer users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from hotrow.bench.gpu.device_clock import bench_device, memory_rate, timed
from hotrow.bench.gpu.hbm import scale
from hotrow.bench.harness import Result, Timing, lower
from hotrow.errors import HotRowError, OptionError
from hotrow.kernels.attention.backward import backward
from hotrow.kernels.attention.forward import forward
from hotrow.kernels.launch import INTERPRETED

HEADS, WARMUP, REPEATS = 4, 3, 12
POSITIONS, BUCKETS = 1024, 32
BLOCK = 128  # of FlexAttention; rows are padded to a multiple
TOLERANCE = {torch.bfloat16: 0.1, torch.float32: 1e-2}  # of outputs of magnitude 5
MATRIX = 8192  # of the product whose rate is the limit


@dataclass(frozen=True)
class Workload:
    """Users whose lengths are drawn, and what their attention is."""

    name: str
    users: int
    median: int
    longest: int
    dim: int
    dtype: torch.dtype = torch.bfloat16
    kind: str = "softmax"
    biases: bool = False


SHORT = Workload("short", users=1024, median=50, longest=1024, dim=64)
LONG = Workload("long", users=256, median=1000, longest=10_000, dim=64)
WORKLOADS = (
    replace(SHORT, name="short/16", dim=16),
    replace(SHORT, name="short/64"),
    replace(SHORT, name="short/64/fp32", dtype=torch.float32),
    replace(LONG, name="long/16", dim=16),
    replace(LONG, name="long/64"),
    replace(SHORT, name="short/64/silu+biases", kind="silu", biases=True),
    replace(SHORT, name="short/64/biases", biases=True),
    replace(LONG, name="long/64/biases", biases=True),
)


def results() -> Iterator[Result | str]:
    """The benchmark's figures."""
    device = bench_device()
    if device.type != "cuda" and not INTERPRETED:
        raise OptionError("hotrow bench attention_gpu needs a GPU, and torch sees none")
    yield "the rates of this GPU's memory and of matrix products"
    bandwidth = memory_rate(device)
    rates = {dtype: matrix_rate(device, dtype) for dtype in TOLERANCE}
    for work in WORKLOADS:
        yield work.name
        yield from measure(work, device, bandwidth, rates[work.dtype])
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measure(work: Workload, device: torch.device, bandwidth: float, rate: float) -> Iterator[Result | str]:
    """The rows of one workload."""
    packed = Packed(work, device)
    moved, products = packed.bytes_moved(), packed.products()
    took = {name: _time(device, step) for name, step in packed.steps().items()}
    for step, ours in took.items():
        name = f"attention/{work.name}/{step}"
        yield f"{name}: {ours.median * 1e3:.3f} ms, {moved[step] / 1e9:.3f} GB, {products[step] / 1e12:.4f} TFLOP"
        yield _row(name, ours, "bytes", moved[step] / bandwidth)
        yield _row(name, ours, "flops", products[step] / rate)
    if work.biases:
        plain = Packed(replace(work, biases=False), device)
        for step, call in plain.steps().items():
            name = f"attention/{work.name}/{step}"
            yield _row(name, took[step], "no biases", _time(device, call).median)
        return
    for peer, steps in (("padded SDPA", packed.sdpa_steps), ("FlexAttention", packed.flex_steps)):
        yield f"{work.name}: {peer}"
        try:
            rows = [
                _row(f"attention/{work.name}/{step}", took[step], peer, _time(device, call).median)
                for step, call in steps().items()
            ]
        except RuntimeError as error:  # a peer that cannot be compiled, or whose masks need too much memory
            yield f"{work.name}: {peer} failed: {type(error).__name__}: {error}"
        else:
            yield from rows


def _time(device: torch.device, step: Callable[[], Any]) -> Timing:
    return timed(device, lambda _: step(), range(WARMUP + REPEATS), WARMUP)


def _row(name: str, ours: Timing, peer: str, seconds: float) -> Result:
    return lower(name, "ms", ours.median * 1e3, peer, seconds * 1e3, ours.spread)


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large matrix product of random numbers."""
    size = MATRIX if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / timed(device, lambda _: a @ b, range(8), 2).median


class Packed:
    """The inputs of a workload, packed: the events of all users one after another."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self.work, self.device = work, device
        random = torch.Generator().manual_seed(1)
        users = max(2, int(work.users * min(1.0, scale())))
        drawn = torch.exp(math.log(work.median) + torch.randn(users, generator=random))
        self.lengths = drawn.long().clamp(1, work.longest)
        self.events = int(self.lengths.sum())
        self.rows = -(-self.events // BLOCK) * BLOCK
        shape = (self.rows, HEADS, work.dim)
        on_device = torch.Generator(device=device).manual_seed(2)
        self.q, self.k, self.v, self.gradient = (
            torch.randn(shape, generator=on_device, device=device).to(work.dtype) for _ in range(4)
        )
        self.gradient[self.events :] = 0
        self.scale = work.dim**-0.5
        self.on_device = self.lengths.to(device)
        tables: tuple[Tensor | None, ...] = (None, None, None, None)
        if work.biases:
            gaps = torch.randint(0, 600_000, (self.rows,), generator=on_device, device=device)
            times = gaps.cumsum(0)  # sorted, as the events of a history are
            tables = times, times, *(torch.randn(HEADS, width, device=device) for width in (POSITIONS, BUCKETS))
        self.inputs = (
            self.q, self.k, self.v, self.on_device, self.on_device, None, None, None, *tables, work.kind, True,
            self.scale, float(work.longest),
        )  # fmt: skip
        self.out, self.log_sums = forward(*self.inputs)

    def bytes_moved(self) -> dict[str, int]:
        """Bytes that must move: inputs once, outputs once, and one number a query and head between the passes."""
        rows = self.events * HEADS
        tensor, number = rows * self.work.dim * self.work.dtype.itemsize, rows * 4
        return {"forward": 4 * tensor + number, "backward": 8 * tensor + number}

    def products(self) -> dict[str, int]:
        """Operations of the matrix products that must be made: two forward, five backward."""
        pairs = int((self.lengths * (self.lengths + 1) // 2).sum())
        one = 2 * pairs * HEADS * self.work.dim
        return {"forward": 2 * one, "backward": 5 * one}

    def steps(self) -> dict[str, Callable[[], Any]]:
        """HotRow's passes."""
        return {
            "forward": lambda: forward(*self.inputs),
            "backward": lambda: backward(self.gradient, self.out, self.log_sums, *self.inputs),
        }

    def sdpa_steps(self) -> dict[str, Callable[[], Any]]:
        """Padded to the longest user, [users, heads, longest, dim]."""
        longest = int(self.lengths.max())
        mask = torch.arange(longest, device=self.device) < self.on_device[:, None]

        def padded(packed: Tensor) -> Tensor:
            made = packed.new_zeros(mask.shape[0], longest, HEADS, self.work.dim)
            made[mask] = packed[: self.events]
            return made.transpose(1, 2).contiguous()

        q, k, v = (padded(tensor).requires_grad_() for tensor in (self.q, self.k, self.v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        self._compare("padded SDPA", out.detach().transpose(1, 2)[mask])
        return self._peer_steps(
            lambda: scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=True, scale=self.scale),
            out, (q, k, v), padded(self.gradient),
        )  # fmt: skip

    def flex_steps(self) -> dict[str, Callable[[], Any]]:
        """Packed, [1, heads, rows, dim], with a block mask of users; the padding is one more user."""
        cuda = self.device.type == "cuda"
        lengths = torch.cat([self.on_device, self.on_device.new_tensor([self.rows - self.events])])
        numbers = torch.arange(lengths.numel(), device=self.device)
        user = numbers.repeat_interleave(lengths, output_size=self.rows)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (user[query] == user[key]) & (query >= key)

        blocks = create_block_mask(visible, None, None, self.rows, self.rows, device=str(self.device), _compile=cuda)
        torch.compiler.reset()  # each workload is compiled for its sizes; torch limits how many one function may have
        call: Any = torch.compile(flex_attention, dynamic=False) if cuda else flex_attention
        q, k, v = (
            tensor.transpose(0, 1)[None].contiguous().requires_grad_(cuda) for tensor in (self.q, self.k, self.v)
        )
        out = call(q, k, v, block_mask=blocks, scale=self.scale)
        self._compare("FlexAttention", out.detach()[0].transpose(0, 1)[: self.events])
        gradient = self.gradient.transpose(0, 1)[None].contiguous()
        plain = [tensor.detach() for tensor in (q, k, v)]
        return self._peer_steps(
            lambda: call(*plain, block_mask=blocks, scale=self.scale), out, (q, k, v) if cuda else (), gradient
        )

    def _peer_steps(
        self, peer_forward: Callable[[], Any], out: Tensor, inputs: tuple[Tensor, ...], gradient: Tensor
    ) -> dict[str, Callable[[], Any]]:
        """A peer's passes; without inputs, the forward pass alone."""
        steps = {"forward": peer_forward}
        if inputs:
            steps["backward"] = lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)
        return steps

    def _compare(self, peer: str, out: Tensor) -> None:
        difference = float((out.float() - self.out[: self.events].float()).abs().max())
        if not difference <= TOLERANCE[self.work.dtype]:
            raise HotRowError(f"{self.work.name}: outputs differ from those of {peer} by {difference:.3g}")
