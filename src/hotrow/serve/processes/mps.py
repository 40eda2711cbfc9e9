"""NVIDIA's Multi-Process Service (MPS): kernels of several engine processes run on one GPU at the same time.

`hotrow serve` starts an MPS for each GPU with several engines (--processes, or a GPU given twice in --devices), unless
one is running, and ends it at shutdown. GPUs with one engine have none. Its pipe is in a private folder whose path is
passed only to the engines of that GPU (CUDA_MPS_PIPE_DIRECTORY). An MPS that already runs, with its pipe in
CUDA_MPS_PIPE_DIRECTORY or /tmp/nvidia-mps, is used and never ended. Without MPS the processes share the GPU by time
slices, and a message says so.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
DEFAULT_PIPE_FOLDER = "/tmp/nvidia-mps"
TIMEOUT_SECONDS = 10.0


class Mps:
    """Starts and stops the MPS of one GPU. `started` is whether this object started it.

    `gpu` is the GPU's id as in CUDA_VISIBLE_DEVICES. Ids, unlike numbers, are the same for an MPS and its clients.
    """

    def __init__(self, folder: str | os.PathLike[str], gpu: str) -> None:
        self.folder, self.gpu = Path(folder), gpu
        self.environment: dict[str, str] = {}  # of the processes that share the GPU
        self.started = False

    def start(self) -> str:
        """Start MPS unless it is running; returns a message for the user."""
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
        """End MPS if `start` started it."""
        if self.started:
            self.started = False
            try:
                self._control([], "quit\n")
            except subprocess.TimeoutExpired:
                log.warning("MPS has not ended after %.0f s", TIMEOUT_SECONDS)

    def _control(self, options: list[str], commands: str | None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [CONTROL, *options], input=commands,
            env={**os.environ, **self.environment, "CUDA_VISIBLE_DEVICES": self.gpu}, timeout=TIMEOUT_SECONDS,
            capture_output=True, text=True, check=False,
        )  # fmt: skip


def running() -> bool:
    """Whether an MPS is running."""
    return (Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_PIPE_FOLDER)) / "control").exists()
