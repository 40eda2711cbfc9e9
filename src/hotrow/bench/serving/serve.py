"""`hotrow serve` under load, beside LitServe, Ray Serve, itself without TensorBatch, and the bare tower.

Everything is a real process on loopback (serve_process.py): the server as a user starts it, a peer as its users would
write it (serve_peers.py), and one load generator for all (load_client.py). They share the machine's cores. Two compared
servers run at the same time and get the load in turns, so that noise affects both. Latencies are measured at the
client.

    serve/same          answers beside trainer.predict: the largest difference; more than 1e-6 is an error
    serve/requests      best requests/s of a peer over 4, 16 and 32 connections, against ours at no worse p99
    serve/tensorbatch   one candidate per request: joined, against one request at a time, at no worse p99
    serve/tower         requests/s with the large tower, beside that tower in a loop on the same cores
    serve/burst         ten times the capacity: p99 of accepted and of refused requests, and the speed right after it
    serve/large         10,000 rows per request, as bytes: requests/s beside hr.Engine in a process, same cores
    serve/unseen_shape  the first request of a shape without a bucket; seconds until its artifact answers

HOTROW_BENCH_SCALE scales the seconds of every load (1 is 4 s a point). HOTROW_BENCH_ONLY selects rows, by the name
after the slash, separated by commas.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import hotrow as hr
from hotrow.bench.harness import Result, higher, lower
from hotrow.bench.serving import serve_model as model
from hotrow.bench.serving.load_client import write_requests
from hotrow.bench.serving.serve_process import ServerError, ServerProcess, hotrow_serve, load, peer_serve
from hotrow.errors import OptionError

ROWS = 50  # candidates of a request
CONNECTIONS = (4, 16, 32)
SECONDS, WARM, ROUNDS = 4.0, 0.5, 3
PEERS = {"litserve": "litserve", "ray": "ray.serve"}
BURST, BURST_CONNECTIONS, DEADLINE_MS = 10, 1024, 100
COMPILE_SECONDS = 300.0
LARGE, LARGE_CONNECTIONS = 10_000, 4
PARTS = ("same", "requests", "tensorbatch", "tower", "burst", "large", "unseen_shape")


@dataclass(frozen=True)
class Point:
    """One server at one number of connections: medians over the rounds."""

    rate: float
    p99: float
    spread: float = 0.0


class Bench:
    """A folder with the model, in the file formats of all servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer = model.trained(model.W_SERVE)
        hr.export(self.trainer.model, folder / "repository" / "ctr")
        model.write_plain(self.trainer, folder / "plain.safetensors")

    def requests(self, rows: int, peer: bool = False, **parameters: Any) -> tuple[Path, bytes]:
        """The file of requests for a kind of server, and one of them."""
        asked = model.questions(rows)
        made = model.for_peers(asked) if peer else model.for_hotrow(asked, **parameters)
        path = self.folder / f"requests-{rows}-{peer}-{len(parameters)}"
        write_requests(str(path), made)
        return path, made[0]

    def serve(self, rows: int, *options: str, compile: bool = False) -> ServerProcess:
        """`hotrow serve`. Without buckets, unless they are measured: their compilation uses the cores under test."""
        artifacts = ("--artifacts", str(self.folder / "artifacts"))
        chosen = ("--compile", *artifacts) if compile else ("--no-compile",)
        return hotrow_serve(self.folder / "repository", self.requests(rows)[1], *chosen, *options)


def results() -> Iterator[Result | str]:
    """All rows."""
    wanted = wanted_parts()
    with tempfile.TemporaryDirectory(prefix="hotrow-bench-") as folder:
        yield "training and exporting W-serve"
        bench = Bench(Path(folder))
        if wanted & {"same", "burst"}:
            with bench.serve(ROWS) as server:
                if "same" in wanted:
                    yield from same(bench, server)
                if "burst" in wanted:
                    yield from burst(bench, server)
        if "requests" in wanted:
            for peer in PEERS:
                yield from requests(bench, peer)
        if "tensorbatch" in wanted:
            yield from tensorbatch(bench)
        if "tower" in wanted:
            yield from tower(Path(folder) / "dlrm")
        if "large" in wanted:
            yield from large(bench)
        if "unseen_shape" in wanted:
            yield from unseen_shape(bench)


