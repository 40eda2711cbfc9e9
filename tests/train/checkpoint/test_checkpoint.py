"""A checkpoint is the whole state of one instant; a damaged or mismatching one is named and changes nothing."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from runs import bits, clicks, make_trainer, names, trained

import hotrow as hr
from hotrow.features import Dense, Key
from hotrow.row_policies import Admission
from hotrow.tiers.host.store import HostStore
from hotrow.train.checkpoint import durable_files
from hotrow.train.checkpoint.manifest import list_checkpoints, open_checkpoint
from hotrow.train.fit import FitOptions, FitRun
from hotrow.train.train_step import make_step


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


# --- one instant, whole ---------------------------------------------------------------------------------------------


def test_a_save_reports_what_it_wrote(tmp_path: Path) -> None:
    trainer = trained()
    report = trainer.save(tmp_path / "a" / "b")
    assert report.path == tmp_path / "a" / "b" / "step-000000000005"
    assert names(report.path) == [
        "dense.safetensors",
        "manifest.json",
        "optimizer.safetensors",
        "rows",
        "state.safetensors",
    ]
    assert (report.step, report.done) == (5, True)
    assert report.rows == sum(len(rows) for rows in trainer.model.embeddings.tables)
    assert 0 < report.rows_written <= report.rows
    assert report.bytes_written > sum(p.stat().st_size for p in report.path.glob("*.safetensors"))
    assert 0 < report.pause_seconds <= report.seconds


def test_everything_comes_back(tmp_path: Path) -> None:
    trainer = trained(precision="fp16")
    trainer.save(tmp_path)
    expected = bits(trainer)
    for memory in (None, hr.Memory(dram="64MiB")):
        other = make_trainer(precision="fp16", torch_seed=7, memory=memory)
        other.fit(clicks(1024), steps=20, progress=False)  # has rows that must go, and a momentum that must not stay
        other.load(tmp_path)
        assert bits(other) == expected


def test_a_background_save_equals_a_save_that_waits(tmp_path: Path) -> None:
    waited = trained(steps=6)
    waited.save(tmp_path / "waited")
    waited.fit(clicks(), steps=4, cursor=waited.cursor, progress=False)

    behind = trained(steps=6)
    goes_on = threading.Event()
    begin = HostStore.begin_snapshot

    class Slow:
        """Finishes the snapshot only after four more steps of training."""

        def __init__(self, store: HostStore) -> None:
            self.inner = begin(store)

        def finish(self, *args: str) -> dict[str, int]:
            assert goes_on.wait(30)
            return dict(self.inner.finish(*args))

        def abandon(self) -> None:
            self.inner.abandon()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostStore, "begin_snapshot", lambda store: Slow(store))
        report = behind.save(tmp_path / "behind", wait=False)
    assert behind.saver.running == 6
    assert not report.done
    for batch, cursor in list(clicks().batches(behind.cursor))[:4]:
        lookup = behind.model.embeddings.route(batch).fetch()
        result = behind._forward_backward(lookup)
        make_step(behind, [])
        FitRun(behind, clicks(), FitOptions())._count(result, batch, cursor)
    goes_on.set()
    behind.wait()
    assert report.done
    assert behind.saver.running is None

    loaded = []
    for folder in ("waited", "behind"):
        trainer = make_trainer(torch_seed=9)
        trainer.load(tmp_path / folder)
        loaded.append(bits(trainer))
    assert loaded[0] == loaded[1]
    assert loaded[0]["steps"] == 6
    assert bits(behind)["rows"] == bits(waited)["rows"]


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trained()
    order: list[str] = []
    rename = durable_files.rename
    monkeypatch.setattr(durable_files, "rename", lambda old, new: (order.append(new.parent.name), rename(old, new)))
    first = trainer.save(tmp_path / "one", wait=False)
    second = trainer.save(tmp_path / "two", wait=False)
    assert first.done
    trainer.wait()
    assert second.done
    assert order == ["one", "two"]
    assert trainer.saver.reports == [first, second]


def test_saving_is_refused_while_gradients_wait(tmp_path: Path) -> None:
    trainer = trained()
    batch, _ = next(iter(clicks().batches()))
    trainer.model.train()
    torch.nn.functional.binary_cross_entropy_with_logits(trainer.model(batch), batch.labels).backward()
    with pytest.raises(hr.CheckpointError, match="gradients wait for step 6; save between two steps"):
        trainer.save(tmp_path)
    assert names(tmp_path) == []
    trainer.forget()
    trainer.save(tmp_path)


def test_the_feature_spec_of_the_source_is_saved_with_it(tmp_path: Path) -> None:
    columns = {"user": list(range(64)), "item": list(range(64)), "click": [0, 1] * 32}
    columns |= {f"d{i}": [float(i)] * 64 for i in range(3)}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    spec = hr.FeatureSpec([Key("user"), Key("item"), *(Dense(f"d{i}") for i in range(3))], label="click")
    source = hr.data.parquet(tmp_path / "clicks.parquet", features=spec, batch_size=16)
    trainer = make_trainer(tmp_path / "saved")
    trainer.fit(source, progress=False)
    path = trainer.save().path
    assert hr.FeatureSpec.load(path / "features.json") == spec
    assert open_checkpoint(path).features() == spec

    again = make_trainer(tmp_path / "saved")
    again.load(path)
    assert again.features == spec
    other = hr.FeatureSpec([*spec.features[:-1], Dense("d2", transform="log1p")], label="click")
    changed = hr.data.parquet(tmp_path / "clicks.parquet", features=other, batch_size=16)
    with pytest.raises(hr.CheckpointError, match=r"feature spec differs from .*features\.json"):
        again.fit(changed, resume=True, progress=False)
    flip_a_bit(path / "features.json")
    with pytest.raises(hr.CheckpointError, match=r"features\.json is corrupt"):
        make_trainer().load(path)


def test_notes_are_kept_and_must_be_plain(tmp_path: Path) -> None:
    trainer = trained()
    path = trainer.save(tmp_path, notes={"test": {"auc": float("nan"), "examples": 3}}).path
    assert open_checkpoint(path).manifest["notes"] == {"test": {"auc": None, "examples": 3}}
    with pytest.raises(hr.OptionError, match="notes= cannot be saved as JSON"):
        trainer.save(tmp_path, notes={"model": trainer})
    trainer.cursor = {"place": object()}  # type: ignore[dict-item]
    with pytest.raises(hr.OptionError, match="cursor of the source cannot be saved"):
        trainer.save(tmp_path)


def test_a_save_needs_to_know_where(tmp_path: Path) -> None:
    with pytest.raises(hr.OptionError, match="pass a folder, or give the Trainer checkpoints="):
        trained().save()
    (tmp_path / "file").write_text("")
    with pytest.raises(hr.StorageError, match=r"cannot make the folder .*file.*"):
        trained().save(tmp_path / "file" / "inside")


# --- which ones stay ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(1, [10]), (3, [10, 8, 6]), (None, [10, 8, 6, 4, 2])])
def test_the_last_checkpoints_are_kept(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    make_trainer(tmp_path, checkpoint_every=2, keep=keep).fit(clicks(), steps=10, progress=False)
    assert [open_checkpoint(path).step for path in list_checkpoints(tmp_path)] == left
    assert len(names(tmp_path)) == len(left)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    trainer.save()
    trainer.metrics.reset()
    report = trainer.save()
    assert names(tmp_path) == [report.path.name] == ["step-000000000005"]
    assert open_checkpoint(tmp_path).manifest["metrics"]["figures"]["examples"] == 0
    assert open_checkpoint(tmp_path).manifest["number"] == 2


def test_the_newest_is_the_one_saved_last_whatever_its_step(tmp_path: Path) -> None:
    trained(steps=9).save(tmp_path)
    trained(steps=4).save(tmp_path)
    assert open_checkpoint(tmp_path).step == 4
    assert names(tmp_path) == ["step-000000000004", "step-000000000009"]


def test_what_a_crash_left_is_removed_and_never_read(tmp_path: Path) -> None:
    trainer = trained()
    saved = trainer.save(tmp_path).path
    (tmp_path / ".step-000000000007.tmp").mkdir()
    (tmp_path / ".step-000000000007.tmp" / "manifest.json").write_text("{}")
    assert open_checkpoint(tmp_path).path == saved
    trainer.fit(clicks(), steps=1, progress=False)
    trainer.save(tmp_path)
    assert names(tmp_path) == ["step-000000000005", "step-000000000006"]


def test_a_checkpoint_that_cannot_be_read_does_not_count_among_those_that_stay(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, keep=2)
    for _ in range(3):
        trainer.fit(clicks(), steps=1, progress=False)
        newest = trainer.save().path
        if newest.name.endswith("2"):
            (newest / "manifest.json").write_text("{")
    assert names(tmp_path) == ["step-000000000001", "step-000000000003"]


# --- damage is named ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "dense.safetensors",
        "optimizer.safetensors",
        "state.safetensors",
        "rows/item/MANIFEST",
        "rows/item/STATE",
    ],
)
def test_a_flipped_bit_is_named_and_nothing_is_loaded(tmp_path: Path, name: str) -> None:
    path = trained().save(tmp_path).path
    flip_a_bit(path / name)
    other = make_trainer()
    before = bits(other)
    with pytest.raises(hr.CheckpointError, match=f"{name} is corrupt"):
        other.load(path)
    assert bits(other) == before


def test_a_damaged_block_of_rows_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    path = trained().save(tmp_path).path
    data = bytearray((path / "rows/item/segment-0000000000.hrs").read_bytes())
    data[4096 + 100] ^= 1
    (path / "rows/item/segment-0000000000.hrs").write_bytes(bytes(data))
    other = trained(steps=2)
    before = bits(other)
    with pytest.raises(hr.CheckpointError, match=r"rows/item/segment-0000000000\.hrs' is damaged in block 0"):
        other.load(path)
    assert bits(other) == before


@pytest.mark.parametrize("name", ["dense.safetensors", "state.safetensors", "rows/item"])
def test_what_is_missing_is_named(tmp_path: Path, name: str) -> None:
    path = trained().save(tmp_path).path
    (path / name).rename(tmp_path / "elsewhere")
    with pytest.raises(hr.CheckpointError, match=f"{name} is missing"):
        make_trainer().load(path)


def test_rows_of_another_checkpoint_are_noticed(tmp_path: Path) -> None:
    path, later = trained(steps=3).save(tmp_path).path, trained(steps=9).save(tmp_path).path
    (path / "rows" / "user").rename(tmp_path / "old")
    (later / "rows" / "user").rename(path / "rows" / "user")
    with pytest.raises(hr.CheckpointError, match=r"rows/user/MANIFEST is corrupt: its size or checksum differs"):
        make_trainer().load(path)


def test_foreign_folders_and_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hr.CheckpointError, match=r"is not a checkpoint: it has no manifest\.json"):
        make_trainer().load(tmp_path)
    path = trained().save(tmp_path).path
    manifest = json.loads((path / "manifest.json").read_text())
    for change, message in (({"version": 99}, "version 99"), ({"format": "other"}, "format 'other'")):
        (path / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(hr.CheckpointError, match=message):
            make_trainer().load(path)
    for text in ("", "[]", '{"format": "hotrow-checkpoint", "version": 1, "step": NaN}'):
        (path / "manifest.json").write_text(text)
        with pytest.raises(hr.CheckpointError, match=r"manifest\.json is corrupt"):
            make_trainer().load(path)


# --- what does not fit is refused with the cure ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 8}, r"table 'user' has dim 8 but .* has 4; pass dim=4"),
        ({"optimizer": hr.optim.SGD()}, r"'user' is trained by SGD \(4 numbers a row\) but .* state of Adam \(12 "),
        ({"optimizer": hr.optim.AdamW()}, r"pass optimizer=hr\.optim\.Adam"),
        ({"seed": 4}, r"draws new rows with seed 3 and this model with 4; pass seed=3"),
        (
            {"width": 8},
            r"weight 'layers.0.weight' has shape \[8, 11\] but .* has \[16, 11\]; build the tower as it was",
        ),
        ({"dense": "sgd"}, r"dense optimizer is SGD but .* has state of Adam; pass dense_optimizer=torch\.optim\.Adam"),
        (
            {"names": ("user", "thing")},
            r"has a table 'thing' that .* lacks \(it has user, item\); map one to it with re",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_unchanged(tmp_path: Path, options: dict, message: str) -> None:
    trained().save(tmp_path)
    other = make_trainer(**options)
    other.fit(clicks(), steps=2, progress=False)
    before = bits(other)
    with pytest.raises(hr.CheckpointError, match=message):
        other.load(tmp_path)
    assert bits(other) == before


def test_towers_and_optimizers_of_another_structure_are_refused(tmp_path: Path) -> None:
    path = trained().save(tmp_path).path
    other = make_trainer()
    other.model.tower.add_module("more", torch.nn.Linear(1, 1))
    with pytest.raises(hr.CheckpointError, match=r"only this tower has the weight 'more\.weight'"):
        other.load(path)
    other.save(tmp_path / "more")
    with pytest.raises(hr.CheckpointError, match=r"only .*000 has the weight 'more\.(weight|bias)'"):
        make_trainer().load(tmp_path / "more")
    other = make_trainer()
    other.dense_optimizer = torch.optim.Adam(list(other.model.tower.parameters())[:2])
    with pytest.raises(hr.CheckpointError, match=r"groups have \[2\] parameters but those of .* have \[6\]"):
        other.load(path)


def test_a_renamed_table_is_mapped(tmp_path: Path) -> None:
    trainer = trained()
    path = trainer.save(tmp_path).path
    other = make_trainer(names=("person", "item"))
    other.load(path, rename={"user": "person"})
    rows, expected = bits(other)["rows"], bits(trainer)["rows"]
    assert rows == {"person": expected["user"], "item": expected["item"]}
    other.save(tmp_path / "renamed")
    assert list(open_checkpoint(tmp_path / "renamed").tables) == ["person", "item"]

    with pytest.raises(hr.OptionError, match=r"rename='usr': .* has no such table; did you mean 'user'"):
        other.load(path, rename={"usr": "person"})
    with pytest.raises(hr.OptionError, match="gives two saved tables one name"):
        other.load(path, rename={"user": "item"})
    with pytest.raises(
        hr.CheckpointError, match=r"has a table 'item' that this model lacks .* rename=\{'item': '...'\}"
    ):
        make_trainer(names=("user",)).load(path)


@pytest.mark.parametrize("ssd", [False, True])
def test_a_renamed_table_goes_on_as_if_it_had_its_old_name(tmp_path: Path, ssd: bool) -> None:
    """The sketch, the cutoffs of sweeps and the clock are loaded with the rows; new rows are zeros under any name."""

    def make(first: str) -> hr.Trainer:
        expiry = hr.Expiry(steps=12, time="30s", min_count=2, every=5)
        tables = [
            hr.Table(
                name,
                dim=4,
                features=[feature],
                initial=hr.Initial.zeros(),
                admission=hr.Admission(after=3, sketch="1MiB"),
                expiry=expiry,
            )
            for name, feature in ((first, "user"), ("item", "item"))
        ]
        memory = hr.Memory(dram="8MiB", ssd=tmp_path / first) if ssd else None
        torch.manual_seed(0)
        return hr.Trainer(hr.Recommender(hr.EmbeddingCollection(tables, memory=memory), make_trainer().model.tower))

    trainer = make("user")
    trainer.fit(clicks(6400), steps=33, progress=False)
    trainer.save(tmp_path / "saved")
    renamed = make("person")
    renamed.load(tmp_path / "saved", rename={"user": "person"})
    renamed.save(tmp_path / "again")
    places = (("saved", "user"), ("again", "person"))
    states = [open_checkpoint(tmp_path / folder).parts(name)[0].folder / "STATE" for folder, name in places]
    assert states[0].read_bytes() == states[1].read_bytes()
    assert trainer.model.embeddings.table("user").clock.marks
    reports = []
    for each in (trainer, renamed):
        torch.manual_seed(1)
        reports.append(each.fit(clicks(6400), steps=40, cursor=each.cursor, progress=False))
    assert reports[0].losses == reports[1].losses
    rows, expected = bits(renamed)["rows"], bits(trainer)["rows"]
    assert rows == {"person": expected["user"], "item": expected["item"]}
    assert rows["person"]


def test_rows_of_some_tables_alone(tmp_path: Path) -> None:
    trainer = trained()
    path = trainer.save(tmp_path).path
    other = make_trainer(names=("user", "thing"), width=8, dense="sgd", torch_seed=4)
    before = bits(other)
    other.load(path, tables=["user"])
    assert bits(other)["rows"] == {"user": bits(trainer)["rows"]["user"], "thing": {}}
    assert other.steps == 5
    assert bits(other)["tower"] == before["tower"]
    with pytest.raises(hr.OptionError, match=r"tables=\['usr'\]: this model has no table 'usr'; did you mean 'user'"):
        other.load(path, tables=["usr"])


# --- rows ------------------------------------------------------------------------------------------------------------


def test_a_save_writes_only_the_rows_that_have_changed(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.fit(clicks(6400), progress=False)
    first = trainer.save()
    trainer.fit(clicks(32), progress=False)
    second = trainer.save()
    assert first.rows_written == first.rows > 500
    assert 0 < second.rows_written <= 64
    assert second.bytes_copied == 0
    expected = bits(trainer)
    for path in list_checkpoints(tmp_path)[1:]:
        shutil.rmtree(path)  # the newer one does not need the older
    other = make_trainer()
    other.load(tmp_path)
    assert bits(other) == expected


def test_a_resumed_run_writes_only_the_rows_that_have_changed(tmp_path: Path) -> None:
    make_trainer(tmp_path, checkpoint_every=200).fit(clicks(6400), progress=False)
    resumed = make_trainer(tmp_path, checkpoint_every=1)
    report = resumed.fit(clicks(6432), resume=True, progress=False)
    assert [save.step for save in report.saves] == [201]
    assert report.saves[0].rows > 500
    assert 0 < report.saves[0].rows_written <= 64


def test_logs_beside_checkpoints_are_removed_with_the_model_and_after_a_dead_process(tmp_path: Path) -> None:
    (tmp_path / ".rows-1-0" / "user").mkdir(parents=True)
    trainer, second = trained(), trained()
    trainer.save(tmp_path)
    second.save(tmp_path)
    assert len(list(tmp_path.glob(".rows-*"))) == 2
    assert not (tmp_path / ".rows-1-0").exists()
    del trainer, second
    gc.collect()
    assert list(tmp_path.glob(".rows-*")) == []
    make_trainer().load(tmp_path)


@pytest.mark.parametrize("small", [False, True])
def test_tiers_of_other_sizes_load_the_same(tmp_path: Path, small: bool) -> None:
    trainer = trained(steps=20, memory=hr.Memory(dram="4MiB", ssd=tmp_path / "ssd") if small else None)
    trainer.save(tmp_path / "saved")
    expected = bits(trainer)
    other = make_trainer(memory=None if small else hr.Memory(dram="4MiB", ssd=tmp_path / "ssd"))
    other.load(tmp_path / "saved")
    assert bits(other) == expected
    renamed = make_trainer(names=("user", "thing"), memory=hr.Memory(dram="4MiB", ssd=tmp_path / "more"))
    renamed.load(tmp_path / "saved", rename={"item": "thing"})
    assert bits(renamed)["rows"]["thing"] == expected["rows"]["item"]


def test_a_sketch_of_another_size_is_refused(tmp_path: Path) -> None:
    def make(sketch: str) -> hr.Trainer:
        tables = [hr.Table(n, dim=4, admission=Admission(after=2, sketch=sketch)) for n in ("user", "item")]
        return hr.Trainer(hr.Recommender(hr.EmbeddingCollection(tables), make_trainer().model.tower))

    trainer = make("1MiB")
    trainer.fit(clicks(), steps=5, progress=False)
    trainer.save(tmp_path)
    make("1MiB").load(tmp_path)
    with pytest.raises(hr.CheckpointError, match=r"sketch of '2MiB' but .* has one of '1MiB'; pass admission="):
        make("2MiB").load(tmp_path)


def test_a_log_that_was_removed_is_named(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "saved")
    trainer.save()
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(hr.StorageError, match=r"\.rows-.* is gone: .* Load the last checkpoint into a new model"):
        trainer.save()
