"""EngineOptions: the options of an engine process. The supervisor creates and checks them before it starts one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hotrow.errors import OptionError, choices
from hotrow.serve.protocol.request import POLICIES

MAX_SOCKET_PATH = 107  # bytes of a Unix socket's path


@dataclass(frozen=True)
class EngineOptions:
    """The options of one engine process.

    >>> EngineOptions("engine.sock", "repository", lanes=0)
    Traceback (most recent call last):
    hotrow.errors.OptionError: lanes=0: give 1 or more
    """

    socket: str
    repository: str
    models: tuple[str, ...] = ()  # (): all models of the repository
    loader: str = "hotrow.serve.execution.servable:open_version"  # module:function(folder, options) -> Servable
    options: dict[str, Any] = field(default_factory=dict)  # the loader's: dram, ssd, hbm, device
    lanes: int = 1
    threads: int = 1  # of each lane
    device: str = "cpu"  # by its name outside of the process; inside, the engine's only GPU is cuda:0
    policy: str | None = None  # overrides that of the versions
    max_rows: int = 1024
    max_wait: float = 0.002
    deadline: float | None = None  # seconds; overrides that of the versions
    queue_rows: int = 262_144
    queue_bytes: int = 512 << 20
    miss_workers: int = 4
    stale_after: float | None = None  # seconds: an alarm when a version's data is older
    poll: float = 0.0  # seconds between polls of the repository; 0: never
    drain: float = 10.0  # seconds
    restore: dict[str, list[str]] | None = None  # instead of models: versions in service before a restart (restore.py)
    restore_releases: dict[str, dict[str, Any]] | None = None  # with it: each model's release at that time

    def __post_init__(self) -> None:
        for name in ("lanes", "threads", "max_rows", "queue_rows", "queue_bytes", "miss_workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: give 1 or more")
        for name in ("deadline", "drain", "stale_after"):
            if (seconds := getattr(self, name)) is not None and not seconds > 0:
                raise OptionError(f"{name}={seconds:g}: give seconds above 0")
        for name in ("max_wait", "poll"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{name}={getattr(self, name):g}: give seconds, 0 or more")
        if self.policy is not None and self.policy not in POLICIES:
            raise OptionError(f"policy={self.policy}: {choices(self.policy, POLICIES)}")
        if len(os.fsencode(self.socket)) > MAX_SOCKET_PATH:
            raise OptionError(
                f"the socket {self.socket} has a path of over {MAX_SOCKET_PATH} bytes; set TMPDIR to a shorter folder"
            )
