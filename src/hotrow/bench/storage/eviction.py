"""Eviction policies: which row to evict from a full DRAM tier. Hit rates, simulated in Python.

A policy is a function (trace, capacity, warmup) -> hits after the first `warmup` accesses. Every miss inserts its row,
one access at a time; pinned rows are not modelled. `optimal` (Belady) is the upper bound, `random` is the lower bound,
`lru` is the peer. This benchmark compares hit rates only; docs/decisions/0002-eviction.md has the cost of
a hit and of a row, and the choice.

The traces, each Zipf over a million keys with a capacity of 10% or 1% of them:

    plain    independent draws
    scan     one access in ten goes to a key that is never accessed again (and can never hit)
    drift    every 10,000 accesses a random 1% of the ranks exchange keys: most of the hot set is new at the end
    batched  plain, without the duplicates in each 4,096 draws: the store's accesses, with flatter frequencies
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hotrow.bench.harness import Result, higher

KEYS, SKEWS = 1_000_000, (1.05, 0.8)
CAPACITIES = (
    (0.1, 1_200_000, 800_000),
    (0.01, 600_000, 300_000),
)  # share of the keys, accesses, warm-up: both fill first
LENGTH = max(length for _, length, _ in CAPACITIES)
SCAN, DRIFT_EVERY, DRIFT_SHARE, BATCH = 0.1, 10_000, 0.01, 4096
HALVE_EVERY = 4  # decayed LFU halves its counts every 4 x capacity accesses
EMPTY = -1

Ints = NDArray[np.int64]
Policy = Callable[[Sequence[int], int, int], int]


def results() -> Iterator[Result | str]:
    """A row per trace, capacity and policy, with LRU on the same trace as the peer."""
    for skew in SKEWS:
        for kind, make in TRACES.items():
            trace = make(np.random.default_rng(0), skew).tolist()
            for share, length, warmup in CAPACITIES:
                name = f"eviction/zipf{skew}/{kind}/{share:.0%}"
                yield name
                percent = 100 / (length - warmup)
                hits = {policy: run(trace[:length], int(KEYS * share), warmup) for policy, run in POLICIES.items()}
                peer = hits.pop("lru") * percent
                for policy, count in hits.items():
                    yield higher(f"{name}/{policy}", "% hits", count * percent, "lru", peer)


def zipf(rng: np.random.Generator, skew: float, count: int) -> Ints:
    """Ranks 0 to KEYS - 1, drawn with weight (rank + 1) ** -skew."""
    weight = np.cumsum(np.arange(1, KEYS + 1, dtype=np.float64) ** -skew)
    ranks: Ints = np.searchsorted(weight, rng.random(count) * weight[-1], side="right").astype(np.int64)
    return ranks


def independent(rng: np.random.Generator, skew: float) -> Ints:
    """Independent draws."""
    return zipf(rng, skew, LENGTH)


def scan(rng: np.random.Generator, skew: float) -> Ints:
    """One access in ten, at random positions, goes to a key that appears nowhere else."""
    trace = zipf(rng, skew, LENGTH)
    places = np.flatnonzero(rng.random(LENGTH) < SCAN)
    trace[places] = KEYS + np.arange(len(places))
    return trace


def drift(rng: np.random.Generator, skew: float) -> Ints:
    """Ranks keep their weight, but every DRIFT_EVERY accesses some of them, hot and cold alike, exchange keys."""
    ranks = zipf(rng, skew, LENGTH)
    key_of = np.arange(KEYS)
    trace = np.empty_like(ranks)
    for start in range(0, LENGTH, DRIFT_EVERY):
        trace[start : start + DRIFT_EVERY] = key_of[ranks[start : start + DRIFT_EVERY]]
        moved = rng.choice(KEYS, int(KEYS * DRIFT_SHARE), replace=False)
        key_of[moved] = key_of[rng.permutation(moved)]
    return trace


def batched(rng: np.random.Generator, skew: float) -> Ints:
    """A trace without duplicates in a batch, as long as the other traces."""
    parts: list[Ints] = []
    while sum(map(len, parts)) < LENGTH:
        parts.append(unique_in_batches(zipf(rng, skew, 256 * BATCH), BATCH))
    return np.concatenate(parts)[:LENGTH]


def unique_in_batches(trace: Ints, batch: int) -> Ints:
    """Keep the first of each key in every `batch` accesses, in order."""
    parts = [trace[start : start + batch] for start in range(0, len(trace), batch)]
    return np.concatenate([part[np.sort(np.unique(part, return_index=True)[1])] for part in parts])


def optimal(trace: Sequence[int], capacity: int, warmup: int = 0) -> int:
    """Belady: evicts the row whose next access is furthest away."""
    never = len(trace)
    following = [never] * len(trace)
    seen: dict[int, int] = {}
    for now in range(len(trace) - 1, -1, -1):
        following[now] = seen.get(trace[now], never)
        seen[trace[now]] = now
    rows: set[int] = set()
    furthest: list[tuple[int, int]] = []  # (-next access, key); pairs that a later access replaced are never on top
    hits = 0
    for now, key in enumerate(trace):
        if key in rows:
            hits += now >= warmup
        else:
            if len(rows) == capacity:
                rows.remove(heapq.heappop(furthest)[1])
            rows.add(key)
        heapq.heappush(furthest, (-following[now], key))
    return hits


def lru(trace: Sequence[int], capacity: int, warmup: int = 0) -> int:
    """Evicts the row that was used longest ago. A hit moves its row in a list."""
    rows: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for now, key in enumerate(trace):
        if key in rows:
            rows.move_to_end(key)
            hits += now >= warmup
        else:
            if len(rows) == capacity:
                rows.popitem(last=False)
            rows[key] = None
    return hits


def clock(trace: Sequence[int], capacity: int, warmup: int = 0, *, top: int, batches: int = 0) -> int:
    """A hand sweeps the slots: it decrements a row's counter, and evicts the row if the counter is already 0.

    A new row starts at 0; a hit adds 1, up to `top`. With `batches`, 1/batches of the slots are evicted at once. New
    rows take freed slots, which are behind the hand, so the hand reaches each one only after a full turn.
    """
    victims = max(1, capacity // batches) if batches else 1
    slot_of: dict[int, int] = {}
    keys = [EMPTY] * capacity
    counter = bytearray(capacity)
    free = list(range(capacity - 1, -1, -1))
    hand = hits = 0
    for now, key in enumerate(trace):
        slot = slot_of.get(key, EMPTY)
        if slot != EMPTY:
            if counter[slot] < top:
                counter[slot] += 1
            hits += now >= warmup
            continue
        if not free:
            while len(free) < victims:
                if counter[hand]:
                    counter[hand] -= 1
                elif keys[hand] != EMPTY:  # a long sweep can come back to a slot that it has freed
                    del slot_of[keys[hand]]
                    keys[hand] = EMPTY
                    free.append(hand)
                hand = (hand + 1) % capacity
        slot = free.pop()
        slot_of[key] = slot
        keys[slot] = key
    return hits


def sieve(trace: Sequence[int], capacity: int, warmup: int = 0) -> int:
    """SIEVE: a hand moves from old to new rows, clears visited bits, and evicts the first row without one.

    Surviving rows keep their position, and new rows are inserted at the new end. Slot `capacity` is the sentinel of the
    insertion list: newer[end] is the oldest row, older[end] the newest.
    """
    end = capacity
    newer, older = [end] * (capacity + 1), [end] * (capacity + 1)
    visited = bytearray(capacity + 1)
    slot_of: dict[int, int] = {}
    keys = [EMPTY] * capacity
    hand, hits = end, 0
    for now, key in enumerate(trace):
        slot = slot_of.get(key, EMPTY)
        if slot != EMPTY:
            visited[slot] = 1
            hits += now >= warmup
            continue
        if len(slot_of) < capacity:
            slot = len(slot_of)
        else:
            while hand == end or visited[hand]:
                visited[hand] = 0
                hand = newer[hand]
            slot, hand = hand, newer[hand]
            newer[older[slot]], older[newer[slot]] = newer[slot], older[slot]
            del slot_of[keys[slot]]
        newest = older[end]
        older[slot], newer[slot] = newest, end
        newer[newest] = older[end] = slot
        slot_of[key] = slot
        keys[slot] = key
    return hits


def lfu(trace: Sequence[int], capacity: int, warmup: int = 0) -> int:
    """Decayed LFU: evicts the least used row, the oldest first among equals. All counts are halved periodically."""
    count_of: dict[int, int] = {}
    groups: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)  # the rows of each count
    least = hits = 0
    for now, key in enumerate(trace):
        if now % (HALVE_EVERY * capacity) == 0:
            halved: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
            for count in sorted(groups):
                halved[count // 2].update(groups[count])
            groups, least = halved, 0
            count_of = {key: count // 2 for key, count in count_of.items()}
        count = count_of.get(key, 0)
        if key in count_of:
            hits += now >= warmup
            del groups[count][key]
        else:
            if len(count_of) == capacity:
                while not groups[least]:
                    least += 1
                victim, _ = groups[least].popitem(last=False)
                del count_of[victim]
            least = min(least, 1)
        count_of[key] = count + 1
        groups[count + 1][key] = None
    return hits


def s3fifo(trace: Sequence[int], capacity: int, warmup: int = 0) -> int:
    """S3-FIFO: new rows wait in a small queue, those used twice there or missed again soon enter the main one.

    The small queue has 10% of the rows, the main one is a 2-bit CLOCK, and the ghost remembers the keys of as many rows
    evicted from the small queue as the main one holds.
    """
    small_size = max(1, capacity // 10)
    ghost_size = capacity - small_size
    counter: dict[int, int] = {}  # of every row
    small: deque[int] = deque()
    main: deque[int] = deque()
    ghost: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for now, key in enumerate(trace):
        if key in counter:
            counter[key] = min(3, counter[key] + 1)
            hits += now >= warmup
            continue
        while len(counter) == capacity:
            if len(small) >= small_size or not main:
                row = small.popleft()
                if counter[row] > 1:
                    counter[row] = 0
                    main.append(row)
                else:
                    del counter[row]
                    ghost[row] = None
                    if len(ghost) > ghost_size:
                        ghost.popitem(last=False)
            else:
                row = main.popleft()
                if counter[row]:
                    counter[row] -= 1
                    main.append(row)
                else:
                    del counter[row]
        counter[key] = 0
        if key in ghost:
            del ghost[key]
            main.append(key)
        else:
            small.append(key)
    return hits


def probation(trace: Sequence[int], capacity: int, warmup: int = 0) -> int:
    """S3-FIFO over a slot array: no row moves, and an evicted row's own stamp replaces the ghost queue.

    New rows wait in a ring of slot numbers, which the hand skips. At the end of the ring, a row with two hits stays and
    leaves the ring; any other row is evicted. A row that returns within as many evictions as the main part has slots
    skips the ring.
    """
    ring_size = max(1, capacity // 10)
    recent = capacity - ring_size
    slot_of: dict[int, int] = {}
    keys = [EMPTY] * capacity
    counter = bytearray(capacity)
    waiting = bytearray(capacity)
    ring: deque[int] = deque()
    evicted_at: dict[int, int] = {}  # in the store: part of the row's record in the tier below
    hand = evictions = hits = 0
    for now, key in enumerate(trace):
        slot = slot_of.get(key, EMPTY)
        if slot != EMPTY:
            if counter[slot] < 3:
                counter[slot] += 1
            hits += now >= warmup
            continue
        if len(slot_of) < capacity:
            slot = len(slot_of)
        while slot == EMPTY:
            if len(ring) >= ring_size:
                oldest = ring.popleft()
                waiting[oldest] = 0
                if counter[oldest] > 1:
                    counter[oldest] = 0
                else:
                    slot = oldest
                continue
            if not waiting[hand]:
                if counter[hand]:
                    counter[hand] -= 1
                else:
                    slot = hand
            hand = (hand + 1) % capacity
        if keys[slot] != EMPTY:
            del slot_of[keys[slot]]
            evicted_at[keys[slot]] = evictions
            evictions += 1
        slot_of[key] = slot
        keys[slot] = key
        counter[slot] = 0
        if evictions - evicted_at.get(key, -capacity) > recent:
            waiting[slot] = 1
            ring.append(slot)
    return hits


def random_policy(trace: Sequence[int], capacity: int, warmup: int = 0) -> int:
    """Evicts a random row."""
    draw = random.Random(0).random
    rows: set[int] = set()
    keys: list[int] = []
    hits = 0
    for now, key in enumerate(trace):
        if key in rows:
            hits += now >= warmup
            continue
        if len(keys) < capacity:
            keys.append(key)
        else:
            slot = int(draw() * capacity)
            rows.remove(keys[slot])
            keys[slot] = key
        rows.add(key)
    return hits


TRACES: dict[str, Callable[[np.random.Generator, float], Ints]] = {
    "plain": independent,
    "scan": scan,
    "drift": drift,
    "batched": batched,
}

POLICIES: dict[str, Policy] = {
    "optimal": optimal,
    "lru": lru,
    "clock1": partial(clock, top=1),
    "clock2": partial(clock, top=3),
    "clock2_batch": partial(clock, top=3, batches=64),
    "sieve": sieve,
    "lfu": lfu,
    "s3fifo": s3fifo,
    "probation": probation,
    "random": random_policy,
}
