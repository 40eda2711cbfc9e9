"""`hotrow demo`: training, serving and updates in two minutes on two cores.

    measure    how fast this machine trains, to choose the length of the log's days
    learn      train on a drifting click log, with rows beyond the memory budget on SSD
    serve      export the model and start `hotrow serve`; a load generator sends requests until the end
    follow     training continues on the live click stream and publishes; the server applies updates while it serves
    look back  evaluate the first model, frozen, on the same clicks; write a report page

Training uses one thread; the other core is for the server and the load generator. Two threads that synchronise at every
layer were several times slower on two busy cores.

Phase lengths are fractions of HOTROW_DEMO_SECONDS (110). Everything is written below `output`; the files of an earlier
demo there are removed first.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as View

from hotrow._core import set_threads
from hotrow.config import Memory
from hotrow.data import Drift, Shape
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.demo.page import Line, Plot, page
from hotrow.demo.server import CANDIDATES, DemoServer, Load, Versions, follows_a_bus, requests
from hotrow.demo.stream import Live
from hotrow.errors import OptionError
from hotrow.models import DLRM
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.optim import RowWiseAdagrad
from hotrow.publish.publisher import Publish
from hotrow.table import Table
from hotrow.train.metrics import Metrics
from hotrow.train.progressive_validation import Window
from hotrow.train.trainer import Trainer
from hotrow.units import format_size

SECONDS, BATCH, DIM, KEYS = 110.0, 1024, 32, 4_000_000
FASTEST = 20_000  # examples a second: the index of the rows created at this speed fits into DRAM beside the rows
DRAM = "48MiB"
DRIFT = Drift(items=0.9, tastes=0.9, new_items=0.25)
SHARES = {"learn": 0.24, "follow": 0.5}
PACE = 0.5  # of the speed of training without a server; the server and the load need the rest
DAYS, WINDOWS = 5, 20
LIVE, FROZEN, BEST, GREY = "#0b7a53", "#b3261e", "#1f5fbf", "#5b6673"


@dataclass
class Sample:
    """The state of the run at a moment."""

    at: float
    examples: int
    hits: int
    misses: int
    cold: int
    used: int


@dataclass
class Run:
    """The measurements of the demo."""

    log: SyntheticClicks
    embeddings: EmbeddingCollection
    begun: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    windows: list[tuple[float, Window]] = field(default_factory=list)

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def sample(self, examples: int) -> None:
        """Record the state of the tiers, at most twice a second."""
        if self.samples and self.now - self.samples[-1].at < 0.5:
            return
        tiers = [rows.store.tier() for rows in self.embeddings.tables]
        self.samples.append(
            Sample(
                self.now,
                examples,
                sum(tier["hits"] for tier in tiers),
                sum(tier["misses"] for tier in tiers),
                sum(tier["cold_rows"] for tier in tiers),
                self.embeddings.budget.used,
            )
        )


def demo(
    output: str, seconds: float | None = None, keep: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Run it, print a summary and the path of the report page; returns the figures."""
    console = console or Console()
    torch.set_num_threads(1)
    set_threads(1)
    total = float(os.environ.get("HOTROW_DEMO_SECONDS", SECONDS)) if seconds is None else seconds
    home = _clear(Path(output))
    log_line = _printer(console)
    log_line(f"[bold]HotRow demo[/], about {total:.0f} s: a click log whose tastes and items change all the time")
    speed = min(FASTEST, _measure(home))
    follow = SHARES["follow"] * total
    per_day = max(2000, int(speed * PACE * follow / DAYS))
    log = SyntheticClicks(examples=1 << 40, batch_size=BATCH, keys=KEYS, drift=DRIFT, shape=Shape(per_day=per_day))
    model = _model(log, Memory(dram=DRAM, ssd=str(home / "ssd")))
    run = Run(log, model.embeddings)
    window = max(BATCH, int(speed * PACE * follow / WINDOWS))
    log_line(f"training alone: {speed:,.0f} examples/s; a day of the log is {per_day:,} clicks")

    log_line(f"[bold]learning[/] with {DRAM} of DRAM over SSD")
    trainer = _trainer(model, window, run)
    report = trainer.fit(Live(log, SHARES["learn"] * total, speed))
    learned = report.examples
    best = log.best_auc(20_000, start=learned)
    from hotrow.serve.execution.engine import Engine
    from hotrow.serve.repository.export import export

    repository, bus = home / "repository", f"dir:{home / 'bus'}"
    export(model, repository / "ctr", values="fp16")
    server = DemoServer(repository, bus, home / "server.log")
    log_line("[bold]serving[/] it: starting hotrow serve")
    load = Load("", home, requests(log, learned))
    try:
        server.start()
        load.address = server.address
        load.start(10 * total)  # until it is stopped
        how = "publications flow into it" if follows_a_bus() else "new versions flow into it"
        log_line(f"[bold]following[/] the log as it happens; the server at http://{server.address} answers, {how}")
        live = _follow(run, model, window, trainer, Live(log, follow, speed * PACE), bus, repository, load)
        load.stop()
        log_line("[bold]looking back[/]: the model as it was when serving began, on the same clicks")
        with Engine(repository / "ctr", version=1) as engine:
            frozen = _frozen(engine, run, learned)
        figures = _figures(run, learned, best, frozen, load, live)
        path = home / "report.html"
        path.write_text(_page(figures, run, frozen, load, live, best))
        (home / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        _summary(console, figures, path)
        if keep:
            console.print(
                f"it continues to serve: http://{server.address}/v2/models/ctr, metrics "
                f"http://127.0.0.1:{server.metrics}/metrics, report {path.resolve()}; Ctrl-C ends it",
                highlight=False,
            )
            _wait()
    finally:
        load.stop()
        server.stop()
    return figures


def _clear(home: Path) -> Path:
    """Empty the folder; raise if it has files that are not of an earlier demo."""
    if home.exists() and any(home.iterdir()) and not (home / ".hotrow-demo").exists():
        raise OptionError(f"--output {home}: there is something that is not an earlier demo; give another folder")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / ".hotrow-demo").write_text("")
    return home


