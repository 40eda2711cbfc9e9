"""When a tower server says that it is ready."""

from __future__ import annotations

import shutil
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from fleet_processes import RowServer, TowerServer, until

from hotrow.bench.serving import fleet_history
from hotrow.bench.serving.fleet_history import History
from hotrow.bench.serving.fleet_servers import HOST


def status(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v2/health/ready", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_tower_server_too_far_behind_its_row_servers_is_not_ready_until_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_history, "ROWS", 10_000)
    monkeypatch.setattr(fleet_history, "INTERVAL", 0.05)
    fleet_history.export(tmp_path)
    bus, lagging = tmp_path / "bus", tmp_path / "lagging"
    with History(f"dir:{bus}", tmp_path / "spool") as history:
        until(lambda: history.newest >= 20, "publications that 1 MiB of history cannot hold")
    lagging.mkdir()
    with ExitStack() as stack:
        rows = RowServer(tmp_path, tmp_path, "--bus", f"dir:{bus}", "--history", "1MiB")
        stack.callback(rows.process.kill)
        tower = TowerServer(tmp_path, tmp_path, rows.address, "--bus", f"dir:{lagging}")
        stack.callback(tower.process.kill)
        until(lambda: tower.connected() == 1, "the tower server to load its version")
        for _ in range(30):  # it has loaded its version, and stays unready
            assert status(tower.port) == 503
            time.sleep(0.1)
        for message in sorted(bus.glob("*.msg")):  # the bus delivers
            shutil.copy(message, lagging / f"{message.name}.part")
            (lagging / f"{message.name}.part").rename(lagging / message.name)
        tower.wait()
