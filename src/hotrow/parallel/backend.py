"""NCCL or Gloo: what carries the rows and gradients of ranks.

Gloo carries CPU memory and is always there: ranks meet over it, and keys, counts and all else that is on the CPU travel
by it. NCCL carries GPU memory from device to device, and only between ranks that have a device each: two on one device
it refuses. So NCCL is used where rows are on GPUs, torch has it, and no two ranks share one; elsewhere what is on a GPU
is copied down for Gloo, and up again (exchange.py).

Every rank says what it has, and each decides from what all have said: the same choice, or the same error, everywhere.
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
    """This rank's GPU among those that it sees: that of its number on its machine; without a launcher that says which
    it is, the current one."""
    if "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def offer(device: torch.device) -> dict[str, Any]:
    """What this rank says to the others about where its rows are, as plain values."""
    on_gpu = device.type == "cuda"
    return {"rows": device.type, "nccl": on_gpu and has_nccl(), "gpu": gpu_name(device) if on_gpu else None}


def gpu_name(device: torch.device) -> str:
    """The same for one piece of hardware, by whatever number a process sees it."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(uuid) if uuid is not None else f"{socket.gethostname()} {device}"


def check_asked(asked: str | None, can: Sequence[bool]) -> None:
    """Refuse NCCL where a rank has none; `can` is what `has_nccl` says on each."""
    without = [str(rank) for rank, has in enumerate(can) if not has]
    if asked == "nccl" and without:
        raise OptionError(f"backend='nccl', but torch has no NCCL or sees no GPU on rank {', '.join(without)}; {CURE}")


def choose(asked: str | None, offers: Sequence[Mapping[str, Any]]) -> str:
    """What carries rows and gradients, from every rank's offer. `asked` is None where nobody has."""
    where = [str(rank_offer["rows"]) for rank_offer in offers]
    for rank, place in enumerate(where):
        if place != where[0]:
            raise OptionError(
                f"rank {rank} has its rows on {place!r} and rank 0 on {where[0]!r}; give all ranks the same hbm= and "
                "device="
            )
    if asked == "gloo":
        return "gloo"
    if where[0] != "cuda":
        if asked == "nccl":
            raise OptionError(
                "backend='nccl' carries GPU memory, and rows and tower are in DRAM; give hbm= ([memory] hbm of a job "
                f"file), or {CURE}"
            )
        return "gloo"
    check_asked(asked, [bool(rank_offer["nccl"]) for rank_offer in offers])
    shared = _shared([str(rank_offer["gpu"]) for rank_offer in offers])
    if asked == "nccl" and shared:
        raise OptionError(
            f"backend='nccl', but ranks {' and '.join(map(str, shared))} share one GPU, which NCCL refuses; start as "
            f"many ranks on a machine as it has GPUs (--ranks, --nproc-per-node), or {CURE}"
        )
    return "nccl" if not shared and all(rank_offer["nccl"] for rank_offer in offers) else "gloo"


def _shared(gpus: Sequence[str]) -> list[int]:
    """The first ranks that have one GPU together, if any do."""
    for gpu in gpus:
        if gpus.count(gpu) > 1:
            return [rank for rank, other in enumerate(gpus) if other == gpu]
    return []