def _printer(console: Console) -> Callable[[str], None]:
    begun = time.monotonic()
    return lambda text: console.print(f"[dim]{time.monotonic() - begun:5.0f} s[/]  {text}", highlight=False)


def _model(log: SyntheticClicks, memory: Memory) -> Recommender:
    tables = [
        Table(name, DIM, {"item": "sum", "history": "mean"}) if name == "item" else Table(name, DIM)
        for name in log.shape.sparse
    ]
    embeddings = EmbeddingCollection(tables, optimizer=RowWiseAdagrad(lr=0.1), memory=memory, seed=1)
    torch.manual_seed(1)
    tower = DLRM(embeddings.features, dense_features=log.shape.dense, bottom=[32], top=[64, 32])
    return Recommender(embeddings, tower)


def _measure(home: Path) -> float:
    """Examples per second of training without a server, on a model that is discarded."""
    log = SyntheticClicks(examples=1 << 40, batch_size=BATCH, keys=KEYS, drift=DRIFT)
    trainer = Trainer(_model(log, Memory(dram=DRAM, ssd=str(home / "measured"))))
    trainer.fit(log, steps=2, progress=False)
    report = trainer.fit(Live(log, 1.5), cursor=trainer.cursor, progress=False)
    shutil.rmtree(home / "measured", ignore_errors=True)
    return report.examples_per_second


def _trainer(
    model: Recommender, window: int, run: Run, publish: Publish | None = None, home: Path | None = None
) -> RecordingTrainer:
    trainer = RecordingTrainer(
        model, torch.optim.Adam(model.tower.parameters(), lr=2e-3), window=window, publish=publish, checkpoints=home
    )
    trainer.run = run
    return trainer


class RecordingTrainer(Trainer):
    """A trainer that records every step in `run`."""

    run: Run
    before = 0  # examples of the run before this fit
    each_step: Callable[[], None] | None = None

    def _after_step(self, *args: Any) -> None:
        super()._after_step(*args)
        self.run.sample(self.before + self.position.examples)
        self.run.losses.append((self.run.now, self.counts.loss))
        points = self.windows.points if self.windows is not None else []
        known = {window.examples for _, window in self.run.windows}
        for window in points:
            moved = dataclasses.replace(window, examples=window.examples + self.before)
            if moved.examples not in known:
                self.run.windows.append((self.run.now, moved))
        if self.each_step is not None:
            self.each_step()


def _follow(
    run: Run,
    model: Recommender,
    window: int,
    first: RecordingTrainer,
    source: Live,
    bus: str,
    repository: Path,
    load: Load,
) -> dict[str, Any]:
    """Train on the live stream, with publications; returns a report."""
    publish = Publish(bus, every_seconds=0.25, spool=str(repository.parent / "spool"))
    trainer = _trainer(model, window, run, publish)
    assert trainer.publisher is not None
    trainer.dense_optimizer = first.dense_optimizer
    trainer.before = first.position.examples
    versions = Versions(model, repository / "ctr", every=max(4.0, source.seconds / 5))
    if not follows_a_bus():
        publisher = trainer.publisher
        trainer.each_step = lambda: versions.tick(publisher.watermark)
    report = trainer.fit(source, cursor=first.cursor)
    counters, until = trainer.publisher.counters, time.time()
    trainer.publisher.close()
    time.sleep(min(1.0, source.seconds / 20))  # the server answers with the last of them
    return {
        "examples_per_second": report.examples_per_second,
        "publications": getattr(counters, "published", 0),
        "rows": getattr(counters, "rows", 0),
        "watermarks": versions.watermarks,
        "until": until,
        "answers": len(load.poll()),
    }