def wanted_parts() -> set[str]:
    """HOTROW_BENCH_ONLY, checked."""
    wanted = set(os.environ.get("HOTROW_BENCH_ONLY", ",".join(PARTS)).split(","))
    if not wanted <= set(PARTS):
        raise OptionError(f"HOTROW_BENCH_ONLY={','.join(sorted(wanted))}: give some of {','.join(PARTS)}")
    return wanted


def scale() -> float:
    """HOTROW_BENCH_SCALE."""
    return float(os.environ.get("HOTROW_BENCH_SCALE", "1"))


# --- the rows ---


def same(bench: Bench, server: ServerProcess) -> Iterator[Result | str]:
    """Compare the server's answers with trainer.predict."""
    yield "comparing answers"
    asked = model.questions(ROWS, 200, seed=2) + model.questions(1, 100, seed=3)
    worst = 0.0
    for question, request in zip(asked, model.for_hotrow(asked), strict=True):
        answer = probabilities(server, request, len(question.keys))
        worst = max(worst, float(np.abs(answer - bench.trainer.predict(question.batch()).numpy()).max()))
    if worst > 1e-6:
        raise ServerError(f"answers differ from trainer.predict by {worst:.2e}, more than 1e-6")
    yield lower("serve/same", "largest difference, 1e-9", max(worst, 1e-12) * 1e9, "bar", 1e3)


def requests(bench: Bench, peer: str) -> Iterator[Result | str]:
    """Requests/s beside a peer, with both servers running and loaded in turns."""
    need(peer)
    theirs, probe = bench.requests(ROWS, peer=True)
    with ExitStack() as stack:
        yield f"starting {peer}"
        ours = stack.enter_context(bench.serve(ROWS))
        other = stack.enter_context(peer_serve(peer, bench.folder / "plain.safetensors", probe))
        sides = {"hotrow": (ours, bench.requests(ROWS)[0]), peer: (other, theirs)}
        points: dict[str, dict[int, Point]] = {"hotrow": {}, peer: {}}
        for connections in CONNECTIONS:
            yield f"{connections} connections to hotrow and {peer}"
            for name, point in in_turns(sides, connections).items():
                points[name][connections] = point
            mine, their = points["hotrow"][connections], points[peer][connections]
            yield higher(f"serve/requests/{connections}", "requests/s", mine.rate, peer, their.rate, mine.spread)
            yield lower(f"serve/p99/{connections}", "ms", mine.p99 * 1e3, peer, their.p99 * 1e3)
    mine, their = best_pair(points["hotrow"], points[peer])
    yield higher("serve/requests", "requests/s", mine.rate, peer, their.rate, mine.spread)
    yield lower("serve/p99", "ms", mine.p99 * 1e3, peer, their.p99 * 1e3)


def tensorbatch(bench: Bench) -> Iterator[Result | str]:
    """One candidate a request: joined into TensorBatches, and one request at a time."""
    path, _ = bench.requests(1)
    with ExitStack() as stack:
        yield "starting two servers"
        joined = stack.enter_context(bench.serve(1))
        single = stack.enter_context(bench.serve(1, "--max-batch", "1"))
        points: dict[str, dict[int, Point]] = {"joined": {}, "single": {}}
        for connections in CONNECTIONS:
            yield f"one candidate a request, {connections} connections"
            for name, point in in_turns({"joined": (joined, path), "single": (single, path)}, connections).items():
                points[name][connections] = point
        check_unbatched(single)
    mine, their = best_pair(points["joined"], points["single"])
    yield higher("serve/tensorbatch", "requests/s", mine.rate, "unbatched", their.rate, mine.spread)
    yield lower("serve/tensorbatch_p99", "ms", mine.p99 * 1e3, "unbatched", their.p99 * 1e3)


