"""A trace of a run for https://ui.perfetto.dev or chrome://tracing: which stage worked on what, when, side by side.

    with trace.recording("run.json"):
        with trace.span("exchange", "keys", bytes=4096):
            ...
        trace.counter("ssd", rows_up=812)

A track is one line in the viewer: a stage, a stream, an exchange. Spans of one track come from one thread at a time and
follow each other or nest. A counter is a curve. A process has one recording at a time; without one, `span` costs a
function call (about 0.2 us on a 2-core EPYC) and `counter` less, so callers need not check.

The file is Chrome's JSON array of events, one per line, written in small batches during the run. So memory is bounded,
and the file of a killed process still opens, because the format allows the closing bracket to be missing. The thread
that fills the buffer writes it, under one lock.

Each rank of a job writes a part of its own (`part`), which the viewer opens by itself. `join` only concatenates the
lines of the parts in a folder, because all ranks count times from a common `origin` of the wall clock. That is exact on
one machine; across machines it is as exact as their clocks. Shifting times in `join` was rejected: it would parse all
events of all ranks again while training waits.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hotrow.errors import OptionError, StorageError

BUFFERED = 256  # events
FLUSH_SECONDS = 0.5


class Recording:
    """An open trace file. Times in it count from `origin`, in seconds of time.time(); None: from now."""

    def __init__(
        self, path: str | os.PathLike[str], process: int = 0, title: str = "hotrow", origin: float | None = None
    ) -> None:
        self.path = Path(path)
        self.process = process
        self._lock = threading.Lock()
        self._tracks: dict[str, int] = {}
        self._lines: list[str] = []
        self._flushed = time.perf_counter()
        self.origin = time.time() if origin is None else origin
        self._start = self._flushed if origin is None else _counter_at(origin)
        self._error: OSError | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = self.path.open("w", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"trace={str(path)!r} cannot be written: {error}; give a file that can") from None
        self._file.write("[\n")
        self._meta("process_name", 0, name=title, origin=self.origin)
        self._meta("process_sort_index", 0, sort_index=process)

    def add(self, track: str, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        """A span, in seconds of time.perf_counter()."""
        at, until = round((begin - self._start) * 1e6, 1), round((end - self._start) * 1e6, 1)
        length = round(until - at, 1)  # from rounded ends, so that neighbours do not overlap
        with self._lock:
            self._put(
                {"name": name, "cat": track, "ph": "X", "ts": at, "dur": length, "tid": self._number(track)}
                | ({"args": args} if args else {})
            )

    def count(self, name: str, values: dict[str, float]) -> None:
        """A point of a curve, or of several that are drawn as one."""
        at = round((time.perf_counter() - self._start) * 1e6, 1)
        with self._lock:
            self._put({"name": name, "ph": "C", "ts": at, "tid": 0, "args": values})

    def close(self) -> None:
        """Write what is left and the closing bracket."""
        with self._lock:
            if self._file.closed:
                return
            seconds = time.perf_counter() - self._start
            last = {"name": "end", "ph": "I", "s": "g", "pid": self.process, "tid": 0, "ts": round(seconds * 1e6, 1)}
            self._lines.append(json.dumps(last) + "\n]\n")
            self._flush()
            self._file.close()
        if self._error is not None:
            raise StorageError(f"the trace {str(self.path)!r} is not complete: {self._error}") from self._error

    def _number(self, track: str) -> int:
        number = self._tracks.get(track)
        if number is None:
            number = self._tracks[track] = len(self._tracks) + 1
            self._meta("thread_name", number, name=track)
            self._meta("thread_sort_index", number, sort_index=number)
        return number

    def _meta(self, kind: str, track: int, **args: Any) -> None:
        self._put({"name": kind, "ph": "M", "tid": track, "args": args})

    def _put(self, event: dict[str, Any]) -> None:
        if self._file.closed:
            return  # the thread outlived the recording
        self._lines.append(json.dumps({**event, "pid": self.process}, default=str) + ",\n")
        if len(self._lines) >= BUFFERED or time.perf_counter() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        self._flushed = time.perf_counter()
        try:
            self._file.write("".join(self._lines))
            self._file.flush()
        except OSError as error:  # a trace must not stop training; raised by close()
            self._error = self._error or error
        self._lines.clear()


class Span:
    """A span on a track: the time that its block takes."""

    __slots__ = ("_args", "_begin", "_name", "_recording", "_track")

    def __init__(self, recording: Recording, track: str, name: str, args: dict[str, Any]) -> None:
        self._recording, self._track, self._name, self._args = recording, track, name, args

    def __enter__(self) -> Span:
        self._begin = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None:
            self._args["error"] = kind.__name__
        self._recording.add(self._track, self._name, self._begin, time.perf_counter(), self._args)

    def note(self, **args: Any) -> None:
        """Add arguments that are known only later."""
        self._args.update(args)


class _NoSpan:
    """A span without a recording."""

    __slots__ = ()

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None

    def note(self, **args: Any) -> None:
        """Do nothing."""


_NO_SPAN = _NoSpan()
_recording: Recording | None = None


def on() -> bool:
    """Whether there is a recording, for callers that compute figures only for it."""
    return _recording is not None


def span(track: str, name: str, **args: Any) -> Span | _NoSpan:
    """A span on a track: `with trace.span("exchange", "rows", bytes=n): ...`."""
    return _NO_SPAN if _recording is None else Span(_recording, track, name, args)


def add(track: str, name: str, begin: float, end: float, **args: Any) -> None:
    """Add a span that has ended, in seconds of time.perf_counter()."""
    if _recording is not None:
        _recording.add(track, name, begin, end, args)


def counter(name: str, **values: float) -> None:
    """Add a point to curves at this moment."""
    if _recording is not None:
        _recording.count(name, values)


@contextmanager
def recording(
    path: str | os.PathLike[str] | None, process: int = 0, title: str = "hotrow", origin: float | None = None
) -> Iterator[Recording | None]:
    """Record into a file while the block runs; with None, do nothing. A rank passes its number as `process`, and the
    `origin` that all ranks share."""
    global _recording
    if path is None:
        yield None
        return
    if _recording is not None:
        raise OptionError(
            f"trace={str(path)!r} while {str(_recording.path)!r} is being recorded; a process has one trace at a time"
        )
    _recording = opened = Recording(path, process, title, origin)
    try:
        yield opened
    finally:
        _recording = None
        opened.close()


def part(path: str | os.PathLike[str], process: int) -> Path:
    """The path of a rank's part of a trace.

    >>> part("runs/run.json", 3).name
    'run.rank-0003.json'
    """
    path = Path(path)
    return path.with_name(f"{path.stem}.rank-{process:04d}{path.suffix}")


def join(path: str | os.PathLike[str]) -> None:
    """Join the newest run's parts beside `path` into one trace, and remove them. Parts of older runs stay.

    The part of a killed process counts up to its last complete line. An error is a warning: the parts stay, and each
    opens by itself.
    """
    path = Path(path)
    name = part(path, 0).name.replace("0000", "[0-9]" * 4)
    try:
        found = [(at, one) for one in sorted(path.parent.glob(name)) if (at := _origin_of(one)) is not None]
        newest = max((at for at, _ in found), default=None)
        parts = [one for at, one in found if at == newest]
        if not parts:
            raise FileNotFoundError(f"there is no {name} that a run has left")
        whole = path.with_name(path.name + ".joining")
        with whole.open("w", encoding="utf-8") as out:
            separator = "[\n"
            for one in parts:
                with one.open(encoding="utf-8") as lines:
                    for line in lines:
                        if line.startswith("{") and line.endswith("\n"):
                            out.write(separator + line.rstrip(",\n"))
                            separator = ",\n"
            out.write("\n]\n")
        whole.replace(path)
        for one in parts:
            one.unlink()
    except OSError as error:
        warnings.warn(
            f"the ranks' parts of the trace {str(path)!r} could not be joined: {error}. Those that are there open one "
            f"by one; hotrow.trace.join({str(path)!r}) tries again",
            stacklevel=2,
        )


def _origin_of(one: Path) -> float | None:
    """The origin of a part's times; None for a file of another program."""
    with one.open(encoding="utf-8") as lines:
        lines.readline()
        try:
            return float(json.loads(lines.readline().rstrip(",\n"))["args"]["origin"])
        except (ValueError, KeyError, TypeError):
            return None


def _counter_at(moment: float) -> float:
    """time.perf_counter() at a moment of time.time(), from the closest of five pairs of readings."""
    pairs = []
    for _ in range(5):
        before, now, after = time.perf_counter(), time.time(), time.perf_counter()
        pairs.append((after - before, (before + after) / 2 - now))
    return moment + min(pairs)[1]