def _frozen(engine: Any, run: Run, learned: int) -> list[tuple[float, float]]:
    """The AUC of the frozen model at every live window after the beginning: seconds and AUC."""
    points, before = [], learned
    for at, window in run.windows:
        if window.examples <= learned:
            continue
        metrics = Metrics()
        for start in range(before, window.examples, BATCH):
            batch = run.log.batch(start, min(BATCH, window.examples - start))
            assert batch.labels is not None
            metrics.update(engine.logits(batch), batch.labels)
        points.append((at, metrics.compute()["auc"]))
        before = window.examples
    return points


def _figures(
    run: Run, learned: int, best: float, frozen: list[tuple[float, float]], load: Load, live: dict[str, Any]
) -> dict[str, Any]:
    answers = [answer for answer in load.poll() if "error" not in answer]
    ages = [age for _, age in _ages(answers, live["watermarks"], live["until"])]
    after = [(at, window) for at, window in run.windows if window.examples > learned]
    warm = [window for _, window in run.windows if window.examples <= learned]
    first, last = run.samples[0], run.samples[-1]
    reads = last.hits + last.misses - first.hits - first.misses
    return {
        "auc_learned": warm[-1].auc if warm else float("nan"),
        "best_auc": best,
        "auc_live": after[-1][1].auc if after else float("nan"),
        "auc_frozen": frozen[-1][1] if frozen else float("nan"),
        "examples": last.examples,
        "examples_per_second": live["examples_per_second"],
        "rows": sum(len(rows) for rows in run.embeddings.tables),
        "rows_on_ssd": last.cold,
        "dram_used": max(sample.used for sample in run.samples),
        "dram_hit_rate": (last.hits - first.hits) / max(1, reads),
        "publications": live["publications"],
        "answers": len(answers),
        "errors": len(load.poll()) - len(answers),
        "latency_ms": _percentiles([answer["ms"] for answer in answers]),
        "freshness_s": _percentiles([age / 1000 for age in ages]),
        "seconds": run.now,
    }


def _ages(answers: list[dict[str, Any]], watermarks: dict[str, int], until: float) -> list[tuple[float, float]]:
    """Time and age (ms) of each answer, from the first publication that the server applied until the last click."""
    fresh = [answer for answer in answers if (answer.get("publication") or answer.get("version") in watermarks)]
    found = [(answer["at"], _age(answer, watermarks)) for answer in fresh if answer["at"] <= until]
    return [(at, age) for at, age in found if age is not None]


def _age(answer: dict[str, Any], watermarks: dict[str, int]) -> float | None:
    """Milliseconds from the newest event in the answering model to the answer, or None where it is not known."""
    if answer.get("freshness_ms") is not None:
        return float(answer["freshness_ms"])
    watermark = watermarks.get(str(answer.get("version")))
    return None if watermark is None else answer["at"] * 1000 - watermark


