"""Ranks meet: they find each other's numbers, versions and addresses in a store, before they connect.

The store is a TCPStore of torchrun, of `hotrow train`'s launcher, or else of rank 0, bound to MASTER_ADDR alone. A
program that has called init_process_group has one already. Entries are sealed with the job token, if there is one
(job_token.py).

Every rank writes its world size and version, and compares those of the others before it waits for anything else: ranks
that do not belong together would wait for each other for ever.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import hotrow
from hotrow.errors import HotRowError, OptionError, RankError
from hotrow.parallel.bounded_store import BoundedStore
from hotrow.parallel.job_token import MAKE_ONE, TOKEN_VARIABLE, TRUSTED_VARIABLE, ForgedEntryError, SealedStore, job_key
from hotrow.undocumented import find

LOOPBACK = "127.0.0.1"
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # set by a launcher that has opened the store
LEAST_WAIT = 30.0  # seconds for other ranks to start


@dataclass
class Meeting:
    """Where ranks have met. `open_store` is the store itself, which NCCL needs; `key` is None without a job token."""

    store: SealedStore
    open_store: Any
    rank: int
    world: int
    key: bytes | None
    address: str  # on which this rank listens
    rounds: int = field(default=0)  # of connecting, so far


def bind_store(host: str, port: int, seconds: float) -> TCPStore:
    """Open a store that listens on `host` alone; by itself a TCPStore listens on every interface."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OptionError(
            f"cannot listen on {host}:{port}, where ranks are to meet: {error.strerror or error}; give an address of "
            "this machine and a free port (MASTER_ADDR and MASTER_PORT, or --meet)"
        ) from None
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )


def meet(timeout: float, token: str | None) -> Meeting:
    """Meet the ranks that a launcher has started, and compare world sizes and versions."""
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    host, port = os.environ.get("MASTER_ADDR", LOOPBACK), _number("MASTER_PORT")
    seconds = max(timeout, LEAST_WAIT)
    try:
        if rank == 0 and os.environ.get(AGENT_STORE) != "True":
            store: Any = bind_store(host, port, seconds)
        else:
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        if isinstance(error, HotRowError):
            raise
        raise RankError(
            f"rank {rank} cannot reach the store at {host}:{port} where ranks meet: {error}; look at MASTER_ADDR and "
            "MASTER_PORT, and whether rank 0 has started"
        ) from error
    # torchrun's store outlives its restarts: addresses of ranks that have died must not be found in it.
    attempt = f"hotrow/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = PrefixStore(attempt, store)
    store.set_timeout(timedelta(seconds=seconds))
    key = None if token is None else job_key(token)
    meeting = Meeting(SealedStore(BoundedStore(store), key, attempt), store, rank, world, key, own_address(host, port))
    try:
        _compare(meeting, seconds)
        if key is None and not dist.is_initialized():
            if is_loopback(host):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else the interface of the machine's name
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
            )
    except RuntimeError as error:
        if isinstance(error, HotRowError):
            raise
        raise RankError(f"rank {rank} could not meet the others: {error}; look at their errors") from error
    return meeting


def meeting_of_group(timeout: float, token: str | None) -> Meeting:
    """The meeting of a process group that the program has made."""
    store = store_of_group(timeout)
    key = None if token is None else job_key(token)
    host = os.environ.get("MASTER_ADDR", LOOPBACK)
    address = own_address(host, int(os.environ.get("MASTER_PORT", "1")))
    sealed = SealedStore(BoundedStore(store), key, "group")
    return Meeting(sealed, store, dist.get_rank(), dist.get_world_size(), key, address)


