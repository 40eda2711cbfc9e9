"""hr.Engine: the trainer's own predictions, from an exported version, in any memory and from any thread."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from small_models import DENSE, KEYS, TOWERS, TwoTasks, collection, make_batch, rows_of, trained

import hotrow as hr


@pytest.mark.parametrize("kind", TOWERS)
def test_predictions_equal_the_trainers(kind: str, tmp_path: Path) -> None:
    trainer = trained(kind)
    hr.export(trainer.model, tmp_path / "ctr")
    with hr.Engine(tmp_path / "ctr") as engine:
        for rows in (1, 2, 3, 17, 64, 257):
            batch = make_batch(rows, seed=100 + rows, keys=2 * KEYS)  # half of the keys were never seen
            torch.testing.assert_close(engine.predict(batch), trainer.predict(batch), rtol=0, atol=1e-6)
            assert engine.logits(batch).shape == (rows,)
        assert engine.signature.dense == DENSE and engine.signature.tasks == 1
        assert engine.signature.sequences == ({"history"} if kind == "din" else set())


def test_lookups_are_the_collections_bits_and_change_nothing(tmp_path: Path) -> None:
    trainer = trained("din")
    hr.export(trainer.model, tmp_path / "ctr")
    with hr.Engine(tmp_path / "ctr") as engine:
        before = rows_of(engine.embeddings)
        assert before == rows_of(trainer.model.embeddings)
        batch = make_batch(50, seed=9, keys=2 * KEYS)
        trainer.model.eval()
        with torch.no_grad():
            expected = trainer.model.embeddings(batch)
        got = engine.lookup(batch)
        assert list(got) == list(expected)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        engine.predict(batch)
        assert rows_of(engine.embeddings) == before


def test_every_memory_gives_the_same_bits(tmp_path: Path) -> None:
    trainer = trained("din", steps=12)
    trainer.model.embeddings.table("user").assign(torch.arange(20_000), torch.randn(20_000, 4))
    hr.export(trainer.model, tmp_path / "ctr")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "ctr").rglob("*") if path.is_file()}
    budgets = {
        "all": None,
        "dram": hr.Memory(dram="64MiB"),
        "ssd": hr.Memory(dram="4MiB", ssd=tmp_path / "ssd"),
        "hbm": hr.Memory(hbm="1MiB"),
    }
    answers = {}
    for name, memory in budgets.items():
        with hr.Engine(tmp_path / "ctr", memory=memory, device="cpu") as engine:
            sizes = (1, 33) if name == "hbm" else (1, 33, 500)  # its kernels are interpreted here
            batches = [make_batch(rows, seed=rows, keys=30_000) for rows in sizes]
            answers[name] = [engine.logits(batch) for batch in batches]
    for name, given in answers.items():
        for got, expected in zip(given, answers["all"], strict=False):
            if name == "hbm":  # another device: equal to rounding
                torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
            else:
                assert torch.equal(got, expected), name
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "ctr").rglob("*") if path.is_file()}


def test_rows_over_ssd_are_links_to_the_repository(tmp_path: Path) -> None:
    trainer = trained()
    hr.export(trainer.model, tmp_path / "ctr")
    segment = next((tmp_path / "ctr" / "1" / "rows" / "user").glob("segment-*"))
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="4MiB", ssd=tmp_path / "ssd")) as engine:
        assert segment.stat().st_nlink == 2
        engine.predict(make_batch(5))
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="4MiB", ssd=tmp_path / "ssd")):  # the folder is free again
        pass


def test_many_threads_get_what_one_gets(tmp_path: Path) -> None:
    trainer = trained("din", steps=8)
    hr.export(trainer.model, tmp_path / "ctr")
    batches = [make_batch(1 + 13 * number, seed=number, keys=2 * KEYS) for number in range(12)]
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="4MiB", ssd=tmp_path / "ssd")) as engine:
        expected = [engine.logits(batch) for batch in batches]
        wrong: list[object] = []

        def lane(first: int) -> None:
            try:
                for turn in range(24):
                    number = (first + turn) % len(batches)
                    if not torch.equal(engine.logits(batches[number]), expected[number]):
                        wrong.append(number)
            except Exception as error:
                wrong.append(error)

        lanes = [threading.Thread(target=lane, args=(number,)) for number in range(4)]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
        assert not wrong


def test_weights_are_replaced_whole_beside_running_lanes(tmp_path: Path) -> None:
    trainer = trained()
    hr.export(trainer.model, tmp_path / "ctr")
    batch = make_batch(16)
    states = [{name: value * factor for name, value in trainer.model.tower.state_dict().items()} for factor in (1, 2)]
    with hr.Engine(tmp_path / "ctr") as engine:
        answers = []
        for state in states:
            engine.replace_weights(state)
            answers.append(engine.logits(batch))
        assert not torch.equal(*answers)
        with torch.no_grad():
            trainer.model.tower.load_state_dict(states[1])
        torch.testing.assert_close(torch.sigmoid(answers[1]), trainer.predict(batch), rtol=0, atol=1e-6)
        stop, mixed = threading.Event(), []

        def lane() -> None:
            while not stop.is_set():
                got = engine.logits(batch)
                if not any(torch.equal(got, answer) for answer in answers):
                    mixed.append(got)

        thread = threading.Thread(target=lane)
        thread.start()
        for turn in range(200):
            engine.replace_weights(states[turn % 2])
        stop.set()
        thread.join()
        assert not mixed


def test_weights_of_another_tower_change_nothing(tmp_path: Path) -> None:
    trainer = trained()
    hr.export(trainer.model, tmp_path / "ctr")
    batch, state = make_batch(4), dict(trainer.model.tower.state_dict())
    name = next(iter(state))
    with hr.Engine(tmp_path / "ctr") as engine:
        before = engine.logits(batch)
        missing = {other: value for other, value in state.items() if other != name}
        for wrong, says in (
            (missing, f"{name!r} is missing"),
            ({**state, "top.leyers": state[name]}, "no weight 'top.leyers'"),
            ({**state, name: state[name][:1]}, "has shape"),
            ({**state, name: state[name] * float("nan")}, "NaN"),
        ):
            with pytest.raises(hr.OptionError, match=says):
                engine.replace_weights(wrong)
        assert torch.equal(engine.logits(batch), before)


def test_raw_columns_go_through_the_saved_spec(tmp_path: Path) -> None:
    spec = hr.FeatureSpec([hr.features.Key("user"), hr.features.Key("item"), hr.features.Dense("price")], label="click")
    embeddings = hr.EmbeddingCollection([hr.Table("user", 4), hr.Table("item", 4)])
    model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, dense_features=1, bottom=(4,), top=(4,)))
    columns = {"user": ["ann", "bob"], "item": ["x", "y"], "price": [1.0, 2.5]}
    hr.Trainer(model).model(spec.apply({**columns, "click": [0, 1]}))
    hr.export(model, tmp_path / "ctr", features=spec)
    with hr.Engine(tmp_path / "ctr") as engine:
        assert engine.features == spec
        expected = hr.Trainer(model).predict(spec.apply(columns, labels=False))
        torch.testing.assert_close(engine.predict(columns), expected, rtol=0, atol=1e-6)
        with pytest.raises(hr.DataError, match="item"):
            engine.predict({"user": ["ann"], "price": [1.0]})


def test_a_model_that_was_never_trained_here(tmp_path: Path) -> None:
    torch.manual_seed(1)
    bags = {"user": torch.nn.EmbeddingBag(50, 4, mode="sum"), "item": torch.nn.EmbeddingBag(60, 4, mode="mean")}
    tower = TwoTasks().eval()
    hr.export(hr.Recommender(hr.from_torch(bags), tower), tmp_path / "bought")
    ids = torch.tensor([3, 49, 7, 0])
    with torch.no_grad():
        one = torch.arange(4)
        expected = tower({name: bag(ids, one) for name, bag in bags.items()}, None)
    with hr.Engine(tmp_path / "bought") as engine:
        assert engine.signature.tasks == 2
        got = engine.logits(hr.KeyedBatch({name: hr.Jagged(ids) for name in bags}))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
        engine.replace_weights(tower.state_dict())  # with the name that is tied
        torch.testing.assert_close(engine.logits(hr.KeyedBatch({n: hr.Jagged(ids) for n in bags})), got)


def test_wrong_batches_are_refused_by_name(tmp_path: Path) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    batch = make_batch(3)
    with hr.Engine(tmp_path / "ctr") as engine:
        with pytest.raises(hr.BatchError, match="reads 3 dense features but the batch has 0"):
            engine.predict(hr.KeyedBatch(batch.ids))
        with pytest.raises(hr.BatchError, match="no feature 'item'"):
            engine.predict(hr.KeyedBatch({"user": batch.ids["user"], "tags": batch.ids["tags"]}, batch.dense))
        with pytest.raises(hr.OptionError, match="without a feature spec"):
            engine.predict({"user": [1]})
        with pytest.raises(hr.OptionError, match="late='never'"):
            engine.run(batch, policy="never")
    with pytest.raises(hr.OptionError, match="closed"):
        engine.predict(batch)


def test_buckets_can_take_the_towers_place(tmp_path: Path) -> None:
    hr.export(trained().model, tmp_path / "ctr")

    class Doubled:
        def __init__(self, original: object) -> None:
            self.original = original

        def run(self, vectors: object, dense: object) -> torch.Tensor:
            return 2 * self.original.run(vectors, dense)  # type: ignore[attr-defined]

    batch = make_batch(5)
    with hr.Engine(tmp_path / "ctr") as plain, hr.Engine(tmp_path / "ctr", towers=Doubled) as engine:
        assert torch.equal(engine.logits(batch), 2 * plain.logits(batch))


def test_default_rows_and_deadline_are_kept(tmp_path: Path) -> None:
    model = hr.Recommender(collection(), TwoTasks())
    hr.export(model, tmp_path / "ctr", policy="default", deadline=0.05, default_rows={"user": [1.0, 2.0, 3.0, 4.0]})
    with hr.Engine(tmp_path / "ctr") as engine:
        assert (engine.source.policy, engine.source.deadline) == ("default", 0.05)
        assert [on_disk.table.default for on_disk in engine.source.tables] == [(1.0, 2.0, 3.0, 4.0), None, None]


def found(engine: hr.Engine, batch: hr.KeyedBatch, policy: str) -> dict[str, torch.Tensor]:
    """The tower's inputs under a policy."""
    live = engine._open()
    with torch.inference_mode(), ExitStack() as held, ExitStack() as locked:
        return engine._pool(live, engine._read_here(live, batch, policy, held, locked))[0]


