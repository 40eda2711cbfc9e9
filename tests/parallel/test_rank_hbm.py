"""Ranks with rows in HBM, against one process with rows in DRAM. Without a GPU kernels are interpreted: tiny batches.

`pytest -m gpu` runs the same on a device that both ranks share, over Gloo, and one rank alone over NCCL.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import deque
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import work
from crew import Crew
from test_rank_rows import check_equal, put_together
from test_rank_training import Tower, WithSequences
from work import DEVICE, Case, Rows, rows_after

import hotrow as hr
from hotrow.table import Lookup
from hotrow.train.train_step import make_step

BATCHES, SIZE, KEYS = 3, 24, 300  # two ranks make two steps of them, in the last of which one rank has none
TIGHT = "3KiB"  # 16 rows of each table


def rows_in_hbm(ranks: hr.Ranks, case: Case, hbm: str) -> Rows:
    embeddings = hr.EmbeddingCollection(
        [rows.table for rows in case.collection(None).tables],
        optimizer=case.collection(None).optimizer,
        seed=5,
        memory=hr.Memory(hbm=hbm),
        device=DEVICE,
        ranks=ranks,
    )
    for step in range(case.steps):
        work.step_of(case, embeddings, [case.batch(step, ranks.rank)])
    return work.rows_of(embeddings)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> None:
    if (request.param == "cuda") != (DEVICE == "cuda"):
        pytest.skip("this process interprets kernels" if DEVICE == "cpu" else "this process compiles kernels")


@pytest.mark.usefixtures("where")
def test_rows_in_hbm_over_ranks_are_those_of_one_process(crews: dict[int, Crew]) -> None:
    case = Case(steps=2, sizes=(5, 4), replicate=True)
    parts = crews[2].run(rows_in_hbm, case, "4MiB")
    check_equal(put_together(parts, ("place",)), rows_after(None, case, 2))


def rows_with_own_rules(ranks: hr.Ranks | None, world: int = 1) -> Rows:
    """Three tables with two dims and three optimizers: a plan's parts have them in another order."""
    tables = [
        hr.Table("user", dim=4, optimizer=hr.optim.SGD(lr=0.5)),
        hr.Table("item", dim=2, features=work.POOLINGS, optimizer=hr.optim.SGD(lr=0.25)),
        hr.Table("place", dim=4),
    ]
    memory, device = (None, None) if ranks is None else (hr.Memory(hbm="4MiB"), DEVICE)
    embeddings = hr.EmbeddingCollection(tables, hr.optim.Adam(lr=0.05), memory, seed=5, device=device, ranks=ranks)
    case = Case(sizes=(5, 4))
    for step in range(2):
        of_all = [case.batch(step, rank) for rank in range(world)]
        work.step_of(case, embeddings, [work.join_batches(of_all) if ranks is None else case.batch(step, ranks.rank)])
    return work.rows_of(embeddings)


@pytest.mark.usefixtures("where")
def test_tables_in_hbm_over_ranks_keep_their_own_rules(crews: dict[int, Crew]) -> None:
    check_equal(put_together(crews[2].run(rows_with_own_rules)), rows_with_own_rules(None, 2))


def is_free_when_let_go(ranks: hr.Ranks) -> bool:
    embeddings = hr.EmbeddingCollection(
        [hr.Table("user", dim=4)], memory=hr.Memory(hbm="2KiB"), device=DEVICE, ranks=ranks
    )
    embeddings(hr.KeyedBatch({"user": hr.Jagged(torch.arange(5))}))["user"].sum().backward()
    embeddings.step()
    assert embeddings.hbm_cache is not None
    rows = weakref.ref(embeddings.hbm_cache.groups[0].cache)
    gc.disable()
    try:
        del embeddings
        return rows() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("where")
def test_hbm_is_free_when_a_collection_over_ranks_is_let_go(crews: dict[int, Crew]) -> None:
    assert crews[2].run(is_free_when_let_go) == [True, True]


def make(ranks: hr.Ranks, hbm: str | None, lookahead: int = 0) -> hr.Trainer:
    tables = [
        hr.Table("user", dim=4),
        hr.Table("item", dim=4, features={"item": "sum", "recent": "mean", "history": "none"}),
    ]
    memory = None if hbm is None else hr.Memory(hbm=hbm)
    device = None if hbm is None else DEVICE
    embeddings = hr.EmbeddingCollection(tables, hr.optim.Adam(lr=0.01), memory, seed=3, device=device, ranks=ranks)
    torch.manual_seed(1)
    return hr.Trainer(hr.Recommender(embeddings, Tower()), lookahead=lookahead)


