"""A progress bar on a terminal. It appears after two seconds, so short work prints nothing.

One bar has one task at a time; `begin` replaces it. Where the console is not a terminal, or `enabled` is false, nothing
is printed at all (train/progress_view.py prints lines there instead).

Used by training and evaluation, by exports and fills of remote stores (rows), and by `hotrow inspect` (bytes). The
thread that entered the block updates the bar; a timer thread starts it after DELAY.
"""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

DELAY = 2.0  # seconds before it shows


class ProgressBar:
    """A bar over counted items, or over bytes. `transient` bars vanish when the block ends."""

    def __init__(
        self,
        title: str,
        total: int | None = None,
        console: Console | None = None,
        enabled: bool = True,
        bytes: bool = False,
        transient: bool = True,
    ) -> None:
        self.console = console or Console()
        self.live = enabled and self.console.is_terminal
        counts: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeElapsedColumn())
        if bytes:
            counts = (DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            *counts,
            TextColumn("{task.fields[status]}"),
            console=self.console,
            refresh_per_second=5,
            transient=transient,
        )
        self._task = self._bar.add_task(title, total=total, status="")
        self._started = False
        self._timer = threading.Timer(DELAY, self._start)
        self._timer.daemon = True

    def __enter__(self) -> ProgressBar:
        if self.live:
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.live:
            self._timer.cancel()
            self._timer.join()
        if self._started:
            self._bar.stop()

    def begin(self, title: str, total: int | None) -> None:
        """Start the next task. Its total is None if it is not known."""
        self._bar.reset(self._task, description=title, total=total)

    def advance(self, count: int) -> None:
        """Count `count` items more."""
        self._bar.advance(self._task, count)

    def update(self, completed: int, status: str = "") -> None:
        """Set how many items are done, and the text behind the bar."""
        self._bar.update(self._task, completed=completed, status=status)

    def _start(self) -> None:
        self._started = True
        self._bar.start()
