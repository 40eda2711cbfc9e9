"""NVIDIA's Multi-Process Service: several engine processes share one GPU at the same moment instead of taking turns.

`hotrow serve --processes N` on a GPU starts it if nobody has, in a private folder that only its own children are told
of (CUDA_MPS_PIPE_DIRECTORY), and ends it with them. One that runs already is used and left alone: its pipe is where
CUDA_MPS_PIPE_DIRECTORY says, or in /tmp/nvidia-mps. Without the program processes take turns, and it is said.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
USUAL = "/tmp/nvidia-mps"
PATIENCE = 10.0  # seconds


class Mps:
    """The service, if it was started here."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.environment: dict[str, str] = {}  # for the processes that are to share the GPU
        self.started = False

    def start(self) -> str:
        """Start it unless one runs; returns what is so now, for people."""
        if running():
            return "MPS runs already and is used"
        if shutil.which(CONTROL) is None:
            return f"there is no {CONTROL}: engine processes take turns on the GPU"
        (self.folder / "mps").mkdir(parents=True, exist_ok=True)
        (self.folder / "mps-log").mkdir(exist_ok=True)
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "mps"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "mps-log"),
        }
        done = self._control(["-d"], None)
        if done.returncode:
            self.environment = {}
            return f"MPS did not start ({done.stderr.strip() or done.returncode}): processes take turns on the GPU"
        self.started = True
        return "MPS was started: engine processes share the GPU"

    def stop(self) -> None:
        """End what `start` started."""
        if self.started:
            self.started = False
            try:
                self._control([], "quit\n")
            except subprocess.TimeoutExpired:
                log.warning("MPS has not ended after %.0f s", PATIENCE)

    def _control(self, options: list[str], words: str | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [CONTROL, *options], input=words, env={**os.environ, **self.environment}, timeout=PATIENCE,
            capture_output=True, text=True, check=False,
        )  # fmt: skip


def running() -> bool:
    """Whether somebody's service is there."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", USUAL)) / "control").exists()
