"""Requests for vectors keep their deadline when a row server does not answer."""

from __future__ import annotations

import http.client
import json
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fleet_processes import RowServer, TowerServer, until

from hotrow.bench.serving import fleet_history
from hotrow.bench.serving.fleet_servers import HOST

REQUEST = {
    "inputs": [{"name": name, "datatype": "INT64", "shape": [2], "data": [1, 2]} for name in fleet_history.TABLES],
    "outputs": [{"name": "embeddings"}],
    "parameters": {"deadline_ms": 600, "policy": "initial"},
}


def ask(port: int) -> tuple[int, float, Any]:
    """Status, seconds, content."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    connection.request("POST", "/v2/models/ctr/infer", json.dumps(REQUEST))
    answer = connection.getresponse()
    content = json.loads(answer.read())
    return answer.status, time.monotonic() - began, content


def test_a_lookup_is_answered_by_policy_before_its_deadline_when_the_row_server_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_history, "ROWS", 1_000)
    fleet_history.export(tmp_path)
    with ExitStack() as stack:
        rows = RowServer(tmp_path, tmp_path)
        stack.callback(rows.process.kill)
        tower = TowerServer(tmp_path, tmp_path, f"{rows.address}?local=off")
        stack.callback(tower.process.kill)
        tower.wait()
        answers = []
        # Without a deadline an answer comes after a second, when the tower server gives up the row server.
        for _ in range(5):  # on a busy machine an answer may miss its deadline all the same
            until(lambda: tower.connected() == 1 and ask(tower.port)[0] == 200, "the row server to be connected")
            rows.process.send_signal(signal.SIGSTOP)
            answers.append(ask(tower.port))
            rows.process.send_signal(signal.SIGCONT)
            status, seconds, content = answers[-1]
            if status == 200 and content["parameters"]["late_rows"] == 4 and seconds < 0.9:
                break
        else:
            pytest.fail(f"no answer came by policy: {answers}")
