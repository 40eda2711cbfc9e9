"""A two-part tower in hr.Engine: users are encoded once, answers are the trainer's, no cached encoding is stale."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fresh_engine import change, publication
from torch import Tensor
from user_models import FEATURES, HISTORY, MOST, USER, Ask, ask, batch_of, exported, user_model, user_trainer

import hotrow as hr
from hotrow.errors import BatchError, OptionError
from hotrow.serve.execution.engine import Engine
from hotrow.serve.execution.user_cache import ENTRY, State

pytestmark = pytest.mark.usefixtures("one_thread")

CACHES = [None, "1MiB", 3000]  # none, one that holds everything, one of two users


@pytest.fixture(scope="module")
def trainer() -> hr.Trainer:
    return user_trainer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, trainer: hr.Trainer) -> Path:
    return exported(tmp_path_factory.mktemp("users"), trainer.model) / "ctr"


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with hr.Engine(folder, user_cache="1MiB") as running:
        yield running


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= 1e-6


@pytest.mark.parametrize("cache", CACHES)
def test_answers_are_the_trainers(folder: Path, trainer: hr.Trainer, cache: Any) -> None:
    batches = [
        [ask(1)],
        [ask(2, rows=1)],
        [ask(seed, rows=1 + seed % 4) for seed in range(7)],
        [ask(3, events=0)],
        [ask(4, events=0), ask(5, events=MOST), ask(6, events=0, rows=1)],
        [ask(1), ask(2), ask(1)],  # a user twice, apart from each other
        [ask(1), ask(90), ask(5, events=MOST), ask(91)],  # some users were there before
    ]
    with hr.Engine(folder, user_cache=cache) as engine:
        for asks in (*batches, *batches):
            batch = batch_of(asks)
            assert close(engine.predict(batch), trainer.predict(batch))


def test_a_user_is_encoded_once_for_all_its_rows(engine: Engine) -> None:
    assert engine.users is not None
    batch = batch_of([ask(1, rows=20), ask(2, rows=20), ask(1, rows=20)])
    engine.predict(batch)
    events = len(ask(1).items) + len(ask(2).items)
    assert (engine.users.batches, engine.users.users, engine.users.events) == (1, 2, events)
    engine.predict(batch)
    assert (engine.users.batches, engine.users.users) == (1, 2)


def test_rows_of_cached_users_are_not_looked_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[int] = []
    route = hr.EmbeddingCollection.route

    def counting(self: Any, batch: hr.KeyedBatch, ahead: bool = True) -> Any:
        looked_up.append(batch.ids["seen_item"].values.numel())
        return route(self, batch, ahead)

    monkeypatch.setattr(hr.EmbeddingCollection, "route", counting)
    old, new = ask(1, events=5), ask(2, events=7)
    engine.predict(batch_of([old]))
    engine.predict(batch_of([old]))
    engine.predict(batch_of([new, old]))
    engine.predict(batch_of([new, old]))
    assert looked_up == [5, 0, 7, 0]


@pytest.mark.parametrize("tasks", [1, 2])
def test_ranges_of_rows_are_scored_against_the_same_encodings(tmp_path: Path, tasks: int) -> None:
    model = user_model(tasks)
    with hr.Engine(exported(tmp_path, model) / "ctr", user_cache="1MiB") as engine:
        assert engine.users is not None
        batch = batch_of([ask(1, rows=9), ask(2, rows=4), ask(1, rows=3)])
        vectors, answer = engine.answer_lookup(batch, tower=True, most_rows=3)
        assert engine.users.batches == 1 and engine.users.users == 2
        assert close(answer.logits, engine.logits(batch)) and answer.logits.shape == ((16,) if tasks == 1 else (16, 2))
        plain = engine.lookup(batch)
        assert all(torch.equal(vectors[name], plain[name]) for name in vectors)


def test_looked_up_vectors_are_per_row_as_those_of_a_padded_tower(engine: Engine, trainer: hr.Trainer) -> None:
    asks = [ask(1, rows=2), ask(2, rows=3), ask(3, rows=1, events=0)]
    found = engine.lookup(batch_of(asks).share_users(["seen_item", "seen_action", "seen_time", "age"]))
    table = trainer.model.embeddings.table
    assert set(found) == {*FEATURES, "seen_item_mask", "seen_action_mask"}
    row = 0
    for one in asks:
        for candidate in one.candidates:
            length = len(one.items)
            assert torch.equal(found["seen_item"][row, :length], table("item").read(torch.tensor(one.items).long()))
            assert not found["seen_item"][row, length:].any()
            assert found["seen_action_mask"][row].sum() == length
            assert torch.equal(found["age"][row], table("age").read(torch.tensor([one.age]))[0])
            assert torch.equal(found["item"][row], table("item").read(torch.tensor([candidate]))[0])
            row += 1


def test_too_long_and_unaligned_histories_are_errors_with_a_cure(engine: Engine) -> None:
    with pytest.raises(BatchError, match=r"'seen_item' has 13 entries in row 0.*max_length=12; give the newest 12"):
        engine.predict(batch_of([ask(1, events=MOST + 1)]))
    one = ask(1, events=4)
    with pytest.raises(BatchError, match="'seen_item' and 'seen_time' are columns of one history, but row 0 has 4 and"):
        engine.predict(batch_of([one._replace(times=one.times[:3])]))


def test_a_batch_of_growing_histories_is_refused(engine: Engine) -> None:
    one = ask(1, events=4)
    shorter = one._replace(items=one.items[:2], actions=one.actions[:2], times=one.times[:2])
    grown = batch_of([one, shorter]).share_users(USER, prefixes=[HISTORY])
    with pytest.raises(BatchError, match=r"see the beginnings of .*share_users\(prefixes=\) is for training"):
        engine.predict(grown)


def test_an_empty_batch_has_no_logits(engine: Engine) -> None:
    batch = batch_of([ask(1, rows=2)])
    none = {name: hr.Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)) for name in batch.ids}
    empty = hr.KeyedBatch(none, torch.empty(0, 2), numbers={"seen_time": none["age"]})
    assert engine.predict(empty).shape == (0,)


def test_a_wrong_size_of_the_cache_is_an_error_before_rows_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="user_cache"):
        hr.Engine(tmp_path / "nothing", user_cache="lots")


# --- never stale ---


def next_publication(number: int, seed: int, model: hr.Recommender) -> Any:
    """A publication of some rows, and of the weights if `seed` is even."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, 60, (8,), generator=draw).unique().tolist()
    tables = {"item": change(keys, float(torch.randn(1, generator=draw)))}
    dense = None
    if seed % 2 == 0:
        dense = {name: torch.randn(w.shape, generator=draw) * 0.2 for name, w in model.tower.state_dict().items()}
    return publication(number, tables, dense)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[tuple[Engine, Engine]]:
    """An engine with a small cache, and one without, to which every update is given."""
    with hr.Engine(folder, user_cache=4 * (ENTRY + 1200)) as cached, hr.Engine(folder) as plain:
        yield cached, plain


