"""RankActor: the Ray actor on a node that starts one rank as a process, keeps its output for the driver, and ends it.

Training runs in the process, never in the actor, so a rank is the same program as under torchrun, a signal to it is a
signal to a process of its own, and the actor is light: this file imports only the standard library, and Ray sends the
class by value, so that an actor does not import hotrow (and with it torch, 1.4 s and 250 MB).

The operating system kills the rank when the actor's process ends, however it ends (child_process.py). Ray ends that
process when its node leaves the cluster, or when the driver is gone. So no rank outlives its job.

Ray calls methods on up to METHODS threads: `read` waits for output while another thread passes on a signal.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = 4
MOST_BYTES = 1 << 20  # of output that wait for the driver; then the rank's own writes wait
RAYS_OWN = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_NODE_ID")  # of the actor's process


@dataclass(frozen=True)
class RankStart:
    """How to start one rank. `variables` replace those of the node's environment; `terminal` is columns and lines of
    the driver's terminal if the rank should see one."""

    program: tuple[str, ...]  # what Python runs, before the job file
    options: tuple[str, ...]  # after it
    job_path: str
    job_text: str
    folder: str  # in which the driver runs: relative paths of the job begin there
    variables: tuple[tuple[str, str], ...]
    terminal: tuple[int, int] | None = None


class RankActor:
    """One rank of the job. Every method returns plain values."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._output = bytearray()
        self._code: int | None = None
        self._process: subprocess.Popen[Any] | None = None
        self._port: socket.socket | None = None
        self._home: str | None = None

    def where(self) -> dict[str, Any]:
        """The node and its installation."""
        import ray

        from importlib.metadata import PackageNotFoundError, version  # isort: skip

        try:
            installed: str | None = version("hotrow")
        except PackageNotFoundError:
            installed = None
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "host": socket.gethostname(),
            "version": installed,
        }

    def reserve_port(self, address: str) -> int:
        """A free port. It stays bound, so that nobody gets it before the rank; who sets SO_REUSEADDR may listen."""
        self._port = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((address, 0))
        return int(self._port.getsockname()[1])

    def leave_mark(self, folder: str, path: str, mark: str) -> tuple[str | None, list[str]]:
        """Create the folder `path` and an empty file in it. Returns the error, if there is one, and what is there."""
        try:
            place = Path(folder, path)
            place.mkdir(parents=True, exist_ok=True)
            (place / mark).touch()
        except OSError as error:
            return str(error), []
        return None, os.listdir(place)

    def remove_mark(self, folder: str, path: str, mark: str) -> None:
        """Remove the file that `leave_mark` created."""
        Path(folder, path, mark).unlink(missing_ok=True)

    def sees(self, folder: str, path: str) -> bool:
        """Whether this node has a path."""
        return Path(folder, path).exists()

    def start(self, rank: RankStart) -> int:
        """Start the rank; returns its process id."""
        package = _package()
        job = self._job_file(rank)
        command = [sys.executable, *rank.program, job, *rank.options]
        environment = {name: value for name, value in os.environ.items() if name not in RAYS_OWN}
        environment |= {"PYTHONUNBUFFERED": "1", **dict(rank.variables)}
        if rank.terminal is None:
            reads, writes = os.pipe()
        else:
            reads, writes = os.openpty()
            columns, lines = rank.terminal
            fcntl.ioctl(writes, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        try:
            self._process = _child_process(package).start(
                [sys.executable, "-I", "-S", str(package / "cluster" / "default_signals.py"), *command],
                env=environment,
                cwd=rank.folder,
                stdin=subprocess.DEVNULL,
                stdout=writes,
                stderr=writes,
                start_new_session=True,
            )
        finally:
            os.close(writes)
        reader = threading.Thread(target=self._read_output, args=(reads,), daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=(reader,), daemon=True).start()
        return int(self._process.pid)

    def read(self, seconds: float) -> tuple[bytes, int | None]:
        """Output since the last call, and the exit code once the rank has ended and its output was read. Waits for one
        of them, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._code is not None, seconds)
            output = bytes(self._output)
            self._output.clear()
            self._changed.notify_all()
            return output, self._code

    def send_signal(self, number: int) -> None:
        """Send the rank a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill the rank and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._home is not None:
            shutil.rmtree(self._home, ignore_errors=True)

    def _job_file(self, rank: RankStart) -> str:
        """The job file's path on this node: the driver's own where that has the same text, else that of a copy."""
        own = Path(rank.folder, rank.job_path)
        try:
            if own.read_text() == rank.job_text:
                return rank.job_path
        except (OSError, ValueError):
            pass
        self._home = tempfile.mkdtemp(prefix="hotrow-job-")
        copy = Path(self._home, own.name)
        copy.write_text(rank.job_text)
        return str(copy)

    def _read_output(self, reads: int) -> None:
        while True:
            try:
                data = os.read(reads, 1 << 16)
            except OSError:  # a terminal whose last writer has ended
                data = b""
            if not data:
                os.close(reads)
                return
            with self._changed:
                self._changed.wait_for(lambda: len(self._output) < MOST_BYTES)
                self._output += data
                self._changed.notify_all()

    def _wait(self, reader: threading.Thread) -> None:
        assert self._process is not None
        code = self._process.wait()
        reader.join(2.0)  # longer only if a child of the rank has its output and outlives it
        with self._changed:
            self._code = code
            self._changed.notify_all()


def _package() -> Path:
    """Where hotrow is installed. Does not import it."""
    from importlib.util import find_spec

    spec = find_spec("hotrow")
    for place in [] if spec is None else spec.submodule_search_locations or []:
        if Path(place, "child_process.py").exists():
            return Path(place)
    raise ModuleNotFoundError(f"{sys.executable} cannot import hotrow")


def _child_process(package: Path) -> Any:
    """The module child_process, without the package around it."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("hotrow_child_process", package / "child_process.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
