"""Ranks with rows in HBM, against one process with rows in DRAM. Without a GPU kernels are interpreted: tiny batches.

`pytest -m gpu` runs the same on a device that both ranks share, over Gloo, and one rank alone over NCCL.
"""

from __future__ import annotations

import pytest
import torch
import work
from crew import Crew
from test_rank_rows import check_equal, put_together
from work import Case, Rows, rows_after

import hotrow as hr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


@pytest.mark.parametrize("where", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_in_hbm_over_ranks_are_those_of_one_process(crews: dict[int, Crew], where: str) -> None:
    if (where == "cuda") != (DEVICE == "cuda"):
        pytest.skip("this process interprets kernels" if DEVICE == "cpu" else "this process compiles kernels")
    case = Case(steps=2, sizes=(5, 4), replicate=True)
    parts = crews[2].run(rows_in_hbm, case, "4MiB")
    check_equal(put_together(parts, ("place",)), rows_after(None, case, 2))


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