@given(
    st.lists(st.tuples(st.sampled_from(["ask", "ask", "ask", "publish", "weights"]), st.integers(0, 9)), max_size=25)
)
@settings(max_examples=30, deadline=None)
def test_no_interleaving_of_updates_and_requests_gives_a_stale_answer(
    pair: tuple[Engine, Engine], trainer: hr.Trainer, steps: list[tuple[str, int]]
) -> None:
    engine, plain = pair
    for kind, seed in steps:
        if kind == "publish":
            update = next_publication(engine.publication + 1, seed, trainer.model)
            engine.apply(update)
            plain.apply(update)
        elif kind == "weights":
            draw = torch.Generator().manual_seed(seed)
            state = {n: torch.randn(w.shape, generator=draw) for n, w in trainer.model.tower.state_dict().items()}
            engine.replace_weights(state)
            plain.replace_weights(state)
        else:
            batch = batch_of([ask((seed + other) % 6, rows=2) for other in range(1 + seed % 3)])
            assert close(engine.logits(batch), plain.logits(batch))
    assert engine.users is not None and engine.users.cache is not None
    assert engine.users.cache.figures()["bytes"] <= engine.users.cache.limit


def test_batches_that_run_during_updates_are_of_one_publication(folder: Path, trainer: hr.Trainer) -> None:
    """Each answer equals that of an engine without a cache at the publication that the answer names."""
    asks = [[ask(seed, rows=3), ask(seed + 1, rows=2)] for seed in range(4)]
    updates = [next_publication(number, seed=number, model=trainer.model) for number in range(1, 16)]
    expected: dict[tuple[int, int], Tensor] = {}
    with hr.Engine(folder) as plain:
        for number in range(len(updates) + 1):
            if number:
                plain.apply(updates[number - 1])
            expected |= {(number, which): plain.logits(batch_of(one)) for which, one in enumerate(asks)}
    answered: list[tuple[int, int, Tensor]] = []
    with hr.Engine(folder, user_cache="1MiB") as engine:
        done = threading.Event()

        def work(first: int) -> None:
            which = first
            while not done.is_set():
                answer = engine.answer(batch_of(asks[which % 4]))
                answered.append((answer.fresh.publication, which % 4, answer.logits))
                which += 1

        threads = [threading.Thread(target=work, args=(first,)) for first in range(2)]
        for thread in threads:
            thread.start()
        for update in updates:
            wanted = len(answered) + 6  # some batches between two updates, on a busy machine too
            while len(answered) < wanted:
                done.wait(0.001)
            engine.apply(update)
        done.set()
        for thread in threads:
            thread.join()
        assert engine.users is not None and engine.users.cache is not None
        figures = engine.users.cache.figures()
    assert figures["hits"] > 0 and figures["outdated"] > 0
    assert len({number for number, _, _ in answered}) > 5
    assert all(close(logits, expected[number, which]) for number, which, logits in answered)


