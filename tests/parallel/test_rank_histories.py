"""Towers over histories on ranks: users of unequal numbers, and ranks without a batch, train one process's model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import history_models as histories
import numpy as np
import pytest
import torch
from crew import Crew
from torch import nn
from work import rows_of

import hotrow as hr
from hotrow.data import Cursor
from hotrow.data.rebatch import join_batches

STEPS, ROWS = 7, (17, 5, 11, 0, 9, 2)  # the last step has a batch for one rank, and one batch has no example


class Joined(histories.Log):
    """Every two batches of the log as one."""

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        found = [batch for batch, _ in super().batches()]
        for at in range((cursor or {}).get("batch", 0), len(found), 2):
            yield join_batches(found[at : at + 2]), {"batch": at + 2}


def train(
    ranks: hr.Ranks | None, name: str, joined: bool = False, rows: tuple[int, ...] = ROWS, **options: Any
) -> dict[str, Any]:
    policies = {"admission": hr.Admission(after=2, sketch="64KiB"), "expiry": hr.Expiry(steps=3, min_count=3, every=1)}
    built = histories.model(name, ranks=ranks, optimizer=hr.optim.SGD(lr=0.1), **policies)
    if ranks is not None and not ranks.has_tower:
        built = hr.Recommender(built.embeddings, nn.Identity())
    parameters = list(built.tower.parameters())
    dense = torch.optim.SGD(parameters, lr=0.1) if parameters else None
    trainer = hr.Trainer(built, dense, **options)
    source = (Joined if joined else histories.Log)(name, STEPS, rows)
    report = trainer.fit(source, progress=False)
    return {
        "tower": {key: value.numpy() for key, value in built.tower.state_dict().items()},
        "rows": rows_of(built.embeddings),
        "losses": report.losses,
        "evaluated": trainer.evaluate(source, progress=False),
    }


def train_with(ranks: hr.Ranks, name: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(ranks, name, **options)


def check_same(ours: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    towers = [one for one in ours if one["tower"]]
    for key, value in whole["tower"].items():
        assert all(np.array_equal(one["tower"][key], towers[0]["tower"][key]) for one in towers)
        np.testing.assert_allclose(towers[0]["tower"][key], value, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(towers[0]["losses"], whole["losses"], rtol=1e-4)
    assert towers[0]["evaluated"] == pytest.approx(whole["evaluated"], rel=1e-3)
    for table, rows in whole["rows"].items():
        found = {key: row for one in ours for key, row in one["rows"][table].items()}
        assert found.keys() == rows.keys()
        for key, (values, count, last) in rows.items():
            assert found[key][1:] == (count, last)
            mine, wanted = (np.frombuffer(part, np.float32) for part in (found[key][0], values))
            np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["hstu", "sim hard", "bst"])
def test_two_ranks_are_one_process_with_both_batches(crews: dict[int, Crew], name: str) -> None:
    ours = crews[2].run(train_with, name, {})
    check_same(ours, train(None, name, joined=True))


def test_any_number_of_row_ranks_trains_the_same_bits() -> None:
    found: list[list[dict[str, Any]]] = []
    options = {"accumulate": 2, "rows": (17, 5, 11)}
    for rows in (1, 2):
        crew = Crew(1 + rows, rows=rows)
        try:
            ours = crew.run(train_with, "hstu", options)
        finally:
            crew.close()
        found.append(ours)
        check_same(ours, train(None, "hstu", **options))
    one, two = found
    assert one[0]["losses"] == two[0]["losses"]
    assert all(np.array_equal(value, two[0]["tower"][key]) for key, value in one[0]["tower"].items())
    for table, rows_of_one in one[1]["rows"].items():
        assert rows_of_one == {**two[1]["rows"][table], **two[2]["rows"][table]}