def test_rows_on_disk_are_answered_by_policy_until_they_are_warm(tmp_path: Path) -> None:
    model = hr.Recommender(collection(), TwoTasks())
    values = torch.ones(100, 4)
    for name in ("user", "item"):
        model.embeddings.table(name).assign(torch.arange(100), values)
    hr.export(model, tmp_path / "ctr", default_rows={"user": [5.0] * 4})
    keys = torch.tensor([1, 2, 3])
    none = hr.Jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    batch = hr.KeyedBatch({"user": hr.Jagged(keys), "item": hr.Jagged(keys + 1000), "tags": none})
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="4MiB", ssd=tmp_path / "ssd")) as engine:
        assert engine.cold(batch) >= 3
        _, late = engine.run(batch, policy="default")
        assert late.ids == 3 and late.by_row is not None and late.by_row.tolist() == [1, 1, 1]
        assert torch.equal(found(engine, batch, "default")["user"], torch.full((3, 4), 5.0))
        unseen = model.embeddings.table("user").store
        initial = hr.EmbeddingCollection([hr.Table("user", 4)], seed=3).table("user").read(keys)
        assert torch.equal(found(engine, batch, "initial")["user"], initial) and len(unseen) == 100
        assert engine.warm(batch) == 3 and engine.cold(batch) == 0
        logits, late = engine.run(batch, policy="default")
        assert late.ids == 0 and late.by_row is None
        assert torch.equal(logits, engine.logits(batch))
        assert torch.equal(engine.lookup(batch)["user"], torch.ones(3, 4))


@pytest.mark.parametrize("values", ["fp16", "int8"])
def test_rows_of_every_type_are_near_the_trainers(values: str, tmp_path: Path) -> None:
    trainer = trained("din", steps=8)
    hr.export(trainer.model, tmp_path / "ctr", values=values)
    batch = make_batch(64, seed=5, keys=2 * KEYS)
    expected = trainer.predict(batch)
    answers = []
    for memory in (None, hr.Memory(dram="4MiB", ssd=tmp_path / "ssd")):
        with hr.Engine(tmp_path / "ctr", memory=memory) as engine:
            answers.append(engine.predict(batch))
    assert torch.equal(*answers)
    torch.testing.assert_close(answers[0], expected, rtol=0, atol=2e-3 if values == "fp16" else 2e-2)
    sizes = {on_disk.table.values for on_disk in engine.source.tables}
    assert sizes == {values}
