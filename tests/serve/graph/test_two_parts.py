"""Towers with a user part: two graphs that together are the tower, over users, rows and events of any number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from two_part_towers import INPUTS, SumTower, sum_tower, two_part_model

import hotrow as hr
from hotrow.errors import OptionError
from hotrow.serve.execution.two_part_tower import TwoPartTower, open_tower
from hotrow.serve.graph.tower import Traced, trace
from hotrow.serve.graph.tower_graph import Shape, TowerGraph
from hotrow.serve.graph.two_parts import pad
from hotrow.serve.repository.manifest import USER

SIZES = [(1, 1, 1), (1, 9, 0), (2, 5, 20), (5, 3, 2), (3, 8, 7), (4, 4, 0)]  # users, rows, most events


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(sum_tower(), INPUTS)


def served(traced: Traced) -> TwoPartTower:
    assert traced.user is not None
    return TwoPartTower.of(traced.user, traced.program, INPUTS, traced.weights, traced.tied)


@pytest.mark.parametrize(("users", "rows", "most"), SIZES)
@torch.no_grad()
def test_both_parts_are_the_tower_whatever_the_sizes_and_the_padding(
    traced: Traced, users: int, rows: int, most: int
) -> None:
    tower = served(traced)
    for seed in range(4):
        vectors, dense = INPUTS.example(rows, most, seed, users)
        want = sum_tower()(dict(vectors), dense)
        encoding = tower.encode(vectors)
        assert encoding.keys() == {"events", "events_lengths", "user"}
        torch.testing.assert_close(tower.score(vectors, encoding, dense), want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(tower.run(pad(INPUTS, vectors), dense), want, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_encodings_of_users_may_be_joined_and_scored_together(traced: Traced) -> None:
    tower = served(traced)
    first, second = (INPUTS.example(6, 5, seed, users=2) for seed in (1, 2))
    apart = [tower.run(vectors, dense) for vectors, dense in (first, second)]
    encodings = [tower.encode(vectors) for vectors, _ in (first, second)]
    joined = {name: torch.cat([encoding[name] for encoding in encodings]) for name in encodings[0]}
    vectors = {
        "item": torch.cat([first[0]["item"], second[0]["item"]]),
        "user_of": torch.cat([first[0]["user_of"], second[0]["user_of"] + 2]),
    }
    assert first[1] is not None and second[1] is not None
    got = tower.score(vectors, joined, torch.cat([first[1], second[1]]))
    torch.testing.assert_close(got, torch.cat(apart), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_new_weights_go_into_both_parts_at_once_and_wrong_ones_into_none(traced: Traced) -> None:
    tower, other = served(traced), sum_tower(7)
    vectors, dense = INPUTS.example(6, 5, 1, users=2)
    before, old = tower.run(vectors, dense), tower.weights
    for state in ({"nonsense": torch.zeros(1)}, {**other.state_dict(), "top.bias": torch.zeros(9)}):
        with pytest.raises(OptionError, match=r"no weight 'nonsense'|shape \[9\]"):
            tower.replace_weights(state)
        assert torch.equal(tower.run(vectors, dense), before)
    tower.replace_weights(other.state_dict())
    torch.testing.assert_close(tower.run(vectors, dense), other(dict(vectors), dense), rtol=1e-6, atol=1e-6)
    assert torch.equal(tower.run(vectors, dense, old), before), "a batch keeps the weights it began with"


def test_each_part_takes_the_weights_that_it_reads(traced: Traced) -> None:
    tower = served(traced)
    assert {name.split(".")[0] for name in tower.user.weights} == {"event", "user"}  # type: ignore[union-attr]
    assert {name.split(".")[0] for name in tower.candidates.weights} == {"item", "top"}  # type: ignore[union-attr]


@torch.no_grad()
def test_an_exported_version_has_both_parts_and_its_weights_once(tmp_path: Path) -> None:
    model = two_part_model()
    version = hr.export(model, tmp_path / "ctr", max_lengths={"seen": 30})
    assert {"tower.pt2", USER, "weights.safetensors"} <= set(version.manifest["files"])
    saved = version.manifest["signature"]
    assert saved["user"] == ["action", "seen", "user", "when"] and saved["numbers"] == ["when"] and saved["jagged"]
    assert saved["aligned"] == [["seen", "action", "when"]]
    assert saved["max_lengths"] == {"seen": 30, "action": 30, "when": 30}, "the option goes before the table's 20"
    tower = open_tower(version, model.embeddings)
    assert isinstance(tower, TwoPartTower)
    vectors, dense = INPUTS.example(6, 5, 1, users=2)
    torch.testing.assert_close(tower.run(vectors, dense), model.tower(dict(vectors), dense), rtol=1e-6, atol=1e-6)


class ReadsItem(SumTower):
    def encode_user(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**super().encode_user(vectors), "more": vectors["item"]}


class ReadsHistory(SumTower):
    def score(self, vectors: dict[str, Tensor], encoding: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return super().score(vectors, encoding, dense) + vectors["seen_lengths"][vectors["user_of"]]


class Padded(SumTower):
    def encode_user(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        longest = int(vectors["seen_lengths"].max())
        return {**super().encode_user(vectors), "grid": torch.zeros(vectors["user"].shape[0], longest)}


class Leaks(SumTower):
    """What lies behind the events of the last user reaches its logits."""

    def score(self, vectors: dict[str, Tensor], encoding: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return super().score(vectors, encoding, dense) + encoding["events"].sum()


class Differs(SumTower):
    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return super().forward(vectors, dense) + 1


@pytest.mark.parametrize(
    ("tower", "message"),
    [
        (ReadsItem, r"ReadsItem.encode_user reads 'item', which is not among its user_features .* Read it in score"),
        (ReadsHistory, r"ReadsHistory.score reads the user feature 'seen', .* into the encoding"),
        (Padded, r"the encoding's 'grid' is .* only users and events may vary; make it jagged, with grid_lengths"),
        (Leaks, r"give other logits .* with padding at the end.* must not reach a logit"),
        (Differs, r"forward must be score\(vectors, encode_user\(vectors\), dense\)"),
    ],
)
def test_a_tower_whose_parts_do_not_fit_is_refused(tower: type[SumTower], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        trace(tower().eval(), INPUTS)


def test_aligned_features_of_users_and_rows_are_refused() -> None:
    with pytest.raises(OptionError, match="must all be user features or none"):
        trace(sum_tower(), replace(INPUTS, user=("user", "seen", "action")))


def test_shapes_of_both_parts_name_rows_users_and_events(traced: Traced) -> None:
    assert traced.user is not None
    user, candidates = TowerGraph(traced.user), TowerGraph(traced.program)
    vectors, dense = INPUTS.example(9, 5, 1, users=3)
    events = vectors["seen"].shape[0]
    assert user.shape_of(user.flatten(vectors, None)) == Shape(3, (events,)) and not user.splits
    tower = served(traced)
    given = {**vectors, **{f"encoding.{name}": value for name, value in tower.encode(vectors).items()}}
    shape = candidates.shape_of(candidates.flatten(given, dense))
    assert shape.rows == 9 and sorted(shape.lengths) == sorted((events, 3)) and candidates.splits


@pytest.mark.parametrize("shape", [Shape(1, (1,)), Shape(4, (3,)), Shape(5, (64,))])
def test_random_inputs_of_a_user_part_are_a_batch(traced: Traced, shape: Shape) -> None:
    assert traced.user is not None
    graph = TowerGraph(traced.user)
    for seed in range(10):
        drawn = dict(zip([given.vector for given in graph.inputs], graph.random_inputs(shape, CPU, seed), strict=True))
        lengths: Any = drawn["seen_lengths"]
        assert torch.equal(lengths, drawn["action_lengths"]) and lengths.min() >= 0
        assert lengths.sum() <= drawn["seen"].shape[0] == shape.lengths[0]


CPU = torch.device("cpu")
