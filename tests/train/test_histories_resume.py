"""Training on histories that are built from a log: a crashed and resumed run ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from runs import bits
from torch import Tensor, nn

import hotrow as hr
from hotrow.data.event_log import builder, event_store
from hotrow.features import EventTimes, FeatureSpec, Key, Sequence, TimeGap
from hotrow.train.checkpoint.manifest import CURSOR, open_checkpoint

SPEC = FeatureSpec(
    [
        Key("item"),
        Sequence("seen", column="seen_item", max_length=6),
        EventTimes("times", column="seen_time", aligned="seen"),
        TimeGap("gaps", column="seen_time", aligned="seen"),
    ],
    label="click",
    time="time",
)
HISTORIES = hr.data.Histories(
    user="user", columns={"seen_item": "item", "seen_time": "time"}, events={"click": [1]}, memory="1MiB"
)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        logits: Tensor = self.layer(torch.cat([vectors[name] for name in ("item", "seen", "gaps")], 1)).squeeze(1)
        return logits


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (event_store, builder):
        monkeypatch.setattr(module, "BLOCK", 32)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows = 600
    columns = {
        "user": [f"u{n * n % 11}" for n in range(rows)],
        "item": [n * 7 % 31 for n in range(rows)],
        "time": [n // 2 * 1000 for n in range(rows)],
        "click": [n * n // 3 % 2 for n in range(rows)],
    }
    folder = tmp_path / "log"
    folder.mkdir()
    for number in range(3):
        part = pa.table(columns).slice(number * 200, 200)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=64)
    return folder


def source(log: Path, kind: str) -> hr.data.Source:
    if kind == "follow":
        return hr.data.follow(log, SPEC, batch_size=20, flush=60, histories=HISTORIES)
    return hr.data.parquet(str(log / "*.parquet"), SPEC, batch_size=20, histories=HISTORIES)


def trainer(folder: Path, every: int | None) -> hr.Trainer:
    torch.manual_seed(0)
    tables = [hr.Table("item", dim=4, features=["item", "seen"]), hr.Table("gaps", dim=4)]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adagrad(lr=0.1), seed=1)
    model = hr.Recommender(embeddings, Tower())
    return hr.Trainer(
        model, torch.optim.SGD(model.tower.parameters(), lr=0.1), checkpoints=folder, checkpoint_every=every
    )


@pytest.mark.parametrize("kind", ["parquet", "follow"])
def test_a_run_stopped_at_a_checkpoint_and_resumed_ends_with_the_same_bits(
    kind: str, log: Path, tmp_path: Path
) -> None:
    whole = trainer(tmp_path / "whole", None)
    expected = whole.fit(source(log, kind), steps=26, progress=False)
    for stop in (3, 8, 17):
        folder = tmp_path / f"stop-{stop}"
        trainer(folder, stop).fit(source(log, kind), steps=stop, progress=False)
        saved = open_checkpoint(folder)
        assert int(saved.tensors(CURSOR)["counts"][0]) == saved.manifest["cursor"]["rows"] == 20 * stop
        again = trainer(folder, None)
        report = again.fit(source(log, kind), steps=26, resume=True, progress=False)
        assert report.resumed_from == stop and report.steps == 26 - stop
        assert report.losses == expected.losses[stop:]
        assert bits(whole) == bits(again)


def test_a_damaged_state_of_the_histories_is_named(log: Path, tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", 5)
    run.fit(source(log, "parquet"), steps=5, progress=False)
    path = open_checkpoint(tmp_path / "run").path / CURSOR
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    with pytest.raises(hr.CheckpointError, match=r"cursor\.safetensors is corrupt"):
        trainer(tmp_path / "run", None).load(path.parent)
