"""Trainer, bus and `hotrow serve` as processes, with something broken between them: in the end the server's rows are
the trainer's, bit for bit at the wire's precision."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import pytest
from server_process import PATIENCE, Command, Events, Server, make_trainer, publications, rows_of, until

import hotrow as hr
from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.tiers.remote.store import open_remote

pytestmark = pytest.mark.usefixtures("redis_installed")


def check_rows(server: Server, trainer: hr.Trainer) -> None:
    """A server that began at an export of fp32 rows may have more digits than the wire: those do not count."""
    server.reaches(publications(trainer))
    np.testing.assert_array_equal(server.ask()[0].astype(np.float16), rows_of(trainer).astype(np.float16))


@pytest.mark.soak
def test_a_bus_that_is_away_for_a_while(tmp_path: Path) -> None:
    """The trainer continues and spools up to its disk budget; the server continues and reports the age of its data."""
    pytest.importorskip("redis")
    with RedisServers(options=["--appendonly", "yes"]) as redis:
        bus = f"{redis.url}/0?stream=ctr"
        trainer = make_trainer(tmp_path, bus, spool_size="64KiB", memory="16KiB")
        trainer.fit(Events(0, 10), progress=False)
        with Server(tmp_path, "--bus", bus, "--stale-after", "2s") as server:
            check_rows(server, trainer)
            before = server.ask()[0]
            redis.servers[0].kill()
            trainer.fit(Events(10, 60), progress=False)
            assert trainer.publisher is not None
            waiting = sum(file.stat().st_size for file in (tmp_path / "spool").rglob("*") if file.is_file())
            assert 0 < waiting <= 64 << 10
            until(lambda: server.metric("hotrow_stale") == 1 and "s old" in server.text(), "the alarm")
            rows, parameters = server.ask()
            assert int(parameters["freshness_ms"]) > 2000 and int(parameters["publication"]) == 10
            np.testing.assert_array_equal(rows, before)
            redis.servers[0].start()
            step = iter(range(60, 10_000))

            def fresh_again() -> bool:
                trainer.fit(Events(at := next(step), at + 1), progress=False)
                return server.metric("hotrow_stale") == 0 and "fresh again" in server.text()

            until(fresh_again, "the alarm's end")
            check_rows(server, trainer)
            assert server.metric("hotrow_bus_errors_total") > 0
        trainer.publisher.close()


@pytest.mark.soak
def test_a_server_killed_while_it_applies(tmp_path: Path) -> None:
    bus = f"dir:{tmp_path / 'bus'}"
    trainer = make_trainer(tmp_path, bus)
    with Server(tmp_path, "--bus", bus) as server:
        for kill in range(3):
            trainer.fit(Events(100 * kill, 100 * kill + 100, pause=0.002), progress=False)
            server.engine().kill()
        check_rows(server, trainer)
        assert "it starts again" in server.text()
    assert trainer.publisher is not None
    trainer.publisher.close()


@pytest.mark.soak
def test_a_server_that_falls_behind_retention_begins_at_a_newer_export(tmp_path: Path) -> None:
    bus = f"dir:{tmp_path / 'bus'}?size=64KiB"
    exports = tmp_path / "repository" / "ctr"
    trainer = make_trainer(
        tmp_path,
        bus,
        snapshot=lambda number: str(
            hr.export(trainer.model, exports, dense_features=0, publication=number, policy="wait").path
        ),
        snapshot_every=100,
    )
    trainer.fit(Events(0, 5), progress=False)
    with Server(tmp_path, "--bus", bus) as server:
        check_rows(server, trainer)
        engine = server.engine()
        engine.send_signal(signal.SIGSTOP)
        trainer.fit(Events(5, 310), progress=False)
        engine.send_signal(signal.SIGCONT)
        check_rows(server, trainer)
        until(lambda: server.metric("hotrow_bus_reloads_total") >= 1, "the reload in the metrics")
    assert trainer.publisher is not None
    trainer.publisher.close()


def test_rows_come_through_a_remote_store_that_two_writers_keep_current(tmp_path: Path) -> None:
    """A server with a cache, and rows that only Redis has; a writer that is killed leaves the other."""
    bus = f"dir:{tmp_path / 'bus'}"
    trainer = make_trainer(tmp_path, bus)
    trainer.fit(Events(0, 20), progress=False)
    with RedisServers() as redis:
        remote = f"{redis.url}?timeout=5"
        arguments = ("publish-remote", bus, remote, "--export", str(tmp_path / "repository" / "ctr"))
        store = open_remote(remote)
        with (
            Command(tmp_path / "one.log", *arguments) as one,
            Command(tmp_path / "two.log", *arguments) as two,
        ):
            until(lambda: store.marks().filled, "a writer to fill the store")
            with Server(tmp_path, "--bus", bus, "--remote", remote, "--dram", "3MiB") as server:
                check_rows(server, trainer)
                trainer.fit(Events(20, 40), progress=False)
                one.process.kill()
                trainer.fit(Events(40, 60), progress=False)
                check_rows(server, trainer)
                assert two.process.poll() is None
                until(lambda: server.metric("hotrow_remote_hits_total") > 0, "the cache's metrics")
                assert server.metric("hotrow_remote_bytes_total") > 0 and server.metric("hotrow_remote_up") == 1
        store.close()
        trainer.publisher.close()  # type: ignore[union-attr]


@pytest.mark.soak
def test_a_master_killed_with_failover_while_a_server_reads_through_it(tmp_path: Path) -> None:
    bus = f"dir:{tmp_path / 'bus'}"
    trainer = make_trainer(tmp_path, bus)
    trainer.fit(Events(0, 20), progress=False)
    with RedisServers(masters=3, replicas=1) as redis:
        arguments = ("publish-remote", bus, redis.url, "--export", str(tmp_path / "repository" / "ctr"))
        with Command(tmp_path / "once.log", *arguments, "--once") as once:
            assert once.process.wait(PATIENCE) == 0, once.text()
        with (
            Command(tmp_path / "writer.log", *arguments),
            Server(tmp_path, "--bus", bus, "--remote", redis.url, "--dram", "3MiB") as server,
        ):
            check_rows(server, trainer)
            store = open_remote(redis.url)
            until(lambda: store.marks().complete == publications(trainer), "the writer")
            store.close()
            time.sleep(0.5)  # data that a replica does not have yet would be lost, see docs/remote.md
            redis.servers[0].kill()
            begin, answers, step = time.monotonic(), 0, 20
            while time.monotonic() < begin + 6:  # through the failover: every request is answered, by policy
                trainer.fit(Events(step, step + 5), progress=False)
                step += 5
                server.ask("initial", 0.5)
                answers += 1
            assert answers > 5
            check_rows(server, trainer)
    assert trainer.publisher is not None
    trainer.publisher.close()
