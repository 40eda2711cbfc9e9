"""EngineOptions: what an engine is told by its supervisor. Made and checked there, before a process starts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hotrow.errors import OptionError, choices
from hotrow.serve.protocol.request import POLICIES

LONGEST_SOCKET = 107  # bytes that a Unix socket's path may have


@dataclass(frozen=True)
class EngineOptions:
    """Everything that an engine process needs to know.

    >>> EngineOptions("engine.sock", "repository", lanes=0)
    Traceback (most recent call last):
    hotrow.errors.OptionError: lanes=0: give 1 or more
    """

    socket: str
    repository: str
    models: tuple[str, ...] = ()  # () is all that the repository has
    loader: str = "hotrow.serve.execution.servable:open_version"  # module:function(folder, options) -> Servable
    options: dict[str, Any] = field(default_factory=dict)  # the loader's: dram, ssd, hbm
    lanes: int = 1
    threads: int = 1  # of each lane
    policy: str | None = None  # instead of the versions' own
    max_rows: int = 1024
    max_wait: float = 0.002
    deadline: float | None = None  # likewise
    queue_rows: int = 262_144
    queue_bytes: int = 512 << 20
    miss_workers: int = 4
    stale_after: float | None = None  # seconds: an alarm when what a version answers from is older
    poll: float = 0.0  # seconds between looks at the repository; 0: never
    drain: float = 10.0  # seconds
    restore: dict[str, list[str]] | None = None  # instead of models: what this engine's last life had, restore.py

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
        if len(os.fsencode(self.socket)) > LONGEST_SOCKET:
            raise OptionError(
                f"the socket {self.socket} has a path of over {LONGEST_SOCKET} bytes; set TMPDIR to a shorter folder"
            )
