"""Transformer and HSTU blocks against loops over users and events; candidates are one more event."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotrow.errors import OptionError
from hotrow.nn.histories import HSTUBlock, TransformerBlock
from hotrow.nn.histories.encoder_block import EncoderBlock

WIDTH, HEADS, PLACES = 6, 2, 3
LENGTHS = {"odd": [0, 1, 7, 2], "one": [1], "empty": [0, 0], "none": []}
BLOCKS: dict[str, Callable[..., EncoderBlock]] = {"transformer": TransformerBlock, "hstu": HSTUBlock}


def build(kind: str, **options: object) -> EncoderBlock:
    torch.manual_seed(0)
    block = BLOCKS[kind](WIDTH, HEADS, **options).double()
    for weight in block.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return block


def plain(block: EncoderBlock, x: Tensor, times: list[int], seen_by: list[list[int]]) -> Tensor:
    """One user's events: event i sees the events `seen_by[i]`. Written event by event, from the weights alone."""
    size = WIDTH // HEADS
    raw = block.projection(block.norm(x))
    if isinstance(block, HSTUBlock):
        raw = F.silu(raw)
    gate, q, k, v = [raw.new_zeros(len(x), 0), *raw.split(WIDTH, 1)][-4:]
    rows = []
    for i, seen in enumerate(seen_by):
        heads = []
        for h in range(HEADS):
            at = slice(h * size, (h + 1) * size)
            scores = []
            for j in seen:
                score = q[i, at] @ k[j, at] / math.sqrt(size)
                if block.bias.by_position is not None:
                    score = score + block.bias.by_position[h, min(abs(i - j), PLACES - 1)]
                if block.bias.by_time is not None:
                    seconds = abs(times[i] - times[j]) // 1000
                    score = score + block.bias.by_time[h, (1 + seconds).bit_length() - 1]
                scores.append(score)
            weights = F.silu(torch.stack(scores)) if block.kind == "silu" else torch.softmax(torch.stack(scores), 0)
            heads.append(sum((w * v[j, at] for w, j in zip(weights, seen, strict=True)), x.new_zeros(size)))
        attended = torch.cat(heads)
        if isinstance(block, HSTUBlock):
            rows.append(x[i] + block.out(block.attention_norm(attended) * gate[i]))
        else:
            assert isinstance(block, TransformerBlock)
            middle = x[i] + block.out(attended)
            rows.append(middle + block.feed_forward(block.feed_forward_norm(middle)))
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_layer_equals_loops_over_events_gradients_included(
    kind: str, biased: bool, causal: bool, lengths: str
) -> None:
    block = build(kind, causal=causal, positions=PLACES if biased else 0, times=biased)
    its = LENGTHS[lengths]
    x = torch.randn(sum(its) + 2, WIDTH, dtype=torch.float64, requires_grad=True)
    times = torch.randint(0, 50_000, (len(x),)).sort().values
    out, _ = block(x, torch.tensor(its, dtype=torch.int64), times if biased else None)
    expected, begin = [], 0
    for length in its:
        seen = [list(range(i + 1 if causal else length)) for i in range(length)]
        piece = slice(begin, begin + length)
        expected.append(plain(block, x[piece], times[piece].tolist(), seen))
        begin += length
    if not begin:
        assert out.isfinite().all()
        return
    wanted = torch.cat(expected)
    torch.testing.assert_close(out[:begin], wanted)
    leaves, weights = [x, *block.parameters()], torch.randn_like(wanted)
    ours = torch.autograd.grad((out[:begin] * weights).sum(), leaves)
    theirs = torch.autograd.grad((wanted * weights).sum(), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("lengths", ["odd", "one", "empty"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_candidate_is_one_more_event_that_the_others_do_not_see(kind: str, biased: bool, lengths: str) -> None:
    block = build(kind, positions=PLACES if biased else 0, times=biased)
    its = LENGTHS[lengths]
    rows = [2, 1, 2, 0][: len(its)]
    x = torch.randn(sum(its), WIDTH, dtype=torch.float64, requires_grad=True)
    candidates = torch.randn(sum(rows), WIDTH, dtype=torch.float64, requires_grad=True)
    times, now = torch.randint(0, 50_000, (len(x),)).sort().values, torch.randint(60_000, 90_000, (sum(rows),))
    keys = block.keys(x)
    torch.testing.assert_close(keys, block(x, torch.tensor(its), times if biased else None)[1])
    given = (now, times) if biased else (None, None)
    out = block.candidates(candidates, keys, torch.tensor(rows), torch.tensor(its), *given)
    expected, row, begin = [], 0, 0
    for count, length in zip(rows, its, strict=True):
        for _ in range(count):
            joined = torch.cat([x[begin : begin + length], candidates[row : row + 1]])
            moments = [*times[begin : begin + length].tolist(), int(now[row])]
            seen = [[i] for i in range(length)] + [list(range(length + 1))]
            expected.append(plain(block, joined, moments, seen)[-1])
            row += 1
        begin += length
    wanted = torch.stack(expected)
    torch.testing.assert_close(out, wanted)
    leaves, weights = [x, candidates, *block.parameters()], torch.randn_like(wanted)
    ours = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    theirs = torch.autograd.grad((wanted * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", BLOCKS)
def test_checkpointing_keeps_less_and_changes_no_bit(kind: str) -> None:
    kept: list[int] = []
    found = []
    for checkpoint in (False, True):
        block = build(kind, checkpoint=checkpoint, dropout=0.5).float()
        x = torch.linspace(-1, 1, 40 * WIDTH).view(40, WIDTH).requires_grad_()
        torch.manual_seed(1)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: (s.append(t.numel()), t)[1], lambda t: t):
            out, keys = block(x, torch.tensor([30, 10]))
        found.append([out, *torch.autograd.grad(out.sum() + keys.sum(), [x, *block.parameters()])])
        kept.append(sum(sizes))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert kept[1] < kept[0] / 4


def test_wrong_options_are_named() -> None:
    with pytest.raises(OptionError, match=r"width=6 cannot be divided into heads=4; give a multiple, such as 32"):
        TransformerBlock(6, 4)
    with pytest.raises(OptionError, match=r"dropout is 1"):
        HSTUBlock(6, 2, dropout=1)
