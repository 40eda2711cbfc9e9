"""Engine.apply: the server's rows and answers become the trainer's, and no batch sees a mixture."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Batches, make_batch, make_model, rows_of, trained
from torch import Tensor, nn

import hotrow as hr
from hotrow.errors import HotRowError, MemoryBudgetError, PublishError
from hotrow.publish.publication import DELTA, HEARTBEAT, Publication, TableChange, to_wire
from hotrow.serve.execution.servable import open_version


def publishing(bus: Path, **options: Any) -> hr.Trainer:
    """A trainer of a small model that publishes to a folder."""
    model = make_model("dlrm")
    dense = torch.optim.Adam(model.tower.parameters(), lr=0.01)
    return hr.Trainer(model, dense, publish=hr.Publish(f"dir:{bus}", heartbeat=60.0, **options))


def change(keys: list[int], value: float, dim: int = 4, deleted: tuple[int, ...] = ()) -> TableChange:
    values = torch.full((len(keys), dim), value)
    return TableChange(torch.tensor(keys), values, torch.tensor(deleted, dtype=torch.int64))


def publication(number: int, tables: dict[str, TableChange], dense: Any = None, **more: Any) -> Publication:
    said = {"kind": DELTA, "previous": number - 1, "run": "r", "step": number, "watermark": None, "cut": 0.0, **more}
    return Publication(number=number, tables=tables, dense=dense, **said)


def at_wire(trainer: hr.Trainer, values: str) -> dict[str, dict[int, bytes]]:
    return {
        rows.table.name: {
            int(key): row.numpy().tobytes()
            for part in rows.scan()
            for key, row in zip(part.keys, to_wire(part.values[:, : rows.table.dim], values).float(), strict=True)
        }
        for rows in trainer.model.embeddings.tables
    }


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("stored", ["fp32", "ssd"])
def test_rows_and_answers_become_the_trainers(tmp_path: Path, wire: str, stored: str) -> None:
    trainer = publishing(tmp_path / "bus", every_steps=2, values=wire)
    hr.export(trainer.model, tmp_path / "ctr")
    trainer.fit(Batches(8), progress=False)
    memory = hr.Memory(dram="3MiB", ssd=str(tmp_path / "rows")) if stored == "ssd" else None
    with hr.Engine(tmp_path / "ctr", memory=memory) as engine:
        subscriber = hr.Subscriber(f"dir:{tmp_path / 'bus'}")
        while engine.publication < 4:
            for one in subscriber.poll(5.0):
                engine.apply(one)
                if stored == "ssd":
                    for rows in engine.embeddings.tables:
                        rows.store.core.evict(100)
        assert rows_of(engine.embeddings) == at_wire(trainer, wire)
        batch = make_batch(50, seed=99)
        expected = trainer.predict(batch)
        apart = float((engine.predict(batch) - expected).abs().max())
        assert apart <= (1e-6 if wire == "fp32" else 1e-2)
    trainer.publisher.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("values", ["fp16", "int8"])
def test_rows_are_kept_in_the_versions_type(tmp_path: Path, values: str) -> None:
    hr.export(trained().model, tmp_path / "ctr", values=values)
    with hr.Engine(tmp_path / "ctr") as engine:
        rows = torch.randn(3, 4)
        engine.apply(publication(1, {"user": TableChange(torch.arange(3), rows, torch.tensor([4]))}))
        table = engine.embeddings.table("user")
        assert torch.allclose(table.read(torch.arange(3)), rows, atol=1e-3 if values == "fp16" else 2e-2)
        assert table.contains(torch.tensor([3, 4])).tolist() == [True, False]


def test_a_publication_of_another_model_changes_nothing(tmp_path: Path) -> None:
    model = trained().model
    hr.export(model, tmp_path / "ctr")
    bad: list[tuple[str, dict[str, TableChange], Any]] = [
        ("which this model lacks", {"user": change([1], 9.0), "shop": change([1], 9.0)}, None),
        ("dim 5", {"user": change([1], 9.0), "item": change([1], 9.0, dim=5)}, None),
        ("NaN", {"user": change([1], 9.0), "item": change([1], float("nan"))}, None),
        ("twice", {"user": change([1], 9.0), "item": change([1, 1], 9.0)}, None),
        ("missing", {"user": change([1], 9.0)}, {}),
    ]
    with hr.Engine(tmp_path / "ctr") as engine:
        before = rows_of(engine.embeddings)
        for words, tables, dense in bad:
            with pytest.raises(HotRowError, match=words):
                engine.apply(publication(1, tables, dense))
        with pytest.raises(PublishError, match="apply those between"):
            engine.apply(publication(2, {"user": change([1], 9.0)}))
        assert rows_of(engine.embeddings) == before and engine.publication == 0


def test_a_publication_over_the_memory_budget_is_undone(tmp_path: Path) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB")) as engine:
        before = rows_of(engine.embeddings)
        many = list(range(1000, 101_000))
        known = sorted(before["user"])
        tables = {"user": change(known[:5], 9.0, deleted=tuple(known[5:8])), "item": change(many, 9.0)}
        with pytest.raises(MemoryBudgetError):
            engine.apply(publication(1, tables))
        assert rows_of(engine.embeddings) == before and engine.publication == 0
        engine.apply(publication(1, {"user": change(known[:5], 9.0)}))
        assert engine.publication == 1


def test_applying_again_and_heartbeats_change_the_watermark_alone(tmp_path: Path) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    with hr.Engine(tmp_path / "ctr") as engine:
        engine.apply(publication(1, {"user": change([1], 9.0)}, watermark=1000))
        engine.apply(publication(1, {"user": change([1], 3.0)}, watermark=1000))
        engine.apply(publication(1, {}, kind=HEARTBEAT, watermark=2000))
        assert float(engine.embeddings.table("user").read(torch.tensor([1]))[0, 0]) == 9.0
        assert (engine.publication, engine.fresh.watermark) == (1, 2000)


class ShowsNumber(nn.Module):
    """Logits that show each part: the number in both rows and in the weight, or something else."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(1))

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        weight = self.number.expand(vectors["user"].shape[0], 1)
        return torch.cat([vectors["user"][:, :1], vectors["item"][:, :1], weight], 1)


