"""Triton's interpreter with a third less work: a kernel's helper functions find the language as its launch left it.

The interpreter replaces the functions of `triton.language` for the time of a launch, and does so again at every call
of another jit function in it, although they are replaced already: that was 30% of a step of training in
tests/nn/test_hbm.py. Here it looks first. What a launch replaces it still puts back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def install() -> None:
    """For this process; once is enough. Requires: TRITON_INTERPRET=1 was set before triton was imported."""
    from triton import language as tl
    from triton.runtime import interpreter

    replace, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if replace is None or scope is None or isinstance(replace, _Once):  # another Triton than we know is as it is
        return
    interpreter._patch_lang = _Once(replace, (tl, tl.core), tl.core.is_builtin, scope)


class _Once:
    """The interpreter's `_patch_lang`, but for functions whose modules are replaced already."""

    def __init__(
        self, replace: Callable[[Any], Any], modules: tuple[Any, ...], plain: Callable[[Any], bool], scope: Any
    ) -> None:
        self._replace, self._modules, self._plain, self._scope = replace, modules, plain, scope
        self._seen = functools.cache(self._find)

    def __call__(self, function: Any) -> Any:
        if any(self._plain(module.load) for module in self._seen(function)):
            return self._replace(function)
        return self._scope()  # with nothing to put back

    def _find(self, function: Any) -> list[Any]:
        """Those of the language's modules that a function sees; all of them, where it sees none, for the error."""
        values = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in self._modules if module in values] or list(self._modules)
