"""A simulated GPU, for tests on a machine without one. Code for a GPU runs, and accesses without an order are reported.

    with simulate_gpu(folder) as device:
        ...train with hbm= on "cuda"...
    assert not device.order.races

README.md says what this guards and what it cannot see. The parts:

    tensors.py  CUDA tensors over host memory
    device.py   streams, events and captured graphs
    driver.py   the CUDA driver, for the core
    order.py    vector clocks and the race detector; kernels report the addresses that they really access
    threads.py  the order between host threads
    plugin.py   runs tests marked gpu over the simulated one

Requires: TRITON_INTERPRET=1, and that torch sees no GPU. One at a time. A process that used it keeps the simulated
driver, so tests use it in a process of their own.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from hotrow import _core
from hotrow.kernels import current_stream
from hotrow.kernels.index.launch_arguments import BatchArguments
from simulated_gpu import driver, tensors, threads
from simulated_gpu.device import CudaEvent, Device, Graph, on_stream
from simulated_gpu.order import HOST
from simulated_gpu.tensors import CudaTensor, Mode, allocate, touch

BYTES = 1 << 34  # of memory that the device reports


@contextmanager
def simulate_gpu(folder: Path, seed: int = 0, failing: Callable[[str], bool] = lambda name: False) -> Iterator[Device]:
    """Simulate a GPU inside the block. `failing(name)` says whether a driver call must fail."""
    device = Device(seed)
    tensors.use(device)
    driver.connect(driver.load(folder), lambda: device, failing)
    lifted = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        for target, name, value in [*_torch_cuda(device), *_elsewhere(device), *threads.replaced(device.order, Mode)]:
            stack.enter_context(patch.object(target, name, value, create=True))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        stack.enter_context(Mode())
        yield device
        device.synchronize_all()


def _torch_cuda(device: Device) -> list[tuple[Any, str, Any]]:
    found = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda where: None,
        "Stream": device.new_stream,
        "Event": lambda **options: CudaEvent(device, **options),
        "CUDAGraph": lambda **options: Graph(device, **options),
        "graph": lambda graph, **options: _captured(device, graph, **options),
        "graph_pool_handle": object,
        "stream": lambda stream: on_stream(device, stream),
        "current_stream": device.current,
        "default_stream": lambda where=None: device.default,
        "synchronize": device.synchronize_all,
        "is_current_stream_capturing": lambda: device.current().graph is not None,
        "mem_get_info": lambda where=None: (BYTES, BYTES),
        "memory_reserved": lambda where=None: 0,
        "memory_allocated": lambda where=None: 0,
        "empty_cache": lambda: None,
        "get_rng_state": lambda where=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, where=None: None,
        "get_device_properties": lambda where=None: types.SimpleNamespace(multi_processor_count=2, uuid="simulated"),
        "cudart": lambda: _Runtime(device),
    }
    current_stream._streams.clear()
    handle = (torch._C, "_cuda_getCurrentRawStream", lambda number: device.current().cuda_stream)
    return [handle, *((torch.cuda, name, value) for name, value in found.items())]


@contextmanager
def _captured(
    device: Device, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    with on_stream(device, stream or device.new_stream()):
        graph.capture_begin(capture_error_mode=capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


class _Runtime:
    """torch.cuda.cudart()."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.device.refuse_if_capturing("making memory reachable")
        if self.device.unreachable:
            self.device.here.failed = True
            return 801
        with self.device.order.lock:
            self.device.order.add("registered", address, size, HOST)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.device.order.remove(address)
        return 0