@pytest.mark.parametrize("towers", ["original", "buckets"])
@pytest.mark.parametrize("ssd", [False, True])
def test_no_batch_sees_a_mixture(tmp_path: Path, towers: str, ssd: bool) -> None:
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)])
    keys = list(range(200))
    for rows in embeddings.tables:
        rows.assign(torch.tensor(keys), torch.zeros(200, 4))
    hr.export(hr.Recommender(embeddings, ShowsNumber()), tmp_path / "ctr", dense_features=0)
    memory = hr.Memory(dram="3MiB", ssd=str(tmp_path / "rows")) if ssd else None
    if towers == "buckets":
        options = {"artifacts": str(tmp_path / "artifacts"), "compile": False}
        tiers = {"dram": "3MiB", "ssd": str(tmp_path / "rows")} if ssd else {}
        engine = open_version(tmp_path / "ctr" / "1", {**options, **tiers}).engine
    else:
        engine = hr.Engine(tmp_path / "ctr", memory=memory)
    with engine:
        ids = torch.arange(200)
        batch = hr.KeyedBatch({"user": hr.Jagged(ids), "item": hr.Jagged(ids.flip(0))})
        stop, wrong, seen = threading.Event(), list[str](), set[int]()

        def ask() -> None:
            while not stop.is_set():
                logits, _, _, fresh = engine.answer(batch)
                if not bool((logits == float(fresh.publication)).all()):
                    wrong.append(f"{fresh.publication}: {logits.unique().tolist()}")
                seen.add(fresh.publication)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        number, end = 0, time.monotonic() + 60
        while number < 40 or (len(seen) <= 5 and time.monotonic() < end):  # on a busy machine
            number += 1
            tables = {name: change(keys, float(number)) for name in ("user", "item")}
            engine.apply(publication(number, tables, {"number": torch.tensor([float(number)])}))
            if ssd:
                for rows in engine.embeddings.tables:
                    rows.store.core.evict(50)
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[:3]
        assert len(seen) > 5