def test_an_update_between_asking_the_cache_and_reading_rows_reads_everything(
    engine: Engine, folder: Path, trainer: hr.Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, update = batch_of([ask(1), ask(2)]), next_publication(1, 0, trainer.model)
    engine.predict(batch_of([ask(1)]))
    assert engine.users is not None
    probe, probed = engine.users.probe, []

    def update_after_probe(*arguments: Any) -> Any:
        found = probe(*arguments)
        probed.append(found.hits)
        engine.apply(update)
        return found

    monkeypatch.setattr(engine.users, "probe", update_after_probe)
    answer = engine.answer(batch)
    assert probed == [1] and answer.fresh.publication == 1
    with hr.Engine(folder) as plain:
        plain.apply(update)
        assert close(answer.logits, plain.logits(batch))


def test_weights_replaced_without_a_publication_make_encodings_unreachable(engine: Engine, trainer: hr.Trainer) -> None:
    batch = batch_of([ask(1)])
    before = engine.logits(batch)
    state = {name: value + 0.5 for name, value in trainer.model.tower.state_dict().items()}
    engine.replace_weights(state)
    assert not close(engine.logits(batch), before)
    engine.replace_weights(trainer.model.tower.state_dict())
    assert close(engine.logits(batch), before)


def test_encodings_of_late_rows_are_not_kept(tmp_path: Path, trainer: hr.Trainer) -> None:
    folder = exported(tmp_path, trainer.model) / "ctr"
    asks = [ask(1, events=6), ask(2, events=MOST)]
    with hr.Engine(folder, memory=hr.Memory(dram="3MiB", ssd=str(tmp_path / "rows")), user_cache="1MiB") as engine:
        assert engine.users is not None and engine.users.cache is not None
        for rows in engine.embeddings.tables:
            rows.store.core.evict(1000)
        batch = batch_of(asks)
        late = engine.answer(batch, "initial")
        assert late.late.ids > 0 and engine.users.cache.figures()["users"] == 0
        assert engine.cold(batch) > 0
        assert close(engine.predict(batch), trainer.predict(batch))  # waits for the rows
        assert engine.users.cache.figures()["users"] == 2
        for rows in engine.embeddings.tables:
            rows.store.core.evict(1000)
        cold = engine.without_cached_users(batch)
        assert engine.cold(cold) < engine.cold(batch) and cold.ids["seen_item"].values.numel() == 0


def test_a_cache_of_a_tower_with_one_part_is_no_error(tmp_path: Path) -> None:
    from small_models import make_batch, make_model

    hr.export(make_model("dlrm"), tmp_path / "ctr")
    with hr.Engine(tmp_path / "ctr", user_cache="1MiB") as engine:
        assert engine.users is None and engine.predict(make_batch(3)).shape == (3,)


def test_the_memory_of_entries_is_bounded(folder: Path) -> None:
    limit = 20_000
    with hr.Engine(folder, user_cache=limit) as engine:
        assert engine.users is not None and engine.users.cache is not None
        for seed in range(0, 80, 4):
            engine.predict(batch_of([ask(seed + other, rows=1) for other in range(4)]))
        cache = engine.users.cache
        figures = cache.figures()
        held = [one for one, _ in cache._entries.values()]
        assert sum(v.untyped_storage().nbytes() for one in held for v in one.values()) <= figures["bytes"] <= limit
        assert figures["evicted"] > 50 > figures["users"] > 5


def test_a_batch_with_users_is_taken_as_it_is(engine: Engine, trainer: hr.Trainer) -> None:
    asks: list[Ask] = [ask(1), ask(2)]
    shared = batch_of(asks).share_users(["seen_item", "seen_action", "seen_time", "age"])
    assert close(engine.predict(shared), trainer.predict(batch_of(asks)))
    assert State(0, 0) == engine.users.cache._state  # type: ignore[union-attr]
