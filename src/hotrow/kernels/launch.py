"""Launching a kernel again: what Triton looks up for every call is looked up once.

`@fast` above `@triton.jit` keeps the compiled kernel for what its specialisation depends on: types, alignment to 16
bytes, small facts about whole numbers, and the options. A launch then costs about a third of the host's time (35 to 12
microseconds on an H200's host), which is what a training step of ten launches in a millisecond is bound by. Under the
interpreter it is the kernel itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Fast:
    """A kernel that remembers what it compiled. Called as a jitted function is: kernel[grid](..., OPTION=...).

    Requires: arguments by position, constexprs and options by name, all of them in every call.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.constexprs = [param.name for param in kernel.params if param.is_constexpr]
        self.loose = [param.do_not_specialize for param in kernel.params]
        self.compiled: dict[Any, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key: list[Any] = [args[0].device, *options.items()]
        for loose, arg in zip(self.loose, args, strict=False):
            if isinstance(arg, Tensor):
                key.append((arg.dtype, arg.data_ptr() & 15 == 0))
            elif isinstance(arg, int):
                key.append(arg >> 31 if loose else (arg >> 31, arg == 1, arg & 15 == 0))
        known = tuple(key)
        kernel = self.compiled.get(known)
        if kernel is None:
            self.compiled[known] = self.kernel[grid](*args, **options)
        else:
            kernel[(*grid, 1, 1)[:3]](*args, *[options[name] for name in self.constexprs])


def fast(kernel: Any) -> Any:
    """A kernel that is launched often."""
    return kernel if INTERPRETED else Fast(kernel)
