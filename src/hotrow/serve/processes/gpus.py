"""The GPUs of this machine that engines can use, or the reason why there are none.

The reasons are checked in this order: no NVIDIA driver, a torch without CUDA, CUDA_VISIBLE_DEVICES that hides all GPUs,
a driver that fails or lists no GPU, a driver that is too old for torch. Each is one sentence with its cure.

The supervisor calls this. It never uses CUDA itself: a machine without a driver is recognised by files, and otherwise a
short process asks the driver (gpu_probe.py). So the supervisor has no CUDA context and takes no GPU memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from hotrow.serve.processes import gpu_probe

# One of them exists where a driver is loaded: Linux, containers, WSL 2, Jetson.
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")
TIMEOUT_SECONDS = 60.0  # of the probe; without NVIDIA's persistence mode each GPU is initialized first
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Gpu:
    """One GPU: its number here, and its id, which CUDA_VISIBLE_DEVICES takes."""

    index: int
    name: str
    uuid: str
    bytes: int


@dataclass(frozen=True)
class Gpus:
    """The usable GPUs in torch's order. Without any, `why` is one sentence with the cure."""

    usable: tuple[Gpu, ...] = ()
    why: str = ""


@lru_cache(maxsize=1)
def usable_gpus() -> Gpus:
    """The usable GPUs of this machine. The driver is asked once."""
    return find_gpus(os.environ, torch.version.cuda)


def find_gpus(environment: Mapping[str, str], torch_cuda: str | None) -> Gpus:
    """The usable GPUs of a process with this environment, whose torch is built for this version of CUDA (None:
    without CUDA)."""
    if not any(Path(file).exists() for file in DRIVER_FILES):
        return Gpus(why="there is no NVIDIA driver on this machine; if it has an NVIDIA GPU, install its driver")
    if torch_cuda is None:
        return Gpus(
            why=f"torch {torch.__version__} is built without CUDA; install a build with CUDA (pytorch.org/get-started)"
        )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return Gpus(why=f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; unset it, or name GPUs in it: 0,1")
    return _from_probe(_probe(environment), visible, torch_cuda)


def _probe(environment: Mapping[str, str]) -> dict[str, Any]:
    """The output of gpu_probe.py, or {"failed": why}."""
    command = [sys.executable, "-I", "-S", gpu_probe.__file__]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
        return found
    except subprocess.TimeoutExpired:
        return {"failed": f"it has not answered for {TIMEOUT_SECONDS:g} s"}
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"failed": f"asking it ended with exit code {done.returncode} ({last})"}


def _from_probe(found: Mapping[str, Any], visible: str | None, torch_cuda: str) -> Gpus:
    if "library" in found:
        return Gpus(
            why=f"the NVIDIA driver's library cannot be loaded ({found['library']}); in a container, start it with "
            "its GPUs (docker run --gpus all), otherwise install the driver again"
        )
    if found.get("code") == NO_DEVICE or found.get("gpus") == []:
        if visible is not None:
            return Gpus(
                why=f"CUDA_VISIBLE_DEVICES={visible!r} names no GPU of this machine; `nvidia-smi -L` lists them"
            )
        return Gpus(why="the NVIDIA driver sees no GPU; if `nvidia-smi -L` lists one, give this user access to it")
    if "gpus" not in found:
        fault = found.get("failed") or f"CUDA error {found['code']}: {found['error']}"
        return Gpus(
            why=f"the NVIDIA driver does not work: {fault}; repair it until `nvidia-smi` works (after an update of the "
            "driver, restart the machine)"
        )
    supported = int(found["driver"]) // 1000
    if supported < int(torch_cuda.partition(".")[0]):
        return Gpus(
            why=f"the NVIDIA driver supports CUDA {supported} and torch {torch.__version__} is built for CUDA "
            f"{torch_cuda}; install a newer driver, or a torch for CUDA {supported}"
        )
    return Gpus(tuple(Gpu(index, **gpu) for index, gpu in enumerate(found["gpus"])))
