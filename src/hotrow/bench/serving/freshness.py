"""Freshness: seconds from an event to an answer that reflects it, on each bus, while rows change fast.

A trainer in this process trains on a live click stream and publishes every 0.1 s. `hotrow serve --bus` applies the
publications and answers a load generator, which is a separate process. Every answer has its age (`freshness_ms`). The
load also runs for a while before training begins, to measure the latency without updates. All processes share this
machine's cores, so the rates of clicks and requests are chosen for two cores. The trainer runs at low priority
(nice -n 10), which is advisable beside a server.

    online/freshness_p50/<bus>, online/freshness_p99/<bus>   seconds, against the bars
    online/changed_rows/<bus>                                rows/s in publications, against the bar
    online/serving_p99/<bus>                                 ms, against 1.3 times that without updates
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from hotrow._core import set_threads
from hotrow.bench.harness import Result, higher, lower
from hotrow.bench.servers.kafka_mock import brokers
from hotrow.bench.servers.redis_cluster import RedisServers, installed
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.demo.server import DemoServer, Load, follows_a_bus
from hotrow.demo.stream import Live
from hotrow.errors import HotRowError
from hotrow.nn import Recommender
from hotrow.publish.publisher import Publish
from hotrow.train.trainer import Trainer

P50, P99, ROWS, SLOWER = 0.5, 1.0, 20_000, 1.3
NICE = 10


@dataclass(frozen=True)
class LoadSettings:
    """Clicks and requests a second, and the seconds of each phase."""

    clicks: int = 11_000
    requests: float = 40.0
    baseline: float = 20.0
    updates: float = 30.0
    settle: float = 5.0  # not counted: the first publication has all rows


@dataclass(frozen=True)
class Measurement:
    """What was measured on one bus."""

    ages: list[float]  # seconds
    latency: list[float]  # ms
    baseline: list[float]  # ms, without updates
    rows: float  # a second


def results(
    make: Callable[[], Recommender], log: SyntheticClicks, bodies: list[str], pace: LoadSettings | None = None
) -> Iterator[Result | str]:
    """The rows of all buses that are installed. Each bus gets a new model of `log`, because the first publication has
    all rows and the Kafka mock keeps only a few MiB."""
    if not follows_a_bus():
        yield "no freshness rows: hotrow serve of this release follows no bus"
        return
    chosen = pace or LoadSettings()
    for name in ("dir", "redis", "kafka"):
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotrow-bench-")))
            bus = stack.enter_context(open_bench_bus(name, home))
            if bus is None:
                yield f"no {name} here: its server or its client is not installed"
                continue
            yield f"following a {name} bus"
            measured = measure(make(), log, bodies, bus, home, chosen)
            yield from rows(name, measured)


def rows(name: str, measured: Measurement) -> Iterator[Result]:
    """The measurement as rows, beside the bars."""
    yield lower(f"online/freshness_p50/{name}", "s", _percentile(measured.ages, 0.5), "bar", P50)
    yield lower(f"online/freshness_p99/{name}", "s", _percentile(measured.ages, 0.99), "bar", P99)
    yield higher(f"online/changed_rows/{name}", "k rows/s", measured.rows / 1e3, "bar", ROWS / 1e3)
    allowed = SLOWER * _percentile(measured.baseline, 0.99)
    yield lower(f"online/serving_p99/{name}", "ms", _percentile(measured.latency, 0.99), "1.3 x without", allowed)


def measure(
    model: Recommender, log: SyntheticClicks, bodies: list[str], bus: str, home: Path, pace: LoadSettings
) -> Measurement:
    """Measure one bus."""
    from hotrow.serve.repository.export import export

    torch.set_num_threads(1)
    set_threads(1)
    export(model, home / "repository" / "ctr", values="fp16")
    server, load = DemoServer(home / "repository", bus, home / "server.log"), Load("", home, bodies, pace.requests)
    begun, done, changed = 0.0, 0.0, 0.0

    publish = Publish(bus, every_seconds=0.1, spool=str(home / "spool"))
    trainer = Trainer(model, torch.optim.Adam(model.tower.parameters(), lr=1e-3), publish=publish)
    publisher = trainer.publisher
    assert publisher is not None

    def train() -> None:
        nonlocal begun, done, changed
        begun, settled = time.time(), list[int]()
        timer = threading.Timer(pace.settle, lambda: settled.append(publisher.counters.rows))
        timer.start()
        try:
            trainer.fit(Live(log, pace.updates + pace.settle, pace.clicks), progress=False)
        finally:
            timer.cancel()
        done = time.time()
        changed = (publisher.counters.rows - settled[0]) / (done - begun - pace.settle)

    try:
        server.start()
        load.address = server.address
        load.start(3600)
        time.sleep(pace.baseline)
        run_at_low_priority(train, trainer.stop)
    finally:
        publisher.close()
        load.stop()
        server.stop()
    answers = [answer for answer in load.poll() if "error" not in answer]
    during = [answer for answer in answers if begun + pace.settle < answer["at"] < done]
    return Measurement(
        [float(answer["freshness_ms"]) / 1000 for answer in during if answer.get("freshness_ms") is not None],
        [float(answer["ms"]) for answer in during],
        [float(answer["ms"]) for answer in answers[20:] if answer["at"] < begun],
        changed,
    )


def run_at_low_priority(work: Callable[[], None], stop: Callable[[], None]) -> None:
    """Run `work` on a thread of low priority, which the threads that it starts inherit. If Ctrl-C or SIGTERM ends the
    calling thread, `stop` ends the work."""

    def low_priority_work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux this is the thread's priority
        work()

    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(low_priority_work).result()
        except BaseException:
            stop()
            raise


def _percentile(values: list[float], part: float) -> float:
    if len(values) < 100:
        raise HotRowError(f"only {len(values)} answers in the time: the machine is too busy to measure anything")
    return statistics.quantiles(values, n=1000, method="inclusive")[round(part * 1000) - 1]


@contextmanager
def open_bench_bus(name: str, home: Path) -> Iterator[str | None]:
    """Start a bus of this kind, with its own server, and yield its address; None if it is not installed."""
    if name == "dir":
        yield f"dir:{home / 'bus'}"
    elif name == "redis" and installed() and find_spec("redis"):
        with RedisServers() as servers:
            yield f"{servers.url}/0?stream=publications"
    elif name == "kafka" and find_spec("confluent_kafka"):
        with brokers() as address:
            yield f"kafka://{address}/publications?create=no"
    else:
        yield None
