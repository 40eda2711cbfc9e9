"""Rows and towers in processes of their own, beside one server that does both (W-serve).

    split/lookup, split/shared   lookups from one row server on one core (split_lookup.py)
    split/requests               requests/s of a tower server with a row server beside it, in shared memory, against a
                                 server that holds its rows ("together")
    split/requests/tcp           the same with two row servers over loopback TCP, half of the shards each
    split/p50/shared, /tcp       median latencies at 0.4 of that server's best rate, against its own plus 1 ms
    split/memory                 MiB for rows with `--processes 4`, against four copies; and against one copy
    split/failover, split/rolling   servers that die and restart under load (fleet.py)

The compared servers run at the same time and get the load in turns. HOTROW_BENCH_SCALE scales the seconds of every
load, HOTROW_BENCH_ONLY selects rows by the name after the slash.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch

import hotrow as hr
from hotrow.bench.harness import Result, higher, lower
from hotrow.bench.serving import fleet, split_lookup
from hotrow.bench.serving import serve_model as model
from hotrow.bench.serving.load_client import write_requests
from hotrow.bench.serving.row_server_process import RowServer, addresses
from hotrow.bench.serving.serve import CONNECTIONS, ROUNDS, ROWS, SECONDS, Point, in_turns, scale
from hotrow.bench.serving.serve_peers import DENSE
from hotrow.bench.serving.serve_process import ServerProcess, hotrow_serve, load
from hotrow.errors import OptionError

PARTS = ("lookup", "requests", "memory", "failover", "rolling")
STEADY, STEADY_CONNECTIONS = 0.4, 16
LATER = 1.0  # ms that two row servers over TCP may add to the median
MEMORY_ROWS, MEMORY_DIM, PROCESSES = 2_000_000, 32, 4
ONE_COPY = 1.1


def results() -> Iterator[Result | str]:
    """All rows."""
    wanted = set(os.environ.get("HOTROW_BENCH_ONLY", ",".join(PARTS)).split(","))
    if not wanted <= set(PARTS):
        raise OptionError(f"HOTROW_BENCH_ONLY={','.join(sorted(wanted))}: give some of {','.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="hotrow-bench-") as folder:
        if "lookup" in wanted:
            yield from split_lookup.results(Path(folder))
        if "requests" in wanted:
            yield from requests(Path(folder))
        if "memory" in wanted:
            yield from memory(Path(folder))
        if "failover" in wanted:
            yield from fleet.failover(Path(folder))
        if "rolling" in wanted:
            yield from fleet.rolling(Path(folder))


def requests(folder: Path) -> Iterator[Result | str]:
    """Requests/s and latency of three servers in turns."""
    yield "training and exporting W-serve"
    repository, path = folder / "repository", folder / "requests"
    hr.export(model.trained(model.W_SERVE).model, repository / "ctr")
    made = model.for_hotrow(model.questions(ROWS))
    write_requests(str(path), made)
    with ExitStack() as stack:
        yield "starting row servers and servers"
        beside = stack.enter_context(RowServer(repository))
        halves = [stack.enter_context(RowServer(repository, "--shards", part)) for part in ("0:512", "512:1024")]

        def serve(*options: str) -> tuple[ServerProcess, Path]:
            return stack.enter_context(hotrow_serve(repository, made[0], "--no-compile", *options)), path

        sides = {
            "together": serve(),
            "shared": serve("--rows", beside.address),
            "tcp": serve("--rows", f"{addresses(halves)}?local=off"),
        }
        points: dict[str, dict[int, Point]] = {name: {} for name in sides}
        for connections in CONNECTIONS:
            yield f"{connections} connections to each in turns"
            for name, point in in_turns(sides, connections).items():
                points[name][connections] = point
        best = {name: max(of.values(), key=lambda point: point.rate) for name, of in points.items()}
        for name in ("shared", "tcp"):
            row = "split/requests" + ("" if name == "shared" else f"/{name}")
            yield higher(row, "requests/s", best[name].rate, "together", best["together"].rate, best[name].spread)
        yield "the same rate to each in turns"
        steady = {
            "connections": STEADY_CONNECTIONS,
            "seconds": SECONDS * scale(),
            "rate": STEADY * best["together"].rate,
        }
        medians: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(ROUNDS):
            for name, (server, requests_file) in sides.items():
                medians[name].append(load(server, requests_file, steady)[0]["p50"] * 1e3)
        together = median(medians["together"])
        for name in ("shared", "tcp"):
            yield lower(f"split/p50/{name}", "ms", median(medians[name]), "together + 1 ms", together + LATER)


def memory(folder: Path) -> Iterator[Result | str]:
    """Memory of four engine processes: a model with many rows, less the same model with few."""
    found: dict[tuple[int, int], float] = {}
    for rows in (MEMORY_ROWS, 1000):
        yield f"exporting {rows:,} rows"
        repository, probe = export_rows(folder / f"memory-{rows}", rows)
        for processes in (1, PROCESSES):
            yield f"{processes} processes with {rows:,} rows"
            with hotrow_serve(repository, probe, "--no-compile", "--processes", str(processes)) as server:
                for _ in range(50):
                    server.ask(probe)
                found[rows, processes] = proportional_bytes(server)
    one = found[MEMORY_ROWS, 1] - found[1000, 1]
    shared = found[MEMORY_ROWS, PROCESSES] - found[1000, PROCESSES]
    mib = float(1 << 20)
    yield lower("split/memory", f"MiB for rows, {PROCESSES} processes", shared / mib, "copies", PROCESSES * one / mib)
    yield lower("split/memory/one_copy", "MiB for rows", shared / mib, "1.1 x one copy", ONE_COPY * one / mib)


def export_rows(folder: Path, rows: int) -> tuple[Path, bytes]:
    """A repository with W-serve's features, all in one table of `rows` rows; and a request."""
    features = dict.fromkeys(model.NAMES, "sum")
    embeddings = hr.EmbeddingCollection([hr.Table("all", MEMORY_DIM, features)], optimizer=hr.optim.SGD(lr=0.1))
    embeddings.tables[0].store.assign(torch.arange(rows), torch.zeros(rows, MEMORY_DIM))
    tower = hr.models.DLRM(embeddings.features, dense_features=DENSE, bottom=(16,), top=(16,))
    hr.export(hr.Recommender(embeddings, tower), folder / "ctr")
    return folder, model.for_hotrow(model.questions(ROWS, 1))[0]


def proportional_bytes(server: ServerProcess) -> float:
    """The memory of a server's processes; a page that several share counts once."""
    assert server.process is not None
    root = psutil.Process(server.process.pid)
    return float(sum([process.memory_full_info().pss for process in [root, *root.children(recursive=True)]]))
