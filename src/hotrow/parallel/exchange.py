"""Channel: the exchanges that HotRow makes between ranks, over one carrier. A channel connects all ranks, or `members`.

All members must issue the exchanges of one channel in the same order. So each activity with an order of its own (the
route thread, the training thread, dense gradients during backward, a background save) has its own channel. One thread
at a time uses a channel.

Gloo carries CPU memory: a tensor on a GPU is copied to the host before an exchange and back after it. An exchange of
the core may do so instead (`use_core_exchange`): shared memory between ranks of one machine (shared_memory.py), on the
channels that training waits for, or connections that are authenticated with the job token (sockets.py). A channel may
have a second group, NCCL's, for tensors on GPUs (`use_device_group`; backend.py decides); tensors on the CPU, such as
counts and keys, keep to the first. One thread issues both, in one order, so neither waits for the other.

An exchange fails if a rank died or did not take part before the timeout. It then raises a RankError that names the rank
(health.py). On a patient channel an exchange may take hours: the waiting thread polls, and checks the other ranks'
heartbeats and whether another channel has failed. parallel/watchdog.py watches exchanges that a device waits for.

`waited()` counts the seconds that a thread has waited for other ranks (with NCCL hardly any: the stream waits). While a
trace is recorded, each exchange is a span on its channel's track, from its begin to the end of the wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotrow import trace
from hotrow.backoff import Backoff
from hotrow.parallel.health import Health, HeartbeatMonitor
from hotrow.parallel.watchdog import Watchdog

POLL_SECONDS, LONGEST_POLL = 0.0001, 0.2  # between two polls on a patient channel: the first pause, and the longest
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


class _ThreadState(threading.local):
    waited = 0.0


_thread = _ThreadState()


def waited() -> float:
    """How many seconds the calling thread has waited in exchanges so far."""
    return _thread.waited


@dataclass
class Exchange:
    """An exchange in flight; `wait` returns what arrived."""

    work: Any
    arrived: Tensor
    home: torch.device
    channel: Channel
    span: ExchangeSpan | None = None

    def wait(self) -> Tensor:
        """Wait for the exchange; returns what arrived, on the device of what was sent."""
        begin = time.perf_counter()
        try:
            if self.channel.patient:
                self._poll()
            with self.channel.issuing(self.arrived):
                self.work.wait()
            self.channel.watch(self.arrived)
        except RuntimeError as error:
            raise self.channel.explain(error) from error
        _thread.waited += time.perf_counter() - begin
        if self.span is not None:
            self.span.end()
        return self.arrived.to(self.home)

    def _poll(self) -> None:
        backoff, heartbeats = Backoff(POLL_SECONDS, LONGEST_POLL), HeartbeatMonitor(self.channel.health)
        while not self.work.is_completed():
            if self.channel.health.broken.is_set():
                raise RuntimeError("another exchange of this rank has failed")
            heartbeats.check()
            time.sleep(backoff.next())


@dataclass(frozen=True)
class CoreWork:
    """An exchange of the core, with the interface of torch's work."""

    channel: Channel
    number: int

    def is_completed(self) -> bool:
        return self.channel.is_complete(self.number)

    def wait(self) -> None:
        self.channel.wait_core(self.number)


class ExchangeSpan:
    """An exchange's span on a trace. `lanes` says which of the channel's tracks are in use: where several exchanges are
    in flight at once (dense gradients), each has a track of its own, so that spans of a track never overlap."""

    def __init__(self, lanes: list[bool], channel: str, what: str, sent: int, received: int) -> None:
        if all(lanes):
            lanes.append(False)
        self._lanes, self._lane = lanes, lanes.index(False)
        lanes[self._lane] = True
        self._track = f"exchange {channel}" + (f" {self._lane + 1}" if self._lane else "")
        self._what, self._bytes = what, {"sent": sent, "received": received}
        self._begin = time.perf_counter()

    def end(self) -> None:
        """The exchange has ended."""
        trace.add(self._track, self._what, self._begin, time.perf_counter(), **self._bytes)
        self._lanes[self._lane] = False