def _percentiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {name: float("nan") for name in ("p50", "p90", "p99")}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def _page(
    figures: dict[str, Any],
    run: Run,
    frozen: list[tuple[float, float]],
    load: Load,
    live: dict[str, Any],
    best: float,
) -> str:
    aucs = [(at, window.auc) for at, window in run.windows]
    ends = [point[0] for point in (aucs or [(0.0, 0.0)])]
    answers = [answer for answer in load.poll() if "error" not in answer]
    zero = time.time() - run.now
    moments = [(answer["at"] - zero, answer["ms"]) for answer in answers]
    ages = [(at - zero, age / 1000) for at, age in _ages(answers, live["watermarks"], live["until"])]
    rates, hits = _rates(run.samples)
    plots = [
        Plot(
            "AUC: predict, then learn",
            "Each point is a window of clicks, predicted before the model learned from them. The frozen model is "
            "the one with which serving began.",
            [
                Line("live", LIVE, aucs),
                Line("frozen", FROZEN, frozen),
                Line("best", BEST, [(ends[0], best), (ends[-1], best)]),
            ],
        ),
        Plot("Log loss", "Of every step's batch, smoothed.", [Line("loss", LIVE, _smooth(run.losses))]),
        Plot(
            "Rows found in DRAM",
            f"Percent of the rows a batch needed; the others came from SSD. DRAM is {DRAM}.",
            [Line("DRAM hits", LIVE, hits)],
        ),
        Plot(
            "Rows on SSD",
            "Beyond the memory budget.",
            [Line("rows", BEST, [(s.at, s.cold) for s in run.samples])],
            floor=0,
        ),
        Plot("Throughput", "Examples learned a second.", [Line("examples/s", LIVE, rates)], floor=0),
        Plot(
            "Latency of answers",
            f"Milliseconds, {CANDIDATES} candidates a request, while the model is updated.",
            _spread(moments),
            floor=0,
        ),
        Plot(
            "Freshness",
            "Seconds from the newest click in the answering model to its answer, from the first publication on.",
            _spread(ages),
            floor=0,
        ),
    ]
    latency, fresh = figures["latency_ms"], figures["freshness_s"]
    cards = [
        ("live AUC at the end", f"{figures['auc_live']:.4f}"),
        ("frozen AUC at the end", f"{figures['auc_frozen']:.4f}"),
        ("best reachable", f"{best:.4f}"),
        ("rows, of them on SSD", f"{figures['rows']:,}, {figures['rows_on_ssd']:,}"),
        ("DRAM used", format_size(figures["dram_used"])),
        ("DRAM hits", f"{figures['dram_hit_rate']:.1%}"),
        ("examples/s", f"{figures['examples_per_second']:,.0f}"),
        ("latency p50, p90, p99", " / ".join(f"{latency[p]:.1f}" for p in latency) + " ms"),
        ("freshness p50, p90, p99", " / ".join(f"{fresh[p]:.2f}" for p in fresh) + " s"),
    ]
    lead = (
        f"{figures['examples']:,} clicks, {figures['publications']} publications, {figures['answers']:,} answers in "
        f"{figures['seconds']:.0f} s, on {len(os.sched_getaffinity(0))} cores."
    )
    return page("HotRow demo", lead, cards, plots)


def _rates(samples: list[Sample]) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    rates, hits = [], []
    for old, new in zip(samples, samples[4:], strict=False):
        rates.append((new.at, (new.examples - old.examples) / (new.at - old.at)))
        reads = new.hits + new.misses - old.hits - old.misses
        if reads:
            hits.append((new.at, 100 * (new.hits - old.hits) / reads))
    return rates, hits


def _smooth(points: list[tuple[float, float]], most: int = 150) -> list[tuple[float, float]]:
    """Means over stretches of consecutive points."""
    step = max(1, len(points) // most)
    return [
        (part[-1][0], statistics.fmean(y for _, y in part))
        for part in (points[at : at + step] for at in range(0, len(points), step))
    ]


def _spread(points: list[tuple[float, float]], parts: int = 40) -> list[Line]:
    """p50, p90 and p99 over stretches of time."""
    step = max(10, len(points) // parts)
    groups = [points[at : at + step] for at in range(0, len(points) - step + 1, step)]
    found = [(group[-1][0], _percentiles([y for _, y in group])) for group in groups]
    colors = {"p50": LIVE, "p90": BEST, "p99": GREY}
    return [Line(name, color, [(at, cuts[name]) for at, cuts in found]) for name, color in colors.items()]


def _summary(console: Console, figures: dict[str, Any], path: Path) -> None:
    latency, fresh = figures["latency_ms"], figures["freshness_s"]
    learned = (figures["auc_learned"] - 0.5) / (figures["best_auc"] - 0.5)
    view = View(show_header=False, box=None, padding=(0, 2))
    view.add_row(
        "AUC on unseen clicks",
        f"[bold green]{figures['auc_live']:.4f}[/] live, [bold red]{figures['auc_frozen']:.4f}[/] frozen when serving "
        "began",
    )
    view.add_row(
        "best reachable AUC", f"{figures['best_auc']:.4f}  (what the log's own truth scores: clicks are random)"
    )
    view.add_row(
        "learned at first", f"{figures['auc_learned']:.4f}: {learned:.0%} of the way from guessing to the best"
    )
    view.add_row("rows", f"{figures['rows']:,}, of them {figures['rows_on_ssd']:,} on SSD; {DRAM} of DRAM kept")
    view.add_row("found in DRAM", f"{figures['dram_hit_rate']:.1%} of the rows that batches needed")
    view.add_row("speed while serving", f"{figures['examples_per_second']:,.0f} examples/s")
    view.add_row(
        "answers",
        f"{figures['answers']:,}, errors {figures['errors']}; p50 {latency['p50']:.1f} ms, p99 {latency['p99']:.1f} ms",
    )
    view.add_row("publications", f"{figures['publications']}")
    view.add_row("freshness of answers", f"p50 {fresh['p50']:.2f} s, p99 {fresh['p99']:.2f} s")
    view.add_row("in all", f"{figures['seconds']:.0f} s")
    console.print(Panel(view, title="summary", expand=False))
    console.print(f"The report with plots is [bold]{path.resolve()}[/]", highlight=False, soft_wrap=True)


def _wait() -> None:
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        pass
