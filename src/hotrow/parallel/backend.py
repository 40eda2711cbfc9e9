"""NCCL or Gloo: which one carries the rows and gradients of ranks.

Gloo carries CPU memory and is always available: ranks meet over it, and it carries keys, counts and everything else on
the CPU. NCCL carries GPU memory from device to device, and refuses two ranks on one device. So NCCL is used where rows
are on GPUs, torch has NCCL, and every rank has a GPU of its own. Otherwise GPU memory is copied to the host for Gloo
and back (exchange.py).

Every rank describes its device, and each decides from all descriptions: the same choice, or the same error, everywhere.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hotrow.errors import OptionError

BACKENDS = ("nccl", "gloo")
CURE = "leave backend= out (Gloo then carries them), or pass backend='gloo'"


def has_nccl() -> bool:
    """Whether this process could use NCCL at all."""
    return torch.cuda.is_available() and torch.cuda.device_count() > 0 and dist.is_nccl_available()


def own_device() -> torch.device:
    """This rank's GPU among those that it sees: by its number on its machine (LOCAL_RANK), else the current one."""
    if "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def describe_device(device: torch.device) -> dict[str, Any]:
    """Where this rank's rows are, for the other ranks, as JSON values."""
    on_gpu = device.type == "cuda"
    return {"rows": device.type, "nccl": on_gpu and has_nccl(), "gpu": gpu_name(device) if on_gpu else None}


def gpu_name(device: torch.device) -> str:
    """An id of the hardware, whatever number a process sees it by."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(uuid) if uuid is not None else f"{socket.gethostname()} {device}"


def check_backend(requested: str | None, can: Sequence[bool]) -> None:
    """Raise if NCCL is requested and a rank has none. `can` is `has_nccl()` of each rank."""
    without = [str(rank) for rank, has in enumerate(can) if not has]
    if requested == "nccl" and without:
        raise OptionError(f"backend='nccl', but torch has no NCCL or sees no GPU on rank {', '.join(without)}; {CURE}")


def choose_backend(requested: str | None, devices: Sequence[Mapping[str, Any]]) -> str:
    """The backend for rows and gradients, from every rank's description. `requested` is None without `backend=`."""
    where = [str(device["rows"]) for device in devices]
    for rank, place in enumerate(where):
        if place != where[0]:
            raise OptionError(
                f"rank {rank} has its rows on {place!r} and rank 0 on {where[0]!r}; give all ranks the same hbm= and "
                "device="
            )
    if requested == "gloo":
        return "gloo"
    if where[0] != "cuda":
        if requested == "nccl":
            raise OptionError(
                "backend='nccl' carries GPU memory, and rows and tower are in DRAM; give hbm= ([memory] hbm of a job "
                f"file), or {CURE}"
            )
        return "gloo"
    check_backend(requested, [bool(device["nccl"]) for device in devices])
    shared = _shared([str(device["gpu"]) for device in devices])
    if requested == "nccl" and shared:
        raise OptionError(
            f"backend='nccl', but ranks {' and '.join(map(str, shared))} share one GPU, which NCCL refuses; start as "
            f"many ranks on a machine as it has GPUs (--ranks, --nproc-per-node), or {CURE}"
        )
    return "nccl" if not shared and all(device["nccl"] for device in devices) else "gloo"


def _shared(gpus: Sequence[str]) -> list[int]:
    """The first ranks that have one GPU in common, if any do."""
    for gpu in gpus:
        if gpus.count(gpu) > 1:
            return [rank for rank, other in enumerate(gpus) if other == gpu]
    return []
