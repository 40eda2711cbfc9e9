"""The compile manager in the server: a queue of shapes, one thread, and a process that compiles.

`request(shape)` returns at once. The manager's thread takes one shape after another. It uses the cached artifact if
there is one; otherwise a process of low priority compiles it (compiler_process.py). Then `adopt` (Towers._adopt) loads,
compares and times the artifact and decides whether it takes traffic. Each shape ends in one final state:

    live       it takes traffic
    slower     its results are right, but it is not faster than the original graph
    mismatch   its results differ: it is quarantined in the cache and not built again
    failed     the compiler refused all of it, took longer than `limit` seconds, or its process died twice

A graph that the compiler refuses as a whole is partitioned (graph_partition.py); each attempt is a job of the same
process. A search has MOST_ATTEMPTS attempts and, after the first, `limit` seconds for all of them; then the shape stays
on the original graph. If a job exceeds its time limit or the process dies, the search ends at once. The result of a
search is used for all shapes of the graph. A damaged package is built again.
A lock on the cache folder allows one compilation at a time over all models and processes that share it, because one
takes a core and a gigabyte. A process that was idle for a minute is ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hotrow.serve.compile.artifacts import ArtifactCache, compiler, key_of
from hotrow.serve.compile.compiled_tower import ArtifactError
from hotrow.serve.compile.graph_partition import CannotCutError, Cut, Refusal, cut, search
from hotrow.serve.graph.tower_graph import Shape, TowerGraph
from hotrow.undocumented import ChangedError

log = logging.getLogger("hotrow.serve")

ATTEMPTS = 2  # for a job whose process dies; a refusal or a time limit is final
IDLE_SECONDS = 60.0
Adopt = Callable[
    [Shape, Path | None, Cut | None], tuple[str, str]
]  # returns state and reason; None: no artifact; not partitioned


@dataclass
class Compilations:
    """The state of every requested shape, for metrics and descriptions."""

    states: dict[Shape, str] = field(default_factory=dict)  # queued, compiling, or a final state
    reasons: dict[Shape, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of each compilation
    died: int = 0
    reused: int = 0  # artifacts found in the cache
    tries: int = 0  # jobs sent to the compile process
    pieces: dict[Shape, int] = field(default_factory=dict)  # compiled pieces
    eager: dict[Shape, tuple[str, ...]] = field(default_factory=dict)  # ops that stay eager

    def count(self, *states: str) -> int:
        """How many shapes are in any of these states."""
        return sum(state in states for state in list(self.states.values()))


class Compiler:
    """Compiles shapes of one graph in the background."""

    def __init__(
        self, graph: TowerGraph, cache: ArtifactCache, adopt: Adopt, device: torch.device, threads: int, limit: float
    ) -> None:
        self.compilations = Compilations()
        self.missing = None if compiler() else "there is no C++ compiler (g++, or the one named by CXX) on PATH"
        self._graph, self._cache, self._adopt = graph, cache, adopt
        self._device, self._threads, self._limit = device, threads, limit
        self._queue: queue.Queue[Shape | None] = queue.Queue()
        self._changed = threading.Condition()
        self._closing = False
        self._process: _Process | None = None
        self._saved: TowerGraph | None = None
        self._excluded: tuple[str, ...] | None = None  # nodes that the search found to be refused
        self._cannot_compile = ""  # why no shape can be compiled
        self._last_logged = ""  # the reason that was logged last
        self._thread = threading.Thread(target=self._work, name="compile-manager", daemon=True)
        self._thread.start()
        if self.missing:
            log.warning("%s; towers are served without compilation", self.missing)

    def request(self, shape: Shape) -> bool:
        """Queue a shape; False if it was requested before."""
        with self._changed:
            if shape in self.compilations.states or self._closing:
                return False
            self.compilations.states[shape] = "queued"
        self._queue.put(shape)
        return True

    def wait(self, shapes: list[Shape], seconds: float | None = None) -> bool:
        """Wait until all shapes are in a final state; False if `seconds` pass first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._closing or not any(self.compilations.states.get(s) in ("queued", "compiling") for s in shapes)
                ),
                seconds,
            )

    def close(self) -> None:
        """Kill the process, even during a job, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while not self._closing:
            try:
                shape = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._end_process()
                continue
            if shape is None or self._closing:
                break
            try:
                state, why = self._obtain(shape)
            except ChangedError as error:
                state, why = "failed", str(error)
                self._cannot_compile = why
            except Exception as error:  # for example a full disk: this shape stays eager, the next may work
                state, why = "failed", f"{type(error).__name__}: {error}"
            if state in ("failed", "mismatch"):
                if why != self._last_logged:  # a reason that holds for all shapes is logged once
                    log.warning("bucket %s stays on the original graph: %s: %s", shape, state, why)
                self._last_logged = why
                if self._device.type == "cuda":  # the original graph can still be captured as a CUDA graph
                    with contextlib.suppress(Exception):
                        why = f"{why}; captured: {' '.join(self._adopt(shape, None, None))}"
            self._end(shape, state, why)
        self._end_process()

    def _obtain(self, shape: Shape) -> tuple[str, str]:
        """Take the artifact from the cache or compile it, then put it in service."""
        key = key_of(self._graph.digest, shape, self._device, self._threads)
        metadata = self._cache.metadata(key)
        if metadata and "quarantined" in metadata:
            return "mismatch", str(metadata["quarantined"])
        path = self._cache.find(key)
        if path is not None:
            with contextlib.suppress(ArtifactError, CannotCutError):  # an artifact that cannot be loaded is built again
                ended = self._put_in_service(shape, path, key)
                self.compilations.reused += 1
                return ended
        if self.missing:
            return "failed", self.missing
        if self._cannot_compile:
            return "failed", self._cannot_compile
        with self._compile_lock():
            if self._closing:
                return "failed", "the server is closing"
            path = self._cache.find(key)  # another process may have built it
            why = ""
            if path is None:
                path, why = self._compile(shape, key)
        return ("failed", why) if path is None else self._put_in_service(shape, path, key)

    def _put_in_service(self, shape: Shape, path: Path, key: str) -> tuple[str, str]:
        excluded = (self._cache.metadata(key) or {}).get("aside")
        partition = None
        if excluded is not None:
            self._excluded = tuple(excluded)
            partition = cut(self._read_back(), shape, self._excluded)
        self.compilations.pieces[shape], self.compilations.eager[shape] = (
            (len(partition.pieces), partition.ops) if partition else (1, ())
        )
        state, why = self._adopt(shape, path, partition)
        if state == "mismatch":
            self._cache.quarantine(key, why)
        return state, why

    def _compile(self, shape: Shape, key: str) -> tuple[Path | None, str]:
        """Compile the whole graph, or the pieces that the compiler takes."""
        self._set(shape, "compiling")
        built = self._cache.folder / f"{key}.{uuid.uuid4().hex}.building.pt2"
        job = {
            "program": os.fspath(self._program()),
            "rows": shape.rows,
            "lengths": shape.lengths,
            "device": str(self._device),
            "threads": self._threads,
            "schemas": self._graph.custom_ops,
            "out": os.fspath(built),
        }
        begin, until = time.monotonic(), float("inf")

        def attempt(excluded: tuple[str, ...] | None) -> Refusal | None:
            nonlocal until
            refusal = self._attempt({**job, "aside": excluded}, min(self._limit, until - time.monotonic()))
            until = min(until, time.monotonic() + self._limit)
            return refusal

        try:
            excluded = search(self._read_back, shape, attempt, self._excluded)
            seconds = time.monotonic() - begin
            self.compilations.seconds.append(seconds)
            metadata = {"shape": str(shape), "seconds": seconds, "graph": self._graph.digest, "aside": excluded}
            return self._cache.add(key, built, metadata), ""
        except CannotCutError as error:
            self._cannot_compile = str(error)
            return None, str(error)
        except _FinalError as error:
            return None, str(error)
        finally:
            built.unlink(missing_ok=True)

    def _attempt(self, job: dict[str, Any], seconds: float) -> Refusal | None:
        """Send a job, again if the process dies. Raises _FinalError if no other partition would help."""
        for _ in range(ATTEMPTS):
            self.compilations.tries += 1
            reply = self._send_job(job, seconds)
            if reply is not None:
                break
            self.compilations.died += 1
            if self._closing:
                raise _FinalError("the server is closing")
        else:
            raise _FinalError("the compile process died; see compiler.log in the cache folder")
        if reply["ok"]:
            return None
        if reply.get("changed"):
            raise CannotCutError(str(reply["error"]))
        if reply.get("over"):
            raise _FinalError(f"it took longer than limit={self._limit:g} seconds")
        if reply.get("final"):
            raise _FinalError(str(reply["error"]))
        return Refusal(str(reply["error"]), tuple(reply["ops"]), tuple(reply["nodes"]))

    def _read_back(self) -> TowerGraph:
        """The graph as the compile process reads it: saving and loading may rename nodes."""
        if self._saved is None:
            self._saved = TowerGraph.load(self._program())
        return self._saved

    def _send_job(self, job: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The reply to a job; None if the process died."""
        if self._process is None or not self._process.alive:
            self._end_process()
            self._process = _Process(self._cache.folder)
        reply = self._process.run(job, max(0.0, seconds), lambda: self._closing)
        if reply is None or reply.get("over"):
            self._end_process()
        return reply

    def _program(self) -> Path:
        """A file with the graph: the repository's, or a copy in the cache."""
        if self._graph.path is None:
            path = self._cache.folder / f"{self._graph.digest[:32]}.program"
            if not path.exists():
                scratch = self._cache.folder / f"{uuid.uuid4().hex}.pt2"
                torch.export.save(self._graph.program, scratch)
                os.replace(scratch, path)
            return path
        return self._graph.path

    @contextlib.contextmanager
    def _compile_lock(self):  # type: ignore[no-untyped-def]
        """Allow one compilation at a time in this cache folder."""
        with (self._cache.folder / "turn.lock").open("w") as lock:
            while not self._closing:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.1)
            yield

    def _set(self, shape: Shape, state: str) -> None:
        with self._changed:
            self.compilations.states[shape] = state

    def _end(self, shape: Shape, state: str, why: str) -> None:
        with self._changed:
            self.compilations.states[shape] = state
            if why:
                self.compilations.reasons[shape] = why
            self._changed.notify_all()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _FinalError(Exception):
    """Why a shape is not compiled; no other partition would help."""


class _Process:
    """The compile process and the pipes to and from it."""

    def __init__(self, folder: Path) -> None:
        scratch = folder / "inductor"
        scratch.mkdir(mode=0o700, exist_ok=True)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": os.fspath(scratch),
        }
        environment.pop("TRITON_INTERPRET", None)
        read_end, write_end = os.pipe()
        with (folder / "compiler.log").open("wb") as log_file:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "hotrow.serve.compile.compiler_process",
                    "--reply",
                    str(write_end),
                ],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(write_end,),
                env=environment,
                start_new_session=True,  # a process group, which is killed with the compilers it started
            )
        os.close(write_end)
        self._replies = read_end

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def run(self, job: dict[str, Any], seconds: float, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Send a job and wait for its reply. With `over` in it, the time limit passed and the process must be
        killed."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return None
        until, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            if stop():
                return None
            if time.monotonic() > until:
                return {"ok": False, "over": True}
            if select.select([self._replies], [], [], 0.2)[0]:
                block = os.read(self._replies, 1 << 16)
                if not block:
                    return None
                line += block
        reply: dict[str, Any] = json.loads(line)
        return reply

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        os.close(self._replies)
