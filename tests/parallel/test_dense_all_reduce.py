"""The tower's gradients over ranks: fixed buckets, sent during backward, and bit-exact sums in rank order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from crew import Crew
from torch import Tensor, nn

import hotrow as hr
from hotrow.parallel.dense_all_reduce import DenseGradients

SIZES = [(40, 3), (7,), (1,), (300,), (9, 2), (5,)]
BUCKET = 160  # bytes, 40 floats: the last two parameters are one bucket, the second and the third another
NOWHERE, ONLY_ON_1 = 2, 1  # parameters without a gradient, on every rank and on all but one


def gradient(rank: int, turn: int, number: int) -> Tensor:
    """Its numbers differ widely in size, so that another order of additions gives other bits."""
    draw = np.random.default_rng([rank, turn, number])
    values = draw.standard_normal(SIZES[number]) * 10.0 ** draw.integers(-3, 4, SIZES[number])
    return torch.from_numpy(values.astype(np.float32))


def has(rank: int, number: int) -> bool:
    return number != NOWHERE and (number != ONLY_ON_1 or rank == 1)


def sums(ranks: hr.Ranks, accumulate: int) -> dict[str, Any]:
    """Two steps: the buckets, how many were sent when backward reached its last gradient, and the sums."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    dense = DenseGradients(parameters, ranks, BUCKET)
    begun: list[int] = []
    parameters[0].register_hook(lambda _: begun.append(dense._begun))  # backward makes the last one's gradient first
    results = []
    for step in range(2):
        for parameter in parameters:
            parameter.grad = None
        for turn in range(accumulate):
            if turn + 1 == accumulate:
                dense.arm()
            total = torch.zeros(())
            for number, parameter in enumerate(parameters):
                if has(ranks.rank, number):
                    total = total + (parameter * gradient(ranks.rank, step * accumulate + turn, number)).sum()
            total.backward()
        dense.finish()
        results.append([None if parameter.grad is None else parameter.grad.clone() for parameter in parameters])
    return {"buckets": [len(bucket.parameters) for bucket in dense.buckets], "begun": begun, "results": results}


def expected(world: int, turns: range, number: int, backwards: bool = False) -> Tensor:
    """The ranks' own sums, added up in rank order."""
    ranks = [rank for rank in range(world) if has(rank, number)]
    of_ranks = []
    for rank in reversed(ranks) if backwards else ranks:
        mine = gradient(rank, turns[0], number)
        for turn in turns[1:]:
            mine = mine + gradient(rank, turn, number)
        of_ranks.append(mine)
    total = of_ranks[0]
    for mine in of_ranks[1:]:
        total = total + mine
    return total


@pytest.mark.parametrize("accumulate", [1, 2])
def test_buckets_leave_during_backward_and_are_added_up_in_rank_order(crew: Crew, accumulate: int) -> None:
    for ours in crew.run(sums, accumulate):
        assert ours["buckets"] == [2, 1, 2, 1]
        # The third waits for a parameter that gets no gradient. Before the last backward of a step none may be sent.
        assert ours["begun"] == ([0] * (accumulate - 1) + [2]) * 2
        for step, results in enumerate(ours["results"]):
            turns = range(step * accumulate, (step + 1) * accumulate)
            for number, result in enumerate(results):
                if number == NOWHERE:
                    assert result is None
                else:
                    assert torch.equal(result, expected(crew.world, turns, number)), f"parameter {number}"


def test_the_order_of_ranks_matters_to_these_gradients() -> None:
    """Otherwise the test above would prove nothing. Two numbers have only one sum."""
    assert not torch.equal(expected(3, range(1), 3), expected(3, range(1), 3, backwards=True))


def exchanges_of_a_step(ranks: hr.Ranks) -> tuple[dict[str, int], list[list[float]]]:
    """How many exchanges a step's buffers take, and what they are afterwards."""
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4)], ranks=ranks)
    tower = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer = hr.Trainer(hr.Recommender(embeddings, tower))
    assert trainer.team is not None
    for number, buffer in enumerate(tower.buffers()):
        buffer.fill_(10 * ranks.rank + number)
    channels = ("patient", "dense", "rows")
    before = {name: ranks.channel(name).count for name in channels}
    trainer.team.reduce_dense()
    counts = {name: ranks.channel(name).count - before[name] for name in channels}
    return counts, [buffer.reshape(-1).tolist() for buffer in tower.buffers()]


def test_all_buffers_of_a_tower_travel_in_one_exchange(crew: Crew) -> None:
    """Six of them, of two types. The gradients' one bucket takes two."""
    for counts, buffers in crew.run(exchanges_of_a_step):
        assert counts == {"patient": 0, "dense": 3, "rows": 0}
        assert [set(values) for values in buffers] == [{number} for number in range(6)]
