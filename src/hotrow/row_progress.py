"""What a person sees of work on many rows: nothing for two seconds, then a bar on the terminal."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PATIENCE = 2.0  # seconds before it shows


class RowsView:
    """A bar over the rows of a task, one task after another."""

    def __init__(self, title: str, console: Console | None = None, enabled: bool = True) -> None:
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not enabled,
            transient=True,
        )
        self.task = self.bar.add_task(title, total=None)
        self._shows = threading.Timer(PATIENCE, self.bar.start)
        self._shows.daemon = True

    def __enter__(self) -> RowsView:
        self._shows.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._shows.cancel()
        self._shows.join()
        self.bar.stop()

    def begin(self, what: str, rows: int | None) -> None:
        """The next task, over so many rows, if that is known."""
        self.bar.reset(self.task, description=what, total=rows)

    def advance(self, rows: int) -> None:
        """So many rows more."""
        self.bar.advance(self.task, rows)
