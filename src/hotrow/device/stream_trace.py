"""When a GPU's streams ran their work, as tracks of a trace: uploads, write-backs and compute.

The host only enqueues such work. The device measures it, with an event before and one after. Pairs of events queue
until the second has completed, which `resolve` checks now and then; during training nothing waits for them. Device time
is converted to host time by an anchor: an event that was waited for once, at the start. Clocks drift, so two facts
correct the conversion: work starts after it was enqueued and ends before it was seen complete. Elapsed times are float
milliseconds, so the anchor is moved forward before they lose precision.

Without a trace or a GPU, `span` costs one function call. Any thread may make spans; the spans of one stream come from
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

MAX_ANCHOR_AGE = 10.0  # seconds from the anchor: a float of milliseconds has a resolution of a microsecond there


class _Pair(NamedTuple):
    name: str
    begin: Any
    end: Any
    enqueued: float  # on the host, before `begin`
    args: dict[str, Any]


class StreamTracer:
    """The pairs of events of all streams. `new_event` makes an event that measures time."""

    def __init__(self, stream: Any, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._anchor = new_event()
        self._anchor.record(stream)
        self._anchor.synchronize()
        self._anchor_time = time.perf_counter()  # of the anchor, on the host
        self._waiting: dict[str, deque[_Pair]] = {}
        self._tracks: dict[tuple[str, Any], str] = {}
        self._last: dict[str, float] = {}  # when the last span of a track ended

    @contextmanager
    def span(self, track: str, stream: Any, name: str, args: dict[str, Any]) -> Iterator[None]:
        """Trace the work that is enqueued on a stream inside the block."""
        enqueued, begin, end = time.perf_counter(), self._new_event(), self._new_event()
        begin.record(stream)
        try:
            yield
        finally:
            end.record(stream)
            self._queue(track, stream).append(_Pair(name, begin, end, enqueued, args))

    def _queue(self, track: str, stream: Any) -> deque[_Pair]:
        """The queue of a stream. A second stream with the same kind of work gets its own track."""
        key = (track, stream.cuda_stream)
        if key not in self._tracks:
            number = sum(kind == track for kind, _ in list(self._tracks)) + 1  # other threads add theirs
            self._tracks[key] = track if number == 1 else f"{track} {number}"
        return self._waiting.setdefault(self._tracks[key], deque())

    def resolve(self, wait: bool = False) -> None:
        """Add completed spans to the trace. With `wait`, wait for all."""
        for track, queue in list(self._waiting.items()):
            while queue:
                if wait:
                    queue[0].end.synchronize()
                elif not queue[0].end.query():
                    break
                self._emit(track, queue.popleft())

    def _emit(self, track: str, pair: _Pair) -> None:
        seen = time.perf_counter()
        begin, end = (self._anchor.elapsed_time(event) / 1e3 for event in (pair.begin, pair.end))
        self._anchor_time += max(0.0, pair.enqueued - (self._anchor_time + begin))
        self._anchor_time -= max(0.0, self._anchor_time + end - seen)
        first = max(
            self._anchor_time + begin, self._last.get(track, 0.0)
        )  # corrections must not make neighbours overlap
        self._last[track] = last = max(first, self._anchor_time + end)
        trace.add(track, pair.name, first, last, **pair.args)
        if end > MAX_ANCHOR_AGE:
            self._anchor, self._anchor_time = pair.end, self._anchor_time + end


_streams: StreamTracer | None = None


def on() -> bool:
    """Whether streams are measured."""
    return _streams is not None


def span(track: str, stream: Any, name: str, **args: Any) -> AbstractContextManager[None]:
    """Trace the work that is enqueued on a stream inside the block: `with span("gpu: rows up",
    self.upload_stream, "rows", rows=n): ...`.

    Without a stream (None) nothing is measured.
    """
    if _streams is None or stream is None:
        return nullcontext()
    return _streams.span(track, stream, name, args)


def computing(device: torch.device, name: str) -> AbstractContextManager[None]:
    """As `span`, for compute on the training thread's stream."""
    if _streams is None:
        return nullcontext()
    return _streams.span("gpu: compute", torch.cuda.current_stream(device), name, {})


def begin(device: torch.device) -> None:
    """Measure from now on, if there is a trace and the device is a GPU. Waits for the device once."""
    global _streams
    if trace.on() and device.type == "cuda":
        _streams = StreamTracer(torch.cuda.current_stream(device), lambda: torch.cuda.Event(enable_timing=True))


def resolve() -> None:
    """Add completed spans to the trace. Does not wait."""
    if _streams is not None:
        _streams.resolve()


def end(whole: bool = True) -> None:
    """Stop measuring. With `whole`, wait for the spans in flight and add them to the trace."""
    global _streams
    streams, _streams = _streams, None
    if streams is not None and whole:
        streams.resolve(wait=True)
