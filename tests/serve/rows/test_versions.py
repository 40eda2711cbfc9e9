"""Versions that a row server loads on demand, drops, lacks, and refuses by name."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from row_servers import Rows, Stranger, connected, model_of, over, problem, same_bits, until, where
from small_models import Batches, make_batch, trained

import hotrow as hr
from hotrow.errors import HotRowError, StorageError
from hotrow.serve.repository.manifest import Version, open_version
from hotrow.serve.repository.releases import Release, change_release
from hotrow.serve.rows import row_server_process
from hotrow.tiers.rows.handshake import ERROR, HELLO, fingerprint, make_hello


def damage(version: Path) -> None:
    """Change a byte in the middle of every file with rows."""
    for path in version.glob("rows/*/segment-*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)


def test_a_version_that_comes_later_is_loaded_on_demand(tmp_path: Path, rows: Rows) -> None:
    trainer = trained()
    hr.export(trainer.model, tmp_path / "ctr")
    server = rows.start(tmp_path)
    trainer.fit(Batches(2, first=100), progress=False)
    hr.export(trainer.model, tmp_path / "ctr")
    batch = make_batch(20)
    with over(tmp_path / "ctr", where(server)) as engine, hr.Engine(tmp_path / "ctr") as plain:
        assert engine.version == 2
        assert same_bits(engine.logits(batch), plain.logits(batch))
    with hr.Engine(tmp_path / "ctr", 1, memory=hr.Memory(rows=where(server))) as engine:
        with hr.Engine(tmp_path / "ctr", 1) as plain:
            assert same_bits(engine.logits(batch), plain.logits(batch))
    assert set(server.versions) == {("ctr", 1), ("ctr", 2)}


def test_an_old_version_that_nobody_uses_is_dropped_and_loaded_again(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_server_process, "UNUSED_SECONDS", 0.1)
    monkeypatch.setattr(row_server_process, "CLOCK_SECONDS", 0.05)
    for _ in range(2):
        hr.export(trained().model, tmp_path / "repository" / "ctr")
    server = rows.start(tmp_path / "repository", dram="3MiB", ssd=str(tmp_path / "ssd"))
    for local in ("on", "off", "on"):
        with hr.Engine(tmp_path / "repository" / "ctr", 1, memory=hr.Memory(rows=where(server, local=local))) as engine:
            assert set(server.versions) == {("ctr", 1), ("ctr", 2)}
            time.sleep(0.3)
            assert ("ctr", 1) in server.versions  # it is in use
            engine.logits(make_batch(5))
        until(lambda: set(server.versions) == {("ctr", 2)}, "version 1 to be dropped")


def test_a_version_that_is_not_there_is_refused_by_number_and_others_serve(
    tmp_path: Path, repository: Path, rows: Rows
) -> None:
    """A row server whose copy of the repository lacks the version that the tower server serves."""
    shutil.copytree(repository, tmp_path / "other")
    shutil.copytree(repository / "ctr" / "1", tmp_path / "newer" / "ctr" / "1")
    hr.export(trained().model, tmp_path / "newer" / "ctr")
    lacking, having = rows.start(tmp_path / "other"), rows.start(tmp_path / "newer")
    newer = tmp_path / "newer" / "ctr" / "2"
    problem(newer, where(lacking), "version 2 of 'ctr' does not load:")
    with connected(newer, where(lacking, having)) as servers:
        servers.wait_until_complete(20)
        figures = servers.figures()["servers"]
        assert figures[having.addresses[0]]["up"] and not figures[lacking.addresses[0]]["up"]


def test_a_damaged_version_is_refused_by_name(tmp_path: Path, rows: Rows) -> None:
    for _ in range(2):
        hr.export(trained().model, tmp_path / "ctr")
    server = rows.start(tmp_path)
    damage(tmp_path / "ctr" / "1")
    said = problem(tmp_path / "ctr" / "1", where(server), "version 1 of 'ctr' does not load:")
    assert str(tmp_path / "ctr" / "1" / "rows") in said
    with connected(tmp_path / "ctr" / "2", where(server)) as servers:
        servers.wait_until_complete(20)


def test_a_server_whose_newest_version_is_damaged_serves_the_other_models(tmp_path: Path, rows: Rows) -> None:
    for name in ("ctr", "feed", "shop"):
        hr.export(trained().model, tmp_path / name)
    damage(tmp_path / "feed" / "1")
    server = rows.start(tmp_path)
    assert set(server.versions) == {("ctr", 1), ("shop", 1)}
    problem(tmp_path / "feed" / "1", where(server), "version 1 of 'feed' does not load:")
    with over(tmp_path / "shop", where(server)) as engine:
        engine.logits(make_batch(5))


def test_a_version_that_takes_long_to_load_is_waited_for(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        hr.export(trained().model, tmp_path / "ctr")
    server = rows.start(tmp_path)
    load = server._load

    def slowly(version: Version) -> None:
        time.sleep(1.5)
        load(version)

    monkeypatch.setattr(server, "_load", slowly)
    with connected(tmp_path / "ctr" / "1", where(server)) as servers:
        servers.wait_until_complete(0.7)


def test_a_server_of_this_machine_that_cannot_load_a_version_is_not_waited_for(tmp_path: Path, rows: Rows) -> None:
    for _ in range(2):
        hr.export(trained().model, tmp_path / "repository" / "ctr")
    server = rows.start(tmp_path / "repository", listen=(f"unix:{tmp_path / 'rows.sock'}",))
    damage(tmp_path / "repository" / "ctr" / "1")
    with connected(tmp_path / "repository" / "ctr" / "1", server.addresses[0]) as servers:
        with pytest.raises(StorageError, match=r"does not load: .* is damaged in block 0"):
            servers.wait_until_complete(60.0)


def test_a_server_none_of_whose_models_loads_says_why(tmp_path: Path, rows: Rows) -> None:
    hr.export(trained().model, tmp_path / "ctr")
    damage(tmp_path / "ctr" / "1")
    with pytest.raises(HotRowError, match=str(tmp_path / "ctr" / "1")):
        rows.start(tmp_path)


def test_other_tables_or_another_seed_are_refused_with_the_cure(repository: Path, rows: Rows) -> None:
    server = rows.start(repository)
    version = open_version(repository / "ctr" / "1")
    tables = [on_disk.table for on_disk in version.tables]
    right = model_of(version)
    for wrong in (fingerprint(tables, 99), fingerprint(tables[:2], 3)):
        stranger = Stranger(server.addresses[0])
        hello = make_hello(right._replace(fingerprint=wrong), stranger.challenge(), None)
        stranger.send(HELLO, hello.text)
        kind, _, text = stranger.frame()
        assert kind == ERROR
        assert b"has other tables or another seed here than at the client; copy the same export to both" in text
        assert stranger.is_closed()


def test_a_model_that_is_not_served_is_refused_with_those_that_are(tmp_path: Path, rows: Rows) -> None:
    for name in ("ctr", "feed"):
        hr.export(trained().model, tmp_path / name)
    server = rows.start(tmp_path, models=("ctr",))
    problem(tmp_path / "feed" / "1", where(server), "this row server has no model 'feed'; it serves ctr")


def test_a_row_server_starts_with_the_stable_version(tmp_path: Path, rows: Rows) -> None:
    for _ in range(2):
        hr.export(trained().model, tmp_path / "ctr")
    change_release(tmp_path / "ctr", lambda _: Release(aliases={"stable": 1}))
    server = rows.start(tmp_path)
    assert set(server.versions) == {("ctr", 1)}
