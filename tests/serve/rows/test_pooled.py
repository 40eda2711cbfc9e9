"""Features that row servers pool: the bits of a plain engine, and fewer bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from row_servers import Rows, over, same_bits, servers_of, where
from torch import Tensor

import hotrow as hr
from hotrow.errors import LateError

KEYS = 4000


class Sum(torch.nn.Module):
    """A tower that shows every vector in its logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(width, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        logits: Tensor = self.out(torch.cat([vectors[name] for name in sorted(vectors)], dim=1)).squeeze(1)
        return logits


def export(folder: Path, values: str) -> None:
    torch.manual_seed(0)
    tables = [hr.Table("item", 16, {"bought": "sum", "seen": "mean"}), hr.Table("tag", 12, {"tags": "mean"})]
    embeddings = hr.EmbeddingCollection(tables, seed=3)
    for rows in embeddings.tables:
        rows.store.assign(torch.arange(KEYS), torch.randn(KEYS, rows.table.dim))
    hr.export(hr.Recommender(embeddings, Sum(embeddings.width)), folder / "ctr", values=values, policy="wait")


def bags(rows: int, longest: int, generator: torch.Generator) -> hr.Jagged:
    lengths = torch.randint(0, longest + 1, (rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return hr.Jagged(torch.randint(0, 2 * KEYS, (int(offsets[-1]),), generator=generator), offsets)


def batch(rows: int, seed: int) -> hr.KeyedBatch:
    generator = torch.Generator().manual_seed(seed)
    longest = {"bought": 60, "seen": 80, "tags": 1}
    return hr.KeyedBatch({name: bags(rows, most, generator) for name, most in longest.items()})


@pytest.mark.parametrize("values", ["fp32", "fp16", "int8"])
def test_pooled_features_have_the_bits_of_a_plain_engine(tmp_path: Path, rows: Rows, values: str) -> None:
    export(tmp_path, values)
    server = rows.start(tmp_path)
    with hr.Engine(tmp_path / "ctr") as plain:
        for local in ("on", "off"):
            with over(tmp_path / "ctr", where(server, local=local)) as engine:
                for seed, count in enumerate((1, 50, 300, 1000)):
                    drawn = batch(count, seed)
                    assert same_bits(engine.logits(drawn), plain.logits(drawn))
                figures = servers_of(engine).figures()
                assert figures["pooled"] >= 2 * 3  # both features of long bags, in all but the smallest batch


def test_pooled_features_are_fewer_bytes_than_their_rows(tmp_path: Path, rows: Rows) -> None:
    export(tmp_path, "fp32")
    whole, halves = rows.start(tmp_path), [rows.start(tmp_path, part) for part in ("0:512", "512:1024")]
    found = []
    for servers in ([whole], halves):
        with over(tmp_path / "ctr", where(*servers, local="off")) as engine:
            drawn = batch(20, 7)
            engine.logits(drawn)
            found.append(servers_of(engine).figures())
    assert found[0]["pooled"] == 2 and found[1]["pooled"] == 0  # no server has all keys of a bag
    assert found[0]["bytes"] < found[1]["bytes"] / 2


def test_late_pooled_features_are_answered_by_policy(tmp_path: Path, rows: Rows) -> None:
    export(tmp_path, "fp32")
    server = rows.start(tmp_path)
    with over(tmp_path / "ctr", where(server)) as engine, hr.Engine(tmp_path / "ctr") as plain:
        drawn = batch(100, 1)
        rows.end(server)
        logits, late = engine.run(drawn, "initial")
        assert late.ids == sum(ids.values.numel() for ids in drawn.ids.values())
        for store in plain.embeddings.tables:
            store.store.erase(torch.arange(KEYS))
        torch.testing.assert_close(logits, plain.run(drawn)[0], rtol=1e-4, atol=1e-5)  # every row is an initial one
        with pytest.raises(LateError, match="did not come from the row servers in time"):
            engine.run(drawn, "wait")
