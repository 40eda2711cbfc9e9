"""An engine over several stores: Redis gone, RocksDB or the export answer, and answers name how old their rows are."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from small_models import make_batch, trained
from test_remote_engine import change, filled, publication, write

import hotrow as hr
from hotrow.bench.servers.redis_cluster import RedisServers, until
from hotrow.errors import OptionError
from hotrow.serve.processes.serve_options import ServeOptions


def test_redis_gone_rocksdb_answers_and_both_gone_the_export(tmp_path: Path, redis_installed: None) -> None:
    pytest.importorskip("rocksdict")
    hr.export(trained().model, tmp_path / "ctr", publication=3)
    users = sorted(set(make_batch(40, keys=500).ids["user"].values.tolist()))
    fourth = publication(4, {"user": change(users, 4.0)}, watermark=4000)
    with RedisServers(options=["--appendonly", "yes"]) as servers, hr.Engine(tmp_path / "ctr") as whole:
        store = filled(servers.url, tmp_path / "ctr")
        remote = [servers.url, f"rocksdb:{tmp_path / 'rows'}", "export:"]
        exported = whole.logits(make_batch(40, keys=500))
        whole.apply(fourth)
        with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="4MiB", remote=remote)) as engine:
            engine.apply(fourth)  # which writes RocksDB; nothing is cached yet
            write(store, fourth)
            batch = make_batch(40, keys=500)
            servers.servers[0].kill()
            answered = engine.answer(batch)
            assert torch.equal(answered.logits, whole.logits(batch))  # RocksDB has publication 4
            assert (answered.fresh.publication, answered.fresh.highest, answered.late.ids) == (4, 4, 0)
            stack = engine.embeddings.remote
            assert stack is not None and stack.figures()["up"] == 0 and stack.figures()["fallback"] > 0

            rocks = stack.store.opened(remote[1])  # type: ignore[attr-defined]
            rocks.read = fail
            drop(engine)
            answered = engine.answer(batch)
            assert torch.equal(answered.logits, exported)
            assert (answered.fresh.publication, answered.late.ids) == (3, 0)
            servers.servers[0].start()
            until(lambda: engine.answer(batch).fresh.publication == 4, "Redis to be used again", 60)
            assert torch.equal(engine.logits(batch), whole.logits(batch))
        store.close()


def fail(table: str, keys: object, deadline: float) -> None:
    """As a read of a disk that is broken."""
    raise OSError("input/output error")


def drop(engine: hr.Engine) -> None:
    """Forget what is cached."""
    for rows in engine.embeddings.tables:
        for part in list(rows.store.scan()):
            rows.store.erase(part.keys)


def test_a_server_starts_while_its_first_store_is_gone(tmp_path: Path, redis_installed: None) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    batch = make_batch(20)
    with RedisServers(options=["--appendonly", "yes"]) as servers:
        filled(servers.url, tmp_path / "ctr").close()
        servers.servers[0].kill()
        memory = hr.Memory(dram="4MiB", remote=[f"{servers.url}?write_timeout=1", "export:"])
        with hr.Engine(tmp_path / "ctr", memory=memory) as engine, hr.Engine(tmp_path / "ctr") as whole:
            begin = time.monotonic()
            assert torch.equal(engine.logits(batch), whole.logits(batch))
            assert time.monotonic() - begin < 5
            servers.servers[0].start()
            assert engine.embeddings.remote is not None
            health = engine.embeddings.remote.store.health
            until(lambda: bool(health()["ok"]), "Redis to be opened", 60)


def test_an_export_is_not_written_and_its_links_are_removed(tmp_path: Path) -> None:
    hr.export(trained().model, tmp_path / "ctr", publication=2)
    before = contents(tmp_path / "ctr")
    links = tmp_path / "links"
    links.mkdir()
    batch = make_batch(20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(links))
        with hr.Engine(tmp_path / "ctr", memory=hr.Memory(dram="4MiB", remote="export:")) as engine:
            with hr.Engine(tmp_path / "ctr") as whole:
                assert torch.equal(engine.logits(batch), whole.logits(batch))
            one = publication(3, {"user": change([int(batch.ids["user"].values[0])], 5.0)})
            engine.apply(one)
            assert engine.answer(batch).fresh.publication == 3  # its cached copy has the publication
            drop(engine)
            assert engine.answer(batch).fresh.publication == 2  # the export's own row has not
    assert contents(tmp_path / "ctr") == before and not list(links.iterdir())


def test_the_whole_stack_answers_as_rows_in_dram_do(tmp_path: Path, redis_installed: None) -> None:
    """HBM (interpreted) over DRAM over SSD over Redis over the export, while publications are applied."""
    pytest.importorskip("triton")
    hr.export(trained().model, tmp_path / "ctr", publication=1)
    with RedisServers(options=["--appendonly", "yes"]) as servers, hr.Engine(tmp_path / "ctr") as whole:
        store = filled(servers.url, tmp_path / "ctr")
        memory = hr.Memory(hbm="8KiB", dram="16MiB", ssd=tmp_path / "ssd", remote=[servers.url, "export:"])
        with hr.Engine(tmp_path / "ctr", memory=memory, device="cpu") as engine:
            batches = [make_batch(3, seed) for seed in range(2)]
            for number in (2, 3):
                for batch in batches:
                    assert close(engine.logits(batch), whole.logits(batch))
                users = sorted(set(batches[0].ids["user"].values.tolist()))
                one = publication(number, {"user": change(users, float(number))})
                for target in (engine, whole):
                    target.apply(one)
                write(store, one)
                answered = engine.answer(batches[0])
                assert close(answered.logits, whole.logits(batches[0]))
                assert answered.fresh.publication == answered.fresh.highest == number
            servers.servers[0].kill()
            drop(engine)
            # HBM has the rows that it took in, and the export the others; of them the users are older.
            answered = engine.answer(batches[0])
            assert answered.late.ids == 0 and answered.fresh.publication in (1, 3)
            same = close(answered.logits, whole.logits(batches[0]))
            assert same or answered.fresh.publication == 1
            cache = engine.embeddings.hbm_cache
            assert cache is not None and cache.figures()["hits"] > 0
        store.close()


def close(some: torch.Tensor, others: torch.Tensor) -> bool:
    """The kernels of HBM pool in another order."""
    return torch.allclose(some, others, atol=1e-6)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_lists_of_stores_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ctr" / "1").mkdir(parents=True)
    redis = "redis://:secret@10.0.0.1:6379"

    def options(*remote: str) -> ServeOptions:
        return ServeOptions(str(tmp_path), remote=remote, models=("ctr",), dram="4GiB")

    assert options(redis, "ctr=rocksdb:/rows", "export:").remotes() == {"ctr": [redis, "rocksdb:/rows", "export:"]}
    for words, remote in (
        ("put it last", ["export:", redis]),
        ("names one store twice", [redis, redis]),
    ):
        with pytest.raises(OptionError, match=words) as refused:
            options(*remote)
        assert "secret" not in str(refused.value)
    with pytest.raises(OptionError, match="names no store"):
        hr.Memory(dram="1GiB", remote=[])
    with pytest.raises(OptionError, match="give the folder of an exported version"):
        hr.EmbeddingCollection([hr.Table("user", 4)], memory=hr.Memory(dram="9MiB", remote=f"export:{tmp_path}"))