class Channel:
    """Exchanges over one carrier: call `create_group` or `use_core_exchange` first. `what` names an exchange on a
    trace."""

    def __init__(self, name: str, health: Health, patient: bool = False, members: Sequence[int] | None = None) -> None:
        self.name, self.health, self.patient = name, health, patient
        self.members = tuple(range(health.world)) if members is None else tuple(members)
        self.is_member = health.rank in self.members
        # This rank's number among the members, and how many there are.
        self.rank = self.members.index(health.rank) if self.is_member else -1
        self.world = len(self.members)
        self.group: Any = None  # Gloo's
        self.carries: str | None = None  # the kind of device whose memory the device group carries
        self._device_group: Any = None
        self._watch: Watchdog | None = None
        self.sent = 0  # bytes to other ranks
        self.count = 0  # exchanges begun
        self._lanes: list[bool] = []  # of a trace, in use or not
        self._core: Any = None  # a _core.SharedMemoryExchange or SocketExchange, which carries CPU memory
        self._in_flight: deque[tuple[int, Tensor, Tensor]] = deque()  # keeps the memory that its exchanges use

    def create_group(self, timeout: float) -> None:
        """Make a Gloo group for this channel. All ranks call it, members or not, for their channels in one order."""
        self.group = dist.new_group(list(self.members), backend="gloo", timeout=timedelta(seconds=timeout))

    def use_device_group(self, kind: str, group: Any, watch: Watchdog) -> None:
        """Exchange memory of devices of this kind over `group` from now on; the device waits for it."""
        self.carries, self._device_group, self._watch = kind, group, watch

    def use_core_exchange(self, exchange: Any) -> None:
        """Exchange CPU memory through `exchange` (_core.SharedMemoryExchange or SocketExchange) from now on."""
        self._core = exchange

    def close(self) -> None:
        """Tell ranks that wait for this one that it has left."""
        if self._core is not None:
            self._core.close()

    def issuing(self, arrived: Tensor) -> AbstractContextManager[None]:
        """The context in which the host issues an exchange into `arrived`."""
        if self._watch is None or arrived.device.type != self.carries:
            return nullcontext()
        return self._watch.issuing(self.name)

    def watch(self, arrived: Tensor) -> None:
        """The current stream waits for `arrived`: have the watchdog watch it."""
        if self._watch is not None and arrived.device.type == self.carries == "cuda":
            self._watch.issued(self.name, torch.cuda.current_stream(arrived.device).record_event())

    def explain(self, error: BaseException) -> BaseException:
        """The error to raise for an exchange that failed."""
        return self.health.explain(self.name, error)

    def all_to_all(self, send: Tensor, to: Sequence[int], received: Sequence[int], *, what: str = "values") -> Tensor:
        """Send elements of `send`, to[r] of them to rank r in order. Returns what arrived: received[r] elements from
        rank r."""
        return self.begin_all_to_all(send, to, received, what=what).wait()

    def begin_all_to_all(
        self, send: Tensor, to: Sequence[int], received: Sequence[int], out: Tensor | None = None, what: str = "values",
        own: bool = True,
    ) -> Exchange:  # fmt: skip
        """As `all_to_all`, without waiting. `send` must not change until the wait. What arrives goes into `out`, if
        given. Without `own`, the part that this rank sends itself may be left out."""
        width = send.element_size()
        span = self._count(what, (sum(to) - to[self.rank]) * width, (sum(received) - received[self.rank]) * width)
        home, send = send.device, self._to_carrier(send)
        arrived = self._output(out, sum(received), send)
        if self._uses_core(arrived):
            return self._begin_core(home, span, arrived, send, list(to), list(received), same=False, own=own)
        return self._begin(home, span, arrived, dist.all_to_all_single, arrived, send, list(received), list(to))

    def begin_all_gather(self, send: Tensor, out: Tensor | None = None, what: str = "values") -> Exchange:
        """Gather every rank's `send`, all of one size, in rank order; into `out`, if given, where this rank's part may
        already be in its place."""
        others = (self.world - 1) * send.numel() * send.element_size()
        span = self._count(what, others, others)
        home, send = send.device, self._to_carrier(send)
        arrived = self._output(out, self.world * send.numel(), send)
        if self._uses_core(arrived):
            size = send.numel()
            return self._begin_core(home, span, arrived, send, [size], [size] * self.world, same=True)
        return self._begin(home, span, arrived, _gather, arrived, send)

    def all_gather(self, send: Tensor, what: str = "values") -> list[Tensor]:
        """Every rank's `send`, all of one size, in rank order."""
        return list(self.begin_all_gather(send, what=what).wait().chunk(self.world))

    def gather_numbers(self, *numbers: int) -> list[list[int]]:
        """Every rank's numbers, in rank order."""
        mine = torch.tensor(numbers, dtype=torch.int64)
        return [part.tolist() for part in self.all_gather(mine, "numbers")]

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's plain value, in rank order."""
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [size for (size,) in self.gather_numbers(data.numel())]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: data.numel()] = data
        parts = self.all_gather(padded)
        return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes, strict=True)]

    def _to_carrier(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == self.carries else tensor.cpu()

    def _uses_core(self, arrived: Tensor) -> bool:
        return self._core is not None and arrived.device.type == "cpu" != self.carries

    @staticmethod
    def _output(out: Tensor | None, size: int, like: Tensor) -> Tensor:
        if out is not None and out.device == like.device:
            return out
        return torch.empty(size, dtype=like.dtype, device=like.device)

    def _count(self, what: str, sent: int, received: int) -> ExchangeSpan | None:
        """Count an exchange's bytes to other ranks; returns its span while a trace is recorded."""
        self.sent += sent
        return ExchangeSpan(self._lanes, self.name, what, sent, received) if trace.on() else None

    def _begin_core(
        self, home: torch.device, span: ExchangeSpan | None, arrived: Tensor, send: Tensor, to: list[int], received:
        list[int], same: bool, own: bool = True,
    ) -> Exchange:  # fmt: skip
        self.count += 1
        width, send = send.element_size(), send.contiguous()
        try:
            if self.health.broken.is_set():
                raise RuntimeError("another exchange of this rank has failed")
            number = self._core.begin(
                send.data_ptr(), [width * n for n in to], same, arrived.data_ptr(), [width * n for n in received], own
            )
        except RuntimeError as error:
            raise self.explain(error) from error
        self._in_flight.append((number, arrived, send))
        return Exchange(CoreWork(self, number), arrived, home, self, span)

    def is_complete(self, number: int) -> bool:
        """Whether the core's exchange `number` is complete. Raises RuntimeError if it has failed."""
        return bool(self._core.is_complete(number))

    def wait_core(self, number: int) -> None:
        """Wait for the core's exchange `number` and those before it."""
        self._core.wait(number)
        while self._in_flight and self._in_flight[0][0] <= number:
            self._in_flight.popleft()

    def _begin(
        self, home: torch.device, span: ExchangeSpan | None, arrived: Tensor, collective: Any, *arguments: Any
    ) -> Exchange:
        self.count += 1
        group = self._device_group if arrived.device.type == self.carries else self.group
        try:
            with self.issuing(arrived):
                work = collective(*arguments, group=group, async_op=True)
        except RuntimeError as error:
            raise self.explain(error) from error
        return Exchange(work, arrived, home, self, span)
