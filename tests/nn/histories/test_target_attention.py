"""Candidates over histories: softmax attention, DIN's local activation and attention over selected events."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrow.nn.attention import LocalActivation
from hotrow.nn.histories import JaggedLocalActivation, SelectedAttention, TargetAttention, local_activation

SHAPES = {
    "odd": ([0, 1, 7, 3], [2, 1, 3, 0]),
    "empty": ([0, 0], [1, 2]),
    "one": ([1], [1]),
    "no rows": ([3, 2], [0, 0]),
    "none": ([], []),
}


def compare(out: Tensor, wanted: list[Tensor], leaves: list[Tensor]) -> None:
    """Values and gradients."""
    expected = torch.stack(wanted) if wanted else out.new_zeros(out.shape)
    torch.testing.assert_close(out, expected)
    if not wanted:
        return
    weights = torch.randn_like(expected)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    ours = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def inputs(shape: str, dim: int) -> tuple[list[int], list[int], Tensor, Tensor]:
    lengths, rows = SHAPES[shape]
    events = torch.randn(sum(lengths) + 2, dim, dtype=torch.float64, requires_grad=True)
    return lengths, rows, torch.randn(sum(rows), dim, dtype=torch.float64, requires_grad=True), events


@pytest.mark.parametrize("shape", SHAPES)
def test_target_attention_equals_loops(shape: str) -> None:
    torch.manual_seed(0)
    layer = TargetAttention(6, 2, positions=3).double()
    lengths, rows, candidates, events = inputs(shape, 6)
    its, counts = torch.tensor(lengths, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)
    out = layer(candidates, layer.keys(events), counts, its)
    wanted, row, begin = [], 0, 0
    for count, length in zip(rows, lengths, strict=True):
        k, v = layer.events(events[begin : begin + length]).chunk(2, 1)
        for _ in range(count):
            heads = []
            for h in range(2):
                at = slice(3 * h, 3 * h + 3)
                scores = [
                    layer.queries(candidates[row])[at] @ k[j, at] / math.sqrt(3)
                    + layer.bias.by_position[h, min(length - j, 2)]  # type: ignore[index]
                    for j in range(length)
                ]
                weights = torch.softmax(torch.stack(scores), 0) if scores else []
                heads.append(sum((w * v[j, at] for j, w in enumerate(weights)), events.new_zeros(3)))
            wanted.append(layer.out(torch.cat(heads)))
            row += 1
        begin += length
    compare(out, wanted, [candidates, events, *layer.parameters()])


@pytest.mark.parametrize("hidden", [(), (3,), (4, 2)])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("activation", ["prelu", "gelu"])
@pytest.mark.parametrize("shape", SHAPES)
def test_jagged_local_activation_equals_the_padded_one(
    shape: str, activation: str, normalize: bool, hidden: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(local_activation.PAIRS_AT_ONCE, "cpu", 8)  # rows of one user are in several chunks, too
    torch.manual_seed(0)
    layer = JaggedLocalActivation(4, hidden, activation=activation, normalize=normalize).double()
    padded = LocalActivation(4, hidden, activation=activation, normalize=normalize).double()
    padded.load_state_dict(layer.state_dict())
    lengths, rows, candidates, events = inputs(shape, 4)
    its, counts = torch.tensor(lengths, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64)
    out = layer(candidates, events, counts, its)
    wanted, row, begin = [], 0, 0
    for count, length in zip(rows, lengths, strict=True):
        for _ in range(count):
            items, mask = events[begin : begin + length].unsqueeze(0), torch.ones(1, length, dtype=torch.bool)
            wanted.append(padded(candidates[row : row + 1], items, mask)[0])
            row += 1
        begin += length
    if not wanted:
        return compare(out, wanted, [])
    torch.testing.assert_close(out, torch.stack(wanted))
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), [candidates, events, *layer.parameters()])
    theirs = torch.autograd.grad(
        (torch.stack(wanted) * weights).sum(),
        [candidates, events, *padded.parameters()],
        allow_unused=True,
        materialize_grads=True,
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    return None


def test_local_activation_passes_torchs_operator_checks() -> None:
    layer = JaggedLocalActivation(4, (3,))
    arguments = (
        torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True), torch.tensor([2, 1]),
        torch.tensor([4, 1]), torch.tensor([4, 2, 1]), list(layer.parameters()), "prelu", False,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hotrow.local_activation.default, arguments)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(0, 3), most=st.integers(1, 4), times=st.booleans(), seed=st.integers(0, 99))
def test_selected_attention_equals_loops(rows: int, most: int, times: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = SelectedAttention(6, 5, 2, times=times).double()
    events = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    candidates = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    index, counts = torch.randint(0, 7, (rows, most)), torch.randint(0, most + 1, (rows,))
    now, then = torch.randint(0, 90_000, (rows,)), torch.randint(0, 90_000, (7,))
    out = layer(candidates, events, index, counts, *((now, then) if times else ()))
    wanted = []
    for row in range(rows):
        chosen = index[row, : int(counts[row])].tolist()
        heads = []
        for h in range(2):
            query = layer.queries(candidates[row]).view(2, 3)[h]
            scores = [query @ (layer.to_keys[h] @ events[j]) / math.sqrt(3) for j in chosen]
            if layer.bias.by_time is not None:
                seconds = [max(0, int(now[row] - then[j])) // 1000 for j in chosen]
                scores = [
                    score + layer.bias.by_time[h, (1 + second).bit_length() - 1]
                    for score, second in zip(scores, seconds, strict=True)
                ]
            weights = torch.softmax(torch.stack(scores), 0) if scores else []
            values = (w * (events[j] @ layer.to_values[h]) for w, j in zip(weights, chosen, strict=True))
            heads.append(sum(values, events.new_zeros(3)))
        wanted.append(layer.out(torch.cat(heads)))
    compare(out, wanted, [candidates, events, *layer.parameters()])