def store_of_group(timeout: float) -> Any:
    """The store of a process group that the program made before. torch does not document where it is; if it is not
    there, rank 0 opens another and broadcasts its address over the group."""
    get = find("torch.distributed.distributed_c10d:_get_default_store", "Rank 0 opens a store of its own for the ranks")
    if get is not None:
        return get()
    store, wait = None, timedelta(seconds=max(timeout, LEAST_WAIT))
    place: list[Any] = ["", 0]
    if dist.get_rank() == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = bind_store(host, 0, wait.total_seconds())
        place = [host, store.port]
    dist.broadcast_object_list(place, src=0)
    return store or TCPStore(place[0], place[1], is_master=False, timeout=wait)


def machine() -> str:
    """An id that all processes of a machine have in common, until it reboots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown, process {os.getpid()}"


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address(host: str, port: int) -> str:
    """The address of this machine by which it reaches `host`. Nothing is sent.

    >>> own_address("127.0.0.1", 29500)
    '127.0.0.1'
    """
    if is_loopback(host):
        return LOOPBACK if host == "localhost" else host
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    return LOOPBACK


def _compare(meeting: Meeting, seconds: float) -> None:
    """Compare every rank's world size, version and machine. All ranks raise if they differ."""
    rank, world, store = meeting.rank, meeting.world, meeting.store
    mine = {"world": world, "version": hotrow.__version__, "machine": machine()}
    store.set(f"hotrow/world/{rank}", json.dumps(mine))
    deadline = time.monotonic() + seconds
    known: dict[int, dict[str, Any]] = {rank: mine}
    while True:
        try:
            for other in range(world):
                if other not in known and store.check([f"hotrow/world/{other}"]):
                    known[other] = _entry(store, other)
            for other, theirs in known.items():
                if theirs["world"] != world:
                    raise OptionError(
                        f"rank {rank} was started for {world} ranks and rank {other} for {theirs['world']}; start all "
                        "with the same WORLD_SIZE (torchrun: the same --nnodes and --nproc-per-node)"
                    )
                if theirs["version"] != mine["version"]:
                    raise OptionError(
                        f"rank {rank} runs HotRow {mine['version']} and rank {other} HotRow {theirs['version']}; "
                        "install one version on all machines"
                    )
        except OptionError:
            _wait_for_the_others(meeting)
            raise
        if len(known) == world:
            break
        if time.monotonic() > deadline:
            missing = [other for other in range(world) if other not in known]
            raise RankError(
                f"rank {rank} has waited {seconds:g} s for rank {', '.join(map(str, missing))} of {world} ranks; start "
                "it, or look at why it did not come"
            )
        time.sleep(0.02)
    machines = {one["machine"] for one in known.values()}
    if meeting.key is None and len(machines) > 1 and os.environ.get(TRUSTED_VARIABLE) != "1":
        _wait_for_the_others(meeting)
        raise OptionError(
            f"the ranks are on {len(machines)} machines and have no job token, so any stranger on the network could "
            f"join or read rows: pass --token-file (join_ranks(token_file=), {TOKEN_VARIABLE}); {MAKE_ONE}. On a "
            f"network that only this job's machines can reach, set {TRUSTED_VARIABLE}=1 instead"
        )


def _entry(store: SealedStore, rank: int) -> dict[str, Any]:
    try:
        return dict(json.loads(store.get(f"hotrow/world/{rank}")))
    except ForgedEntryError as error:
        raise OptionError(f"rank {rank} cannot be let in: {error}") from None


def _wait_for_the_others(meeting: Meeting) -> None:
    """Rank 0 may hold the store: it leaves when the others have read what they need."""
    store = meeting.store
    store.set(f"hotrow/refused/{meeting.rank}", "")
    here = [rank for rank in range(meeting.world) if store.check([f"hotrow/world/{rank}"])]
    deadline = time.monotonic() + 10
    while meeting.rank == 0 and time.monotonic() < deadline:
        if store.check([f"hotrow/refused/{rank}" for rank in here]):
            return
        time.sleep(0.02)


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        raise OptionError(
            f"{name}={os.environ.get(name)!r} in the environment: a launcher sets it to a whole number; use torchrun, "
            "or hotrow train --ranks N"
        ) from None
