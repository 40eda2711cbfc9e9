"""Kernel launches without Triton's per-call work on the host.

`@cached_launch` above `@triton.jit` keeps the compiled kernel by everything that its specialisation depends on: types,
alignment to 16 bytes, small facts about integers, and the options. A training step is ten launches in a millisecond, so
it is bound by what the host does for each. Addresses are passed as plain numbers, so the launcher does not ask the
driver what kind of memory every tensor is. Under the interpreter the kernel is left as it is.

Triton documents neither its launcher nor what a jitted function knows of its parameters. A launcher is called only if
it has the parameters of the tested versions (test_launch.py, test_compile.py). With any other, and with an untested
version, every launch is the documented `kernel[grid](...)`: the same result, with more work on the host.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from hotrow.kernels.current_stream import current_stream_handle
from hotrow.undocumented import describe, is_tested, warn_once

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SLOWER = "Kernels are launched through Triton's documented call: the same results, with more host time per launch"


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


class CachedLauncher:
    """A kernel with a cache of its compiled variants, called as a jitted function is: kernel[grid](..., OPTION=...).

    Requires: a grid of one dimension; arguments by position, constexprs and options by name, all of them in every call
    and in one order.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.constexprs = [param.name for param in kernel.params if param.is_constexpr]
        self.unspecialized = [param.do_not_specialize for param in kernel.params]
        self.compiled: dict[Any, Callable[..., None] | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid[0])

    def _launch(self, programs: int, *args: Any, **options: Any) -> None:
        device = args[0].get_device()
        key: list[Any] = [device, *options.values()]
        values: list[Any] = []
        for unspecialized, arg in zip(self.unspecialized, args, strict=False):
            if arg.__class__ is int:
                wide = not -(1 << 31) <= arg < 1 << 31
                key.append(wide if unspecialized else (wide, arg == 1, arg & 15 == 0))
            elif arg.__class__ is not float:
                key.append(arg.dtype)
                arg = arg.data_ptr()
                key.append(arg & 15 == 0)
            values.append(arg)
        variant = tuple(key)
        launch = self.compiled.get(variant)
        if launch is not None:
            launch(programs, device, values)
            return
        compiled = self.kernel[(programs,)](*args, **options)
        if variant not in self.compiled:
            self.compiled[variant] = _make_launch(compiled, tuple(options[name] for name in self.constexprs))


# What Triton's launcher takes before a kernel's arguments, 3.6 to 3.9: the last four have names from 3.7 on.
_GRID = ("gridX", "gridY", "gridZ", "stream", "function")
_KNOWN_PARAMETERS = (_GRID, (*_GRID, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"))


def _make_launch(compiled: Any, constants: tuple[Any, ...]) -> Callable[[int, int, list[Any]], None] | None:
    """A function that launches a compiled kernel with (programs, device, values), and its constants. None for a Triton
    whose launcher may take other arguments."""
    launcher = getattr(compiled, "run", None)
    parts = [getattr(compiled, name, None) for name in ("function", "packed_metadata")]
    if (
        not is_tested("triton")
        or None in parts
        or not callable(launcher)
        or _parameter_names(launcher) not in _KNOWN_PARAMETERS
    ):
        warn_once(f"{describe('triton', 'has a launcher with other parameters')}. {SLOWER}")
        return None
    function, metadata = parts

    def launch(programs: int, device: int, values: list[Any]) -> None:
        launcher(
            programs, 1, 1, current_stream_handle(device), function, metadata, None, None, None, *values, *constants
        )

    return launch


def _parameter_names(launcher: Callable[..., None]) -> tuple[str, ...]:
    """The names of a launcher's positional parameters."""
    parameters = inspect.signature(launcher).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)


def cached_launch(kernel: Any) -> Any:
    """Decorates `@triton.jit`: launches the kernel through a CachedLauncher where Triton allows it."""
    if INTERPRETED:
        return kernel
    try:
        return CachedLauncher(kernel)
    except AttributeError as error:
        changed = describe("triton", f"describes a kernel's parameters otherwise ({error})")
        warn_once(f"{changed}. {SLOWER}")
        return kernel
