"""Causal jagged attention, forward and backward, beside the best of torch's own ways on the same jagged input.

torch's ways, each with one thread and with all cores; the fastest is the peer:

    one call of scaled_dot_product_attention (SDPA) for each user
    users sorted by length and joined into chunks whose longest is at most `ratio` times the shortest, padded
    all users in one padded batch

SDPA on nested tensors has no CPU kernel in torch 2.13 ("No viable backend"). All ways read and write `[events, heads,
dim]`, as a layer does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hotrow
from hotrow.bench.harness import Result, alternate, lower
from hotrow.bench.sequences.workload import DIM, HEADS, cores, device, drawn_lengths, finished
from hotrow.nn.jagged import jagged_attention

WARMUP, REPEATS, TRIALS, RATIOS = 2, 15, 3, (1.1, 1.35, 2.0)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def results() -> Iterator[Result | str]:
    """The figures of this group."""
    before = torch.get_num_threads(), hotrow.threads()
    try:
        yield from _measured("sequences/attention", DIM)
        yield from _measured("sequences/attention/head_dim_64", 64 * HEADS)
    finally:
        torch.set_num_threads(before[0])
        hotrow.set_threads(before[1])


def _measured(name: str, dim: int) -> Iterator[Result | str]:
    lengths = drawn_lengths()
    events = int(lengths.sum())
    generator = torch.Generator().manual_seed(1)
    q, k, v, gradient = (torch.randn(events, HEADS, dim // HEADS, generator=generator).to(device()) for _ in range(4))
    hotrow.set_threads(cores())
    of_users = lengths.to(device())

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jagged_attention(q, k, v, of_users, of_users, causal=True)

    def step(attend: Attend, threads: int, i: int = 0) -> Tensor:
        torch.set_num_threads(threads)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        out.backward(gradient)
        return out.detach()

    expected, best, fastest = step(ours, cores()), math.inf, None
    for way, attend in torch_ways(lengths):
        for threads in sorted({1, cores()}) if device().type == "cpu" else (1,):
            yield f"{name}: torch, {way}, {threads} threads"
            torch.testing.assert_close(step(attend, threads), expected, atol=1e-4, rtol=1e-4)
            took = alternate([finished(lambda i, a=attend, t=threads: step(a, t))], 0, TRIALS)[0].median  # type: ignore[misc]
            if took < best:
                best, fastest = took, (attend, threads)
    assert fastest is not None
    yield f"{name}: in turns"
    sides = [finished(lambda i: step(ours, cores())), finished(lambda i: step(*fastest))]
    mine, peer = alternate(sides, WARMUP, REPEATS)
    yield lower(name, "ms", mine.median * 1e3, "sdpa", peer.median * 1e3, mine.spread)


def torch_ways(lengths: Tensor) -> Iterator[tuple[str, Attend]]:
    """torch's own ways to compute causal attention of jagged rows."""
    sizes = lengths.tolist()
    yield "a call for each user", lambda q, k, v: _by_user(sizes, q, k, v)
    for ratio in RATIOS:
        chunks = _chunks(lengths, ratio)
        yield f"chunks of similar length ({ratio})", lambda q, k, v, chunks=chunks: _by_chunk(chunks, q, k, v)  # type: ignore[misc]
    whole = _chunks(lengths, math.inf)
    yield "one padded batch", lambda q, k, v: _by_chunk(whole, q, k, v)


def _by_user(sizes: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for rows in zip(*(x.split(sizes) for x in (q, k, v)), strict=True):
        one_q, one_k, one_v = (x.transpose(0, 1)[None] for x in rows)
        outs.append(scaled_dot_product_attention(one_q, one_k, one_v, is_causal=True)[0].transpose(0, 1))
    return torch.cat(outs)


def _by_chunk(chunks: list[tuple[Tensor, Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    outs = []
    for rows, mask, _ in chunks:
        chunk_q, chunk_k, chunk_v = (x[rows].transpose(1, 2) for x in (q, k, v))
        outs.append(scaled_dot_product_attention(chunk_q, chunk_k, chunk_v, is_causal=True).transpose(1, 2)[mask])
    return torch.empty_like(v).index_copy(0, torch.cat([chunk[2] for chunk in chunks]), torch.cat(outs))


def _chunks(lengths: Tensor, ratio: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each chunk: rows `[users, longest]` (0 where padded), which are real, and the real ones."""
    order = torch.argsort(lengths)
    begins = lengths.cumsum(0) - lengths
    chunks: list[list[int]] = []
    for user in order.tolist():
        if not chunks or lengths[user] > ratio * lengths[chunks[-1][0]]:
            chunks.append([])
        chunks[-1].append(user)
    found = []
    for chunk in chunks:
        users = torch.tensor(chunk)
        place = torch.arange(int(lengths[users].max()))
        mask = place < lengths[users, None]
        rows = torch.where(mask, begins[users, None] + place, 0)
        found.append((rows.to(device()), mask.to(device()), rows[mask].to(device())))
    return found
