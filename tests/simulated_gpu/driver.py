"""The CUDA driver for the core, which loads libcuda.so.1 at its first call. A small C library of that name is loaded
before, and its functions call the simulated device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from simulated_gpu.device import CudaEvent, Device
from simulated_gpu.order import HOST

Handle, Address, Size = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
NOT_READY, FAILED = 600, 700

_calls: list[Any] = []  # C holds pointers to these


def compiler() -> str | None:
    """The C compiler, None if there is none."""
    return shutil.which("cc") or shutil.which("gcc")


def load(folder: Path) -> Any:
    """Build the library if needed and load it. From then on the core uses it as the machine's driver."""
    made = folder / "libcuda.so.1"
    if not made.exists():
        found = compiler()
        assert found is not None
        source = Path(__file__).with_name("driver.c")
        options = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
        subprocess.run([found, *options, str(source), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


def connect(library: Any, device: Callable[[], Device], failing: Callable[[str], bool]) -> None:
    """Connect the library to `device()`. `failing(name)` says whether a call must fail."""

    def event_of(handle: int) -> CudaEvent:
        return device().events.setdefault(handle, CudaEvent(device()))

    def record(event: int, stream: int) -> None:
        event_of(event).record(device().stream(stream or 0))

    def wait(event: int) -> None:
        event_of(event).synchronize()

    def query(event: int) -> int:
        return 0 if event_of(event).query() else NOT_READY

    def destroy(event: int) -> None:
        device().events.pop(event, None)

    def hold(stream: int, event: int) -> None:
        event_of(event).wait(device().stream(stream or 0))

    def copy(to: int, source: int, size: int, stream: int, what: str) -> None:
        def work(agent: int) -> None:
            device().order.touch_range(agent, source, size, False, what)
            device().order.touch_range(agent, to, size, True, what)
            ctypes.memmove(to, source, size)

        device().run(device().stream(stream or 0).agent, what, work)

    def launch(graph: int, stream: int) -> None:
        on, (cell, size) = device().stream(stream or 0), device().cells.get(graph, (0, 0))
        with device().order.lock:  # its arguments were written just before
            device().order.touch_range(HOST, cell, size, True, "writing launch arguments")
            device().graphs[graph].run(on.agent)

    kinds = {
        "event_record": ([Handle, Handle], record),
        "event_wait": ([Handle], wait),
        "event_query": ([Handle], query),
        "event_destroy": ([Handle], destroy),
        "stream_wait": ([Handle, Handle], hold),
        "copy_up": ([Address, Handle, Size, Handle], lambda to, off, n, s: copy(to, off, n, s, "a copy up")),
        "copy_down": ([Handle, Address, Size, Handle], lambda to, off, n, s: copy(to, off, n, s, "a copy down")),
        "graph_launch": ([Handle, Handle], launch),
    }

    def guarded(name: str, call: Callable[..., Any]) -> Callable[..., int]:
        def guard(*args: Any) -> int:
            try:
                return FAILED if failing(name) else int(call(*args) or 0)
            except BaseException as error:  # an exception cannot pass through C
                device().errors.append(error)
                return FAILED

        return guard

    _calls[:] = [ctypes.CFUNCTYPE(ctypes.c_int, *types)(guarded(name, call)) for name, (types, call) in kinds.items()]
    pointers = (ctypes.c_void_p * len(_calls))(*(ctypes.cast(call, ctypes.c_void_p) for call in _calls))
    library.set_callbacks(pointers)


def int32s(address: int, count: int) -> np.ndarray:
    """An int32 array at an address."""
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)), (count,))
