"""The progress of training: a live bar on a terminal, a line every five seconds in a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console

from hotrow.progress import ProgressBar
from hotrow.train.stage_times import format_shares
from hotrow.train.task_metrics import describe_figures
from hotrow.units import format_count

SHOWN = ("logloss", "auc", "window auc", "hbm hits")
SHOWN_OF_TASK = ("logloss", "auc", "rmse", "deviance")


class ProgressView:
    """Examples done, their speed, and the metrics so far. Callers ask `due` first: at most five times a second on a
    terminal, every five seconds in a log."""

    def __init__(
        self,
        title: str,
        total: int | None,
        enabled: bool = True,
        console: Console | None = None,
        done: int = 0,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.title, self.total, self.enabled = title, total, enabled
        self.done = done  # examples before an interruption; the speed excludes them
        self.bar = ProgressBar(title, total, self.console, enabled, transient=False)
        self.started = self.last_line = time.perf_counter()
        self.interval = 0.2 if self.bar.live else 5.0

    def __enter__(self) -> ProgressView:
        self.bar.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.bar.__exit__(kind, error, tb)

    @property
    def due(self) -> bool:
        """Whether it is time to show something new."""
        return self.enabled and time.perf_counter() - self.last_line >= self.interval

    def update(
        self,
        examples: int,
        ids: int | None,
        metrics: dict[str, float],
        saving: int | None = None,
        stages: dict[str, float] | None = None,
        owner: str = "",
    ) -> None:
        """Show the state after `examples`; `saving` is the step whose checkpoint is being written.

        `stages` is the busy share of each stage since the last call. `owner` is a prefix for metrics of a single rank
        ("rank 0: "); `ids` is None if the total over ranks is not known.
        """
        self.last_line = time.perf_counter()
        seconds = max(1e-9, self.last_line - self.started)
        figures = describe_figures({name: value for name, value in metrics.items() if "/" in name and _of_task(name)})
        figures = "  ".join([figures] * bool(figures) + [f"{n} {metrics[n]:.4f}" for n in SHOWN if n in metrics])
        speed = f"{format_count(examples / seconds)} examples/s"
        if ids is not None:
            speed += f"  {format_count(ids / seconds)} ids/s"
        status = f"{speed}  {owner}{figures}" if figures else speed
        if saving is not None:
            status += f"  saving step {saving:,}"
        if stages is not None:
            status += f"  {format_shares(stages)}"
        shown = self.done + examples
        if self.bar.live:
            self.bar.update(shown, status)
        else:
            total = f" of {format_count(self.total)}" if self.total else ""
            self.console.print(f"{self.title}: {format_count(shown)}{total} examples, {status}", highlight=False)


def _of_task(name: str) -> bool:
    """Whether a metric of a task is shown; "examples" says which tasks have no labels."""
    return name.rpartition("/")[2] in (*SHOWN_OF_TASK, "examples")
