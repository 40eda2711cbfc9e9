"""hr.export writes a version completely or not at all, and does not change the model."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Batches, files_of, make_batch, make_model, rows_of, trained
from torch import Tensor, nn

import hotrow as hr
from hotrow.serve.repository.manifest import open_version
from hotrow.tiers.host.store import Snapshot
from hotrow.train.checkpoint import durable_files


def run(exports: Path | None, memory: hr.Memory | None = None, **options: Any) -> tuple[Any, ...]:
    """A run of two halves, with or without an export between them; everything that it ends with."""
    model = make_model("dlrm", memory, **options)
    model.tower.top.add_module("drop", nn.Dropout(0.1))
    trainer = hr.Trainer(model, torch.optim.Adam(model.tower.parameters(), lr=0.01))
    torch.manual_seed(7)
    first = trainer.fit(Batches(3, rows=16), progress=False)
    if exports is not None:
        assert model.training
        hr.export(model, exports / "ctr")
        assert model.training and all(p.requires_grad for p in model.tower.parameters())
    second = trainer.fit(Batches(3, rows=16, first=3), progress=False)
    weights = {name: value.cpu().numpy().tobytes() for name, value in model.tower.state_dict().items()}
    return first.losses + second.losses, rows_of(model.embeddings), weights, torch.get_rng_state().tolist()


@pytest.mark.parametrize("where", ["dram", "ssd", "hbm"])
def test_training_does_not_notice_an_export(where: str, tmp_path: Path) -> None:
    def memory(name: str) -> hr.Memory | None:
        ssd = hr.Memory(dram="8MiB", ssd=tmp_path / name)
        return {"dram": None, "ssd": ssd, "hbm": hr.Memory(hbm="1MiB")}[where]

    device = {"device": "cpu"} if where == "hbm" else {}
    assert run(tmp_path, memory("a"), **device) == run(None, memory("b"), **device)


def test_rows_of_a_table_larger_than_memory_are_all_exported(tmp_path: Path) -> None:
    memory = hr.Memory(dram="8MiB", ssd=tmp_path / "ssd")
    embeddings = hr.EmbeddingCollection([hr.Table("user", 64), hr.Table("item", 64)], memory=memory)
    count, draw = 60_000, torch.Generator().manual_seed(0)
    values = torch.randn(count, 64, generator=draw)
    for begin in range(0, count, 10_000):
        keys = torch.arange(begin, begin + 10_000)
        embeddings.table("user").assign(keys, values[keys])
    heard: list[int] = []
    model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, top=(4,)))
    version = hr.export(model, tmp_path / "ctr", progress=heard.append)
    assert sum(heard) == count and version.manifest["tables"][0]["rows"] == count
    with hr.Engine(tmp_path / "ctr") as engine:
        assert torch.equal(engine.embeddings.table("user").read(torch.arange(count)), values)
    assert sum(p.stat().st_size for p in version.path.rglob("segment-*")) < count * 300  # values alone, each once


def test_what_a_version_has(tmp_path: Path) -> None:
    trainer = trained("din", steps=5)
    version = hr.export(trainer.model, tmp_path / "ctr")
    manifest = version.manifest
    assert manifest["trained"] == {"step": 5, "watermark": None} and manifest["publication"] == 0
    assert manifest["torch"] == torch.__version__ and manifest["seed"] == 3
    assert sorted(manifest["files"]) == [name for name in files_of(version.path) if name != "manifest.json"]
    assert manifest["tables"][1]["features"] == {"item": "sum", "history": "none"}
    version.verify(whole=True)
    with zipfile.ZipFile(version.path / "tower.pt2") as archive:
        contents = b"".join(archive.read(name) for name in archive.namelist())
    assert os.fspath(Path(hr.__file__).parent.parent).encode() not in contents  # no path of this machine
    assert b"site-packages" not in contents


def test_the_watermark_of_what_trained_it(tmp_path: Path) -> None:
    model = make_model()
    trainer = hr.Trainer(model, torch.optim.Adam(model.tower.parameters()))

    class Timed(Batches):
        def batches(self, cursor: Any = None) -> Any:
            for batch, after in super().batches(cursor):
                time = torch.full((batch.size,), 1000 * after)
                yield hr.KeyedBatch(batch.ids, batch.dense, batch.labels, time), after

    trainer.fit(Timed(3), progress=False)
    assert hr.export(model, tmp_path / "ctr").manifest["trained"]["watermark"] == 3000


def test_versions_count_up_and_are_never_changed(tmp_path: Path) -> None:
    model = make_model()
    assert [hr.export(model, tmp_path / "ctr").number for _ in range(2)] == [1, 2]
    assert hr.export(model, tmp_path / "ctr", version=10).number == 10
    assert hr.export(model, tmp_path / "ctr").number == 11
    with pytest.raises(hr.OptionError, match="version=10"):
        hr.export(model, tmp_path / "ctr", version=10)


STEPS = ["make", "write", "sync", "rename", "file_digest", "finish"]


@pytest.mark.parametrize("step", STEPS)
def test_an_export_that_is_interrupted_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    hr.export(model, tmp_path / "ctr")
    before = files_of(tmp_path)
    place: Any = {"finish": Snapshot, "file_digest": sys.modules["hotrow.serve.repository.export"]}.get(
        step, durable_files
    )
    real, calls = getattr(place, step), 0
    failed = 0
    for number in range(12):

        def die(*arguments: Any, at: int = number, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                raise KeyboardInterrupt
            return real(*arguments, **named)

        calls = 0
        monkeypatch.setattr(place, step, die)
        try:
            hr.export(model, tmp_path / "ctr", version=2)
        except KeyboardInterrupt:
            monkeypatch.setattr(place, step, real)
            failed += 1
            left = files_of(tmp_path)
            if (tmp_path / "ctr" / "2").exists():  # all was on the disk but the name
                open_version(tmp_path / "ctr" / "2").verify(whole=True)
                break
            assert left == before
        else:
            break
    assert failed > 0
    with hr.Engine(tmp_path / "ctr") as engine:
        engine.predict(make_batch(3))


def test_what_a_crash_left_is_not_a_version_and_goes(tmp_path: Path) -> None:
    model = make_model()
    draft = tmp_path / "ctr" / ".1.tmp"
    draft.mkdir(parents=True)
    (draft / "tower.pt2").write_bytes(b"half")
    with pytest.raises(hr.RepositoryError, match="no version"):
        hr.Engine(tmp_path / "ctr")
    hr.export(model, tmp_path / "ctr")
    assert not draft.exists()


class Branches(nn.Module):
    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return vectors["user"].sum(1) if float(vectors["user"].sum()) > 0 else vectors["item"].sum(1)


class SizeOfTheExample(nn.Module):
    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return vectors["user"].sum(1) * int(vectors["user"].shape[0])


class OneForAll(nn.Module):
    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return vectors["user"].sum()


def test_towers_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    embeddings = hr.EmbeddingCollection([hr.Table("user", 4), hr.Table("item", 4)])
    for tower, says in ((Branches(), "must not branch"), (OneForAll(), "logits of shape")):
        with pytest.raises(hr.OptionError, match=says):
            hr.export(hr.Recommender(embeddings, tower), tmp_path / "ctr")
    try:
        hr.export(hr.Recommender(embeddings, SizeOfTheExample()), tmp_path / "ctr")
    except hr.OptionError:
        assert not (tmp_path / "ctr").exists()
    else:  # torch.export kept the size free after all: then its answers are right
        with hr.Engine(tmp_path / "ctr") as engine:
            ids = hr.Jagged(torch.arange(7))
            batch = hr.KeyedBatch({"user": ids, "item": ids})
            expected = 7 * embeddings.eval()(batch)["user"].sum(1)
            torch.testing.assert_close(engine.logits(batch), expected)


def test_wrong_options_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    model = make_model()
    spec = hr.FeatureSpec([hr.features.Key("user")])
    other = hr.FeatureSpec([hr.features.Key(n) for n in ("user", "item", "tags")])
    for options, says in (
        ({"values": "fp64"}, "values='fp64'"),
        ({"policy": "hope"}, "policy='hope'"),
        ({"deadline": 0}, "deadline=0"),
        ({"deadline": float("nan")}, "deadline=nan"),
        ({"default_rows": {"user": [1.0]}}, "give 4 finite numbers"),
        ({"default_rows": {"usr": [1.0] * 4}}, "no table 'usr'"),
        ({"features": spec}, "no feature 'item'"),
        ({"features": other}, "how many dense features"),
        ({"dense_features": 5}, "dense_features= says 5, the tower says 3"),
        ({"version": 0}, "version '0'"),
    ):
        with pytest.raises(hr.OptionError, match=says):
            hr.export(model, tmp_path / "ctr", **options)
    for name in (".ctr", "c t r", "-x"):
        with pytest.raises(hr.OptionError, match="model name"):
            hr.export(model, tmp_path / name)
    with pytest.raises(hr.OptionError, match=r"trainer\.model"):
        hr.export(hr.Trainer(model), tmp_path / "ctr")  # type: ignore[arg-type]
    assert files_of(tmp_path) == []


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    version = hr.export(make_model(), tmp_path / "ctr")
    assert json.loads((version.path / "manifest.json").read_text())["format"] == "hotrow-export"
