"""Connect: join a Ray cluster, or raise an error within a bounded time.

Ray 2.60 waits almost three minutes for an address without a listener, and then ends the process. So a child process
tries the address first, and this process joins only after the child succeeded. That costs two seconds, once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from types import ModuleType

from hotrow.errors import ClusterError, OptionError

LOCAL = "local"
TRIAL_SECONDS = 30.0
_TRIAL = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
ray.shutdown()
"""
_lock = threading.Lock()
_names: set[str] = set()  # the addresses under which this process has joined its cluster


def import_ray() -> ModuleType:
    """Ray, or an error with the cure."""
    try:
        import ray
    except ImportError as error:
        raise OptionError(
            f"a Ray cluster needs Ray, which cannot be imported ({error}); pip install 'hotrow[ray]'"
        ) from error
    module: ModuleType = ray
    return module


def connect(address: str | None, cpus: int | None, store_bytes: int) -> str:
    """Join the cluster at `address` and return the cluster's own address.

    None means the cluster that this process has already joined, else the environment's RAY_ADDRESS, else "local".
    "local" starts a Ray with `cpus` CPUs and an object store of `store_bytes`, which ends with this process.
    """
    with _lock:
        ray = import_ray()
        if ray.is_initialized():
            joined = str(ray.get_runtime_context().gcs_address)
            if address not in (None, "auto", LOCAL, joined, *_names):
                raise OptionError(
                    f"ray address={address!r}, but this process has joined the cluster at {joined}; name that one, or "
                    "call ray.shutdown() before"
                )
            return joined
        named = address or os.environ.get("RAY_ADDRESS") or LOCAL
        _join(ray, named, cpus, store_bytes)
        _names.clear()
        _names.add(named)
        return str(ray.get_runtime_context().gcs_address)


def _join(ray: ModuleType, address: str, cpus: int | None, store_bytes: int) -> None:
    if address.startswith("ray://"):
        raise OptionError(
            f"ray address={address!r} is a Ray Client's, through which batches would be copied twice; let this machine "
            "join the cluster with `ray start --address=HOST:PORT --num-cpus=0` and give that HOST:PORT"
        )
    started = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
        started |= {"num_cpus": cpus, "object_store_memory": store_bytes, "include_dashboard": False}
    else:
        _trial_join(address)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **started)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        raise ClusterError(f"the Ray cluster at {address!r} cannot be joined: {error}") from error
    finally:
        # Ray installs a handler that exits at once, so a trainer could not save.
        # A local Ray ends with this process anyway.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _trial_join(address: str) -> None:
    """Raise unless this machine can join the cluster at `address`."""
    if address != "auto":
        _check_listening(address)
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _TRIAL, address], capture_output=True, text=True, timeout=TRIAL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"the Ray cluster at {address!r} does not answer within {TRIAL_SECONDS:.0f} s; is that the head's address "
            "(`ray status` there shows it), and has this machine joined with `ray start --address=HOST:PORT`?"
        ) from None
    if "InvalidAuthToken" in trial.stderr:
        raise ClusterError(
            f"the Ray cluster at {address!r} wants a token; set RAY_AUTH_MODE=token, and put the cluster's token on "
            "this machine as Ray's manual says (the file ~/.ray/auth_token)"
        )
    if trial.returncode:
        lines = [line for line in trial.stderr.strip().splitlines() if line.strip()] or [f"exit {trial.returncode}"]
        raise ClusterError(
            f"the Ray cluster at {address!r} cannot be joined: {lines[-1].strip()}. Start one with `ray start --head`, "
            "and let this machine join it with `ray start --address=HOST:PORT --num-cpus=0`"
        )


def _check_listening(address: str) -> None:
    """Raise unless a server listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise OptionError(f"ray address={address!r}; give HOST:PORT, 'auto' or 'local'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"nobody answers at the Ray cluster's address {address!r} ({error}); start a head there with "
            f"`ray start --head --port={port}`, or check the address"
        ) from error
