"""The simulated device: streams, events and graphs with the interfaces of torch's, over `order.Order`.

Work is done when it is enqueued. Work on a stream that is being captured is not done but added to the graph, and
`replay` does it. As in torch: 32 streams of each priority are handed out in turn; a capturing thread may not wait,
query an event or allocate pinned memory; nothing can wait for captured work. Whether an event has completed that
nothing waited for is random.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from simulated_gpu.order import HOST, Event, Order

POOL = 32


class CaptureError(RuntimeError):
    """An operation that CUDA refuses during a capture."""


class Device:
    """One GPU."""

    def __init__(self, seed: int) -> None:
        self.order = Order()
        self.random = random.Random(seed)
        self.here = threading.local()
        self.default = Stream(self, 1, 0)
        self.pools = [[Stream(self, 2 + POOL * p + i, -p) for i in range(POOL)] for p in range(2)]
        self.given = [0, 0]
        self.graphs: dict[int, Graph] = {}
        self.events: dict[int, Event] = {}
        self.cells: dict[
            int, tuple[int, int]
        ] = {}  # by graph that the core launches: address and size of its arguments
        self.capturers: set[str] = set()  # threads that captured
        self.done: dict[str, int] = {}  # how often each kind of work was done
        self.unreachable = False  # whether the host's memory cannot be registered
        self.errors: list[BaseException] = []  # errors in driver callbacks, which cannot raise through C

    def new_stream(self, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        pool = int(priority < 0)
        self.given[pool] += 1
        return self.pools[pool][(self.given[pool] - 1) % POOL]

    def stream(self, handle: int) -> Stream:
        return self.default if not handle else self.pools[(handle - 1) // POOL][(handle - 1) % POOL]

    def current(self, device: Any = None) -> Stream:
        return getattr(self.here, "stream", self.default)

    @property
    def capturing(self) -> Graph | None:
        """The graph that this thread captures."""
        return getattr(self.here, "graph", None)

    @property
    def memory(self) -> str:
        """The kind of memory that an allocation gets now."""
        return "device" if self.current().graph is None else "graph"

    def refuse_if_capturing(self, what: str) -> None:
        """Raise, if this thread captures."""
        if self.capturing is not None:
            raise CaptureError(f"{what}: operation not permitted when stream is capturing")

    def enqueue(self, what: str, work: Callable[[int], Any]) -> Any:
        """Enqueue work on the current stream; `work` gets the stream's agent. During a capture, add it to the graph."""
        stream = self.current()
        if what.startswith("a") and getattr(
            self.here, "failed", False
        ):  # torch checks for errors after its own launches
            self.here.failed = False
            raise RuntimeError("CUDA error: what an earlier call returned")
        with self.order.lock:
            if stream.graph is not None:
                stream.graph.works.append((what, work))
                return None
            return self.run(stream.agent, what, work)

    def run(self, agent: int, what: str, work: Callable[[int], Any]) -> Any:
        with self.order.lock:
            self.done[what] = self.done.get(what, 0) + 1
            self.order.settle()
            self.order.launch(agent)
            return work(agent)

    def synchronize(self, stream: Stream) -> None:
        self.refuse_if_capturing("waiting for a stream")
        with self.order.lock:
            self.order.join(HOST, stream.agent)

    def synchronize_all(self, device: Any = None) -> None:
        for stream in (self.default, *self.pools[0], *self.pools[1]):
            with self.order.lock:
                self.order.join(HOST, stream.agent)


class Stream:
    """The interface of torch.cuda.Stream."""

    def __init__(self, owner: Device, agent: int, priority: int) -> None:
        self.owner, self.agent, self.priority = owner, agent, priority
        self.graph: Graph | None = None
        self.device, self.device_index, self.cuda_stream = torch.device("cuda", 0), 0, agent - 1
        owner.order.names[agent] = f"stream {agent - 1}"

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: CudaEvent) -> None:
        event.wait(self)

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        event = event or CudaEvent(self.owner)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.owner.synchronize(self)

    def query(self) -> bool:
        return self.record_event().query()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return self.agent


class CudaEvent:
    """The interface of torch.cuda.Event."""

    def __init__(self, owner: Device, enable_timing: bool = False, **_: Any) -> None:
        self.owner, self.timing, self.event = owner, enable_timing, Event()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.owner.current()
        with self.owner.order.lock:
            if stream.graph is not None:
                self.event.captured = True
                return
            self.event.captured = False
            self.owner.order.record(self.event, stream.agent)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.owner.current()
        with self.owner.order.lock:
            recorded = self.event.clock is not None or self.event.captured
            if recorded and (stream.graph is not None) != self.event.captured:
                raise CaptureError("dependency created on uncaptured work in another stream, or the other way")
            if not self.event.captured:
                self.owner.order.wait(stream.agent, self.event)

    def synchronize(self) -> None:
        self.owner.refuse_if_capturing("waiting for an event")
        with self.owner.order.lock:
            self.owner.order.wait(HOST, self.event)

    def query(self) -> bool:
        self.owner.refuse_if_capturing("asking for an event")
        with self.owner.order.lock:
            if self.owner.order.passed(self.event) or self.owner.random.random() < 0.5:
                self.owner.order.wait(HOST, self.event)
                return True
            return False

    def elapsed_time(self, other: CudaEvent) -> float:
        assert self.timing and other.timing and self.event.clock is not None and other.event.clock is not None
        assert self.owner.order.passed(self.event) and self.owner.order.passed(other.event), "not ready"
        return float(np.sum(other.event.clock) - np.sum(self.event.clock)) * 1e-3


class Graph:
    """The interface of torch.cuda.CUDAGraph."""

    def __init__(self, owner: Device, keep_graph: bool = False) -> None:
        self.owner, self.keep = owner, keep_graph
        self.works: list[tuple[str, Callable[[int], Any]]] = []
        self.stream: Stream | None = None
        self.kept: list[Any] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local", "other threads may go on with theirs"
        self.owner.refuse_if_capturing("capturing twice")
        stream = self.owner.current()
        assert stream is not self.owner.default and stream.graph is None, "a stream that can be captured"
        self.stream, stream.graph, self.owner.here.graph = stream, self, self
        self.owner.capturers.add(threading.current_thread().name)

    def capture_end(self) -> None:
        assert self.owner.capturing is self and self.stream is not None and self.owner.current() is self.stream
        self.stream.graph = self.owner.here.graph = None

    def raw_cuda_graph(self) -> int:
        assert self.keep, "keep_graph=True"
        self.owner.graphs[id(self)] = self
        return id(self)

    def replay(self) -> None:
        self.owner.refuse_if_capturing("replaying")
        self.run(self.owner.current().agent)

    def run(self, agent: int) -> None:
        with self.owner.order.lock, _disable_current_modes():
            for what, work in self.works:
                self.owner.run(agent, what, work)


@contextmanager
def on_stream(owner: Device, stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    before = owner.current()
    owner.here.stream = stream or before
    try:
        yield
    finally:
        owner.here.stream = before