def tower(folder: Path) -> Iterator[Result | str]:
    """The large tower behind the server and in a loop; the loop runs while the server is idle, in turns."""
    yield "training and exporting W-dlrm at dim 16"
    folder.mkdir()
    trainer = model.trained(model.W_DLRM)
    hr.export(trainer.model, folder / "repository" / "ctr")
    made = model.for_hotrow(model.questions(ROWS))
    write_requests(str(folder / "requests"), made)
    bare = bare_tower(trainer)
    with hotrow_serve(folder / "repository", made[0], "--no-compile") as server:
        rates: list[float] = []
        loops: list[float] = []
        for turn in range(ROUNDS):
            yield f"the large tower, turn {turn + 1}"
            rates.append(load(server, folder / "requests", closed(CONNECTIONS[1]))[0]["rate"])
            loops.append(bare(SECONDS * scale() / 2))
    yield higher("serve/tower", "requests/s", median(rates), "bare", median(loops), spread(rates))


def burst(bench: Bench, server: ServerProcess) -> Iterator[Result | str]:
    """Ten times the capacity for a few seconds, between two measurements of the capacity."""
    path, _ = bench.requests(ROWS, deadline_ms=DEADLINE_MS)
    yield "measuring the capacity"
    load(server, path, closed(CONNECTIONS[1]))
    steady = load(server, path, closed(CONNECTIONS[1]))[0]
    yield f"{BURST} times {steady['rate']:,.0f} requests/s"
    seconds = max(1.0, 3 * scale())
    flood = {"connections": BURST_CONNECTIONS, "seconds": seconds, "rate": BURST * steady["rate"]}
    after = {"connections": CONNECTIONS[1], "seconds": 1.0}
    during, recovered = load(server, path, flood, after)
    offered = during["sent"] / during["seconds"]
    yield higher("serve/burst/offered", "requests/s", offered, "capacity", steady["rate"])
    yield lower("serve/burst", "p99 of accepted, ms", during["p99"] * 1e3, "deadline", float(DEADLINE_MS))
    if during["refused"]:
        refused = during["refused_p99"] * 1e3
        yield lower("serve/burst/refused", "p99 of refused, ms", refused, "deadline", float(DEADLINE_MS))
    yield higher("serve/burst/accepted", "requests/s", during["rate"], "capacity", steady["rate"])
    yield higher("serve/burst/after", "requests/s", recovered["rate"], "capacity", steady["rate"])


def large(bench: Bench) -> Iterator[Result | str]:
    """Large requests: the server, and the engine in this process while the server is idle, in turns."""
    asked = model.questions(LARGE, 8)
    path = bench.folder / "requests-large"
    write_requests(str(path), model.for_hotrow(asked))
    batches = [question.batch() for question in asked]
    load_of = {"connections": LARGE_CONNECTIONS, "seconds": SECONDS * scale(), "warm": WARM}
    with bench.serve(ROWS) as server, hr.Engine(bench.folder / "repository" / "ctr") as engine:
        rates: list[float] = []
        loops: list[float] = []
        for turn in range(ROUNDS):
            yield f"{LARGE:,} rows a request, turn {turn + 1}"
            rates.append(load(server, path, load_of)[0]["rate"])
            count, began = 0, time.perf_counter()
            while time.perf_counter() - began < SECONDS * scale():
                engine.predict(batches[count % len(batches)])
                count += 1
            loops.append(count / (time.perf_counter() - began))
    yield higher("serve/large", "requests/s", median(rates), "engine", median(loops), spread(rates))


def unseen_shape(bench: Bench) -> Iterator[Result | str]:
    """The first request of a shape does not wait for compilation. Then the compiled artifact takes over, or is rejected
    because it is no faster."""
    asked = model.for_hotrow(model.questions(37, 50, seed=4))
    known = model.for_hotrow(model.questions(ROWS, 50, seed=5))
    with bench.serve(ROWS, compile=True) as server:
        yield "a request of an unseen shape"
        usual = median([timed(lambda r=r: server.ask(r)) for r in known[1:20]])  # type: ignore[misc]
        began = time.monotonic()
        first = timed(lambda: server.ask(asked[0]))
        yield lower("serve/unseen_shape", "first answer, ms", first * 1e3, "seen", usual * 1e3)
        yield "waiting for the compiler"
        taken = until_compiled(server, asked, began)
    if taken is not None:
        yield lower("serve/takeover", "seconds", taken, "limit", COMPILE_SECONDS)


