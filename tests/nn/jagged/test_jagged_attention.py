"""Jagged attention: the core's kernel beside the plain reference, gradients, threads, padding, export and bad input."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils.checkpoint import checkpoint

import hotrow
from hotrow.errors import BatchError, OptionError
from hotrow.nn.jagged import jagged_attention, reference

LENGTHS = [0, 1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 200]  # around the kernel's tiles
FORMS = ("causal", "bidirectional", "cross", "visible", "own", "own_visible", "causal_own")
EVENTS, HEADS, DIM = 9, 2, 4


class Case:
    """Inputs drawn from a seed: every form, both kinds, biases, sizes around a tile, padding rows, odd widths."""

    def __init__(self, seed: int, form: str, most: int = 8) -> None:
        draw, self.generator = random.Random(f"{seed} {form}"), torch.Generator().manual_seed(seed)
        users, heads, dim = draw.choice([0, 1, 3, most]), draw.choice([1, 2, 4]), draw.choice([1, 5, 16, 33])
        width = draw.choice([dim, dim, 1, 7, 40])
        k_lengths = [draw.choice(LENGTHS) for _ in range(users)]
        paired = form in ("causal", "bidirectional", "causal_own")
        q_lengths = k_lengths if paired else [draw.choice([0, 1, 5, 16, 40]) for _ in range(users)]
        n, m = sum(q_lengths) + draw.choice([0, 3]), sum(k_lengths) + draw.choice([0, 5])
        self.q, self.k, self.v = self.leaf(n, heads, dim), self.leaf(m, heads, dim), self.leaf(m, heads, width)
        self.q_lengths = torch.tensor(q_lengths, dtype=torch.int64)
        self.k_lengths = torch.tensor(k_lengths, dtype=torch.int64)
        self.options: dict[str, Any] = {
            "kind": draw.choice(["softmax", "silu"]),
            "causal": form.startswith("causal"),
            "scale": draw.choice([None, 0.3]),
            "divisor": draw.choice([None, 3.0]),
        }
        if "own" in form:
            self.options |= {"own_k": self.leaf(n, heads, dim), "own_v": self.leaf(n, heads, width)}
        if "visible" in form:
            self.options["visible"] = torch.randint(-1, 70, (n,), generator=self.generator)
        if draw.random() < 0.6:
            self.options["position_bias"] = self.leaf(heads, draw.choice([2, 4, 50, 300]))
        if draw.random() < 0.6:
            self.options["time_bias"] = self.leaf(heads, draw.choice([2, 5, 20, 60]))
            for name, rows in (("q_times", n), ("k_times", m)):
                times = (torch.rand(rows, generator=self.generator) ** 4 * 1e9).long()
                times[: rows // 2] = times[: rows // 2].add(1).log2().long().exp2().long() * 1000 - 1000  # at the edges
                self.options[name] = times

    def leaf(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator, requires_grad=True)

    def run(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The output and the gradients of everything that has one, for one gradient of the output."""
        given = {"q": self.q, "k": self.k, "v": self.v, **self.options}
        leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in given.items() if _is_leaf(t)}
        given |= leaves
        q, k, v = given.pop("q"), given.pop("k"), given.pop("v")
        out = jagged_attention(q, k, v, self.q_lengths, self.k_lengths, **given)
        gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), gradient)]


