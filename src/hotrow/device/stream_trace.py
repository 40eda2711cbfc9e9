"""What the streams of a GPU did when, on tracks of a trace: rows that go up, rows that go down, compute.

The host only asks for such work; when it happened is measured by the device, with an event before it and one behind.
Pairs wait in order until their second event has come to pass, which is looked up now and then (`resolve`) and never
waited for while training goes on. The device's time is made the host's by an anchor: an event that was waited for once,
at the start. Clocks drift, so two things that must hold correct it: nothing happened before it was asked for, nor after
it was seen to be done. An elapsed time is a float of milliseconds: the anchor is moved on, before that becomes coarse.

Without a recording, or a GPU, `span` costs a function call. Any thread may make spans; those of one stream come from
one thread at a time. One thread resolves them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from hotrow import trace

MOVE_ON = 10.0  # seconds from the anchor: a float of milliseconds has a resolution of a microsecond there


class _Pair(NamedTuple):
    name: str
    begin: Any
    end: Any
    asked: float  # on the host, before `begin`
    args: dict[str, Any]


class Streams:
    """Pairs of events of all streams. `new_event` makes one that measures time."""

    def __init__(self, stream: Any, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._anchor = new_event()
        self._anchor.record(stream)
        self._anchor.synchronize()
        self._at = time.perf_counter()  # of the anchor, on the host
        self._waiting: dict[str, deque[_Pair]] = {}
        self._tracks: dict[tuple[str, Any], str] = {}
        self._last: dict[str, float] = {}  # when the last span of a track ended

    @contextmanager
    def span(self, track: str, stream: Any, name: str, args: dict[str, Any]) -> Iterator[None]:
        """What is asked of a stream inside the block."""
        asked, begin, end = time.perf_counter(), self._new_event(), self._new_event()
        begin.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            self._queue(track, stream).append(_Pair(name, begin, end, asked, args))

    def _queue(self, track: str, stream: Any) -> deque[_Pair]:
        """Of a stream; the second one with that kind of work has a track of its own."""
        key = (track, stream.cuda_stream)
        if key not in self._tracks:
            number = sum(kind == track for kind, _ in list(self._tracks)) + 1  # other threads add theirs
            self._tracks[key] = track if number == 1 else f"{track} {number}"
        return self._waiting.setdefault(self._tracks[key], deque())

    def resolve(self, wait: bool = False) -> None:
        """Put spans that are over on the trace. With `wait`, all of them."""
        for track, queue in list(self._waiting.items()):
            while queue:
                if wait:
                    queue[0].end.synchronize()
                elif not queue[0].end.query():
                    break
                self._show(track, queue.popleft())

    def _show(self, track: str, pair: _Pair) -> None:
        seen = time.perf_counter()
        begin, end = (self._anchor.elapsed_time(event) / 1e3 for event in (pair.begin, pair.end))
        self._at += max(0.0, pair.asked - (self._at + begin))
        self._at -= max(0.0, self._at + end - seen)
        first = max(self._at + begin, self._last.get(track, 0.0))  # a correction must not make neighbours overlap
        self._last[track] = last = max(first, self._at + end)
        trace.add(track, pair.name, first, last, **pair.args)
        if end > MOVE_ON:
            self._anchor, self._at = pair.end, self._at + end


_streams: Streams | None = None


def on() -> bool:
    """Whether streams are measured."""
    return _streams is not None


def span(track: str, stream: Any, name: str, **args: Any) -> AbstractContextManager[None]:
    """A span of what is asked of a stream inside the block: `with span("gpu: rows up", self.up, "rows", rows=n): ...`.

    None is no stream, and nothing is measured.
    """
    if _streams is None or stream is None:
        return nullcontext()
    return _streams.span(track, stream, name, args)


def computing(device: torch.device, name: str) -> AbstractContextManager[None]:
    """The same, for what the thread that trains asks of its stream."""
    if _streams is None:
        return nullcontext()
    return _streams.span("gpu: compute", torch.cuda.current_stream(device), name, {})


def begin(device: torch.device) -> None:
    """Measure from now on, if there is a trace and the device is a GPU. Waits for the device once."""
    global _streams
    if trace.on() and device.type == "cuda":
        _streams = Streams(torch.cuda.current_stream(device), lambda: torch.cuda.Event(enable_timing=True))


def resolve() -> None:
    """Put what is over on the trace. Waits for nothing."""
    if _streams is not None:
        _streams.resolve()


def end(whole: bool = True) -> None:
    """Measure no more; if the run was `whole`, wait for what is under way and put it on the trace, too."""
    global _streams
    streams, _streams = _streams, None
    if streams is not None and whole:
        streams.resolve(wait=True)
