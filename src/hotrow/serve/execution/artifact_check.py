"""Compares and times an artifact against the original graph, before it takes traffic.

Functions without state; the compile manager's thread calls them (Towers._adopt).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = 1e-6  # of the largest logit, float32 on a CPU
CUDA_TOLERANCE = 1e-4  # its kernels sum in another order, over other tiles
TRIALS = 9


def difference(logits: Tensor, expected: Tensor, tolerance: float | None, where: object) -> str:
    """How an artifact's logits differ from the original graph's, or an empty string. `where` is the shape compared."""
    if logits.shape != expected.shape or logits.dtype != expected.dtype:
        return (
            f"it gives {logits.dtype} {list(logits.shape)}, the original graph {expected.dtype} {list(expected.shape)}"
        )
    allowed = tolerance or (CUDA_TOLERANCE if logits.device.type == "cuda" else TOLERANCE)
    largest = max(float(expected.abs().max()), 1e-30)
    apart = float((logits - expected).abs().max()) / largest
    return "" if apart <= allowed else f"{apart:.1e} of the largest logit apart at {where}, over {allowed:g}"


def best_seconds(function: Callable[[], object], device: torch.device) -> float:
    """The shortest of TRIALS runs."""
    return best_seconds_in_turns(function, function, device)[0]


def best_seconds_in_turns(
    first: Callable[[], object], second: Callable[[], object], device: torch.device
) -> tuple[float, float]:
    """The shortest of TRIALS runs of each, run in turns, after two warm-up runs each."""
    best = [float("inf"), float("inf")]
    for trial in range(-2, TRIALS):
        for which, function in enumerate((first, second)):
            begin = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # not the device: another thread may capture
            if trial >= 0:
                best[which] = min(best[which], time.perf_counter() - begin)
    return best[0], best[1]
