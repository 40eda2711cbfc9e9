"""An engine over a remote store: the trainer's answers, late rows by policy, and the publications they are from."""

from __future__ import annotations

import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_batch, trained

import hotrow as hr
from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.errors import LateError, MemoryBudgetError, OptionError
from hotrow.publish.publication import DELTA, Publication, TableChange
from hotrow.serve.processes.serve_options import ServeOptions
from hotrow.serve.repository.manifest import open_version
from hotrow.serve.updates.remote_fill import fill_from_export
from hotrow.tiers.remote.store import RemoteStore, open_remote, write_publication


@pytest.fixture
def url(redis: RedisServers) -> str:
    return f"{redis.url}?namespace={uuid.uuid4().hex}&timeout=5"


@pytest.fixture(params=["dlrm", "din"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> hr.Trainer:
    trainer = trained(request.param)
    hr.export(trainer.model, tmp_path / "ctr", publication=3, policy="wait")
    return trainer


def filled(url: str, folder: Path) -> RemoteStore:
    store = open_remote(url)
    fill_from_export(store, open_version(folder / "1"))
    return store


def publication(number: int, tables: dict[str, TableChange], **more: Any) -> Publication:
    said = {"kind": DELTA, "previous": number - 1, "run": "r", "step": number, "watermark": None, "cut": 0.0, **more}
    return Publication(number=number, tables=tables, dense=None, **said)


def change(keys: list[int], value: float, deleted: tuple[int, ...] = ()) -> TableChange:
    return TableChange(torch.tensor(keys), torch.full((len(keys), 4), value), torch.tensor(deleted, dtype=torch.int64))


def write(store: RemoteStore, one: Publication) -> None:
    tables = {name: (c.keys.numpy(), c.values.numpy()) for name, c in one.tables.items()}
    write_publication(store, one.number, tables, {name: c.deleted.numpy() for name, c in one.tables.items()})


def test_answers_are_the_trainers_from_a_cache_that_is_too_small(tmp_path: Path, trainer: hr.Trainer, url: str) -> None:
    filled(url, tmp_path / "ctr").close()
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB", remote=url)) as engine:
        for seed in range(4):
            batch = make_batch(60, seed)
            answered = engine.answer(batch)
            assert torch.allclose(answered.logits.sigmoid(), trainer.predict(batch), atol=1e-6)
            assert answered.late.ids == 0 and tuple(answered.fresh)[::2] == (3, 3)
        assert engine.embeddings.remote is not None
        assert engine.embeddings.remote.metrics()["hits"] > 0


@pytest.mark.parametrize("policy", ["initial", "default"])
def test_rows_that_are_not_cached_follow_the_policy_without_waiting(tmp_path: Path, url: str, policy: str) -> None:
    trainer = trained()
    hr.export(trainer.model, tmp_path / "ctr", default_rows={"user": [7.0] * 4})
    filled(url, tmp_path / "ctr").close()
    batch = make_batch(5)
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB", remote=url)) as engine:
        late = engine.answer(batch, policy).late
        ids = [batch.ids[name] for name in ("user", "item", "tags")]
        assert late.ids == sum(one.values.numel() for one in ids)
        assert late.by_row is not None
        assert late.by_row.tolist() == (2 + ids[2].lengths()).tolist()
        vectors = engine.embeddings.route(batch, ahead=False).read(policy).gather()[1]
        if policy == "default":
            assert (vectors[0] == 7.0).all() and (vectors[1] == 0.0).all()
        assert engine.cold(batch) == late.ids
        engine.warm(batch)
        assert engine.cold(batch) == 0
        answered = engine.answer(batch, policy)
        assert answered.late.ids == 0
        assert torch.allclose(answered.logits.sigmoid(), trainer.predict(batch), atol=1e-6)


def test_a_key_without_a_row_is_not_late_once_the_store_was_read(tmp_path: Path, url: str) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    filled(url, tmp_path / "ctr").close()
    batch = make_batch(5, keys=KEYS_NOBODY_HAS)
    batch.ids["user"].values.fill_(10**9)
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB", remote=url)) as engine:
        engine.warm(batch)
        assert engine.cold(batch) == 0 and engine.answer(batch, "initial").late.ids == 0
        engine.apply(publication(1, {"user": change([10**9], 2.0)}))  # now the key has a row
        assert engine.cold(batch) == 5


KEYS_NOBODY_HAS = 50


def test_answers_report_rows_older_and_newer_than_the_applied_publication(tmp_path: Path, url: str) -> None:
    hr.export(trained().model, tmp_path / "ctr", publication=3)
    store = filled(url, tmp_path / "ctr")
    batch = make_batch(5)
    users = sorted(set(batch.ids["user"].values.tolist()))
    fourth = publication(4, {"user": change(users[:1], 4.0)}, watermark=4000)
    fifth = publication(5, {"user": change(users[1:2], 5.0, deleted=(users[2],))}, watermark=5000)
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB", remote=url)) as engine:
        engine.apply(fourth)
        engine.apply(fifth)  # the store has neither
        fresh = engine.answer(batch).fresh
        assert (fresh.publication, fresh.highest) == (3, 5)
        write(store, fourth)
        until = time.monotonic() + 10
        while engine.answer(batch).fresh != (4, 4000, 5):  # the store's mark is known to within a second
            assert time.monotonic() < until
        write(store, fifth)
        while engine.answer(batch).fresh != (5, 5000, 5):
            assert time.monotonic() < until
        user = engine.embeddings.table("user")
        assert user.read(torch.tensor(users[:2]))[:, 0].tolist() == [4.0, 5.0]
        assert user.contains(torch.tensor(users[:3])).tolist() == [True, True, False]
        other = make_batch(30, seed=5, keys=10_000)  # not cached yet
        keys = sorted(set(other.ids["user"].values.tolist()))
        write(store, publication(6, {"user": change(keys, 6.0)}))  # the store is ahead of this server
        fresh = engine.answer(other).fresh
        assert (fresh.publication, fresh.highest) == (5, 6)
    store.close()


def test_a_store_older_than_the_export_is_reported_and_read_again_soon(tmp_path: Path, url: str) -> None:
    hr.export(trained().model, tmp_path / "ctr", publication=3)
    store = filled(url, tmp_path / "ctr")
    hr.export(trained(steps=6).model, tmp_path / "ctr", publication=4)
    batch = make_batch(5)
    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB", remote=url)) as engine:
        assert engine.answer(batch).fresh.publication == 3
        fill_from_export(store, open_version(tmp_path / "ctr" / "2"))
        until = time.monotonic() + 10
        while engine.answer(batch).fresh.publication != 4:
            assert time.monotonic() < until
        with hr.Engine(tmp_path / "ctr", 2) as whole:
            assert torch.equal(engine.logits(batch), whole.logits(batch))
    store.close()


def test_a_store_that_does_not_answer_makes_rows_late_or_an_error(tmp_path: Path, redis_installed: None) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    with RedisServers() as servers:
        url = f"{servers.url}?timeout=0.1"
        filled(url, tmp_path / "ctr").close()
        batch, cached = make_batch(5), make_batch(5, seed=1, keys=10)
        with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB", remote=url)) as engine:
            expected = engine.logits(cached)
            servers.servers[0].pause()
            assert torch.equal(engine.logits(cached), expected)  # DRAM has it
            begin = time.monotonic()
            engine.warm(batch)
            assert engine.answer(batch, "initial").late.ids > 0
            with pytest.raises(LateError, match="did not come from the remote store"):
                engine.answer(batch)
            assert time.monotonic() - begin < 5
            servers.servers[0].resume()
            engine.warm(batch, patient=True)
            assert engine.answer(batch, "initial").late.ids == 0


def test_rocksdb_is_filled_and_written_by_the_server_itself(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    trainer = trained()
    hr.export(trainer.model, tmp_path / "ctr")
    memory = hr.Memory(dram="3MiB", remote=f"rocksdb:{tmp_path / 'rows'}")
    batch = make_batch(50, seed=9)
    with hr.Engine(tmp_path / "ctr", memory=memory) as engine:
        assert torch.allclose(engine.predict(batch), trainer.predict(batch), atol=1e-6)
        user = int(batch.ids["user"].values[0])
        engine.apply(publication(1, {"user": change([user], 9.0)}))
        with hr.Engine(tmp_path / "ctr", memory=memory) as beside:  # as another version of the model
            beside.apply(publication(1, {"user": change([user], 9.0)}))
            assert torch.equal(beside.logits(batch), engine.logits(batch))
    with hr.Engine(tmp_path / "ctr", memory=memory) as engine:  # what was written is there
        engine.warm(batch)
        assert float(engine.embeddings.table("user").read(torch.tensor([user]))[0, 0]) == 9.0


def test_batches_beside_publications_see_rows_of_what_they_name(tmp_path: Path, url: str) -> None:
    """Every publication sets every row to its number: an answer's rows must lie between what it names."""
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4)])
    keys = list(range(400))
    embeddings.table("user").assign(torch.tensor(keys), torch.zeros(400, 4))
    hr.export(hr.Recommender(embeddings, Shows()), tmp_path / "ctr", dense_features=0)
    store, problems, done = filled(url, tmp_path / "ctr"), [], threading.Event()

    def ask(engine: hr.Engine, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        while not done.is_set():
            some = torch.randint(0, 400, (50,), generator=draw)
            answered = engine.answer(hr.KeyedBatch({"user": hr.Jagged(some)}))
            fresh, low, high = answered.fresh, float(answered.logits.min()), float(answered.logits.max())
            if not fresh.publication <= low <= high <= fresh.highest:
                problems.append((fresh, low, high))

    with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB", remote=url)) as engine:
        threads = [threading.Thread(target=ask, args=(engine, seed)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for number in range(1, 31):
            one = publication(number, {"user": change(keys, float(number))})
            for step in (engine.apply, lambda it: write(store, it))[:: 1 if number % 2 else -1]:
                step(one)
            engine.embeddings.table("user").store.core.evict(200)
        done.set()
        for thread in threads:
            thread.join()
    assert not problems
    store.close()


class Shows(torch.nn.Module):
    """The first number of the row."""

    def forward(self, vectors: dict[str, torch.Tensor], dense: torch.Tensor | None) -> torch.Tensor:
        return vectors["user"][:, 0]


def test_options_of_the_server_that_do_not_go_together(tmp_path: Path) -> None:
    for name in ("ctr", "feed"):
        (tmp_path / name / "1").mkdir(parents=True)
    redis = "redis://:secret@10.0.0.1:6379"

    def options(*remote: str, **more: Any) -> ServeOptions:
        return ServeOptions(str(tmp_path), remote=remote, **{"models": ("ctr",), "dram": "4GiB", **more})

    assert options(redis).remotes() == {"ctr": [redis]}
    both = options(f"ctr={redis}", "feed=rocksdb:/data/feed", models=("ctr", "feed"))
    assert both.remotes() == {"ctr": [redis], "feed": ["rocksdb:/data/feed"]}
    for words, remote, more in (
        ("--remote without --dram", redis, {"dram": None}),
        ("say which model follows it, such as --remote ctr=redis", redis, {"models": ("ctr", "feed")}),
        ("there is no model 'cart'", f"cart={redis}", {}),
        ("did you mean 'redis'", "redi://10.0.0.1", {}),
        ("lets one process open a folder", "rocksdb:/data/rows", {"processes": 2}),
    ):
        with pytest.raises(OptionError, match=words) as refused:
            options(remote, **more)
        assert "secret" not in str(refused.value)


def test_impossible_configurations_are_refused_with_the_cure(tmp_path: Path, url: str) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    with pytest.raises(OptionError, match=r"has no rows yet.*hotrow publish-remote"):
        hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="3MiB", remote=url))
    filled(url, tmp_path / "ctr").close()
    with pytest.raises(MemoryBudgetError, match="give at least"):
        hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="1MiB", remote=url))
    with pytest.raises(OptionError, match="remote= without dram="):
        hr.Memory(remote=url)
    with pytest.raises(OptionError, match="ssd_limit='1GiB' without ssd= and remote="):
        hr.Memory(dram="3MiB", ssd=str(tmp_path), ssd_limit="1GiB")
    tables = [hr.Table("user", 4), hr.Table("item", 4), hr.Table("tags", 4, {"tags": "mean"})]
    embeddings = hr.EmbeddingCollection(tables, memory=hr.Memory(dram="3MiB", remote=url))
    with pytest.raises(OptionError, match="are only read"):
        embeddings(make_batch(3))


def test_a_batch_of_no_examples_reads_nothing(tmp_path: Path, url: str) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    filled(url, tmp_path / "ctr").close()
    tables = [hr.Table("user", 4), hr.Table("item", 4), hr.Table("tags", 4, {"tags": "mean"})]
    embeddings = hr.EmbeddingCollection(tables, memory=hr.Memory(dram="3MiB", remote=url)).eval()
    lookup = embeddings.route(make_batch(0), ahead=False)
    assert (lookup.examples, lookup.finished) == (0, False)  # an evaluation goes on
    assert lookup.prefetch().rows == 0
    pooled, _ = lookup.read().gather()
    assert pooled.shape == (0, 12) and lookup.late_ids == 0
