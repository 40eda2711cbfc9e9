"""A plugin of pytest (`-p on_ptx`): where tests would have kernels interpreted they are compiled, and their PTX runs on
the CPU (ptx.py).

Requires: it comes before Triton, with TRITON_INTERPRET unset. Tests are told that it is set.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from pathlib import Path
from typing import Any

import torch
import triton
from compile_only import Card
from ptx import Program
from triton.runtime.cache import get_cache_manager

from hotrow import kernels


class Processor(Card):
    """A card that is this machine's CPU."""

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
    assert "TRITON_INTERPRET" not in os.environ
    card = Processor()
    triton.runtime.driver.set_active(card)
    torch._C._cuda_getCurrentRawStream = card.get_current_stream  # type: ignore[attr-defined]
    triton.knobs.runtime.interpret = False
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)
    os.environ["TRITON_INTERPRET"] = "1"
