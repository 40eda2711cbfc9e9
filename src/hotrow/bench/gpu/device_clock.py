"""Times on the GPU, between two CUDA events (without a GPU, on the host); the bandwidth of its memory and of PCIe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hotrow.bench.harness import Timing, timing
from hotrow.undocumented import find

IDLE_CYCLES = 2_000_000
RATE_BYTES, PCIE_BYTES, RATE_TIMES = 2 << 30, 256 << 20, 10
Given = TypeVar("Given")
Made = TypeVar("Made")


def bench_device() -> torch.device:
    """The GPU, or the CPU under Triton's interpreter."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def timed(
    device: torch.device,
    call: Callable[[Given], Made],
    inputs: Sequence[Given],
    warmup: int,
    undo: Callable[[Made], None] | None = None,
) -> Timing:
    """Seconds of call(input), one after another, without the first `warmup`.

    The device idles for a millisecond before each call, so that the time to launch is hidden, as in a training loop.
    """
    cuda, clocks = device.type == "cuda", []
    for given in inputs:
        clock: Any = CudaClock() if cuda else HostClock()
        result = call(given)
        clock.stop()
        clocks.append(clock)
        if undo:
            undo(result)
    if cuda:
        torch.cuda.synchronize()
    return timing([clock.seconds() for clock in clocks[warmup:]])


def memory_rate(device: torch.device) -> float:
    """Bytes per second that a copy on the device reads and writes, together."""
    size = RATE_BYTES if device.type == "cuda" else RATE_BYTES >> 7
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    took = timed(device, lambda _: target.copy_(source), range(RATE_TIMES), 2)
    return 2 * size / took.median


def pcie_rate(device: torch.device) -> float:
    """Bytes per second of a copy from pinned memory to the device."""
    cuda = device.type == "cuda"
    size = PCIE_BYTES if cuda else PCIE_BYTES >> 4
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=cuda)
    target = torch.zeros(size, dtype=torch.uint8, device=device)
    took = timed(device, lambda _: target.copy_(pinned, non_blocking=True), range(RATE_TIMES), 2)
    return size / took.median


def idle(cycles: int) -> None:
    """Keep the device idle for this many of its cycles, so that the host gets ahead of it."""
    sleep = find("torch.cuda:_sleep", "GPU times include the host's launch time")
    if sleep is not None:
        sleep(cycles)


class CudaClock:
    """Time on the device, from now to stop()."""

    def __init__(self) -> None:
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        idle(IDLE_CYCLES)
        self.start.record()

    def stop(self) -> None:
        self.end.record()

    def seconds(self) -> float:
        return float(self.start.elapsed_time(self.end)) / 1e3


class HostClock:
    """Time on the host, from now to stop()."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def stop(self) -> None:
        self.end = time.perf_counter()

    def seconds(self) -> float:
        return self.end - self.start
