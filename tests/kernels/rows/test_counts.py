from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernels import reference

from hotrow.kernels.rows.counts import add_count


@triton.jit
def _add_kernel(codes, seen, streams, keys, out, step, n, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < n
    code = tl.load(codes + at, mask=real, other=0)
    more = tl.load(seen + at, mask=real, other=0)
    stream, key = tl.load(streams + at, mask=real, other=0), tl.load(keys + at, mask=real, other=0)
    tl.store(out + at, add_count(code, more, stream, key, step), mask=real)


def _add(codes: torch.Tensor, seen: torch.Tensor, streams: torch.Tensor, keys: torch.Tensor, step: int) -> torch.Tensor:
    out = torch.empty_like(codes)
    _add_kernel[(triton.cdiv(len(codes), 256),)](codes, seen, streams, keys, out, step, len(codes), BLOCK=256)
    return out


EDGES = [0, 1, 4094, 4095, 4096 + 2048, 4096 + 4095, 15 * 4096 + 2048, 15 * 4096 + 4094, 15 * 4096 + 4095]
SEEN = [0, 1, 2, 7, 4095, 4096, 100_000, 134_000_000, 2**31 - 1]


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1])
def test_codes_are_those_of_the_core(step: int, device: torch.device) -> None:
    draws = torch.Generator().manual_seed(step)
    pairs = torch.cartesian_prod(torch.tensor(EDGES), torch.tensor(SEEN))
    random = torch.stack([torch.randint(0, 65536, (400,), generator=draws),
                          torch.randint(0, 20_000, (400,), generator=draws)], dim=1)  # fmt: skip
    both = torch.cat([pairs, random]).int()
    codes, seen = both.t().contiguous()
    n = len(both)
    keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=draws)
    keys[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    streams = torch.randint(-(2**63), 2**63 - 1, (n,), generator=draws)
    got = _add(codes.to(device), seen.to(device), streams.to(device), keys.to(device), step)
    expected = [reference.add_count(c, s, stream, key, step) for (c, s), stream, key in
                zip(both.tolist(), streams.tolist(), keys.tolist(), strict=True)]  # fmt: skip
    assert got.tolist() == expected


def test_philox_has_the_published_vectors() -> None:
    """Random123's known answers for philox4x32 with 10 rounds."""
    word = 0xFFFFFFFF
    assert reference.philox((0, 0, 0, 0), 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert reference.philox((word,) * 4, word << 32 | word) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def test_counts_stay_near_the_truth(device: torch.device) -> None:
    """Many keys seen a thousand at a time: the mean of the codes is the true count."""
    n = 2000
    codes = torch.full((n,), 4000, dtype=torch.int32, device=device)
    seen = torch.full_like(codes, 1001)
    keys, streams = torch.arange(n, device=device), torch.full((n,), 5, dtype=torch.int64, device=device)
    for step in range(3):
        codes = _add(codes, seen, streams, keys, step)
    decoded = (codes & 4095).double() * 2.0 ** (codes >> 12).double()
    assert decoded.mean().item() == pytest.approx(4000 + 3003, rel=1e-3)
