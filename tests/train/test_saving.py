"""A saved model comes back the same, and a damaged one is named, never half-read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import hotrow as hr
from hotrow.features import Key
from hotrow.train.saving import load_model, save_model


def make_model(dim: int = 4, optimizer: hr.optim.Optimizer | None = None, names: tuple[str, ...] = ("user", "item")):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    embeddings = hr.EmbeddingCollection(
        [hr.Table(n, dim=dim) for n in names], optimizer=optimizer or hr.optim.Adam(), seed=3
    )
    return hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, top=(8,)))


def train_a_little(model: hr.Recommender) -> hr.KeyedBatch:
    batch = hr.KeyedBatch(
        {"user": hr.Jagged(torch.tensor([1, -5, 2**62])), "item": hr.Jagged(torch.tensor([7, 7, 8]))},
        labels=torch.tensor([1.0, 0.0, 1.0]),
    )
    for _ in range(3):
        torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
        model.embeddings.step()
    return batch


def saved(tmp_path: Path) -> tuple[Path, hr.Recommender, hr.KeyedBatch]:
    model = make_model()
    batch = train_a_little(model)
    save_model(model, tmp_path / "m", {"features": hr.FeatureSpec([Key("user"), Key("item")]), "note": "hello"})
    return tmp_path / "m", model, batch


def test_a_loaded_model_predicts_and_goes_on_training_with_the_same_bits(tmp_path: Path) -> None:
    folder, model, batch = saved(tmp_path)
    other = make_model()
    with torch.no_grad():
        for p in other.tower.parameters():
            p.zero_()
    manifest = load_model(other, folder)
    assert manifest["notes"] == {"note": "hello"}
    assert hr.FeatureSpec.load(folder / "features.json").id_names == ("user", "item")
    assert other.embeddings.steps == 3
    train_a_little(model)
    train_a_little(other)
    with torch.no_grad():
        assert torch.equal(model(batch), other(batch))
    assert [h.count for h in model.embeddings.table("item").hottest()] == [12, 6]
    assert model.embeddings.table("item").hottest() == other.embeddings.table("item").hottest()


def test_saving_again_replaces_the_folder_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    folder, model, _ = saved(tmp_path)
    save_model(model, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_failed_save_leaves_the_old_model(tmp_path: Path) -> None:
    folder, model, _ = saved(tmp_path)
    with pytest.raises(TypeError):
        save_model(model, folder, {"note": object()})
    load_model(make_model(), folder)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("name", ["dense.safetensors", "rows/user-00000.safetensors", "features.json"])
def test_a_flipped_bit_is_named(tmp_path: Path, name: str) -> None:
    folder, _, _ = saved(tmp_path)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(bytes(data))
    other = make_model()
    with pytest.raises(hr.CheckpointError, match=f"{name} is corrupt"):
        load_model(other, folder)
    assert len(other.embeddings.table("user")) == 0


def test_missing_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hr.CheckpointError, match="not a saved model"):
        load_model(make_model(), tmp_path)
    folder, _, _ = saved(tmp_path)
    (folder / "rows" / "user-00000.safetensors").unlink()
    with pytest.raises(hr.CheckpointError, match=r"user-00000\.safetensors is missing"):
        load_model(make_model(), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(hr.CheckpointError, match="version 99"):
        load_model(make_model(), folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(hr.CheckpointError, match="corrupt"):
        load_model(make_model(), folder)


def test_a_model_that_does_not_fit_is_refused_with_the_cure(tmp_path: Path) -> None:
    folder, _, _ = saved(tmp_path)
    with pytest.raises(hr.CheckpointError, match=r"dim 8 but .* has 4; pass dim=4"):
        load_model(make_model(dim=8), folder)
    with pytest.raises(hr.CheckpointError, match="state of Adam"):
        load_model(make_model(optimizer=hr.optim.SGD()), folder)
    with pytest.raises(hr.CheckpointError, match="'item' that this model lacks"):
        load_model(make_model(names=("user", "thing")), folder)
