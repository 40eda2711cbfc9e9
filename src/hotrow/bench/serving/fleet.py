"""Fleets whose servers die and restart under load: `split/failover` and `split/rolling` of `hotrow bench split`.

split/failover/failed    answers that were not 200, or lost, while one of two row servers is killed with SIGKILL every
                         5 s for a minute and started again at once (failover.py); bar 0
split/failover/p99       ms, beside the deadline of 50 ms
split/rolling/failed     answers that were not 200, or lost, while two tower servers and four row servers behind
                         nginx are restarted one after another, and rows are published (rolling_restart.py); bar 0
split/rolling/mixed      answers that differ from the trainer's history at their publication; bar 0
split/rolling/oldest     seconds since the publication of the oldest answer; bar 2
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hotrow as hr
from hotrow.bench.harness import Result, lower
from hotrow.bench.serving import serve_model as model
from hotrow.bench.serving.failover import measure_failover
from hotrow.bench.serving.fleet_servers import check_nginx
from hotrow.bench.serving.load_client import write_requests
from hotrow.bench.serving.rolling_restart import measure_rolling
from hotrow.bench.serving.serve import ROWS, scale

FAILOVER_SECONDS, ROUNDS = 60.0, 2
DEADLINE = 50.0  # ms
OLDEST = 2.0  # seconds


def failover(folder: Path) -> Iterator[Result | str]:
    """Kill one of two row servers every KILL_SECONDS."""
    yield "training and exporting W-serve"
    repository = folder / "failover"
    hr.export(model.trained(model.W_SERVE).model, repository / "ctr")
    made, path = model.for_hotrow(model.questions(ROWS)), folder / "failover-requests"
    write_requests(str(path), made)
    yield "two row servers, one of them killed every 5 s"
    found = measure_failover(repository, path, made[0], FAILOVER_SECONDS * scale(), DEADLINE)
    yield f"{found.kills} kills, {found.answers} answers at {found.rate:.0f} requests/s, load {os.getloadavg()[0]:.1f}"
    if found.why:
        yield found.why
    yield none("split/failover/failed", "answers", found.failed)
    yield lower("split/failover/p99", "ms", found.p99, "deadline", DEADLINE)


def rolling(folder: Path) -> Iterator[Result | str]:
    """Restart every process of a fleet while rows are published."""
    check_nginx()
    rounds = max(1, round(ROUNDS * scale()))
    yield f"a rolling restart of 4 row servers and 2 tower servers, {rounds} rounds"
    found = measure_rolling(folder / "rolling", rounds)
    yield (
        f"{found.restarts} restarts, {found.checked.answers} answers at {found.checked.publications} publications, the "
        f"slowest in {found.slowest:.2f} s, {found.rate:,.0f} rows/s published, load {os.getloadavg()[0]:.1f}"
    )
    yield from [*found.failed[:3], *found.checked.mixed[:3]]
    yield none("split/rolling/failed", "answers", len(found.failed))
    yield none("split/rolling/mixed", "answers", len(found.checked.mixed))
    yield lower("split/rolling/oldest", "s", found.checked.oldest, "bar", OLDEST)


def none(name: str, unit: str, count: int) -> Result:
    """A count whose bar is 0."""
    return Result(name, unit, count, "bar", 0.0, 0.0 if count else 1.0)
