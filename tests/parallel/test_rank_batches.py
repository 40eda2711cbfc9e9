"""Ranks that read files: each decodes its own batches, and the run is that of ranks which read all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from crew import Crew, environment, free_port
from work import rows_of

import hotrow as hr
from hotrow.data import Cursor
from hotrow.features import FeatureSpec, Key

SPEC = FeatureSpec([Key("user"), Key("item")], label="click")
LAYOUT = hr.data.TextLayout({"user": "integer", "item": "integer", "click": "number"})


class ReadAll:
    """A source that cannot pass over a batch."""

    def __init__(self, source: hr.data.Source) -> None:
        self.source, self.examples = source, source.examples

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        return self.source.batches(cursor)

    def describe(self) -> str:
        return self.source.describe()


def write(folder: Path, sizes: list[int]) -> None:
    draw = np.random.default_rng(0)
    for number, rows in enumerate(sizes):
        columns = {"user": draw.integers(0, 90, rows), "item": draw.integers(0, 50, rows), "click": np.arange(rows) % 2}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=32)
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        (folder / f"{number}.csv").write_text("\n".join(lines))


def open_files(folder: Path, kind: str) -> hr.data.Source:
    if kind == "parquet":
        return hr.data.parquet(str(folder / "*.parquet"), features=SPEC, batch_size=32)
    return hr.data.text(str(folder / "*.csv"), LAYOUT, features=SPEC, batch_size=32)


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, vectors: dict[str, torch.Tensor], dense: torch.Tensor | None) -> torch.Tensor:
        return self.layer(torch.cat(list(vectors.values()), 1)).squeeze(1)


def train(ranks: hr.Ranks, folder: Path, kind: str, whole: bool) -> tuple[Any, int]:
    """Two fits, the second from the cursor of the first, and the rows that features were made of here."""
    source = open_files(folder, kind)
    torch.manual_seed(1)
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)], seed=3, ranks=ranks)
    trainer = hr.Trainer(hr.Recommender(embeddings, Tower()))
    made, apply = 0, FeatureSpec.apply

    def counting(spec: FeatureSpec, columns: Any, labels: bool = True) -> hr.KeyedBatch:
        nonlocal made
        made += columns.num_rows
        return apply(spec, columns, labels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FeatureSpec, "apply", counting)
        read = ReadAll(source) if whole else source
        first = trainer.fit(read, steps=4, progress=False)
        made = 0
        second = trainer.fit(read, cursor=first.cursor, progress=False)
    return (first.losses, second.losses, second.cursor, rows_of(embeddings)), made


@pytest.mark.parametrize("kind", ["parquet", "text"])
def test_files_give_the_bits_of_reading_all_for_a_share_of_the_features(crew: Crew, tmp_path: Path, kind: str) -> None:
    write(tmp_path, [200, 0, 333, 491])  # 32 batches: the last step of three ranks lacks one
    ours, theirs = (crew.run(train, tmp_path, kind, whole) for whole in (False, True))
    assert [result for result, _ in ours] == [result for result, _ in theirs]
    left = 1024 - 4 * 32 * crew.world
    assert [made for _, made in theirs] == [left] * crew.world
    assert sum(made for _, made in ours) == left
    assert max(made for _, made in ours) <= left / crew.world + 32


JOB = """
[data]
source = "criteo-tsv"
path = "{path}"
batch_size = 8
[embeddings]
dim = 4
[tower]
kind = "dlrm"
bottom = [8]
top = [8]
[ranks]
timeout = 20
"""


def test_a_bad_line_of_one_rank_ends_the_job_with_it_on_all(tmp_path: Path) -> None:
    lines = ["\t".join([str(i % 2), *["1"] * 13, *["0a"] * 26]) for i in range(200)]
    lines[92] = "3" + lines[92][1:]  # in batch 11: rank 1 of two
    (tmp_path / "day").write_text("\n".join(lines))
    (tmp_path / "job.toml").write_text(JOB.format(path=tmp_path / "day"))
    port = free_port()
    ranks = [
        forked.hotrow(
            "train", str(tmp_path / "job.toml"), "--quiet", log=tmp_path / f"log-{rank}", env=environment(rank, 2, port)
        )
        for rank in range(2)
    ]
    assert all(rank.wait(90) for rank in ranks)
    said = ["".join(rank.text().split()) for rank in ranks]
    fact = f"{tmp_path / 'day'},line93,column'label':thelabelis3.0"
    assert fact in said[1] and "becauserank" not in said[1]
    assert f"rank0stops,becauserank1failed:DataError:{fact}" in said[0]