def _is_leaf(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@pytest.fixture
def threads() -> Iterator[None]:
    before = hotrow.threads()
    yield
    hotrow.set_threads(before)


def small(**options: Any) -> Tensor:
    """A call with lengths 3, 0 and 2, and 4 padding rows, whose inputs `options` replace."""
    generator = torch.Generator().manual_seed(3)
    given = {name: torch.randn(EVENTS, HEADS, DIM, generator=generator) for name in "qkv"}
    lengths = torch.tensor([3, 0, 2])
    given |= {"q_lengths": lengths, "k_lengths": lengths, **options}
    return jagged_attention(**given)


@pytest.mark.parametrize("form", FORMS)
def test_kernel_equals_the_reference(form: str) -> None:
    for seed in range(6):
        case = Case(seed, form)
        for mine, exact in zip(case.run(), case.run(torch.float64), strict=True):  # float64 runs the reference
            largest = exact.abs().max() if exact.numel() else 0.0
            torch.testing.assert_close(mine.double(), exact, rtol=0.0, atol=2e-5 * max(1.0, float(largest)))


OTHER_INSTRUCTION_SET = """
import torch
from hotrow import _core
from hotrow.nn.jagged import jagged_attention
lengths = torch.tensor([40, 0, 3, 130])
times = torch.arange(173) * 1500
for kind in ("softmax", "silu"):
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        sizes = [(173, 2, 9)] * 3 + [(2, 20), (2, 8)]
        q, k, v, position, time = leaves = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
        out = jagged_attention(q, k, v, lengths, lengths, q_times=times, k_times=times, position_bias=position,
                               time_bias=time, kind=kind, causal=True)
        found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for mine, exact in zip(*found):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)
print(_core.attention_instruction_set())
"""


@pytest.mark.parametrize("most", ["baseline", "avx2"])
def test_kernels_of_older_processors_equal_the_reference(most: str) -> None:
    environment = {**os.environ, "HOTROW_SIMD": most}
    ran = subprocess.run(
        [sys.executable, "-c", OTHER_INSTRUCTION_SET], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() in (most, "baseline")


@pytest.mark.parametrize("kind", ["softmax", "silu"])
@pytest.mark.parametrize("form", ["causal", "bidirectional", "own_visible"])
def test_reference_has_the_gradients_of_its_output(form: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(5)

    def leaf(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64, requires_grad=True)

    n, lengths = 7, torch.tensor([3, 0, 1, 2])
    times = torch.tensor([0, 999, 1000, 3000, 50, 1, 7])
    options: dict[str, Any] = {"causal": form == "causal", "kind": kind, "divisor": 2.0}
    leaves = [leaf(n, 2, 3), leaf(n, 2, 3), leaf(n, 2, 2), leaf(2, 2), leaf(2, 3)]
    if form == "own_visible":
        leaves += [leaf(n, 2, 3), leaf(n, 2, 2)]
        options["visible"] = torch.tensor([0, 1, 9, 2, 1, 1, 0])

    def run(q: Tensor, k: Tensor, v: Tensor, position: Tensor, time: Tensor, *own: Tensor) -> Tensor:
        given = dict(zip(("own_k", "own_v"), own, strict=False))
        given |= {"position_bias": position, "time_bias": time, "q_times": times, "k_times": times}
        return jagged_attention(q, k, v, lengths, lengths, **given, **options)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_causal_attention_is_what_torch_computes_for_each_user() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 70]
    q, k, v = (torch.randn(sum(lengths), 2, 16, generator=generator) for _ in range(3))
    out = jagged_attention(q, k, v, torch.tensor(lengths), torch.tensor(lengths), causal=True)
    for mine, *rows in zip(*(x.split(lengths) for x in (out, q, k, v)), strict=True):
        by_head = [x.transpose(0, 1) for x in rows]
        torchs = nn.functional.scaled_dot_product_attention(*by_head, is_causal=True)
        torch.testing.assert_close(mine, torchs.transpose(0, 1), atol=2e-6, rtol=1e-5)


def test_time_buckets_change_at_powers_of_two_of_seconds() -> None:
    milliseconds = torch.tensor(
        [0, 999, 1000, 2999, 3000, 6999, 7000, (1 << 30) * 1000 - 1001, (1 << 30) * 1000 - 1000]
    )
    assert reference.time_bucket(milliseconds).tolist() == [0, 0, 1, 1, 2, 2, 3, 29, 30]
    one = torch.ones(1, 1, 1)
    bias = torch.arange(40.0).reshape(1, 40)
    for elapsed, bucket in zip(milliseconds.tolist(), reference.time_bucket(milliseconds).tolist(), strict=True):
        now = torch.tensor([elapsed + 1_700_000_000_000])
        out = jagged_attention(
            one, one, one, torch.tensor([1]), torch.tensor([1]), q_times=now, k_times=now - elapsed, time_bias=bias,
            kind="silu", scale=0.0,
        )  # fmt: skip
        assert out.item() == pytest.approx(bucket / (1 + 2.718281828**-bucket), rel=1e-5), elapsed


@pytest.mark.parametrize("form", ["causal", "own_visible"])
def test_results_are_the_same_bits_for_any_number_of_threads(form: str, threads: None) -> None:
    found = []
    for number in (1, 2, 5):
        hotrow.set_threads(number)
        found.append([tensor for seed in range(20, 24) for tensor in Case(seed, form, most=40).run()])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_a_long_user_is_split_without_a_change(threads: None) -> None:
    """3,500 events make 6 million pairs a head: several parts, whose sums are added in order."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, gradient = (torch.randn(3502, 1, 4, generator=generator) for _ in range(4))
    lengths = torch.tensor([3500])

    def run() -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = jagged_attention(*leaves, lengths, lengths, causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, gradient)

    hotrow.set_threads(1)
    alone = run()
    hotrow.set_threads(3)
    assert all(torch.equal(a, b) for a, b in zip(alone, run(), strict=True))
    leaves = [x[:3500].detach().transpose(0, 1).requires_grad_() for x in (q, k, v)]
    torchs = nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    exact = torchs.detach(), *torch.autograd.grad(torchs, leaves, gradient[:3500].transpose(0, 1))
    for mine, other in zip(alone, exact, strict=True):
        assert not mine[3500:].any()
        torch.testing.assert_close(mine[:3500].transpose(0, 1), other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["softmax", "silu"])
def test_padding_rows_give_zeros_and_reach_nothing(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(EVENTS, HEADS, DIM, generator=generator) for _ in range(3))
    found = []
    for padding in (0.0, float("nan")):
        leaves = [x.clone() for x in (q, k, v)]
        for leaf in leaves:
            leaf[5:] = padding
            leaf.requires_grad_()
        out = small(**dict(zip("qkv", leaves, strict=True)), kind=kind, causal=True)
        gradient = torch.ones_like(out)
        gradient[5:] = padding
        found.append([out.detach(), *torch.autograd.grad(out, leaves, gradient)])
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty) and not dirty[5:].any() and dirty[:5].any()


def test_chunks_of_a_joint_projection_are_read_in_place() -> None:
    joint = torch.randn(EVENTS, 3, HEADS, DIM)
    whole = small(**dict(zip("qkv", (x.contiguous() for x in joint.unbind(1)), strict=True)))
    assert torch.equal(small(**dict(zip("qkv", joint.unbind(1), strict=True))), whole)
    turned = {
        name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in zip("qkv", joint.unbind(1), strict=True)
    }
    assert torch.equal(small(**turned), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(EVENTS, HEADS, DIM, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    q.requires_grad_()
    out = small(q=q, k=k, v=v)
    assert out.dtype == dtype
    assert torch.equal(out, small(q=q.float(), k=k.float(), v=v.float()).to(dtype))
    out.sum().backward()
    assert q.grad is not None and q.grad.dtype == dtype and q.grad.abs().sum() > 0


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(3, 3 * HEADS * DIM)
        self.position_bias = nn.Parameter(torch.randn(HEADS, 5))

    def forward(self, events: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.projection(events).unflatten(1, (3, HEADS, DIM)).unbind(1)
        return jagged_attention(q, k, v, lengths, lengths, position_bias=self.position_bias, causal=True)


def test_autocast_and_checkpoints_train() -> None:
    layer, events, lengths = Encoder(), torch.randn(EVENTS, 3), torch.tensor([4, 5])
    layer(events, lengths).sum().backward()
    exact = [parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None]
    layer.zero_grad()
    checkpoint(layer, events, lengths, use_reentrant=False).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(exact, layer.parameters(), strict=True))
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(events, lengths)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    for a, b in zip(exact, layer.parameters(), strict=True):
        assert b.grad is not None and b.grad.dtype == torch.float32
        torch.testing.assert_close(a, b.grad, atol=0.2, rtol=0.1)


def test_exported_graph_takes_other_sizes() -> None:
    layer = Encoder().eval()
    free = Dim.DYNAMIC
    program = torch.export.export(
        layer, (torch.randn(EVENTS, 3), torch.tensor([4, 3])), dynamic_shapes=({0: free}, {0: free})
    ).run_decompositions()
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "hotrow.jagged_attention.default" in names
    assert {name.split(".")[0] for name in names} <= {"hotrow", "aten", "<built-in function getitem>"}
    with torch.inference_mode():
        for lengths in ([4, 3], [0, 70, 1, 12], [1], []):
            events = torch.randn(sum(lengths) + 2, 3)
            given = (events, torch.tensor(lengths, dtype=torch.int64))
            assert torch.equal(program.module(check_guards=False)(*given), layer(*given))


def test_operator_is_what_it_declares() -> None:
    lengths = torch.tensor([3, 0, 2])
    q, k, v = (torch.randn(EVENTS, HEADS, DIM, requires_grad=True) for _ in range(3))
    rest = (None, None, None, None, None, torch.randn(HEADS, 3, requires_grad=True), None, "softmax", True, 0.5, 1.0)
    torch.library.opcheck(torch.ops.hotrow.jagged_attention.default, (q, k, v, lengths, lengths, *rest))


ROWS = torch.zeros(EVENTS, HEADS, DIM)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_lengths": torch.tensor([3, 7, 0])}, r"q_lengths sum to 10 but q has 9 rows; give"),
        ({"k_lengths": torch.tensor([10, 0, 0])}, r"k_lengths sum to 10 but k has 9 rows"),
        ({"k_lengths": torch.tensor([3, -1, 2])}, r"k_lengths has -1; give lengths of at least 0"),
        ({"k_lengths": torch.tensor([3, 1, 2]), "causal": True}, r"user 1 has 0 queries and 1 keys; pass equal"),
        ({"k_lengths": torch.tensor([3, 0])}, r"k_lengths is torch.int64 \[2\]; give int64 \[3\]"),
        ({"q_lengths": torch.tensor([3, 0, 2]).int()}, r"q_lengths is torch.int32 \[3\]; give int64 \[3\]"),
        ({"q": ROWS[None]}, r"without a batch dimension"),
        ({"k": ROWS[:, :1]}, r"k has shape \[9, 1, 4\]; give \[9, 2, 4\]"),
        ({"v": ROWS[:4]}, r"v has shape \[4, 2, 4\]; give \[9, 2, 4\]"),
        ({"v": ROWS.bfloat16()}, r"v is torch.bfloat16 but q is torch.float32; convert v"),
        ({"own_k": ROWS}, r"own_k and own_v belong together"),
        ({"own_k": ROWS[:3], "own_v": ROWS}, r"own_k has shape \[3, 2, 4\]; give \[9, 2, 4\], a key for each query"),
        ({"visible": torch.zeros(3, dtype=torch.int64)}, r"visible is torch.int64 \[3\]; give int64 \[9\]"),
        ({"visible": torch.zeros(9, dtype=torch.int64), "causal": True}, r"causal and visible both limit"),
        ({"time_bias": torch.zeros(2, 3)}, r"pass q_times and k_times"),
        ({"position_bias": torch.zeros(3, 3)}, r"position_bias has shape \[3, 3\]; give \[2 heads, buckets >= 1\]"),
    ],
)
def test_bad_input_is_named_with_its_cure(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        small(**options)


def test_unknown_kind_and_bad_divisor_are_refused() -> None:
    with pytest.raises(OptionError, match="kind is 'softmx'; did you mean 'softmax'"):
        small(kind="softmx")
    with pytest.raises(OptionError, match=r"divisor is 0\.0; give a number above 0"):
        small(kind="silu", divisor=0.0)
