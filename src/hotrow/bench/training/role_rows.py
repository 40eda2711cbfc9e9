"""What the processes of `roles/rows` and `roles/link` do: W-rows' batches over a row rank, or in one process.

The tower rank pools rows and sends a random gradient back; it computes nothing else. Batches are drawn in advance.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from hotrow.bench.training.rank_processes import Figures, Turn
from hotrow.bench.training.repeated_batches import RepeatedBatches

LOOKAHEAD = 2


@dataclass(frozen=True)
class RowsJob:
    """26 tables of `keys` keys, with W-rows' Zipf ids or uniform ones, for `steps` steps a turn: a multiple of 16, the
    number of batches. `filling` of them come before a turn's seconds count: the pipeline is still empty. With
    `keep_memory` a process gives no freed memory back to the system."""

    dim: int
    keys: int
    steps: int
    uniform: bool = False
    filling: int = 0
    threads: int = 1
    keep_memory: bool = False


def prepare_local(rank: int, job: RowsJob) -> Turn:
    """The store called in process, on one thread."""
    embeddings, batches, unique, grad = _prepared(None, job)
    source = RepeatedBatches(batches).batches()

    def turn() -> Figures:
        core_time = time.process_time()
        for _ in range(job.steps):
            embeddings.pooled(next(source)[0]).backward(grad)
            embeddings.step()
        return {"rows": unique * job.steps, "core": time.process_time() - core_time}

    return turn


def prepare_rows(rank: int, job: RowsJob) -> Turn:
    """Rank 0 is a tower rank that computes nothing, rank 1 the row rank."""
    import hotrow as hr
    from hotrow.parallel.rank_batches import NoBatches
    from hotrow.train import pipeline
    from hotrow.train.lookahead import LookaheadOptions

    ranks = hr.join_ranks("gloo", timeout=300, rows=1)
    assert ranks is not None
    embeddings, batches, unique, grad = _prepared(ranks, job)
    source: Any = RepeatedBatches(batches) if ranks.has_tower else NoBatches(list(embeddings.features), ranks)

    def compute(lookup: Any) -> None:
        if ranks.has_tower:
            embeddings.pooled(lookup).backward(grad)
        else:
            embeddings.step_without_gradients(lookup)
        embeddings.step()

    def turn() -> Figures:
        core_time, start, done = time.process_time(), time.perf_counter(), 0
        options = LookaheadOptions(LOOKAHEAD, needed=lambda: job.steps - done)
        for _ in pipeline.run(source, embeddings, compute, None, options):
            done += 1
            if done == job.filling:
                start = time.perf_counter()
        core, seconds = time.process_time() - core_time, time.perf_counter() - start
        timed = unique * (job.steps - job.filling)
        return {"rows": unique * job.steps, "core": core, "seconds": seconds, "timed": timed}

    return turn


def _prepared(ranks: Any, job: RowsJob) -> tuple[Any, list[Any], float, Any]:
    """The collection with a row for every key where rows are owned, its batches, the unique keys of one of them (their
    mean), and the gradient of each."""
    import torch

    import hotrow as hr
    from hotrow.bench.storage.rows import BATCH, BATCHES, TABLES, draw_ids
    from hotrow.train.freed_memory import keep_freed_memory

    if job.keep_memory:
        keep_freed_memory(1 << 30, 1 << 30)
    torch.set_num_threads(1)
    hr.set_threads(job.threads)
    names = [f"t{i}" for i in range(TABLES)]
    rule = hr.optim.RowWiseAdagrad(lr=0.01)
    embeddings = hr.EmbeddingCollection([hr.Table(name, dim=job.dim) for name in names], optimizer=rule, ranks=ranks)
    if ranks is None or ranks.owns_rows:
        for name in names:
            embeddings.table(name).create(torch.arange(job.keys))
    generator = torch.Generator().manual_seed(0)
    if job.uniform:
        ids = [torch.randint(job.keys, (TABLES, BATCH), generator=generator) for _ in range(BATCHES)]
    else:
        ids = [batch % job.keys for batch in draw_ids()]
    batches = [
        hr.KeyedBatch({n: hr.Jagged(row.contiguous()) for n, row in zip(names, batch, strict=True)}) for batch in ids
    ]
    unique = sum(row.unique().numel() for batch in ids for row in batch) / len(ids)
    return embeddings, batches, unique, torch.randn(BATCH, embeddings.width, generator=generator) * 0.01
