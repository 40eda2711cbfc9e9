"""`hotrow demo`: the whole path in a minute. A click log with millions of keys, a model that learns it, numbers out."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table as View

from hotrow.config import format_size
from hotrow.data.synthetic import SyntheticClicks
from hotrow.models import DLRM
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.optim import RowWiseAdagrad
from hotrow.table import Table
from hotrow.train.trainer import Trainer

EXAMPLES, TESTS, KEYS, BATCH, DIM = 1_000_000, 100_000, 50_000_000, 4096, 16


def demo(output: str, examples: int = EXAMPLES, console: Console | None = None) -> dict[str, float]:
    """Train DLRM on a synthetic click log and print a summary; returns its figures."""
    console = console or Console()
    start = time.perf_counter()
    console.print(
        f"[bold]HotRow demo[/]: DLRM learns a synthetic click log in Criteo's shape: {examples:,} examples, 26 "
        f"features with keys out of {KEYS:,} and no vocabulary.",
        highlight=False,
    )
    train = SyntheticClicks.criteo_like(examples=examples, batch_size=BATCH, keys=KEYS)
    test = SyntheticClicks.criteo_like(examples=TESTS, offset=examples, batch_size=BATCH, keys=KEYS)
    names = list(train.shape.sparse)
    embeddings = EmbeddingCollection(
        tables=[Table(name, dim=DIM) for name in names], optimizer=RowWiseAdagrad(lr=0.05), seed=1
    )
    torch.manual_seed(1)
    bottom, top = [64], [128, 64]
    tower = DLRM(embeddings.features, dense_features=train.shape.dense, bottom=bottom, top=top)
    trainer = Trainer(Recommender(embeddings, tower), torch.optim.Adam(tower.parameters(), lr=1e-3), keep=1)
    trainer.job = {"tower": {"kind": "dlrm", "bottom": bottom, "top": top}, "dense_features": train.shape.dense}
    report = trainer.fit(train)
    tested = trainer.evaluate(test)
    best = train.best_auc(TESTS)
    trainer.save(Path(output), notes={"metrics": {"test": tested}})
    figures = {
        "auc": tested["auc"],
        "best_auc": best,
        "rows": float(sum(len(rows) for rows in embeddings.tables)),
        "seconds": time.perf_counter() - start,
        "examples_per_second": report.examples_per_second,
    }
    _summary(console, figures, tested, embeddings, output)
    return figures


def _summary(
    console: Console, figures: dict[str, float], tested: dict[str, float], embeddings: EmbeddingCollection, output: str
) -> None:
    memory = [rows.memory() for rows in embeddings.tables]
    total = sum(m["total_bytes"] for m in memory)
    payload = sum(m["payload_bytes"] for m in memory)
    learned = (figures["auc"] - 0.5) / (figures["best_auc"] - 0.5)
    view = View(show_header=False, box=None, padding=(0, 2))
    view.add_row("AUC on unseen examples", f"[bold green]{figures['auc']:.4f}[/]")
    view.add_row(
        "best reachable AUC", f"{figures['best_auc']:.4f}  (what the log's own truth scores: clicks are random)"
    )
    view.add_row("learned", f"{learned:.0%} of the way from guessing (0.5) to the best")
    view.add_row("log loss, calibration", f"{tested['logloss']:.4f}, {tested['calibration']:.3f}  (1 is perfect)")
    view.add_row("distinct keys seen", f"{figures['rows']:,.0f}, each with a row made when it first appeared")
    view.add_row(
        "memory of the rows", f"{format_size(total)}, of which {format_size(payload)} values and optimizer state"
    )
    view.add_row("speed", f"{figures['examples_per_second']:,.0f} examples/s, {figures['seconds']:.0f} s in all")
    console.print(Panel(view, title="summary", expand=False))
    console.print(
        f"The model is in [bold]{output}[/]. Next: [bold]hotrow inspect {output}[/], "
        f"[bold]hotrow inspect {output} --table C3[/], [bold]hotrow export {output} repository[/], "
        "[bold]hotrow train --help[/]",
        highlight=False,
    )