def _elsewhere(device: Device) -> list[tuple[Any, str, Any]]:
    """Replacements outside torch.cuda: calls that touch memory report it."""
    numpy, execute = torch.Tensor.numpy, interpreter.GridExecutor.__call__
    run = interpreter.InterpretedFunction.run
    set_original, builder = BatchArguments.set, interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    swap, change = builder.create_atomic_cas, builder.create_atomic_rmw

    def to_numpy(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        with device.order.lock:
            touch(HOST, tensor, False, "numpy")
        return numpy(tensor, *args, **options)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        device.refuse_if_capturing("making pinned memory")
        with _disable_current_modes():
            return allocate(tensor.shape, tensor.dtype, "pinned", HOST).copy_(tensor)

    def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
        block = device.order.block_of(tensor.data_ptr())
        return block is not None and block.kind == "pinned"

    def set_arguments(arguments: BatchArguments, *numbers: Any) -> None:
        with device.order.lock:
            touch(HOST, arguments._pinned, True, "setting the batch's arguments")
        set_original(arguments, *numbers)

    def execute_kernel(kernel: Any, *args: Any, **options: Any) -> None:
        plain = [arg.inner if isinstance(arg, CudaTensor) else arg for arg in args]
        if not any(isinstance(arg, CudaTensor) for arg in args):
            raise RuntimeError("a kernel without memory of the device")
        name = kernel.fn.__name__

        def work(agent: int) -> None:
            device.here.touched = touched = {}
            try:
                with _disable_current_modes():
                    execute(kernel, *plain, **options)
            finally:
                device.here.touched = None
            for write in (False, True):
                for (size, writes), places in touched.items():
                    if writes == write:
                        device.order.touch(agent, np.unique(np.concatenate(places)), size, write, name)

        device.enqueue(name, work)

    def run_serially(function: Any, *args: Any, **options: Any) -> Any:
        with device.order.lock:  # the interpreter has one thread, and CPython 3.11 parses on one
            return run(function, *args, **options)

    def noted(pointers: Any, mask: Any, *writes: bool) -> None:
        touched = getattr(device.here, "touched", None)
        if touched is not None:
            places = pointers.data.reshape(-1) if mask is None else pointers.data[mask.astype(bool)]
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            for write in writes:
                touched.setdefault((size, write), []).append(places)

    def loading(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        noted(pointers, mask.data, False)
        return load(self, pointers, mask, *rest)

    def storing(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        noted(pointers, mask.data, True)
        return store(self, pointers, value, mask, *rest)

    def swapping(self: Any, pointers: Any, *rest: Any) -> Any:
        noted(pointers, None, False, True)
        return swap(self, pointers, *rest)

    def changing(self: Any, kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        noted(pointers, mask.data, False, True)
        return change(self, kind, pointers, value, mask, *rest)

    row_transfer = _core.RowTransfer
    return [
        (torch, "inference_mode", torch.no_grad),  # whose tensors cannot be wrapped
        (torch.Tensor, "numpy", to_numpy),
        (torch.Tensor, "pin_memory", pin),
        (torch.Tensor, "is_pinned", is_pinned),
        (BatchArguments, "set", set_arguments),
        (interpreter.InterpretedFunction, "run", run_serially),
        (interpreter.GridExecutor, "__call__", execute_kernel),
        (builder, "create_masked_load", loading),
        (builder, "create_masked_store", storing),
        (builder, "create_atomic_cas", swapping),
        (builder, "create_atomic_rmw", changing),
        (_core, "RowTransfer", lambda *args: _RowTransfer(device, row_transfer, *args)),
    ]


class _RowTransfer:
    """Wraps _core.RowTransfer and reports the memory that the host touches in it."""

    def __init__(self, device: Device, transfer: Any, *args: Any) -> None:
        self.device, self.transfer, self.width = device, transfer(*args), args[3]
        for size, cells in zip((32, 40), args[6:8], strict=True):
            device.cells |= {graph: (cell, size) for graph, cell in cells}

    def upload(
        self, parts: Any, count: int, keys: int, slots: int, steps: int, counts: int, zero_copy_count: int, *rest: Any
    ) -> int:
        order, staged = self.device.order, rest[2]
        with order.lock:
            if keys:
                for address in (slots, steps, counts):
                    order.touch_range(HOST, address, 4 * count, True, "looking rows up")
            order.touch_range(HOST, staged, 4 * self.width * (count - zero_copy_count), True, "gathering rows")
        order.caller = order.host()
        return int(self.transfer.upload(parts, count, keys, slots, steps, counts, zero_copy_count, *rest))

    def begin_write_back(self, stream: int, device_rows: int, rows: int, staged: int) -> Any:
        return _WriteBack(self, self.transfer.begin_write_back(stream, device_rows, rows, staged), rows, staged)


class _WriteBack:
    def __init__(self, transfer: _RowTransfer, write_back: Any, rows: int, staged: int) -> None:
        self.transfer, self.write_back, self.rows, self.staged = transfer, write_back, rows, staged

    def store_rows(self, parts: Any, slots: int, steps: int, counts: int, clean: int) -> None:
        self.write_back.store_rows(parts, slots, steps, counts, clean)
        order, row = self.transfer.device.order, 4 * self.transfer.width
        if not self.rows:
            return
        slot_numbers = driver.int32s(slots, self.rows)
        with order.lock:
            order.touch_range(HOST, self.staged, row * self.rows, False, "storing written-back rows")
            for table, begin, end in parts:
                address, _, _ = table.row_memory()
                some = slot_numbers[begin:end][slot_numbers[begin:end] >= 0].astype(np.int64)
                if some.size:
                    order.touch(HOST, address + some * row, row, True, "storing written-back rows")


__all__ = ["CudaTensor", "Device", "simulate_gpu"]
