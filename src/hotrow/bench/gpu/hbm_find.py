"""W-find: find and insert-and-evict in HBM beside HierarchicalKV's figures, and the hit rate of sets of eight ways.

An index of 128 Mi slots, a million keys per call, drawn uniformly from those present and fresh for every call, so that
no cache helps; at loads 0.5, 0.75 and 1.0. HierarchicalKV (hkv) was measured on the same GPU with the same work; its
figures are in HKV.

Bytes that must move per key, and the limit at 4.3 TB/s: slots, 8 + 64 + 4 = 76 (57 billion keys/s); rows of dim 8, 140
(31) and of dim 32, 332 (13); insert-and-evict at dim 32, 640 to 900 with its sort (6.7 to 4.8). Random 64-byte reads
over gigabytes reach about a third of that: 18 to 20 billion keys/s for slots alone, 8.7 with rows of dim 32.

`hit_rate`: batches of Zipf 1.05 draws over ten times the capacity are looked up in our cache and in an exact, fully
associative one of the same size and policy. The unique keys of each batch are counted once both caches are full.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hotrow.bench.gpu import hkv_operations
from hotrow.bench.gpu.device_clock import bench_device, timed
from hotrow.bench.gpu.hkv_operations import find_rows, insert_and_evict
from hotrow.bench.harness import Result, Timing, higher
from hotrow.kernels.index import find as find_module
from hotrow.kernels.index.dedup import compact_keys, dedup
from hotrow.kernels.index.find import find
from hotrow.kernels.index.insert import choose_slots, erase, insert_keys
from hotrow.kernels.index.sets import POLICIES, WAYS, SetIndex
from hotrow.kernels.index.touch import initial_score, touch

LOADS = (0.5, 0.75, 1.0)
HKV = {
    "find/slots": (6.7, 6.0, 4.5),
    "find/dim8": (3.55, 3.62, 3.34),
    "find/dim32": (3.46, 3.40, 3.56),
    "insert_and_evict": (1.72, 1.58, 0.80),
}
WARMUP, REPEATS = 5, 20
HALF_LIFE, ZIPF, HIT_BAR = 100.0, 1.05, 0.97


def results(
    capacity: int = 128 << 20,
    keys: int = 1 << 20,
    repeats: int = REPEATS,
    cached: int = 1 << 20,
    draws: int = 1 << 18,
    batches: int = 80,
) -> Iterator[Result | str]:
    """The results, each after a status line."""
    bench = Bench(capacity, keys, repeats)
    for i, load in enumerate(LOADS):
        yield f"filling {capacity:,} slots to {load:.0%}"
        bench.fill(load)
        for name, time_it in bench.sides.items():
            yield f"{name} at load {load}"
            took = time_it(bench)
            yield higher(
                f"hbm/{name}/{load}",
                "billion keys/s",
                keys / took.median / 1e9,
                "hkv",
                HKV[name][i],
                took.spread,
            )
    del bench
    for policy in POLICIES:
        yield f"hit rate of {policy}"
        ours, full = hit_rates(policy, cached, draws, batches)
        yield higher(f"hbm/hit_rate/{policy}", "of its hit rate", ours / full, "fully_associative", HIT_BAR)


class Bench:
    """An index that fills up, rows beside it, and the calls to time."""

    def __init__(self, capacity: int, keys: int, repeats: int) -> None:
        self.device = bench_device()
        self.index = SetIndex([capacity // WAYS], self.device)
        self.rows = {dim: torch.rand(self.index.capacity, dim, device=self.device) for dim in (8, 32)}
        self.begins = torch.tensor([0, keys], dtype=torch.int32, device=self.device)
        self.keys, self.repeats = keys, repeats
        self.warmup = min(WARMUP, repeats)
        self.used, self.batch = 0, 0
        self.sides: dict[str, Callable[[Bench], Timing]] = {
            "find/slots": Bench.slots,
            "find/dim8": lambda bench: bench.values(8),
            "find/dim32": lambda bench: bench.values(32),
            "insert_and_evict": Bench.inserts,
        }

    def fresh(self, n: int) -> torch.Tensor:
        """Keys that were never in the index."""
        self.used += n
        return torch.arange(self.used - n, self.used, device=self.device) * 0x9E3779B97F4A7C1

    def present(self, n: int) -> torch.Tensor:
        """Keys drawn uniformly from the index."""
        slots = self.index.occupied().nonzero().view(-1)
        return self.index.keys.view(-1)[slots[torch.randint(len(slots), (n,), device=self.device)]]

    def fill(self, load: float) -> None:
        """Insert until this share of the slots is taken, to a thousandth."""
        target = load * self.index.capacity
        while (left := int(target - int(self.index.occupied().sum()))) > target / 1000:
            self.batch += 1
            new = dedup(self.fresh(min(max(left, self.keys), 1 << 22)))
            slots = choose_slots(self.index, new.keys, None, new.number, self.batch - 1).slots
            insert_keys(self.index, new.keys, slots, new.number, self.batch, float(self.batch))

    def slots(self) -> Timing:
        """Time find without rows."""
        inputs = [self.present(self.keys) for _ in range(self.warmup + self.repeats)]
        return timed(self.device, lambda keys: find(self.index, keys, self.begins), inputs, self.warmup)

    def values(self, dim: int) -> Timing:
        """Time find with the rows."""
        inputs = [self.present(self.keys) for _ in range(self.warmup + self.repeats)]
        out = torch.empty(self.keys, dim, device=self.device)
        rows = self.rows[dim]
        return timed(
            self.device, lambda keys: find_rows(self.index, rows, dim, keys, out, self.begins), inputs, self.warmup
        )

    def inserts(self) -> Timing:
        """insert_and_evict of absent keys. Keys inserted into empty ways are erased again, so that the load stays."""
        values = torch.rand(self.keys, 32, device=self.device)
        inputs = [self.fresh(self.keys) for _ in range(self.warmup + self.repeats)]
        full = float(self.index.occupied().float().mean()) > 0.99

        def insert(keys: torch.Tensor) -> torch.Tensor:
            self.batch += 1
            settled = self.batch - 1
            return insert_and_evict(self.index, self.rows[32], keys, values, batch=self.batch, settled=settled).slots

        undo = None if full else lambda slots: erase(self.index, slots)
        return timed(self.device, insert, inputs, self.warmup, undo)


def hit_rates(policy: str, capacity: int, draws: int, batches: int) -> tuple[float, float]:
    """Hit rates of our cache and of the fully associative one over the last half of the batches."""
    device, keys = bench_device(), 10 * capacity
    caches = (SetCache(policy, capacity, device), FullCache(policy, capacity, keys, device))
    hits, requested = [0, 0], 0
    generator = torch.Generator(device).manual_seed(0)
    for t in range(1, batches + 1):
        unique = torch.unique(zipf(draws, keys, generator))
        found = [cache.batch(unique, t) for cache in caches]
        if t > batches // 2:
            hits = [a + b for a, b in zip(hits, found, strict=True)]
            requested += len(unique)
    if any(cache.filled() < 0.99 for cache in caches):
        raise RuntimeError(f"the caches are not full after {batches} batches of {draws} draws; give more batches")
    return hits[0] / requested, hits[1] / requested


def zipf(n: int, keys: int, generator: torch.Generator) -> torch.Tensor:
    """The ids of W-gpu before they are scattered over the key space: 0 is the most frequent."""
    u = torch.rand(n, dtype=torch.float64, device=generator.device, generator=generator)
    x: torch.Tensor = (u * ((keys + 1) ** (1 - ZIPF) - 1) + 1) ** (1 / (1 - ZIPF))
    return (x.long() - 1).clamp(0, keys - 1)


class SetCache:
    """Our index, used as the HBM tier uses it."""

    def __init__(self, policy: str, capacity: int, device: torch.device) -> None:
        self.index, self.policy = SetIndex([capacity // WAYS], device), policy

    def batch(self, keys: torch.Tensor, t: int) -> int:
        """How many of the unique keys were present. Afterwards all are, except where their sets are full of pinned
        keys."""
        begins = torch.tensor([0, len(keys)], dtype=torch.int32, device=keys.device)
        missing = torch.zeros(1, dtype=torch.int32, device=keys.device)
        slots = find(self.index, keys, begins, t, missing)
        count = int(missing)
        new = dedup(compact_keys(slots, count, keys, begins)[1])
        chosen = choose_slots(self.index, new.keys, new.tables, new.number, t - 1, self.policy).slots
        insert_keys(self.index, new.keys, chosen, new.number, t, initial_score(t, self.policy, HALF_LIFE))
        touch(self.index, slots, None, t, self.policy, HALF_LIFE)
        return len(keys) - count

    def filled(self) -> float:
        return float(self.index.occupied().float().mean())


@dataclass
class FullCache:
    """Exact and fully associative: evicts the lowest scores of the whole cache, never the batch's own keys."""

    policy: str
    capacity: int
    keys: int
    device: torch.device
    slot_of: torch.Tensor = field(init=False)  # of every key; -1 where absent
    key_of: torch.Tensor = field(init=False)  # of every slot; -1 where empty
    scores: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.slot_of = torch.full((self.keys,), -1, device=self.device)
        self.key_of = torch.full((self.capacity,), -1, device=self.device)
        self.scores = torch.full((self.capacity,), float("-inf"), device=self.device)

    def batch(self, keys: torch.Tensor, t: int) -> int:
        """As SetCache.batch."""
        slots = self.slot_of[keys]
        held, new = slots[slots >= 0], keys[slots < 0]
        now = torch.tensor(initial_score(t, self.policy, HALF_LIFE), device=self.device)
        self.scores[held] = torch.logaddexp2(self.scores[held], now) if self.policy == "lfu" else now
        order = self.scores.clone()
        order[held] = float("inf")
        taken = order.argsort(stable=True)[: min(len(new), self.capacity - len(held))]
        evicted = self.key_of[taken]
        self.slot_of[evicted[evicted >= 0]] = -1
        new = new[: len(taken)]
        self.key_of[taken], self.slot_of[new], self.scores[taken] = new, taken, now
        return len(held)

    def filled(self) -> float:
        return float((self.key_of >= 0).float().mean())


