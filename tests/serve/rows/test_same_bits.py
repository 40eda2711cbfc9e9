"""Logits over row servers have the bits of those of an engine that holds the rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from row_servers import Rows, over, same_bits, servers_of, where
from small_models import TOWERS, make_batch, trained

import hotrow as hr
from hotrow.serve.execution.engine import Engine

DIVISIONS = {
    "one": ["0:1024"],
    "two": ["0:512", "512:1024"],
    "overlapping": ["0:700", "300:1024", "0:512", "512:1024"],  # a replica or more for each shard
}
UNSEEN = 1000  # keys up to here are drawn; the models have seen 300


def batches(count: int) -> list[hr.KeyedBatch]:
    """Drawn batches: seen and unseen keys, features without ids, one row, no row with tags."""
    drawn = [make_batch(rows, seed, UNSEEN) for seed, rows in enumerate([1, 2, 17, 64, 300, 5, 33, 8][:count])]
    drawn[0].ids["tags"] = hr.Jagged(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))
    drawn[0].ids["history"] = hr.Jagged(torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))
    extreme = drawn[1].ids["user"].values
    extreme[0], extreme[1] = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return drawn


def check(engine: Engine, plain: Engine, count: int = 8) -> None:
    for batch in batches(count):
        assert same_bits(engine.logits(batch), plain.logits(batch))
        vectors, answer = engine.answer_lookup(batch, tower=True, most_rows=7)
        expected, logits = plain.answer_lookup(batch, tower=True, most_rows=7)
        assert same_bits(answer.logits, logits.logits) and vectors.keys() == expected.keys()
        for name, one in expected.items():
            assert same_bits(vectors[name], one) and same_bits(engine.lookup(batch)[name], one), name


@pytest.mark.parametrize("kind", TOWERS)
def test_every_tower_answers_the_bits_of_a_plain_engine(tmp_path: Path, rows: Rows, kind: str) -> None:
    hr.export(trained(kind).model, tmp_path / "ctr")
    servers = [rows.start(tmp_path, shards) for shards in DIVISIONS["two"]]
    with hr.Engine(tmp_path / "ctr") as plain:
        for local in ("on", "off"):
            with over(tmp_path / "ctr", where(*servers, local=local)) as engine:
                assert {s.local for s in servers_of(engine)._servers.values()} == {local == "on"}
                check(engine, plain)


@pytest.mark.parametrize("values", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_division_and_type_answers_the_bits_of_a_plain_engine(
    tmp_path: Path, rows: Rows, division: str, values: str
) -> None:
    hr.export(trained("din").model, tmp_path / "ctr", values=values)
    servers = [rows.start(tmp_path, shards) for shards in DIVISIONS[division]]
    with hr.Engine(tmp_path / "ctr") as plain:
        for local in ("on", "off"):
            with over(tmp_path / "ctr", where(*servers, local=local)) as engine:
                check(engine, plain, 4)
                assert servers_of(engine).counters["late"] == 0


@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_rows_that_are_on_ssd_have_the_same_bits(tmp_path: Path, rows: Rows, values: str) -> None:
    repository = tmp_path / "repository"
    hr.export(trained("din", steps=8).model, repository / "ctr", values=values)
    servers = [
        rows.start(repository, shards, dram="3MiB", ssd=str(tmp_path / f"ssd-{number}"))
        for number, shards in enumerate(DIVISIONS["two"])
    ]
    with hr.Engine(repository / "ctr") as plain:
        for local in ("on", "off"):
            with over(repository / "ctr", where(*servers, local=local)) as engine:
                for batch in batches(4):
                    for server in servers:  # all of it cold before each batch
                        for table in server.versions["ctr", 1].embeddings.tables:
                            table.store.core.evict(1 << 20)
                    assert same_bits(engine.logits(batch), plain.logits(batch))
    assert all(server.figures()["server"]["cold"] > 0 for server in servers)


def rounded(engine: Engine, wire: str, values: str) -> None:
    """Round all rows of a plain engine as the wire does, initial values of unseen keys too."""
    for table in engine.embeddings.tables:
        keys = torch.arange(UNSEEN)
        encoding = hr.EmbeddingCollection([hr.Table("t", table.table.dim, values=wire)], hr.optim.SGD()).table("t")
        encoding.assign(keys, table.read(keys))
        table.store.core.assign(keys, encoding.read(keys), None, None)


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_a_rounded_wire_equals_rows_that_were_rounded_first(tmp_path: Path, rows: Rows, wire: str) -> None:
    hr.export(trained("din").model, tmp_path / "ctr")
    servers = [rows.start(tmp_path, shards) for shards in DIVISIONS["overlapping"]]
    with hr.Engine(tmp_path / "ctr") as plain:
        rounded(plain, wire, "fp32")
        for local in ("on", "off"):
            with over(tmp_path / "ctr", where(*servers, local=local, wire=wire)) as engine:
                for seed, size in enumerate([1, 40, 300]):
                    batch = make_batch(size, seed, UNSEEN)
                    assert same_bits(engine.logits(batch), plain.logits(batch))


def test_a_batch_of_many_keys_is_split_over_frames(tmp_path: Path, rows: Rows) -> None:
    """More keys than a frame takes, over shared memory and TCP."""
    model = hr.Recommender(hr.EmbeddingCollection([hr.Table("user", 4)], seed=3), FirstOfRow())
    hr.export(model, tmp_path / "ctr", dense_features=0)
    servers = [rows.start(tmp_path, shards) for shards in DIVISIONS["two"]]
    batch = hr.KeyedBatch({"user": hr.Jagged(torch.randperm(400_000))})
    with hr.Engine(tmp_path / "ctr") as plain:
        expected = plain.logits(batch)
        for local in ("on", "off"):
            with over(tmp_path / "ctr", where(*servers, local=local)) as engine:
                assert same_bits(engine.logits(batch), expected)


class FirstOfRow(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(1))

    def forward(self, vectors: dict[str, torch.Tensor], dense: torch.Tensor | None) -> torch.Tensor:
        return vectors["user"][:, 0] + 0.0 * self.nothing
