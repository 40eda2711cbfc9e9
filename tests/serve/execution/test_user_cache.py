"""UserCache keeps encodings of one state, within its bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from user_models import ask, batch_of, signature

import hotrow as hr
from hotrow.errors import OptionError
from hotrow.serve.execution.user_cache import ENTRY, TENSOR, State, UserCache, digests
from hotrow.serve.execution.user_part import UserPart

pytestmark = pytest.mark.usefixtures("one_thread")


def encoding(user: int, floats: int = 4) -> dict[str, torch.Tensor]:
    return {"x": torch.full((floats,), float(user))}


def bytes_of(floats: int = 4) -> int:
    return ENTRY + TENSOR + 4 * floats


@given(st.lists(st.tuples(st.sampled_from(["find", "store", "state"]), st.integers(0, 6)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_it_is_a_bounded_lru_of_one_state(steps: list[tuple[str, int]]) -> None:
    cache, state = UserCache(3 * bytes_of()), State(0, 0)
    plain: OrderedDict[int, int] = OrderedDict()  # the reference: user → the publication of its encoding
    for kind, user in steps:
        if kind == "state":
            state = State(state.publication + user % 2, state.weights + user // 4)
            if user % 2 or user // 4:
                plain.clear()
        elif kind == "store":
            cache.store(state, [b"%d" % user], [encoding(user)])
            plain[user] = state.publication
            plain.move_to_end(user)
            while len(plain) > 3:
                plain.popitem(last=False)
        else:
            (found,) = cache.find(state, [b"%d" % user])
            assert (found is not None) == (user in plain)
            if found is not None:
                assert torch.equal(found["x"], encoding(user)["x"])
                plain.move_to_end(user)
        assert cache.figures()["bytes"] <= cache.limit


def test_an_older_state_finds_and_stores_nothing() -> None:
    cache = UserCache("1MiB")
    cache.store(State(2, 1), [b"a"], [encoding(1)])
    for older in (State(1, 1), State(2, 0)):
        cache.store(older, [b"a", b"b"], [encoding(8), encoding(9)])
        assert cache.find(older, [b"a", b"b"]) == [None, None]
    found = cache.find(State(2, 1), [b"a", b"b"])
    assert found[0] is not None and found[0]["x"][0] == 1 and found[1] is None
    assert cache.find(State(2, 2), [b"a"]) == [None] and cache.figures()["outdated"] == 1


def test_counts_and_bytes_are_exact_and_a_too_large_entry_is_not_stored() -> None:
    cache = UserCache(2 * bytes_of())
    cache.store(State(0, 0), [b"a", b"b", b"c"], [encoding(1), encoding(2), encoding(3)])
    cache.store(State(0, 0), [b"large"], [encoding(4, 10_000)])
    cache.store(State(0, 0), [b"c"], [encoding(5)])  # again
    cache.find(State(0, 0), [b"a", b"b", b"c"])
    cache.find(State(0, 0), [b"c"], count=False)
    wanted = {"hits": 2, "misses": 1, "evicted": 1, "outdated": 0, "users": 2, "bytes": 2 * bytes_of()}
    assert cache.figures() == {**wanted, "limit": 2 * bytes_of()}


def test_threads_at_once_keep_the_bound_and_the_values() -> None:
    cache, wrong = UserCache(10 * bytes_of()), []

    def work(seed: int) -> None:
        for step in range(300):
            user = (seed * 7 + step * step) % 25
            (found,) = cache.find(State(step // 100, 0), [b"%d" % user])
            if found is not None and found["x"][0] != user + 100 * (step // 100):
                wrong.append(user)
            cache.store(State(step // 100, 0), [b"%d" % user], [encoding(user + 100 * (step // 100))])
            if cache.figures()["bytes"] > cache.limit:
                wrong.append("bytes")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", ["0", 0, "much", -1])
def test_a_wrong_size_is_an_error(size: str | int) -> None:
    with pytest.raises(OptionError, match="user_cache"):
        UserCache(size)


def test_digests_differ_by_every_part_of_a_user() -> None:
    one = ask(3, rows=1, events=3)
    changed = [
        one,
        one._replace(items=[*one.items[:2], 59]),
        one._replace(items=one.items[:2], actions=one.actions[:2], times=one.times[:2]),
        one._replace(actions=one.items, items=one.actions),
        one._replace(times=[*one.times[:2], one.times[2] + 1]),
        one._replace(age=one.age + 1),
        one._replace(items=[], actions=[], times=[]),
    ]
    features = ("seen_item", "seen_action", "seen_time", "age")
    found = digests(batch_of(changed).share_users(features))
    assert len(set(found)) == len(changed)
    other = one._replace(candidates=[1, 2], tags=[[], [3]], dense=torch.zeros(2, 2))  # candidates are no part of it
    assert digests(batch_of([other]).share_users(features)) == found[:1]


def test_weights_of_ids_are_part_of_a_digest() -> None:
    def digest(weights: list[float] | None, values: tuple[int, ...] = (1, 2)) -> bytes:
        heavy = None if weights is None else torch.tensor(weights)
        ids = {"seen": hr.Jagged(torch.tensor(values), torch.tensor([0, 2]), heavy)}
        return digests(hr.KeyedBatch(ids).share_users(["seen"]))[0]

    assert len({digest(None), digest([1.0, 1.0]), digest([1.0, 2.0]), digest([2.0, 1.0])}) == 4


def test_rows_are_sorted_by_user_and_put_back() -> None:
    part = UserPart(signature())
    batch = batch_of([ask(1, rows=2), ask(2, rows=1), ask(1, rows=2), ask(3, rows=1)])
    sorted_batch, places = part.arrange(batch)
    assert sorted_batch.user_of is not None and sorted_batch.user_of.tolist() == [0, 0, 0, 0, 1, 2]
    assert places is not None and sorted_batch.ids["item"].values[places].equal(batch.ids["item"].values)
    assert part.arrange(sorted_batch)[1] is None
