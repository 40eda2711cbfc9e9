"""What a person sees while training: a live bar on a terminal, a plain line now and then in a log file."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hotrow.config import in_units
from hotrow.train.stage_times import brief

SHOWN = ("logloss", "auc", "window auc", "hbm hits")


def human(count: float) -> str:
    """A count for people.

    >>> human(1234567)
    '1.2M'
    """
    return in_units(count, 1000, ("", "k", "M", "G", "T"))


class ProgressView:
    """Examples done, their speed, and the metrics so far. `update` is cheap: it redraws at most five times a second."""

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
        self.done = done  # examples of an interrupted run, which do not count for the speed
        self.live = enabled and self.console.is_terminal
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            refresh_per_second=5,
        )
        self.task = self.bar.add_task(title, total=total, status="")
        self.started = self.last_line = time.perf_counter()
        self.interval = 0.2 if self.live else 5.0

    def __enter__(self) -> ProgressView:
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.live:
            self.bar.stop()

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
        whose: str = "",
    ) -> None:
        """Show the state after `examples`; `saving` is the step whose checkpoint is being written.

        `stages` is how busy each stage was since the last time. `whose` is said of metrics that are not everybody's;
        `ids` are None where they would not be, either.
        """
        self.last_line = time.perf_counter()
        seconds = max(1e-9, self.last_line - self.started)
        figures = "  ".join(f"{name} {metrics[name]:.4f}" for name in SHOWN if name in metrics)
        speed = f"{human(examples / seconds)} examples/s"
        if ids is not None:
            speed += f"  {human(ids / seconds)} ids/s"
        status = f"{speed}  {whose}{figures}" if figures else speed
        if saving is not None:
            status += f"  saving step {saving:,}"
        if stages is not None:
            status += f"  {brief(stages)}"
        shown = self.done + examples
        if self.live:
            self.bar.update(self.task, completed=shown, status=status)
        else:
            share = f" of {human(self.total)}" if self.total else ""
            self.console.print(f"{self.title}: {human(shown)}{share} examples, {status}", highlight=False)
