"""Launching a kernel again: what Triton looks up for every call is looked up once.

`@fast` above `@triton.jit` keeps the compiled kernel for what its specialisation depends on: types, alignment to 16
bytes, small facts about whole numbers, and the options. A step of training is ten launches in a millisecond, so it is
bound by what the host does for each; addresses go down as plain numbers, so that the launcher need not ask the driver
what kind of memory every tensor is. Under the interpreter it is the kernel itself.

Triton documents neither its launcher nor what a jitted function knows of its parameters. A launcher is called only if
it takes what those of the tested versions take (test_launch.py, test_compile.py); with any other, and with a version
that was not tested, every launch is the documented `kernel[grid](...)`: the same result, with more work on the host.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from hotrow.kernels.current_stream import stream_handle
from hotrow.undocumented import describe, is_tested, warn_once

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SLOWER = "Kernels are launched by Triton alone: the same results, with more work on the host for each"


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. Triton's own takes microseconds on the host.

    >>> cdiv(7, 4), cdiv(8, 4)
    (2, 2)
    """
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not below n.

    >>> [power_of_2(n) for n in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << (n - 1).bit_length()


class Fast:
    """A kernel that remembers what it compiled. Called as a jitted function is: kernel[grid](..., OPTION=...).

    Requires: a grid of one dimension; arguments by position, constexprs and options by name, all of them in every call
    and in one order.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.constexprs = [param.name for param in kernel.params if param.is_constexpr]
        self.loose = [param.do_not_specialize for param in kernel.params]
        self.compiled: dict[Any, Callable[..., None] | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid[0])

    def _launch(self, programs: int, *args: Any, **options: Any) -> None:
        device = args[0].get_device()
        key: list[Any] = [device, *options.values()]
        values: list[Any] = []
        for loose, arg in zip(self.loose, args, strict=False):
            if arg.__class__ is int:
                wide = not -(1 << 31) <= arg < 1 << 31
                key.append(wide if loose else (wide, arg == 1, arg & 15 == 0))
            elif arg.__class__ is not float:
                key.append(arg.dtype)
                arg = arg.data_ptr()
                key.append(arg & 15 == 0)
            values.append(arg)
        known = tuple(key)
        run = self.compiled.get(known)
        if run is not None:
            run(programs, device, values)
            return
        compiled = self.kernel[(programs,)](*args, **options)
        if known not in self.compiled:
            self.compiled[known] = _runner(compiled, tuple(options[name] for name in self.constexprs))


# What Triton's launcher takes before a kernel's arguments, 3.6 to 3.9: the last four have names from 3.7 on.
_GRID = ("gridX", "gridY", "gridZ", "stream", "function")
_KNOWN = (_GRID, (*_GRID, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"))


def _runner(compiled: Any, constants: tuple[Any, ...]) -> Callable[[int, int, list[Any]], None] | None:
    """How to run a compiled kernel on so many programs; constants are passed over by the launcher. None for a Triton
    that may do it in another way."""
    launcher = getattr(compiled, "run", None)
    parts = [getattr(compiled, name, None) for name in ("function", "packed_metadata")]
    if not is_tested("triton") or None in parts or not callable(launcher) or _named(launcher) not in _KNOWN:
        warn_once(f"{describe('triton', 'may launch kernels in another way')}. {SLOWER}")
        return None
    function, metadata = parts

    def run(programs: int, device: int, values: list[Any]) -> None:
        launcher(programs, 1, 1, stream_handle(device), function, metadata, None, None, None, *values, *constants)

    return run


def _named(launcher: Callable[..., None]) -> tuple[str, ...]:
    """The names of what a launcher takes by position."""
    parameters = inspect.signature(launcher).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)


def fast(kernel: Any) -> Any:
    """A kernel that is launched often."""
    if INTERPRETED:
        return kernel
    try:
        return Fast(kernel)
    except AttributeError as error:
        warn_once(f"{describe('triton', f'tells less of a kernel ({error})')}. {SLOWER}")
        return kernel
