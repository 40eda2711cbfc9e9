"""Spans of a GPU's streams, over events that a test completes; only `pytest -m gpu` uses real ones."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.device import stream_trace
from hotrow.device.stream_trace import StreamTracer


class Machine:
    """A host's clock and a device's, which has another origin and may run faster. Events record calls to them."""

    def __init__(self, drift: float = 0.0) -> None:
        self.host, self.drift, self.waits = 1000.0, drift, 0

    def at(self, host: float) -> float:
        return 77.0 + (host - 1000.0) * (1 + self.drift)

    def event(self) -> Event:
        return Event(self)


class Stream:
    """Its work ends so many seconds after it was enqueued, in order."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine, self.cuda_stream, self.free = machine, number, 0.0

    def work(self, seconds: float) -> None:
        self.free = max(self.free, self.machine.host) + seconds


class Event:
    """Completes when its stream has done the work enqueued before it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def record(self, stream: Stream) -> None:
        self.done = max(stream.free, self.machine.host)

    def query(self) -> bool:
        return self.done <= self.machine.host

    def synchronize(self) -> None:
        self.machine.waits += 1
        self.machine.host = max(self.machine.host, self.done)

    def elapsed_time(self, other: Event) -> float:
        return float(np.float32(1e3 * (self.machine.at(other.done) - self.machine.at(self.done))))


Spans = dict[str, list[tuple[str, float, float, dict[str, Any]]]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Spans:
    found: Spans = defaultdict(list)

    def add(track: str, name: str, begin: float, end: float, **args: Any) -> None:
        found[track].append((name, begin, end, args))

    monkeypatch.setattr(stream_trace.trace, "add", add)
    return found


def machine_of(monkeypatch: pytest.MonkeyPatch, drift: float = 0.0) -> Machine:
    machine = Machine(drift)
    monkeypatch.setattr(stream_trace.time, "perf_counter", lambda: machine.host)
    return machine


def test_a_span_is_shown_when_the_device_has_done_it_and_nobody_waits(
    shown: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of(monkeypatch)
    up = Stream(machine, 1)
    streams = StreamTracer(up, machine.event)
    assert machine.waits == 1  # for the anchor
    for number in range(2):
        with streams.span("gpu: rows up", up, f"batch {number}", {"rows": 5}):
            up.work(0.25)
    streams.resolve()
    assert not shown
    machine.host += 0.3  # the first is done
    streams.resolve()
    assert [name for name, *_ in shown["gpu: rows up"]] == ["batch 0"]
    assert machine.waits == 1
    streams.resolve(wait=True)
    (_, begin, end, args), (_, after, last, _) = shown["gpu: rows up"]
    assert (begin, end, after, last) == pytest.approx((1000.0, 1000.25, 1000.25, 1000.5), abs=1e-6)
    assert args == {"rows": 5}


def test_every_stream_of_a_kind_has_a_track_and_work_of_another_is_not_waited_for(
    shown: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of(monkeypatch)
    first, second = Stream(machine, 1), Stream(machine, 2)
    streams = StreamTracer(first, machine.event)
    for stream, seconds in ((first, 9.0), (second, 0.1)):
        with streams.span("gpu: rows down", stream, "rows", {}):
            stream.work(seconds)
    machine.host += 1
    streams.resolve()
    assert list(shown) == ["gpu: rows down 2"]
    streams.resolve(wait=True)
    assert list(shown) == ["gpu: rows down 2", "gpu: rows down"]


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_the_devices_time_stays_the_hosts_over_hours(
    shown: Spans, monkeypatch: pytest.MonkeyPatch, drift: float
) -> None:
    """Clocks drift apart by 0.36 s in two hours, and milliseconds since the start are floats: both are corrected."""
    machine = machine_of(monkeypatch, drift)
    stream = Stream(machine, 1)
    streams, real = StreamTracer(stream, machine.event), []
    for _ in range(7200):
        enqueued = machine.host
        with streams.span("gpu: compute", stream, "batch", {}):
            stream.work(0.9)
        real.append((enqueued, enqueued + 0.9))
        machine.host += 0.9001
        streams.resolve()
        machine.host = enqueued + 1
    assert len(shown["gpu: compute"]) == 7200
    before = 0.0
    for (_, begin, end, _), (truly_began, truly_ended) in zip(shown["gpu: compute"], real, strict=True):
        assert abs(begin - truly_began) < 5e-4 and abs(end - truly_ended) < 5e-4
        assert before <= begin <= end
        before = end


def test_without_a_gpu_or_a_trace_nothing_is_measured() -> None:
    stream_trace.begin(torch.device("cpu"))
    assert not stream_trace.on()
    with stream_trace.span("gpu: rows up", object(), "rows"), stream_trace.computing(torch.device("cpu"), "batch 1"):
        pass
    stream_trace.resolve()
    stream_trace.end()
