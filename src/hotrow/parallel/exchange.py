"""Channel: one carrier between all ranks, and the few exchanges that HotRow makes over it.

Exchanges of one channel must be issued in the same order by all ranks, so whatever runs in an order of its own (the
route thread, the training thread, dense gradients during backward, a save behind training) has a channel of its own.
A channel is used by one thread at a time.

Gloo carries CPU memory alone: tensors on a GPU are copied down and up again around it. Ranks of one machine exchange
what is in CPU memory through memory that they share instead (`share`; shared_memory.py), as far as training waits for it. A
channel may have a second group, NCCL's, for what is on GPUs (`carry`; backend.py says when); what is on the CPU, as
counts and keys are, goes the other way there too. One thread asks for both, in one order, so neither can wait for the
other.

An exchange that fails, because a rank died or did not come within the timeout, raises RankError with the rank's name:
health.py finds out who it was. On a patient channel an exchange may take hours; whoever waits there looks now and then
whether the others' hearts still beat, and whether another channel has failed meanwhile. What the device waits for,
parallel/watchdog.py looks after.

How long a thread has waited for others is counted always (`waited`; with NCCL a thread hardly does: the stream waits).
While there is a trace, an exchange is a span of its channel's track, from its begin to the end of the wait for it.
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
from hotrow.parallel.health import Health, Hearts
from hotrow.parallel.watchdog import Watch

LOOK_SECONDS, LONGEST_LOOK = 0.0001, 0.2  # between two looks on a patient channel: at first, and when it takes long
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name since torch 2.13


class _Here(threading.local):
    waited = 0.0


_here = _Here()


def waited() -> float:
    """How many seconds the thread that asks has waited in exchanges so far."""
    return _here.waited


@dataclass
class Exchange:
    """One that is under way; `wait` gives what arrived."""

    work: Any
    arrived: Tensor
    home: torch.device
    channel: Channel
    shown: Shown | None = None

    def wait(self) -> Tensor:
        """Until it is there."""
        begin = time.perf_counter()
        try:
            if self.channel.patient:
                self._look()
            with self.channel.asking(self.arrived):
                self.work.wait()
            self.channel.asked(self.arrived)
        except RuntimeError as error:
            raise self.channel.explain(error) from error
        _here.waited += time.perf_counter() - begin
        if self.shown is not None:
            self.shown.end()
        return self.arrived.to(self.home)

    def _look(self) -> None:
        pause, hearts = LOOK_SECONDS, Hearts(self.channel.health)
        while not self.work.is_completed():
            if self.channel.health.broken.is_set():
                raise RuntimeError("another exchange of this rank has failed")
            hearts.check()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK)


@dataclass(frozen=True)
class Posted:
    """An exchange through shared memory, as torch's work."""

    channel: Channel
    number: int

    def wait(self) -> None:
        self.channel.take(self.number)


class Shown:
    """An exchange on a trace. `lanes` says which of the channel's tracks are in use: where several exchanges are under
    way at once (dense gradients), each has a track of its own, so that spans of a track never overlap."""

    def __init__(self, lanes: list[bool], channel: str, what: str, sent: int, received: int) -> None:
        if all(lanes):
            lanes.append(False)
        self._lanes, self._lane = lanes, lanes.index(False)
        lanes[self._lane] = True
        self._track = f"exchange {channel}" + (f" {self._lane + 1}" if self._lane else "")
        self._what, self._bytes = what, {"sent": sent, "received": received}
        self._begin = time.perf_counter()

    def end(self) -> None:
        """It is there."""
        trace.add(self._track, self._what, self._begin, time.perf_counter(), **self._bytes)
        self._lanes[self._lane] = False


