"""What each kernel must compute, in plain torch and Python: slow, but short and easy to check."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from hotrow.kernels.index.key_hash import GOLDEN, MULTIPLIERS
from hotrow.kernels.index.sets import CROWDED, SPILL, WAYS, SetIndex
from hotrow.kernels.rows.layout import Items, RowLayout, Source

# --- the index: mixing, find, dedup, insert, touch ------------------------------------------------------------------


def _int64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hash_key(keys: torch.Tensor) -> torch.Tensor:
    """hash_key of core/hash/hash.h; the 64 bits as int64."""
    x = keys + _int64(GOLDEN)
    x = (x ^ _shift(x, 30)) * _int64(MULTIPLIERS[0])
    x = (x ^ _shift(x, 27)) * _int64(MULTIPLIERS[1])
    return x ^ _shift(x, 31)


def unsigned_order(hashes: torch.Tensor) -> torch.Tensor:
    """int64 values that compare as the hashes do when unsigned."""
    return hashes ^ _int64(1 << 63)


def set_of(hashes: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The first choice of each hash in a table that owns `count` sets from `first` on. Requires: count < 2^31."""
    return first + (_shift(hashes, 32) * count >> 32)


def second_set_of(hashes: torch.Tensor, first: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """The second choice."""
    return first + ((hashes & 0xFFFFFFFF) * count >> 32)


def tables_at(begins: torch.Tensor, n: int) -> torch.Tensor:
    """The table of each of n positions."""
    return torch.bucketize(torch.arange(n, device=begins.device), begins[1:-1].long(), right=True)


def find(index: SetIndex, keys: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Slots of keys, -1 where absent."""
    found = torch.full_like(keys, -1)
    for choice in (second_set_of, set_of):
        sets = choice(hash_key(keys), index.first[tables], index.count[tables])
        match = index.keys[sets] == keys[:, None]
        found = torch.where(match.any(dim=1), sets * WAYS + match.int().argmax(dim=1), found)
    return found.int()


def find_rows(slots: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Rows at slots, zeros where the slot is -1."""
    return torch.where(slots[:, None] >= 0, rows[slots.clamp(min=0).long(), :dim], 0)


def compact(slots: torch.Tensor) -> torch.Tensor:
    """Rising positions of the slots below 0."""
    return (slots < 0).nonzero().flatten().int()


def dedup(keys: torch.Tensor, tables: torch.Tensor | None) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Unique (table, key) pairs by table, then by unsigned hash; how often each occurs; the place of each input."""
    of = [0] * len(keys) if tables is None else tables.tolist()
    order = unsigned_order(hash_key(keys)).tolist()
    entries = list(zip(of, order, keys.tolist(), strict=True))
    unique = sorted(set(entries))
    place = {entry: i for i, entry in enumerate(unique)}
    inverse = [place[entry] for entry in entries]
    counts = [0] * len(unique)
    for i in inverse:
        counts[i] += 1
    return [(table, key) for table, _, key in unique], counts, inverse


def target(index: SetIndex, keys: torch.Tensor, tables: torch.Tensor, settled: int) -> torch.Tensor:
    """The set each new key goes to: its first choice, or the second where that is well filled and it is less so."""
    occupied = index.occupied().view(-1, WAYS)
    taken = occupied.sum(dim=1)
    may = (~occupied | (index.pins.reshape(-1, WAYS) <= settled)).sum(dim=1)
    first, second = (c(hash_key(keys), index.first[tables], index.count[tables]) for c in (set_of, second_set_of))
    crowded = torch.minimum(may[first], may[second]) < CROWDED
    better = torch.where(crowded, may[second] > may[first], taken[second] < taken[first])
    return torch.where((taken[first] >= SPILL) & better, second, first)


def choose(index: SetIndex, keys: torch.Tensor, tables: torch.Tensor, settled: int) -> list[int]:
    """The slot of each new key: the r-th of a set takes the r-th best way, and -1 when no way is left."""
    occupied = index.occupied().tolist()
    pins, scores = index.pins.tolist(), index.scores.tolist()
    sets = target(index, keys, tables, settled).tolist()
    free: dict[int, list[int]] = {}
    slots = []
    for s in sets:
        if s not in free:
            ways = range(s * WAYS, s * WAYS + WAYS)
            empty = [slot for slot in ways if not occupied[slot]]
            cold = sorted((scores[slot], slot) for slot in ways if occupied[slot] and pins[slot] <= settled)
            free[s] = empty + [slot for _, slot in cold]
        slots.append(free[s].pop(0) if free[s] else -1)
    return slots


def touch(score: float, batch: int, policy: str, half_life: float) -> float:
    """A slot's score after a batch that used it."""
    if policy == "lru":
        return float(batch)
    now = batch / half_life
    high, low = max(score, now), min(score, now)
    return high + math.log2(1 + 2 ** (low - high))


# --- the rows: gather, runs, update, counts, rounding ---------------------------------------------------------------


def row_places(source: Source, slots: torch.Tensor) -> list[torch.Tensor]:
    """The row of each slot, as a view."""
    cache = source.capacity
    return [source.rows[s] if s < cache else source.extra[s - cache] for s in slots.tolist()]  # type: ignore[index]


def row_values(source: Source, layout: RowLayout, slots: torch.Tensor) -> torch.Tensor:
    """Values in fp32, zeros where the slot is -1."""
    every = source.rows if source.extra is None else torch.cat([source.rows, source.extra])
    values = layout.values(every).float()
    if layout.dtype == "int8":
        scale, bias = every[:, layout.state_offset, None], every[:, layout.state_offset + 1, None]
        values = values * scale + bias
    return torch.where(slots[:, None] >= 0, values[slots.clamp(min=0).long()], 0.0)


def pool(values: torch.Tensor, offsets: torch.Tensor | None, scales: torch.Tensor | None) -> torch.Tensor:
    """Rows [N, dim] to items, each bag summed in order."""
    if scales is not None:
        values = values * scales[:, None]
    if offsets is None:
        return values
    begins, lengths = offsets[:-1].long(), offsets.diff()
    out = torch.zeros(len(lengths), values.shape[1], device=values.device)
    for i in range(max(lengths.tolist(), default=0)):
        more = lengths > i
        out[more] = out[more] + values[begins[more] + i]
    return out


def group(slots: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    """Positions by slot and then by place, the start of each run and the end of all, and the slots of the runs."""
    values = slots.tolist()
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    starts = [i for i in range(len(order)) if i == 0 or values[order[i]] != values[order[i - 1]]]
    return order, [*starts, len(order)], [values[order[start]] for start in starts]


def sum_runs(
    slots: torch.Tensor, items: Items, gradients: Sequence[torch.Tensor | None], dim: int, piece: int
) -> tuple[torch.Tensor, list[bool]]:
    """The summed gradient of each run [runs, dim], and whether it has any; long runs piece by piece."""
    order, starts, _ = group(slots)
    begins = items.begins.tolist()
    item_of = items.item_of.tolist() if items.item_of is not None else list(range(len(order)))
    features = [f for f in range(len(begins) - 1) for _ in range(begins[f], begins[f + 1])]
    sums, given = [], []
    for start, end in itertools.pairwise(starts):
        partials = []
        for first in range(start, end, piece):
            rows = []
            for position in order[first : min(first + piece, end)]:
                item = item_of[position]
                matrix = gradients[features[item]]
                if matrix is not None:
                    row = matrix[item - begins[features[item]]].float()
                    rows.append(row if items.scales is None else row * items.scales[position])
            if rows:
                partials.append(_in_order(rows))
        given.append(bool(partials))
        sums.append(_in_order(partials) if partials else torch.zeros(dim))
    return torch.stack(sums) if sums else torch.zeros(0, dim), given


def _in_order(rows: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, rows)


def philox(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """philox of core/random/philox.h, on unsigned numbers."""
    word = 0xFFFFFFFF
    k0, k1 = key & word, key >> 32 & word
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & word, a >> 32 ^ c3 ^ k1, a & word
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def draw(stream: int, key: int, step: int, block: int) -> tuple[int, int, int, int]:
    """draw of core/random/philox.h, of signed or unsigned numbers."""
    return philox((key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF, step, block), stream & 0xFFFFFFFFFFFFFFFF)


def add_count(code: int, seen: int, stream: int, key: int, step: int) -> int:
    """add_count of core/rows/row_header.h."""
    total = ((code & 4095) << (code >> 12)) + seen
    exponent = 0
    while exponent < 15 and total >> exponent > 4095:
        exponent += 1
    mantissa, rest = total >> exponent, total & ((1 << exponent) - 1)
    if rest and draw(stream, key, step, 0)[0] >> (32 - exponent) < rest:
        mantissa += 1
    if mantissa > 4095:
        if exponent == 15:
            return 15 << 12 | 4095
        mantissa, exponent = mantissa >> 1, exponent + 1
    return exponent << 12 | mantissa


def draws(stream: int, key: int, step: int, dim: int) -> list[int]:
    """A row's random words: element e has word e % 4 of block e / 4."""
    return [word for block in range(-(-dim // 4)) for word in draw(stream, key, step, block)][:dim]


def stochastic_round(value: torch.Tensor, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounds fp32 to a multiple of the type's last place: down, or up with the probability of the cut-off part."""
    digits, lowest, cut = (7, -126, 16) if dtype == torch.bfloat16 else (10, -14, 13)
    size = value.double().abs()
    exponent = torch.frexp(size).exponent - 1
    place = torch.ldexp(torch.ones_like(size), exponent.clamp(min=lowest) - digits)
    whole = (size / place).floor()
    part = ((size / place - whole) * 2**cut).floor()
    up = part + (bits & (2**cut - 1)) >= 2**cut
    rounded = ((whole + up) * place).clamp(max=torch.finfo(dtype).max)
    return torch.where(value.isfinite(), rounded.copysign(value.double()), value.double()).to(dtype)


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes uint8 [n, dim], scales [n] and biases [n] of fp32 values: value = code * scale + bias."""
    bias, high = values.min(dim=1).values, values.max(dim=1).values
    scale = (high - bias) / 255
    codes = ((values - bias[:, None]) / torch.where(scale > 0, scale, 1.0)[:, None] + 0.5).clamp(0, 255)
    return codes.to(torch.uint8), scale, bias
