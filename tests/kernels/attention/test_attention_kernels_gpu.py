"""Compiled kernels on a GPU: large shapes beside the reference, equal bits, CUDA graphs and autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_attention_inputs import Case, compare, computed, converted, draw

from hotrow.kernels.attention.forward import forward
from hotrow.kernels.graph_capture import capture_graph
from hotrow.kernels.launch import INTERPRETED
from hotrow.nn.jagged import jagged_attention

pytestmark = pytest.mark.gpu

LONG = [900, 0, 1, 64, 129, 33, *range(1, 40)]
CASES = [
    Case("causal", heads=2, dim=64, value_dim=64, positions=200, buckets=32, padding=77, scale=0.125),
    Case("causal", "silu", heads=2, dim=64, value_dim=64, positions=2000, buckets=32, padding=77, scale=0.125),
    Case("bidirectional", heads=2, dim=48, value_dim=64, positions=300, buckets=8, scale=0.125, sorted_times=False),
    Case("visible", heads=2, dim=16, value_dim=16, positions=300, buckets=32, scale=0.25),
    Case("visible and own", "silu", heads=1, dim=128, value_dim=32, positions=300, buckets=32, scale=0.1),
    Case("own", heads=2, dim=128, value_dim=128, positions=50, buckets=20, scale=0.1),
    Case("own", heads=1, dim=256, value_dim=256, positions=None, buckets=20, scale=0.06),
    Case("causal", heads=1, dim=256, value_dim=200, positions=500, buckets=None, scale=0.06),
]


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available() or INTERPRETED:
        pytest.skip("needs a CUDA device and TRITON_INTERPRET unset")
    return torch.device("cuda", torch.cuda.current_device())


def _inputs(case: Case, dtype: torch.dtype, gpu: torch.device, queries: list[int] | None = None) -> tuple[Any, ...]:
    self_attention = case.layer in ("causal", "bidirectional")
    return converted(draw(case, LONG if self_attention or queries is None else queries, LONG), dtype, gpu)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_without_tf32_is_exact_to_rounding(case: Case, gpu: torch.device) -> None:
    compare(_inputs(case, torch.float32, gpu), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_half_precision_is_exact_to_rounding(case: Case, dtype: torch.dtype, gpu: torch.device) -> None:
    compare(_inputs(case, dtype, gpu), 1e-2)


@pytest.mark.parametrize("case", CASES[3:6], ids=str)
def test_few_candidates_of_long_histories(case: Case, gpu: torch.device) -> None:
    compare(_inputs(case, torch.bfloat16, gpu, [3] * len(LONG)), 1e-2)


def test_tf32_is_taken_where_torch_allows_it(gpu: torch.device) -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        compare(_inputs(CASES[0], torch.float32, gpu), 1e-2)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("users", [1, 3000])
def test_one_long_history_and_thousands_of_short_ones(users: int, gpu: torch.device) -> None:
    lengths = [6000] if users == 1 else [1 + i % 12 for i in range(users)]
    case = Case("causal", heads=1, dim=32, value_dim=32, positions=100, buckets=32, scale=0.2)
    compare(converted(draw(case, lengths, lengths), torch.bfloat16, gpu), 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_input_gives_the_same_bits(dtype: torch.dtype, gpu: torch.device) -> None:
    for case in (CASES[0], CASES[4]):
        inputs = _inputs(case, dtype, gpu)
        gradient = torch.randn(*inputs[0].shape[:2], inputs[2].shape[2], device=gpu).to(dtype)
        first = computed(inputs, gradient)
        for _ in range(3):
            again = computed(inputs, gradient)
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_captured_graph_follows_new_lengths_and_values(gpu: torch.device) -> None:
    case = Case("visible and own", heads=2, dim=32, value_dim=32, positions=20, buckets=32, scale=0.2, padding=40)
    one = list(converted(draw(case, [5, 100, 0, 3], [40, 300, 7, 1], 1), torch.bfloat16, gpu))
    other = converted(draw(case, [90, 0, 17, 1], [0, 20, 300, 28], 2), torch.bfloat16, gpu)
    gradient = torch.randn(148, 2, 32, device=gpu).bfloat16()
    computed(one, gradient)  # compiles
    torch.cuda.synchronize()
    with capture_graph(gpu) as graph:
        captured = computed(one, gradient)
    for given in (one, other):
        for mine, new in zip(one, given, strict=True):
            if isinstance(mine, torch.Tensor) and mine is not new:
                mine.copy_(new)
        graph.replay()
        plain = computed(given, gradient)
        assert all(torch.equal(captured[name], plain[name]) for name in plain)


def test_the_operator_trains_on_a_gpu_as_on_the_cpu(gpu: torch.device) -> None:
    found = []
    for device in (torch.device("cpu"), gpu):
        inputs = list(converted(draw(CASES[0], [5, 0, 70], [5, 0, 70]), torch.float32, device))
        leaves = [inputs[at].requires_grad_() for at in (0, 1, 2, 10, 11)]
        out = jagged_attention(
            *inputs[:5], q_times=inputs[8], k_times=inputs[9], position_bias=inputs[10], time_bias=inputs[11],
            causal=True, scale=0.125,
        )  # fmt: skip
        out.square().sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-4, atol=1e-4 * float(on_cpu.abs().max()))


def test_offsets_beyond_32_bits(gpu: torch.device) -> None:
    rows = 2**31 // 2048 + 70  # of 16 heads of 128 floats, so the last rows lie beyond 2**31 elements
    wide = torch.zeros(rows, 16, 128, dtype=torch.bfloat16, device=gpu)
    wide[-64:] = torch.randn(64, 16, 128, device=gpu)
    lengths = torch.tensor([rows - 64, 64], device=gpu)
    queries = torch.tensor([0, 64], device=gpu)
    options = (None, None, None, None, None, None, None, "softmax", False, 0.1, 1.0)
    out, _ = forward(wide[-64:], wide, wide, queries, lengths, *options)
    alone, _ = forward(wide[-64:], wide[-64:], wide[-64:], queries[1:], lengths[1:], *options)
    assert torch.equal(out, alone)