class Channel:
    """Exchanges over one carrier, which `meet` or `share` gives it. `what` names one on a trace: keys, rows."""

    def __init__(self, name: str, health: Health, patient: bool = False) -> None:
        self.name, self.health, self.patient = name, health, patient
        self.rank, self.world = health.rank, health.world
        self.group: Any = None  # Gloo's
        self.carries: str | None = None  # the kind of device whose memory a group of its own carries
        self._device_group: Any = None
        self._watch: Watch | None = None
        self.sent = 0  # bytes to other ranks
        self.count = 0  # exchanges begun
        self._lanes: list[bool] = []  # of a trace, in use or not
        self._box: Any = None  # a _core.Mailbox: what is in CPU memory goes through memory that ranks share
        self._coming: deque[tuple[int, Tensor]] = deque()  # what it will write into, by exchange

    def meet(self, timeout: float) -> None:
        """Gloo carries this channel. All ranks call it, for their channels in one order."""
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def carry(self, kind: str, group: Any, watch: Watch) -> None:
        """What is on such devices goes over that group from now on, and is waited for there."""
        self.carries, self._device_group, self._watch = kind, group, watch

    def share(self, box: Any) -> None:
        """What is in CPU memory goes through that mailbox from now on."""
        self._box = box

    def close(self) -> None:
        """Others that wait for this rank here are told that it has left."""
        if self._box is not None:
            self._box.close()

    def asking(self, arrived: Tensor) -> AbstractContextManager[None]:
        """Inside it, the host asks for what will be in `arrived`."""
        if self._watch is None or arrived.device.type != self.carries:
            return nullcontext()
        return self._watch.asking(self.name)

    def asked(self, arrived: Tensor) -> None:
        """This stream waits for what will be in `arrived`."""
        if self._watch is not None and arrived.device.type == self.carries == "cuda":
            self._watch.asked(self.name, torch.cuda.current_stream(arrived.device).record_event())

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an exchange that failed."""
        return self.health.explain(self.name, error)

    def all_to_all(self, send: Tensor, to: Sequence[int], came: Sequence[int], *, what: str = "values") -> Tensor:
        """Elements of `send`, `to[r]` of them to rank r in order; what came, `came[r]` from rank r, in order."""
        return self.begin_all_to_all(send, to, came, what=what).wait()

    def begin_all_to_all(
        self, send: Tensor, to: Sequence[int], came: Sequence[int], out: Tensor | None = None, what: str = "values",
        own: bool = True,
    ) -> Exchange:  # fmt: skip
        """The same, without waiting. `send` must stay as it is until then. What comes goes into `out`, if given.
        Without `own`, nobody will read there what this rank sends itself."""
        width = send.element_size()
        shown = self._show(what, (sum(to) - to[self.rank]) * width, (sum(came) - came[self.rank]) * width)
        home, send = send.device, self._at_the_wire(send)
        arrived = self._room(out, sum(came), send)
        if self._shared(arrived):
            return self._post(home, shown, arrived, send, list(to), list(came), same=False, own=own)
        return self._begin(home, shown, arrived, dist.all_to_all_single, arrived, send, list(came), list(to))

    def begin_all_gather(self, send: Tensor, out: Tensor | None = None, what: str = "values") -> Exchange:
        """Every rank's `send`, all of one size, one after another; into `out`, if given, where this rank's may already
        be in its place."""
        others = (self.world - 1) * send.numel() * send.element_size()
        shown = self._show(what, others, others)
        home, send = send.device, self._at_the_wire(send)
        arrived = self._room(out, self.world * send.numel(), send)
        if self._shared(arrived):
            size = send.numel()
            return self._post(home, shown, arrived, send, [size], [size] * self.world, same=True)
        return self._begin(home, shown, arrived, _gather, arrived, send)

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

    def _at_the_wire(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == self.carries else tensor.cpu()

    def _shared(self, arrived: Tensor) -> bool:
        return self._box is not None and arrived.device.type == "cpu" != self.carries

    @staticmethod
    def _room(out: Tensor | None, size: int, like: Tensor) -> Tensor:
        if out is not None and out.device == like.device:
            return out
        return torch.empty(size, dtype=like.dtype, device=like.device)

    def _show(self, what: str, sent: int, received: int) -> Shown | None:
        """Count an exchange's bytes to and from other ranks; its span, while there is a trace."""
        self.sent += sent
        return Shown(self._lanes, self.name, what, sent, received) if trace.on() else None

    def _post(
        self, home: torch.device, shown: Shown | None, arrived: Tensor, send: Tensor, to: list[int], came: list[int],
        same: bool, own: bool = True,
    ) -> Exchange:  # fmt: skip
        self.count += 1
        width, send = send.element_size(), send.contiguous()
        try:
            if self.health.broken.is_set():
                raise RuntimeError("another exchange of this rank has failed")
            number = self._box.begin(
                send.data_ptr(), [width * n for n in to], same, arrived.data_ptr(), [width * n for n in came], own
            )
        except RuntimeError as error:
            raise self.explain(error) from error
        self._coming.append((number, arrived))
        return Exchange(Posted(self, number), arrived, home, self, shown)

    def take(self, number: int) -> None:
        """Wait for that exchange of the mailbox; those before it come with it."""
        self._box.wait(number)
        while self._coming and self._coming[0][0] <= number:
            self._coming.popleft()

    def _begin(
        self, home: torch.device, shown: Shown | None, arrived: Tensor, collective: Any, *arguments: Any
    ) -> Exchange:
        self.count += 1
        group = self._device_group if arrived.device.type == self.carries else self.group
        try:
            with self.asking(arrived):
                work = collective(*arguments, group=group, async_op=True)
        except RuntimeError as error:
            raise self.explain(error) from error
        return Exchange(work, arrived, home, self, shown)
