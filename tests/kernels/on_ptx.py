"""A pytest plugin (`-p on_ptx`) that runs kernel tests on compiled code, on the CPU: Triton compiles each kernel, and
ptx.py runs its PTX. test_ptx.py uses it.

Guards: the results of compiled kernels on a machine without a GPU, above all the arithmetic whose bits are promised
(stochastic rounding, counts, update rules), which the interpreter computes with numpy instead.
Cannot see: races between threads, ptxas's translation of PTX, a GPU's approximations of log2 and exp2, speed.

Requires: it is loaded before Triton, with TRITON_INTERPRET unset. Tests then see TRITON_INTERPRET=1, so they use CPU
tensors.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path
from typing import Any

import torch
import triton
from compile_only import FakeDriver
from ptx import Program
from triton.runtime.cache import get_cache_manager

from hotrow import kernels


class CpuDriver(FakeDriver):
    """A driver whose launches run the kernel's PTX on this machine's CPU."""

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        text = Path(get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")).read_text()
        program = Program(text, 32 * metadata.num_warps, metadata.shared)
        kinds = list(source.signature.values())

        def launch(gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:  # noqa: N803
            given = zip(kinds, args[4:], strict=True)  # behind metadata and hooks
            program.run(gridX, [_number(kind, value) for kind, value in given if kind != "constexpr"])

        return launch


def _number(kind: str, value: Any) -> int | float:
    if isinstance(value, torch.Tensor):
        return int(value.data_ptr())
    return float(value) if kind == "fp32" else int(value)


def pytest_load_initial_conftests() -> None:
    """Import all kernels as compiled ones, then have the tests see the interpreter's setting."""
    assert "TRITON_INTERPRET" not in os.environ
    driver = CpuDriver()
    triton.runtime.driver.set_active(driver)
    torch._C._cuda_getCurrentRawStream = driver.get_current_stream  # type: ignore[attr-defined]
    triton.knobs.runtime.interpret = False
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)
    os.environ["TRITON_INTERPRET"] = "1"