def result(trainer: hr.Trainer, losses: list[float]) -> dict[str, Any]:
    tower = {name: value.cpu().numpy().tobytes() for name, value in trainer.model.tower.state_dict().items()}
    return {"rows": work.rows_of(trainer.model.embeddings), "tower": tower, "losses": losses}


def fitted(ranks: hr.Ranks, hbm: str | None, lookahead: int) -> dict[str, Any]:
    trainer = make(ranks, hbm, lookahead)
    report = trainer.fit(WithSequences(BATCHES * SIZE, SIZE, keys=KEYS), epochs=2, progress=False)
    return result(trainer, report.losses)


def fitted_ahead(ranks: hr.Ranks, hbm: str, ahead: int) -> tuple[dict[str, Any], int, int]:
    """As `fit` with a lookahead, on one thread: a batch is routed and looked up when the one so many before it is
    computed, and its rows come when the next one has been. Also how many rows came ahead, and how many left."""
    trainer = make(ranks, hbm)
    assert trainer.team is not None
    embeddings, losses, staged, moved = trainer.model.embeddings, [], deque[Lookup](), 0
    embeddings.in_flight(ahead + 1)
    trainer.model.train()
    steps = -(-BATCHES // ranks.world)
    passes = [trainer.team.source(WithSequences(BATCHES * SIZE, SIZE, keys=KEYS)).batches() for _ in range(2)]
    batches = [batch for one in passes for batch, _ in itertools.islice(one, steps)]
    with patch("hotrow.tiers.hbm.staging_queue.BACKOFF", 0):
        for number in range(len(batches)):
            for batch in batches[number + len(staged) : number + 1 + ahead]:
                staged.append(embeddings.route(batch))
                staged[-1].prefetch()
            moved += sum(lookup.stage().rows for lookup in list(staged)[:-1])
            _, loss, _ = trainer._forward_backward(embeddings.fetch(staged.popleft()))
            make_step(trainer, [])
            trainer.cursor = {}
            losses.append(float(loss))
    embeddings.settle()
    assert embeddings.hbm_cache is not None
    return result(trainer, trainer.team.sums(losses)), moved, embeddings.hbm_cache.report()["evictions"]


@pytest.mark.usefixtures("where")
def test_every_lookahead_and_budget_gives_the_bits_of_one_batch_at_a_time(crews: dict[int, Crew]) -> None:
    """And to rounding what ranks with rows in DRAM give. One rank has an empty batch now and then."""
    plain = crews[2].run(fitted, "4MiB", 0)
    assert crews[2].run(fitted, TIGHT, 2) == plain
    ahead = crews[2].run(fitted_ahead, TIGHT, 1)
    assert [outcome for outcome, _, _ in ahead] == plain
    assert all(moved > 3 and left > 3 for _, moved, left in ahead), [figures for _, *figures in ahead]
    in_dram = crews[2].run(fitted, None, 0)
    ours, theirs = (put_together([one["rows"] for one in all_ranks]) for all_ranks in (plain, in_dram))
    check_equal(ours, theirs, tolerance=1e-4)
    np.testing.assert_allclose(plain[0]["losses"], in_dram[0]["losses"], rtol=1e-4)
    assert len(plain[0]["losses"]) == 4


@pytest.mark.usefixtures("where")
def test_a_sum_beyond_the_wire_is_named_in_hbm_too(crews: dict[int, Crew]) -> None:
    for message, unchanged in crews[2].run(work.beyond_the_wire, "fp16", 1e6, "4MiB"):
        assert "on rank 1 is finite but beyond 65504, the largest float16 on the wire" in message
        assert unchanged


@pytest.mark.gpu
def test_one_rank_over_nccl_is_one_process() -> None:
    if DEVICE == "cpu":
        pytest.skip("this process interprets kernels")
    crew = Crew(1, backend="nccl")
    try:
        case = Case(steps=4, sizes=(50,))
        (rows,) = crew.run(rows_in_hbm, case, "64MiB")
        check_equal(rows, rows_after(None, case, 1))
    finally:
        crew.close()
