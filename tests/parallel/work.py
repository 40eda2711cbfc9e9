"""Functions that ranks run in tests, and one process's results for the same batches."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hotrow as hr
from hotrow.data.rebatch import join_batches
from hotrow.parallel.ranks import WIRES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
POOLINGS = {"item": "sum", "liked": "mean", "seen": "none"}
Rows = dict[str, dict[int, tuple[bytes, int, int]]]  # by table and key: values with state, count, last step


@dataclass(frozen=True)
class Case:
    """Tables, an optimizer and batches, the same in every process that makes them from these numbers."""

    optimizer: str = "Adam"
    admission: dict[str, Any] | None = None
    expiry: dict[str, Any] | None = None
    replicate: bool = False
    replicate_all: bool = False
    steps: int = 6
    sizes: tuple[int, ...] = (7, 0, 5)  # examples of each rank's batches; those of more ranks begin again
    keys: int = 40
    accumulate: int = 1
    whole: bool = False  # whole numbers and SGD: every sum is exact, so any number of ranks gives the same bits
    silent: bool = False  # the feature "liked" gets no gradient
    often: int = 0  # occurrences of one key in one batch
    memory: dict[str, Any] = field(default_factory=dict)

    def collection(self, ranks: hr.Ranks | None, ssd: Path | None = None) -> hr.EmbeddingCollection:
        rules: dict[str, Any] = {}
        if self.admission is not None:
            rules["admission"] = hr.Admission(**self.admission)
        if self.expiry is not None:
            rules["expiry"] = hr.Expiry(**self.expiry)
        initial = hr.Initial.constant(1.0) if self.whole else hr.Initial()
        optimizer = hr.optim.SGD(lr=0.5) if self.whole else getattr(hr.optim, self.optimizer)(lr=0.05)
        tables = [
            hr.Table("user", dim=8, initial=initial, replicate=self.replicate_all, **rules),
            hr.Table("item", dim=3, features=POOLINGS, initial=initial, replicate=self.replicate_all, **rules),
            hr.Table("place", dim=4, initial=initial, replicate=self.replicate or self.replicate_all),
        ]
        memory = hr.Memory(**self.memory, ssd=ssd) if ssd is not None else None
        return hr.EmbeddingCollection(tables, optimizer=optimizer, seed=5, ranks=ranks, memory=memory)

    def batch(self, step: int, rank: int) -> hr.KeyedBatch:
        draw = np.random.default_rng([step, rank])
        n = self.sizes[rank % len(self.sizes)]

        def ids(weights: bool = False) -> hr.Jagged:
            # A power of two in a bag, so that means of whole numbers are exact.
            lengths = draw.choice([0, 1, 2, 4], n)
            offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int64))
            values = torch.from_numpy(draw.integers(-self.keys, self.keys, int(lengths.sum())))
            scale = torch.from_numpy(draw.integers(1, 4, len(values)).astype(np.float32)) if weights else None
            return hr.Jagged(values, offsets, scale)

        user = draw.integers(0, self.keys, n)
        if self.often and n:
            liked = hr.Jagged(torch.full((self.often * n,), 3), torch.arange(n + 1) * self.often)
        else:
            liked = ids()
        return hr.KeyedBatch(
            {
                "user": hr.Jagged(torch.from_numpy(user)),
                "item": ids(weights=True),
                "liked": liked,
                "seen": ids(),
                "place": ids(),
            },
            time=torch.from_numpy(draw.integers(0, 1000, n) + 60_000 * step),
        )


def loss_of(case: Case, out: dict[str, Tensor]) -> Tensor:
    """Gradients of whole numbers for whole rows; otherwise ones that depend on the rows."""
    total = torch.zeros(())
    for number, (name, vectors) in enumerate(out.items()):
        if name.endswith("_mask") or (case.silent and name == "liked"):
            continue
        total = total + (vectors.sum() * 8 if case.whole else ((vectors - number) ** 2).sum())
    return total


def step_of(case: Case, embeddings: hr.EmbeddingCollection, batches: list[hr.KeyedBatch]) -> None:
    for batch in batches:
        loss_of(case, embeddings(batch)).backward()
    embeddings.step()


def rows_of(embeddings: hr.EmbeddingCollection) -> Rows:
    tables: Rows = {}
    for table in embeddings.tables:
        rows = tables.setdefault(table.table.name, {})
        for chunk in table.scan():
            for key, values, count, last in zip(
                chunk.keys.tolist(), chunk.values, chunk.counts.tolist(), chunk.last_steps.tolist(), strict=True
            ):
                rows[key] = (values.numpy().tobytes(), count, last)
    return tables


def rows_after(ranks: hr.Ranks | None, case: Case, world: int = 1, ssd: Path | None = None) -> Rows:
    """Rows after the case's steps: a rank's own, or those of one process that sees all ranks' batches as one."""
    embeddings = case.collection(ranks, ssd)
    for step in range(case.steps):
        parts = range(step * case.accumulate, (step + 1) * case.accumulate)
        if ranks is not None:
            step_of(case, embeddings, [case.batch(part, ranks.rank) for part in parts])
        else:
            step_of(case, embeddings, [join_batches([case.batch(part, r) for r in range(world)]) for part in parts])
    return rows_of(embeddings)