# --- how they are measured ---


def in_turns(sides: dict[str, tuple[ServerProcess, Path]], connections: int) -> dict[str, Point]:
    """Load every side in turns. Returns the point of each."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for turn in range(ROUNDS):
        for name, (server, path) in sides.items():
            if not turn:
                load(server, path, {"connections": connections, "seconds": min(1.0, SECONDS * scale())})
            found[name] += load(server, path, closed(connections))
    return {
        name: Point(median(f["rate"] for f in all), median(f["p99"] for f in all), spread([f["rate"] for f in all]))
        for name, all in found.items()
    }


def closed(connections: int) -> dict[str, Any]:
    """The phase of a closed loop (load_client.py)."""
    seconds = SECONDS * scale()
    return {"connections": connections, "seconds": seconds, "warm": min(WARM, seconds / 4)}


def best_pair(ours: dict[int, Point], theirs: dict[int, Point]) -> tuple[Point, Point]:
    """Our best point and the peer's. The peer's has its most requests/s. Ours has the most requests/s at no worse p99,
    or the lowest p99 if all are worse."""
    their = max(theirs.values(), key=lambda point: point.rate)
    quick = [point for point in ours.values() if point.p99 <= their.p99]
    return max(quick, key=lambda p: p.rate) if quick else min(ours.values(), key=lambda p: p.p99), their


def spread(values: list[float]) -> float:
    """Half the range of the values, over their median."""
    return (max(values) - min(values)) / 2 / median(values)


def check_unbatched(server: ServerProcess) -> None:
    """Raise if the server's statistics show that it joined requests."""
    head = b"GET /v2/models/ctr/stats HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    (stats,) = json.loads(server.ask(head)[1])["model_stats"]
    if stats["inference_count"] != stats["execution_count"]:
        raise ServerError(f"--max-batch 1 joined requests: {stats}")


def bare_tower(trainer: hr.Trainer) -> Callable[[float], float]:
    """A function that runs the tower alone in a loop on all cores, one request's rows at a time, and returns
    requests/s."""
    question = model.questions(ROWS, 1)[0].batch()
    with torch.inference_mode():
        vectors = {name: v.clone() for name, v in trainer.model.embeddings.eval()(question).items()}
    tower, cores = trainer.model.tower.eval(), len(os.sched_getaffinity(0))

    def loop(seconds: float) -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(cores)
        count, began = 0, time.perf_counter()
        with torch.inference_mode():
            while time.perf_counter() - began < seconds:
                tower(vectors, question.dense)
                count += 1
        torch.set_num_threads(before)
        return count / (time.perf_counter() - began)

    return loop


def probabilities(server: ServerProcess, request: bytes, rows: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Send a request and return its probabilities, which are the last bytes of the body."""
    status, body = server.ask(request)
    if status != 200:
        raise ServerError(f"{server.name} answered {status}: {body[:500]!r}")
    return np.frombuffer(body[-4 * rows :], np.float32)


def timed(work: Callable[[], Any]) -> float:
    """The seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def until_compiled(server: ServerProcess, asked: list[bytes], began: float) -> float | None:
    """Seconds until an answer came from a compiled artifact; None if none came in time, or if it is no faster."""
    while time.monotonic() - began < COMPILE_SECONDS * min(1.0, scale()):
        if b'"compiled":true' in server.ask(asked[0])[1]:
            return time.monotonic() - began
        time.sleep(0.25)
    return None


def need(peer: str) -> None:
    """Raise if the peer is not installed."""
    try:
        importlib.import_module(PEERS[peer])
    except ImportError as error:
        raise OptionError(f"{peer} is not installed ({error}): pip install 'hotrow[bench]'") from None
