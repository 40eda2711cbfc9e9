"""A patch of Triton's interpreter that makes kernel tests a third faster; it guards nothing and changes no result.

The interpreter replaces the functions of `triton.language` for the time of a launch, and again at every call of another
jit function within the launch, although they are replaced already: 30% of a training step in tests/nn/hbm/test_hbm.py.
With this patch it checks first, and a launch still restores what it replaced. A Triton whose interpreter has other
internals is left as it is. Installed by tests/conftest.py under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Patch this process; a second call does nothing. Requires: TRITON_INTERPRET=1 was set before triton's import."""
    from triton import language as tl
    from triton.runtime import interpreter

    replace, scope = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "_LangPatchScope", None)
    if replace is None or scope is None or isinstance(replace, _Once):  # unknown internals: leave them
        return
    interpreter._patch_lang = _Once(replace, (tl, tl.core), tl.core.is_builtin, scope)


class _Once:
    """The interpreter's `_patch_lang`, skipped for functions whose modules are replaced already."""

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
        """The language's modules among a function's globals; all if it has none, so that Triton raises its error."""
        values = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in self._modules if module in values] or list(self._modules)
