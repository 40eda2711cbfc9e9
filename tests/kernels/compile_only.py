"""Compiles every kernel for a GPU on a machine without one; nothing runs.

Guards: each kernel passes Triton's compiler and ptxas with the types, alignments, constants and options of real
launches, in every branch (launches.py); launch.py gives Triton's launcher what Triton itself gives it; registers and
spills of a step. The interpreter accepts what the compiler refuses: branches of different types, shapes that are no
constants, pointers of another type.
Cannot see: results. Kernels write nothing, so what their launchers return is undefined (on_ptx.py runs them).

Triton asks its driver for the device, loads compiled code there and launches it. `FakeDriver` is such a driver, so
launchers work on CPU tensors as they are. A kernel's first launch goes through Triton and later ones through
kernels/launch.py; here each is made twice, and both must pass the same arguments. The statements that the compiler
visits are recorded: a branch on a constexpr that is never taken would not be compiled.

As a program (`python compile_only.py [compute capability]`) it makes every launch of launches.py and prints a report as
JSON. Requires: TRITON_INTERPRET is not set, and Triton's cache is empty, since code from the cache visits no statement.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import launches
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler.code_generator import CodeGenerator
from triton.compiler.compiler import LazyDict
from triton.knobs import HookChain

from hotrow import kernels
from hotrow.bench.gpu import hkv_operations
from hotrow.kernels.launch import CachedLauncher

SOURCES = [*sorted(Path(kernels.__file__).parent.rglob("*.py")), Path(hkv_operations.__file__)]
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HOPPER = 90


class FakeDriver:
    """Triton's driver for a GPU that does not exist: loads nothing, and records launches."""

    def __init__(self, capability: int = HOPPER) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.utils = self
        self.launched: list[tuple[Any, ...]] = []  # the arguments that Triton's launcher was given
        self.used: dict[str, int] = {}  # resources of the kernel loaded last

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 99 << 10}  # of the smallest GPUs, sm_86 and sm_89

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, bytes spilled, and the most threads of a program."""
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True)
        registers, stack = (int(re.search(rf"{what}:(\d+)", usage.stdout)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
        self.used = {"registers": registers, "stack": stack, "shared": shared}
        return 1, 1, registers, stack, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> CudaLauncher:
        """Triton's own launcher, except that its last call, into C, is recorded instead."""
        launcher = CudaLauncher.__new__(CudaLauncher)
        vars(launcher).update(metadata._asdict(), arg_annotations=None, kernel_signature=None, gsan_enabled=False)
        launcher.launch = lambda *args: self.launched.append(args)
        return launcher


class Compiler:
    """Compiles every launch of a kernel in this process. `made` are those that compiled, `errors` the others."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.made: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.seen: set[tuple[str, int]] = set()  # statements, by file and line
        triton.runtime.driver.set_active(driver)
        torch._C._cuda_getCurrentRawStream = driver.get_current_stream  # type: ignore[attr-defined]
        launch, visit = CachedLauncher._launch, CodeGenerator.visit_compound_statement
        CachedLauncher._launch = lambda fast, *args, **options: self._launch(launch, fast, *args, **options)  # type: ignore[method-assign]
        CodeGenerator.visit_compound_statement = lambda generator, block: visit(
            generator, self._record(generator, block)
        )

    def _launch(self, launch: Callable[..., None], fast: Any, programs: int, *args: Any, **options: Any) -> None:
        name = f"{fast.kernel.fn.__module__.rpartition('.')[2]}.{fast.kernel.fn.__name__}"
        known = len(fast.compiled)
        try:
            launch(fast, programs, *args, **options)
            if len(fast.compiled) > known:
                launch(fast, programs, *args, **options)
                once, again = self.driver.launched[-2:]
                assert _as_passed(once) == again, f"launch.py gives the launcher {again}, Triton {_as_passed(once)}"
                self.made.append(
                    {"kernel": name, "options": {k: str(v) for k, v in options.items()}, **self.driver.used}
                )
        except Exception as error:
            types = [getattr(arg, "dtype", type(arg).__name__) for arg in args]
            self.errors.append(f"{name} of {types} with {options}: {type(error).__name__}: {error}")

    def _record(self, generator: CodeGenerator, block: list[ast.stmt]) -> list[ast.stmt]:
        file = Path(generator.file_name).name
        self.seen.update((file, generator.begin_line + statement.lineno) for statement in block)
        return block

    def report(self) -> dict[str, Any]:
        """The launches that compiled, those that did not, and the kernel statements that the compiler has not
        seen."""
        unseen = [f"{file}:{line}" for file, line in statements() if (file, line) not in self.seen]
        return {"triton": triton.__version__, "made": self.made, "errors": self.errors, "unseen": unseen}


def _as_passed(arg: Any) -> Any:
    """An argument as launch.py passes it: addresses in place of tensors, and no hooks of profilers."""
    if isinstance(arg, tuple):
        return tuple(_as_passed(part) for part in arg)
    if isinstance(arg, torch.Tensor):
        return arg.data_ptr()
    return None if isinstance(arg, (LazyDict, HookChain)) else arg


def statements() -> Iterator[tuple[str, int]]:
    """File and line of every statement in a @triton.jit function of SOURCES, except docstrings."""
    for path in SOURCES:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in map(_name, function.decorator_list):
                body = function.body[1:] if ast.get_docstring(function) else function.body
                for statement in body:
                    for node in ast.walk(statement):
                        if isinstance(node, ast.stmt):
                            yield path.name, node.lineno


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


if __name__ == "__main__":
    compiler = Compiler(FakeDriver(*map(int, sys.argv[1:])))
    launches.launch_all()
    print(json.dumps(compiler.report()))
