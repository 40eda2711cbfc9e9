"""Each policy does what its name says: by hand, against a naive version, and never better than the optimum."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow.bench.harness import Result
from hotrow.bench.storage import eviction
from hotrow.bench.storage.eviction import POLICIES, Policy, clock, lfu, lru, optimal, probation, s3fifo, sieve

traces = st.lists(st.integers(0, 9), max_size=60)
capacities = st.integers(1, 12)
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
online = {name: policy for name, policy in POLICIES.items() if name != "optimal"}
every_online_policy = pytest.mark.parametrize("policy", online.values(), ids=online)


@every_policy
@given(trace=traces, capacity=capacities)
def test_no_policy_hits_more_than_the_optimum(policy: Policy, trace: list[int], capacity: int) -> None:
    assert policy(trace, capacity, 0) <= optimal(trace, capacity)


@given(trace=st.lists(st.integers(0, 4), max_size=9), capacity=st.integers(1, 3))
def test_optimum_equals_a_search_of_every_choice(trace: list[int], capacity: int) -> None:
    @cache
    def best(now: int, rows: frozenset[int]) -> int:
        if now == len(trace):
            return 0
        key = trace[now]
        if key in rows:
            return 1 + best(now + 1, rows)
        if len(rows) < capacity:
            return best(now + 1, rows | {key})
        return max(best(now + 1, rows - {victim} | {key}) for victim in rows)

    assert optimal(trace, capacity) == best(0, frozenset())


@every_policy
@given(trace=traces)
def test_with_room_for_all_only_first_accesses_miss(policy: Policy, trace: list[int]) -> None:
    assert policy(trace, 10, 0) == len(trace) - len(set(trace))


@every_policy
@given(trace=traces)
def test_with_room_for_one_only_repeats_hit(policy: Policy, trace: list[int]) -> None:
    assert policy(trace, 1, 0) == sum(a == b for a, b in pairwise(trace))


@every_online_policy
def test_uniform_draws_hit_by_the_share_of_rows_held(policy: Policy) -> None:
    trace = np.random.default_rng(1).integers(0, 400, 40_000).tolist()
    assert policy(trace, 128, 10_000) / 30_000 == pytest.approx(128 / 400, abs=0.015)


@every_online_policy
@given(trace=traces, capacity=capacities, warmup=st.integers(0, 60))
def test_hits_of_the_warmup_are_left_out(policy: Policy, trace: list[int], capacity: int, warmup: int) -> None:
    assert policy(trace, capacity, warmup) == policy(trace, capacity, 0) - policy(trace[:warmup], capacity, 0)


@given(trace=traces, capacity=capacities)
def test_lru_hits_when_few_other_keys_came_between(trace: list[int], capacity: int) -> None:
    def hit(now: int) -> bool:
        if trace[now] not in trace[:now]:
            return False
        last = max(i for i in range(now) if trace[i] == trace[now])
        return len(set(trace[last:now])) <= capacity

    assert lru(trace, capacity) == sum(map(hit, range(len(trace))))


@pytest.mark.parametrize("top", [1, 3])
@given(trace=traces, capacity=capacities)
def test_clock_equals_a_queue_that_takes_used_rows_back(top: int, trace: list[int], capacity: int) -> None:
    counter: dict[int, int] = {}
    queue: deque[int] = deque()
    hits = 0
    for key in trace:
        if key in counter:
            counter[key] = min(top, counter[key] + 1)
            hits += 1
            continue
        while len(queue) == capacity:
            oldest = queue.popleft()
            counter[oldest] -= 1
            if counter[oldest] < 0:
                del counter[oldest]
            else:
                queue.append(oldest)
        counter[key] = 0
        queue.append(key)
    assert clock(trace, capacity, top=top) == hits


def test_clock_in_batches_evicts_several_rows_at_once() -> None:
    trace = letters("abcd a e c")  # inserting e evicts b, and with it c
    assert clock(trace, 4, top=3) == 2
    assert clock(trace, 4, top=3, batches=2) == 1


def test_clock_in_batches_passes_over_the_slots_it_has_just_freed() -> None:
    # The sweep for e evicts d at once, and needs three more turns to evict a.
    assert clock(letters("abcd aaabbbccc e bc d a"), 4, top=3, batches=2) == 9 + 2


@given(trace=traces, capacity=capacities)
def test_sieve_equals_a_list_from_old_to_new(trace: list[int], capacity: int) -> None:
    rows: list[int] = []
    visited: set[int] = set()
    hand = hits = 0
    for key in trace:
        if key in rows:
            visited.add(key)
            hits += 1
            continue
        if len(rows) == capacity:
            while rows[hand] in visited:
                visited.remove(rows[hand])
                hand = (hand + 1) % capacity
            del rows[hand]
            hand = 0 if hand == len(rows) else hand
        rows.append(key)
    assert sieve(trace, capacity) == hits


def test_lfu_keeps_what_was_used_most_until_its_count_decays() -> None:
    assert lfu(letters("aab c a"), 2) == 2
    assert lru(letters("aab c a"), 2) == 1
    # After eight accesses a's 7 becomes 3, so four more uses of b exceed it: inserting c evicts a.
    assert lfu(letters("aaaaaaab bbbb c b"), 2) == 6 + 4 + 1


@pytest.mark.parametrize("policy", [s3fifo, probation])
def test_rows_used_twice_or_missed_again_soon_outlive_a_scan(policy: Policy) -> None:
    fill, walk = list(range(10)), list(range(100, 130))
    assert policy([*fill, 5, 5, *walk, 5], 10, 0) == 3
    assert policy([*fill, 5, *walk, 5], 10, 0) == 1  # once is not enough
    assert policy([*fill, 10, 0, *walk, 0], 10, 0) == 1  # 10 evicts 0, which is inserted again at once
    assert lru([*fill, 10, 0, *walk, 0], 10) == 0


def test_batches_lose_their_duplicates_in_order() -> None:
    trace = np.array([7, 7, 2, 7, 3, 3, 5])
    assert eviction.unique_in_batches(trace, 3).tolist() == [7, 2, 7, 3, 5]


def test_scanned_keys_never_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "LENGTH", 20_000)
    trace = eviction.scan(np.random.default_rng(0), 1.05)
    scanned = trace[trace >= eviction.KEYS]
    assert len(scanned) == len(set(scanned.tolist())) == pytest.approx(2000, rel=0.1)


def test_drift_moves_the_hot_keys_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "KEYS", 100)
    monkeypatch.setattr(eviction, "LENGTH", 200_000)
    monkeypatch.setattr(eviction, "DRIFT_SHARE", 0.5)
    trace = eviction.drift(np.random.default_rng(0), 1.05)
    first, last = (np.bincount(part, minlength=100) for part in (trace[:10_000], trace[-10_000:]))
    assert first.argmax() == 0 != last.argmax()
    assert last.max() == pytest.approx(first.max(), rel=0.1)


def test_every_row_of_the_bench_stands_beside_lru(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "KEYS", 1000)
    monkeypatch.setattr(eviction, "LENGTH", 2000)
    monkeypatch.setattr(eviction, "CAPACITIES", ((0.1, 2000, 1000),))
    rows = [row for row in eviction.results() if isinstance(row, Result)]
    assert len({row.name for row in rows}) == 2 * 4 * (len(POLICIES) - 1)
    assert {row.peer for row in rows} == {"lru"}
    assert all(row.ratio >= 1 for row in rows if row.name.endswith("/optimal"))


def letters(text: str) -> Sequence[int]:
    """A trace with a letter for each key; spaces are for the reader."""
    return [ord(letter) for letter in text if letter != " "]
