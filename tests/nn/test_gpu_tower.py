"""Rows in DRAM and the tower on a GPU: what the CPU gives, to rounding; over ranks and with row ranks, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))

from crew import Crew
from test_rank_training import Tower, WithSequences

import hotrow as hr


def train(ranks: hr.Ranks | None, device: str, towers: int = 1) -> dict[str, Any]:
    """Tables with pooled features and a sequence, a few steps, an evaluation."""
    tables = [
        hr.Table("user", dim=4),
        hr.Table("item", dim=4, features={"item": "sum", "recent": "mean", "history": "none"}),
    ]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), seed=3, ranks=ranks, device=device)
    torch.manual_seed(1)
    trainer = hr.Trainer(hr.Recommender(embeddings, Tower()))
    report = trainer.fit(WithSequences(192 * towers, 16), progress=False)
    tested = trainer.evaluate(WithSequences(100, 16), progress=False)
    device = next(trainer.model.tower.parameters()).device.type
    return {"losses": report.losses, "tested": tested, "device": device}


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(torch.tensor(one["losses"]), torch.tensor(other["losses"]), rtol=1e-4, atol=1e-5)
    assert abs(one["tested"]["logloss"] - other["tested"]["logloss"]) < 1e-4


def test_a_gpu_that_is_not_there_is_an_error_with_the_cure() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(hr.OptionError, match="torch sees no GPU; leave device= out"):
        hr.EmbeddingCollection([hr.Table("user", dim=4)], device="cuda")


@pytest.mark.gpu
def test_rows_in_dram_train_a_tower_on_a_gpu() -> None:
    found, expected = train(None, "cuda"), train(None, "cpu")
    assert found["device"] == "cuda"
    same(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 1])
def test_ranks_train_towers_on_a_gpu_over_rows_in_dram(rows: int) -> None:
    crew = Crew(2 + rows, rows=rows)
    try:
        on_gpu, on_cpu = crew.run(train, "cuda", 2), crew.run(train, "cpu", 2)
    finally:
        crew.close()
    assert [one["device"] for one in on_gpu[:2]] == ["cuda", "cuda"]
    same(on_gpu[0], on_cpu[0])
