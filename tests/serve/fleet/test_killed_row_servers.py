"""Row servers that are killed and come back at their export, while rows are published and requests come."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from fleet_processes import RowServer, TowerServer, load_on, until

from hotrow.bench.serving import fleet_history
from hotrow.bench.serving.fleet_history import Answer, History


def test_no_answer_fails_or_mixes_publications_while_row_servers_are_killed_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_history, "ROWS", 10_000)
    monkeypatch.setattr(fleet_history, "CHANGED", 1_000)
    repository, bus = tmp_path / "repository", f"dir:{tmp_path / 'bus'}"
    fleet_history.export(repository)
    with ExitStack() as stack:
        history = stack.enter_context(History(bus, tmp_path / "spool"))
        rows = [RowServer(repository, tmp_path, "--bus", bus) for _ in range(2)]
        for server in rows:
            stack.callback(server.process.kill)
        addresses = ",".join(server.address for server in rows)
        options = ("--bus", bus, "--deadline", "30s", "--policy", "wait")
        tower = TowerServer(repository, tmp_path, f"{addresses}?local=off", *options)
        stack.callback(tower.process.kill)
        tower.wait()
        with load_on(tower.port, tmp_path, rate=60.0) as load:
            for server in rows:
                until(lambda: tower.connected() == 2, "the tower server to be connected to both row servers")
                time.sleep(0.3)
                server.process.kill()
                until(lambda: tower.connected() == 1, "the tower server to notice")
                server.start()
                stack.callback(server.process.kill)
            until(lambda: tower.connected() == 2, "the tower server to be connected again")
            time.sleep(0.3)
            records = load.answers()
        assert tower.end() == 0
    failed = [f"{one.status}: {one.body[:200]!r}" for one in records if one.status != 200]
    assert not failed, f"{len(failed)} of {len(records)}: {failed[:3]}"
    checked = history.check(
        [Answer.parse(one.number, one.arrived, one.json_bytes, one.body) for one in records],
        fleet_history.request_keys(),
    )
    assert not checked.mixed, f"{len(checked.mixed)} of {checked.answers}: {checked.mixed[:3]}"
    assert checked.answers > 60 and checked.publications > 3
