"""For every lookahead, with and without enough DRAM for all rows: the bits of one batch at a time."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from torch import Tensor, nn
from work import rows_of

import hotrow as hr

BATCH, STEPS, DIM = 1024, 14, 64
SHAPE = hr.data.Shape(sparse={"user": None, "item": None}, dense=3, history_length=0)


class Tower(nn.Module):
    """Dropout and batch norm: what a rank draws and counts depends on its batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 * DIM + 3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        return self.layers(torch.cat([*vectors.values(), dense], 1)).squeeze(1)


def fit(ranks: hr.Ranks, lookahead: int, ssd: Path | None) -> tuple[dict[str, Any], int, int]:
    """Everything that is equal in two equal runs, and how many rows were evicted to SSD and prefetched."""
    tables = [
        hr.Table("user", dim=DIM, admission=hr.Admission(probability=0.8, sketch="64KiB")),
        hr.Table("item", dim=DIM, expiry=hr.Expiry(steps=10, min_count=2, grace=3, every=4)),
    ]
    memory = None if ssd is None else hr.Memory(dram="9MiB", ssd=ssd)
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), memory=memory, seed=3, ranks=ranks)
    torch.manual_seed(1)
    tower = Tower()
    trainer = hr.Trainer(hr.Recommender(embeddings, tower), torch.optim.Adam(tower.parameters()), lookahead=lookahead)
    clicks = hr.data.synthetic(examples=STEPS * BATCH * ranks.world, batch_size=BATCH, keys=2_000_000, shape=SHAPE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "dram=")
        report = trainer.fit(clicks, evaluate=clicks, evaluate_every=STEPS, epochs=2, progress=False)
    rows = {
        name: hashlib.sha256(repr(sorted(of_table.items())).encode()) for name, of_table in rows_of(embeddings).items()
    }
    tiers = [] if ssd is None else [table.store.tier() for table in embeddings.tables]
    bits = {
        "rows": {name: digest.hexdigest() for name, digest in rows.items()},
        "tower": {name: value.numpy().tobytes() for name, value in tower.state_dict().items()},
        "losses": report.losses,
        "evaluations": report.evaluations,
        "metrics": trainer.metrics.state(),
        "cursor": trainer.cursor,
        "random": torch.get_rng_state().numpy().tobytes(),
    }
    return bits, sum(tier["evicted"] for tier in tiers), sum(tier["prefetched"] for tier in tiers)


@pytest.fixture(scope="module")
def expected(crews: dict[int, Crew]) -> list[dict[str, Any]]:
    """One batch at a time, all in DRAM."""
    return [bits for bits, *_ in crews[2].run(fit, 0, None)]


@pytest.mark.parametrize(
    ("lookahead", "tiered"), [(1, False), (2, False), (4, False), (0, True), (1, True), (2, True), (4, True)]
)
def test_every_lookahead_and_tier_gives_the_same_bits_over_ranks(
    crews: dict[int, Crew], expected: list[dict[str, Any]], tmp_path: Path, lookahead: int, tiered: bool
) -> None:
    for rank, (bits, evicted, prefetched) in enumerate(crews[2].run(fit, lookahead, tmp_path if tiered else None)):
        assert bits == expected[rank]
        assert (evicted > 1000) == tiered
        assert (prefetched > 100) == (tiered and lookahead > 0)
