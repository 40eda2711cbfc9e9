"""Saver: writes checkpoints one at a time, on the caller's thread or on a background thread while training goes on.

A second save waits for the first. An error of the background thread is kept and raised by the next save or wait, with
the cure; until then training continues, because the model in memory is intact. The thread is not a daemon: a program
that ends during a save waits for it.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from hotrow import trace
from hotrow.errors import HotRowError, OptionError
from hotrow.train.checkpoint.manifest import list_checkpoints, step_name
from hotrow.train.checkpoint.saving import CapturedState, write
from hotrow.train.report import SaveReport


class Saver:
    """Belongs to one trainer and is called by its thread."""

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.reports: list[SaveReport] = []  # of saves that completed
        self._folders: set[Path] = set()  # folders that this trainer has saved into or loaded from
        self._running: SaveReport | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def running(self) -> int | None:
        """The step that is being written now."""
        thread, running = self._thread, self._running
        return running.step if running is not None and thread is not None and thread.is_alive() else None

    def save(self, capture: Callable[[], CapturedState], folder: Path, wait: bool) -> SaveReport:
        """Capture now, and write (with `wait` on this thread). Raises the error of the previous save, if it failed."""
        start = time.perf_counter()
        self.wait()
        with trace.span("checkpoint", "capture (training waits)"):
            captured = capture()
        report = SaveReport(folder / step_name(captured.step), captured.step, time.perf_counter() - start)
        self._folders.add(folder.resolve())
        if wait:
            self._write(captured, report, start)
            return report
        self._running = report
        self._thread = threading.Thread(
            target=self._write_in_background, args=(captured, report, start), name=f"save {report.path.name}"
        )
        self._thread.start()
        return report

    def wait(self) -> None:
        """Wait for the save in progress; raise its error, once, if it failed."""
        report, error = self._join()
        if error is None or report is None:
            return
        if not isinstance(error, HotRowError):
            raise error
        raise type(error)(
            f"the checkpoint of step {report.step} was not written: {error}. The model in memory and earlier "
            "checkpoints are unchanged: fix the cause and call save() again"
        ) from error

    def settle(self) -> None:
        """Wait for the save in progress; warn if it failed. Called before another checkpoint is loaded."""
        report, error = self._join()
        if error is not None and report is not None:
            warnings.warn(f"the checkpoint of step {report.step} was not written: {error}", stacklevel=3)

    def after_load(self, path: Path) -> None:
        """Record that the checkpoint `path` was loaded: this run may now save into its folder."""
        self._folders.add(path.resolve().parent)

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder with another run's checkpoints: `keep` would remove them one by one."""
        found = [] if folder.resolve() in self._folders else list_checkpoints(folder)
        if found:
            raise OptionError(
                f"checkpoints={str(folder)!r} has checkpoints of an earlier run (the newest is {found[0].name}); "
                "go on from there with resume=True (hotrow train --resume), or give another folder to begin anew"
            )

    def _write(self, captured: CapturedState, report: SaveReport, start: float) -> None:
        try:
            with trace.span("checkpoint", f"write step {report.step}") as span:
                write(captured, report, self.keep)
                span.note(rows_written=report.rows_written, bytes_written=report.bytes_written)
        finally:
            captured.abandon()
        report.seconds, report.done = time.perf_counter() - start, True
        self.reports.append(report)

    def _write_in_background(self, captured: CapturedState, report: SaveReport, start: float) -> None:
        try:
            self._write(captured, report, start)
        except BaseException as error:
            self._error = error

    def _join(self) -> tuple[SaveReport | None, BaseException | None]:
        if self._thread is not None:
            self._thread.join()
        report, error = self._running, self._error
        self._thread = self._running = self._error = None
        return report, error
