"""Row servers that are stopped, killed and started again while a tower server asks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from row_servers import Load, Rows, RowsCommand, over, port_of, servers_of, until, where
from small_models import make_batch

import hotrow as hr
from hotrow.tiers.rows.row_servers import RowServers


def test_a_killed_server_costs_no_answer_and_returns_by_itself(tmp_path: Path, repository: Path, rows: Rows) -> None:
    """Real processes: SIGKILL, SIGSTOP and a restart of one of two replicas, under load."""
    survivor = rows.start(repository)
    first = RowsCommand(tmp_path / "a.log", repository)
    batch = make_batch(30)
    try:
        with hr.Engine(repository / "ctr") as plain:
            expected = plain.logits(batch)
        for local in ("off", "on"):
            address = f"{first.address},{survivor.addresses[0]}?local={local}"
            with over(repository / "ctr", address) as engine:
                servers = servers_of(engine)
                wait_for(servers, 2)
                load = Load(engine, batch, expected)
                first.process.send_signal(signal.SIGSTOP)
                wait_for(servers, 1)
                first.process.send_signal(signal.SIGCONT)
                wait_for(servers, 2)
                first.process.send_signal(signal.SIGKILL)
                wait_for(servers, 1)
                first = RowsCommand(tmp_path / f"{local}.log", repository, first.port)
                wait_for(servers, 2)
                load.end()
    finally:
        first.end()


@pytest.mark.parametrize("local", ["on", "off"])
def test_a_rolling_restart_of_two_replicas_costs_no_answer(repository: Path, rows: Rows, local: str) -> None:
    replicas = [rows.start(repository) for _ in range(2)]
    batch = make_batch(30)
    with hr.Engine(repository / "ctr") as plain:
        expected = plain.logits(batch)
    with over(repository / "ctr", where(*replicas, local=local)) as engine:
        servers = servers_of(engine)
        wait_for(servers, 2)
        load = Load(engine, batch, expected, 4)
        for one in list(replicas):
            rows.end(one)
            wait_for(servers, 1)
            rows.start(repository, port=port_of(one))
            wait_for(servers, 2)
        load.end()
        assert load.slowest < 2.0


def wait_for(servers: RowServers, count: int) -> None:
    until(lambda: len(servers.topology.servers[0]) == count, f"{count} connected servers")