def vectors_after(ranks: hr.Ranks | None, case: Case, world: int = 1) -> list[dict[str, Tensor]]:
    """Training vectors of every step, then those of an evaluation with unseen keys, and how many rows there are."""
    embeddings, outputs = case.collection(ranks), []

    def mine(step: int) -> hr.KeyedBatch:
        if ranks is not None:
            return case.batch(step, ranks.rank)
        return join_batches([case.batch(step, r) for r in range(world)])

    for step in range(case.steps):
        out = embeddings(mine(step))
        loss_of(case, out).backward()
        embeddings.step()
        outputs.append({name: vectors.detach() for name, vectors in out.items()})
    before = sum(len(table) for table in embeddings.tables)
    embeddings.eval()
    outputs.append({name: vectors.detach() for name, vectors in embeddings(mine(1000)).items()})
    assert sum(len(table) for table in embeddings.tables) == before
    return outputs


def bad_gradient(ranks: hr.Ranks, case: Case, on: int) -> tuple[str, bool]:
    """A NaN on one rank: what this rank raises, and whether its rows are as before."""
    embeddings = case.collection(ranks)
    step_of(case, embeddings, [case.batch(0, ranks.rank)])
    before = rows_of(embeddings)
    loss = loss_of(case, embeddings(case.batch(0, ranks.rank)))
    (loss * (float("nan") if ranks.rank == on else 1.0)).backward()
    try:
        embeddings.step()
    except hr.GradientError as error:
        message = str(error)
    else:
        message = ""
    after = rows_of(embeddings)
    step_of(case, embeddings, [case.batch(1, ranks.rank)])  # and it goes on
    return message, before == after


def bytes_of_a_step(ranks: hr.Ranks, wire: str) -> tuple[int, int, int]:
    """Bytes sent in one step, remote unique keys, and bytes of a row on the wire."""
    ranks.wire = WIRES[wire]
    try:
        embeddings = hr.EmbeddingCollection([hr.Table("user", dim=16)], ranks=ranks)
        keys = torch.from_numpy(np.random.default_rng(ranks.rank).integers(0, 1 << 40, 20_000))
        batch = hr.KeyedBatch({"user": hr.Jagged(keys)})
        before = sum(ranks.bytes_sent.values())
        known = ranks.remote_keys
        lookup = embeddings.route(batch).fetch()
        remote = ranks.remote_keys - known
        embeddings(lookup)["user"].sum().backward()
        embeddings.step()
        return sum(ranks.bytes_sent.values()) - before, remote, 16 * ranks.wire.itemsize
    finally:
        ranks.wire = torch.float32


def narrow_wire(ranks: hr.Ranks, case: Case, wire: str) -> Rows:
    ranks.wire = WIRES[wire]
    try:
        return rows_after(ranks, case)
    finally:
        ranks.wire = torch.float32


def beyond_the_wire(ranks: hr.Ranks, wire: str, factor: float, hbm: str | None = None) -> tuple[str, bool]:
    """A step whose gradients on rank 1 are `factor`: what this rank raises, and whether its rows are as before."""
    memory, device = (None, None) if hbm is None else (hr.Memory(hbm=hbm), DEVICE)
    ranks.wire = WIRES[wire]
    try:
        embeddings = hr.EmbeddingCollection(
            [hr.Table("user", dim=2)], hr.optim.SGD(lr=1e-6), memory, device=device, ranks=ranks
        )
        batch = hr.KeyedBatch({"user": hr.Jagged(torch.arange(6))})
        embeddings(batch)["user"].sum().backward()
        embeddings.step()
        before = rows_of(embeddings)
        (embeddings(batch)["user"].sum() * (factor if ranks.rank == 1 else 1.0)).backward()
        try:
            embeddings.step()
        except hr.GradientError as error:
            return str(error), rows_of(embeddings) == before
        return "", rows_of(embeddings) == before
    finally:
        ranks.wire = torch.float32


def routes_ahead(ranks: hr.Ranks, case: Case) -> Rows:
    """Rank r wants to route r batches ahead that it will never train on, and waits in the first of them; then all
    settle and train."""
    embeddings = case.collection(ranks)
    step_of(case, embeddings, [case.batch(0, ranks.rank)])

    refused = []

    def ahead() -> None:
        try:
            for number in range(ranks.rank):
                embeddings.route(case.batch(100 + number, ranks.rank))
        except hr.RankError as error:
            refused.append(error)

    thread = threading.Thread(target=ahead)
    thread.start()
    thread.join(0.2)  # rank 0 routes none, so no rank's route ends
    embeddings.settle(lambda: thread.join(20))
    assert not thread.is_alive()
    assert len(refused) == (ranks.rank > 1)
    step_of(case, embeddings, [case.batch(1, ranks.rank)])
    return rows_of(embeddings)
