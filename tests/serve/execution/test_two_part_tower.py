"""Both parts of a tower on buckets: padding and splits change no logit, and a batch keeps its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from two_part_towers import INPUTS, sum_tower

from hotrow.serve.compile.buckets import Costs, Ladder
from hotrow.serve.execution.towers import TowerOptions, Towers
from hotrow.serve.execution.two_part_tower import TwoPartTower
from hotrow.serve.graph.tower import OriginalTower, trace
from hotrow.serve.graph.tower_graph import Shape, TowerGraph
from hotrow.serve.graph.tower_inputs import USER

USERS, EVENTS, ROWS = 4, 32, 8  # of the buckets


@pytest.fixture(scope="module")
def original() -> TwoPartTower:
    traced = trace(sum_tower(), INPUTS)
    assert traced.user is not None
    return TwoPartTower.of(traced.user, traced.program, INPUTS, traced.weights, traced.tied)


def bucketed(original: TwoPartTower, cache: Path, **options: Any) -> TwoPartTower:
    """Both parts with one bucket each, which no measurement can put out of service."""

    def make(part: OriginalTower, name: str) -> Towers:
        graph = TowerGraph(part.program)
        bucket = bucket_of(graph, name)
        ladder = Ladder((bucket.rows,), tuple((length,) for length in bucket.lengths))
        given = {"cache": cache, "ladder": ladder, "faster": float("inf"), "compile": False, "relearn": 3600.0}
        return Towers(graph, part.weights, part.device, TowerOptions(**{**given, **options}))

    return original.with_parts(make)


def bucket_of(graph: TowerGraph, name: str) -> Shape:
    if name == USER:
        return Shape(USERS, (EVENTS,))
    users = next(-1 - given.of for given in graph.inputs if given.vector == "user_of" and given.of is not None)
    return Shape(ROWS, tuple(USERS if axis == users else EVENTS for axis in range(graph.lengths)))


def put_in_service(tower: TwoPartTower) -> None:
    for part, name in ((tower.user, USER), (tower.candidates, "candidates")):
        assert isinstance(part, Towers)
        bucket = bucket_of(part.graph, name)
        state, why = part._adopt(bucket, None, None)  # the original graph at the bucket's shape
        assert state == "live", why
        prefer_buckets(part)


def prefer_buckets(part: Towers) -> None:
    part._costs = Costs(dict.fromkeys(part._live, 1e-9), dict.fromkeys(part._live, 1.0), part.graph.totals)
    part._plans = {}


@pytest.fixture
def served(original: TwoPartTower, tmp_path: Path) -> Iterator[TwoPartTower]:
    tower = bucketed(original, tmp_path / "cache")
    put_in_service(tower)
    yield tower
    tower.close()


@pytest.mark.parametrize(
    ("users", "rows", "most"), [(4, 8, 6), (1, 8, 0), (3, 5, 8), (1, 1, 1), (2, 21, 9), (4, 64, 5)]
)
@torch.no_grad()
def test_padding_and_splitting_rows_change_no_logit(served: TwoPartTower, users: int, rows: int, most: int) -> None:
    for seed in range(3):
        other, dense = INPUTS.example(8, 8, seed + 9, users=4)
        served.run(other, dense)  # lies where the padding will be
        vectors, dense = INPUTS.example(rows, most, seed, users)
        want = sum_tower()(dict(vectors), dense)
        encoding = served.encode(vectors)
        assert encoding["events"].shape[0] == vectors["seen"].shape[0] and encoding["user"].shape[0] == users
        logits, compiled = served.answer(vectors, encoding, dense)
        assert compiled
        torch.testing.assert_close(logits, want, rtol=1e-6, atol=1e-6)
    assert served.metrics()["user"]["bucket_hits"] == 6 and served.metrics()["candidates"]["fallback_rows"] == 0


@torch.no_grad()
def test_more_users_or_events_than_every_bucket_run_on_the_original_graph(served: TwoPartTower) -> None:
    for users, most in ((5, 2), (4, 30)):
        vectors, dense = INPUTS.example(6, most, 3, users, least=most - 1)
        want = sum_tower()(dict(vectors), dense)
        torch.testing.assert_close(served.run(vectors, dense), want, rtol=1e-6, atol=1e-6)
    assert served.metrics()["user"]["fallback_rate"] == 1


@torch.no_grad()
def test_an_encoding_does_not_change_when_the_next_batch_runs(served: TwoPartTower) -> None:
    vectors, _ = INPUTS.example(6, 5, 1, users=3)
    encoding = served.encode(vectors)
    kept = {name: value.clone() for name, value in encoding.items()}
    served.encode(INPUTS.example(6, 5, 2, users=4)[0])
    assert all(torch.equal(value, kept[name]) for name, value in encoding.items())


@torch.no_grad()
def test_a_batch_keeps_the_weights_of_both_parts(served: TwoPartTower) -> None:
    vectors, dense = INPUTS.example(6, 5, 1, users=3)
    old, before = served.weights, served.run(vectors, dense)
    encoding = served.encode(vectors, old)
    served.replace_weights(sum_tower(7).state_dict())
    torch.testing.assert_close(served.score(vectors, encoding, dense, old), before, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(served.run(vectors, dense), sum_tower(7)(dict(vectors), dense), rtol=1e-6, atol=1e-6)


def test_a_bucket_that_computes_something_else_takes_no_traffic(original: TwoPartTower, tmp_path: Path) -> None:
    tower = bucketed(original, tmp_path / "cache")
    part = tower.user
    assert isinstance(part, Towers)
    run_all = part.graph.run_all
    part._load = (
        lambda path, cut: (
            lambda tensors: [  # type: ignore[method-assign, assignment]
                value + (value.dtype.is_floating_point)
                for value in run_all(tensors[: len(part.weights)], tensors[len(part.weights) :])
            ]
        )
    )
    state, why = part._adopt(Shape(USERS, (EVENTS,)), None, None)
    assert state == "mismatch" and why.startswith("events:"), why
    tower.close()


@pytest.mark.soak
@torch.no_grad()
def test_compiled_buckets_of_both_parts_give_the_logits_of_the_tower(original: TwoPartTower, tmp_path: Path) -> None:
    tower = bucketed(original, tmp_path / "cache", compile=True)
    for part in (tower.user, tower.candidates):
        assert isinstance(part, Towers) and part.start(wait=True, seconds=600)
        assert part.metrics()["buckets"] == 1, part.describe()
        prefer_buckets(part)
    for users, rows, most in ((4, 8, 6), (1, 21, 0), (3, 5, 8)):
        vectors, dense = INPUTS.example(rows, most, 1, users)
        want = sum_tower()(dict(vectors), dense)
        torch.testing.assert_close(tower.run(vectors, dense), want, rtol=1e-5, atol=1e-6)
    tower.close()
