"""Every transport answers with the rows of the keys, and `hotrow bench transports` measures it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from tests import forked

from hotrow.bench.harness import Result
from hotrow.bench.transports import row_transports
from hotrow.bench.transports.row_transports import choice, quietest, wanted
from hotrow.bench.transports.sides import Load
from hotrow.errors import OptionError

# One process serves and asks: a connection raises if an answer has other rows than the table.
ROUND_TRIPS = """
import importlib, os, socket, sys, threading
import numpy as np
from hotrow.bench.transports.sides import check
from hotrow.bench.transports.transport import StoredRows

rows = StoredRows(20_000, 16)
draw = np.random.default_rng(0)
for transport in importlib.import_module(f"hotrow.bench.transports.{sys.argv[1]}").TRANSPORTS:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ready = threading.Event()
    threading.Thread(target=transport.serve, args=(rows, port, ready.set), daemon=True).start()
    assert ready.wait(60)
    for size in (8192, 512):
        connections = [transport.connect(port, 16, size) for _ in range(transport.connections)]
        check(connections, [draw.choice(20_000, size, replace=False) for _ in range(2 * len(connections))], 16)
    print("answered:", transport.name, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("module", "library"),
    [("plain_sockets", "socket"), ("grpc_calls", "grpc"), ("flight", "pyarrow.flight"), ("zeromq", "zmq")],
)
def test_a_transport_answers_with_the_rows_of_the_keys(module: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    log = tmp_path / "log"
    process = forked.python(ROUND_TRIPS, module, log=log)
    assert process.wait(120) == 0, log.read_text()
    names = [one.name for one in importlib.import_module(f"hotrow.bench.transports.{module}").TRANSPORTS]
    assert [line for line in log.read_text().splitlines() if line.startswith("answered")] == [
        f"answered: {name}" for name in names
    ]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a core for each side")
@pytest.mark.soak
def test_the_bench_measures_gloo_beside_sockets_and_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(row_transports.ONLY, "gloo")
    monkeypatch.setattr(row_transports, "TURNS", 4)
    monkeypatch.setattr(row_transports, "DIMS", (16,))
    monkeypatch.setattr(
        row_transports, "Load", lambda dim, cores: Load(dim, cores, rows=20_000, drawn=4, pipelined=0.05, single=0.02)
    )
    rows = {row.name: row for row in row_transports.results() if isinstance(row, Result)}
    measures = [f"{measure}/gloo" for measure in row_transports.MEASURES]
    assert set(rows) == {
        f"transports/dim16/{batch}/{what}"
        for batch in (8192, 512)
        for what in ("core/in process", *measures, "choice/sockets", "memory", "others")
    }
    assert all(row.value > 0 and row.peer_value > 0 for row in rows.values())
    assert rows["transports/dim16/512/choice/sockets"].peer == "gloo"


def test_our_own_protocol_is_compared_with_the_ready_made_one_that_takes_the_least_time() -> None:
    turns = {
        name: [{"512/core": core, "512/others": 0.0}] * 4
        for name, core in {"in process": 1e-5, "sockets": 2e-5, "flight put": 8e-5, "gloo": 6e-5, "own": 3e-5}.items()
    }
    row = choice("choice", turns, 512)
    assert (row.name, row.peer, row.ratio) == ("choice/own", "gloo", pytest.approx(2))


def test_the_quietest_half_of_the_turns_counts() -> None:
    busy = [{"512/core": 9.0, "512/others": 0.5, "512/p50": 1.0, "512/single others": 0.0}]
    quiet = [{"512/core": 2.0, "512/others": 0.1, "512/p50": 7.0, "512/single others": 0.9}]
    assert quietest(busy + quiet, 512, "core") == [2.0]
    assert quietest(busy + quiet, 512, "p50") == [1.0]


def test_an_unknown_transport_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(row_transports.ONLY, "flight,carrier")
    with pytest.raises(OptionError, match="carrier"):
        wanted()