def sweep(capacity: int = 128 << 20, keys: int = 1 << 20) -> Iterator[str]:
    """The speed of each block size on this GPU at load 1.0, a line each: `for line in sweep(): print(line)`."""
    bench = Bench(capacity, keys, REPEATS)
    bench.fill(1.0)

    def line(name: str, side: Callable[[Bench], Timing], module: Any, **values: int) -> str:
        before = {key: getattr(module, key) for key in values}
        try:
            for key, value in values.items():
                setattr(module, key, value)
            took = side(bench)
        finally:
            for key, value in before.items():
                setattr(module, key, value)
        return f"{name:18} {values} {keys / took.median / 1e9:.2f} billion keys/s, {took.median * 1e6:.0f} us"

    for block, warps in itertools.product((64, 128, 256, 512, 1024), (2, 4, 8)):
        yield line("find/slots", Bench.slots, find_module, BLOCK=block, WARPS=warps)
    for dim, elements, warps in itertools.product((8, 32), (1024, 2048, 4096, 8192), (2, 4, 8)):
        values = {"FIND_BLOCK": 1024, "FIND_ELEMENTS": elements, "FIND_WARPS": warps}
        yield line(f"find/dim{dim}", lambda b, dim=dim: b.values(dim), hkv_operations, **values)  # type: ignore[misc]
    for block, warps, elements in itertools.product((64, 128, 256, 512), (4, 8), (2048, 4096)):
        sizes = {"INSERT_BLOCK": block, "INSERT_WARPS": warps, "SWAP_ELEMENTS": elements}
        yield line("insert_and_evict", Bench.inserts, hkv_operations, **sizes)
