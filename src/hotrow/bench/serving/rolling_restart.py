"""A rolling restart of a fleet behind nginx while rows are published, and the check of every answer.

Two row servers for each half of the shards, two tower servers that follow the same bus, nginx in front. Every server is
ended with SIGTERM and started again when it has ended, one after another. Each restart is followed by a pause of SETTLE
seconds, as `minReadySeconds` makes one on Kubernetes: a tower server notices within a second that a row server is back.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hotrow.bench.serving import checked_load, fleet_history
from hotrow.bench.serving.failover import open_client
from hotrow.bench.serving.fleet_history import Answer, Checked, History
from hotrow.bench.serving.fleet_servers import Tower, nginx, steady_ports
from hotrow.bench.serving.row_server_process import RowServer
from hotrow.bench.serving.serve_process import ServerError

RATE, CONNECTIONS = 60.0, 16  # requests/s
SETTLE = 2.0
RANGES = ("0:512", "512:1024")


@dataclass(frozen=True)
class Rolling:
    """What a load saw during a rolling restart."""

    failed: list[str]  # why
    checked: Checked
    restarts: int
    rate: float  # rows/s that were published
    slowest: float  # seconds of an answer


def measure_rolling(folder: Path, rounds: int, settle: float = SETTLE) -> Rolling:
    """Restart all servers one after another, `rounds` times, while a load runs."""
    repository, bus = folder / "repository", f"dir:{folder / 'bus'}"
    fleet_history.export(repository)
    keys = fleet_history.request_keys()
    bodies = fleet_history.request_bodies(keys)
    requests = [checked_load.Record(number, 0, 0, 0, *body) for number, body in enumerate(bodies)]
    checked_load.write_records(str(folder / "requests"), requests)
    with ExitStack() as stack:
        history = stack.enter_context(History(bus, folder / "spool"))
        rows = [
            stack.enter_context(RowServer(repository, "--shards", shards, "--bus", bus, port=port))
            for shards, port in zip(RANGES * 2, steady_ports(4), strict=True)
        ]
        cluster = folder / "cluster.toml"
        cluster.write_text(cluster_text(rows))
        options = ("--bus", bus, "--deadline", "10s")
        probe = fleet_history.probe(bodies)
        towers = [stack.enter_context(Tower(repository, str(cluster), probe, *options)) for _ in range(2)]
        port = stack.enter_context(nginx([tower.port for tower in towers]))
        answers = folder / "answers"
        spec = {
            "port": port,
            "path": "/v2/models/ctr/infer",
            "requests": str(folder / "requests"),
            "answers": str(answers),
            "rate": RATE,
            "connections": CONNECTIONS,
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        with open_client([checked_load.__file__, str(folder / "spec.json")]) as client:
            time.sleep(settle)
            for _ in range(rounds):
                roll(rows, towers, settle)
            _, error = client.communicate(timeout=300)
            if client.returncode:
                raise ServerError(f"the load failed: {error[-2000:]}")
    records = list(checked_load.read_records(str(answers)))
    failed = [f"{one.status}: {one.body[:200].decode(errors='replace')}" for one in records if one.status != 200]
    good = [Answer.parse(one.number, one.arrived, one.json_bytes, one.body) for one in records if one.status == 200]
    slowest = max([one.seconds for one in records], default=0.0)
    restarts = rounds * (len(rows) + len(towers))
    return Rolling(failed, history.check(good, keys), restarts, history.rate, slowest)


def roll(rows: list[RowServer], towers: list[Tower], settle: float) -> None:
    """Restart every server once: SIGTERM, wait until it has ended, start it, wait until it serves."""
    for server in rows:
        code = server.end()
        if code:
            raise ServerError(f"a row server ended with {code}: {server.text()[-2000:]}")
        server.start()
        time.sleep(settle)
    for tower in towers:
        tower.restart()
        time.sleep(settle)


def cluster_text(rows: list[RowServer]) -> str:
    """A cluster.toml of these servers, whose shards are RANGES in turns."""
    parts = []
    for number, shards in enumerate(RANGES):
        servers = ", ".join(f'"{server.address}"' for server in rows[number :: len(RANGES)])
        parts.append(f'[[range]]\nshards = "{shards}"\nservers = [{servers}]\n')
    return "\n".join(parts)
