"""The manager of compilation in the server: a queue of shapes, one thread, and the process that does the work.

`request(shape)` returns at once. The manager's thread takes one shape after another: what the cache has is used,
what it lacks is compiled by a process of low priority (compiler_process.py). Then `adopt` (of towers.py)
loads, compares and times the artifact, and says whether it takes traffic. A shape ends in one state and stays there
until a restart:

    live       it takes traffic
    slower     it computes the same, but the original graph is as fast
    mismatch   it computes something else: quarantined in the cache, and not built again
    failed     the compiler refused all of it, took longer than `limit` seconds, or its process died twice

What the compiler refuses whole is cut (graph_partition.py): each attempt at a cut is a job of that process too. A
search has TRIES attempts and, after the first, `limit` seconds for all of them; then the shape stays on the original
graph. A time limit or a death ends it at once. What one shape's search found, or did not find, holds for all shapes of
the graph. A damaged package is built again. Compilations take turns over all models and processes that share a cache
folder, by a lock on it: one costs a core and a gigabyte. A process that has had nothing to do for a minute is ended.
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

ATTEMPTS = 2  # of a process that dies; a refusal or a time limit is final at once
IDLE_SECONDS = 60.0
Adopt = Callable[[Shape, Path | None, Cut | None], tuple[str, str]]  # → state and why; None: not compiled; not cut


@dataclass
class Compilations:
    """What became of the shapes, for metrics and for people."""

    states: dict[Shape, str] = field(default_factory=dict)  # queued, compiling, or how it ended
    reasons: dict[Shape, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of every compilation
    died: int = 0
    reused: int = 0  # taken from the cache
    tries: int = 0  # jobs of the compile process
    pieces: dict[Shape, int] = field(default_factory=dict)  # that were compiled
    eager: dict[Shape, tuple[str, ...]] = field(default_factory=dict)  # ops that stay eager

    def count(self, *states: str) -> int:
        """How many shapes are in one of these states."""
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
        self._excluded: tuple[str, ...] | None = None  # nodes that were found to be refused
        self._cannot_compile = ""  # why no shape will be compiled
        self._last_logged = ""  # the last reason in the log
        self._thread = threading.Thread(target=self._work, name="compile-manager", daemon=True)
        self._thread.start()
        if self.missing:
            log.warning("%s; towers are served without compilation", self.missing)

    def request(self, shape: Shape) -> bool:
        """Ask for a shape; False if it was asked for before."""
        with self._changed:
            if shape in self.compilations.states or self._closing:
                return False
            self.compilations.states[shape] = "queued"
        self._queue.put(shape)
        return True

    def wait(self, shapes: list[Shape], seconds: float | None = None) -> bool:
        """Until all of them ended in some state; False if the time is over before."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self._closing or not any(self.compilations.states.get(s) in ("queued", "compiling") for s in shapes)
                ),
                seconds,
            )

    def close(self) -> None:
        """End the process, whatever it does, and the thread."""
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
            except Exception as error:  # a full disk, say: this shape stays eager, the next may work
                state, why = "failed", f"{type(error).__name__}: {error}"
            if state in ("failed", "mismatch"):
                if why != self._last_logged:  # once, where it holds for all shapes
                    log.warning("bucket %s stays on the original graph: %s: %s", shape, state, why)
                self._last_logged = why
                if self._device.type == "cuda":  # even so, all its kernels can be launched at once
                    with contextlib.suppress(Exception):
                        why = f"{why}; captured: {' '.join(self._adopt(shape, None, None))}"
            self._end(shape, state, why)
        self._end_process()

    def _obtain(self, shape: Shape) -> tuple[str, str]:
        """From the cache or a compilation, then into service."""
        key = key_of(self._graph.digest, shape, self._device, self._threads)
        metadata = self._cache.metadata(key)
        if metadata and "quarantined" in metadata:
            return "mismatch", str(metadata["quarantined"])
        path = self._cache.find(key)
        if path is not None:
            with contextlib.suppress(ArtifactError, CannotCutError):  # what cannot be loaded any more is built again
                ended = self._into_service(shape, path, key)
                self.compilations.reused += 1
                return ended
        if self.missing:
            return "failed", self.missing
        if self._cannot_compile:
            return "failed", self._cannot_compile
        with self._compile_lock():
            if self._closing:
                return "failed", "the server is closing"
            path = self._cache.find(key)  # another process may have been at it
            why = ""
            if path is None:
                path, why = self._compile(shape, key)
        return ("failed", why) if path is None else self._into_service(shape, path, key)

    def _into_service(self, shape: Shape, path: Path, key: str) -> tuple[str, str]:
        excluded = (self._cache.metadata(key) or {}).get("aside")
        made = None
        if excluded is not None:
            self._excluded = tuple(excluded)
            made = cut(self._read_back(), shape, self._excluded)
        self.compilations.pieces[shape], self.compilations.eager[shape] = (
            (len(made.pieces), made.ops) if made else (1, ())
        )
        state, why = self._adopt(shape, path, made)
        if state == "mismatch":
            self._cache.quarantine(key, why)
        return state, why

    def _compile(self, shape: Shape, key: str) -> tuple[Path | None, str]:
        """Whole, or as much of it as the compiler takes."""
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
        """One job, twice if the process dies. What no cut will mend raises _FinalError."""
        for _ in range(ATTEMPTS):
            self.compilations.tries += 1
            answer = self._send_job(job, seconds)
            if answer is not None:
                break
            self.compilations.died += 1
            if self._closing:
                raise _FinalError("the server is closing")
        else:
            raise _FinalError("the compile process died; see compiler.log in the cache folder")
        if answer["ok"]:
            return None
        if answer.get("changed"):
            raise CannotCutError(str(answer["error"]))
        if answer.get("over"):
            raise _FinalError(f"it took longer than limit={self._limit:g} seconds")
        if answer.get("final"):
            raise _FinalError(str(answer["error"]))
        return Refusal(str(answer["error"]), tuple(answer["ops"]), tuple(answer["nodes"]))

    def _read_back(self) -> TowerGraph:
        """The graph as the compile process reads it: names of nodes may change on the way through a file."""
        if self._saved is None:
            self._saved = TowerGraph.load(self._program())
        return self._saved

    def _send_job(self, job: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer to a job; None if the process died."""
        if self._process is None or not self._process.alive:
            self._end_process()
            self._process = _Process(self._cache.folder)
        answer = self._process.ask(job, max(0.0, seconds), lambda: self._closing)
        if answer is None or answer.get("over"):
            self._end_process()
        return answer

    def _program(self) -> Path:
        """A file with the graph: the repository's, or our own copy."""
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
        """One compilation at a time in this cache folder."""
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
    """Why a shape is not compiled, which no cut will mend."""


class _Process:
    """The compiling process and the two pipes to it."""

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
        theirs, ours = None, None
        ours, theirs = os.pipe()
        with (folder / "compiler.log").open("wb") as told:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "hotrow.serve.compile.compiler_process", "--reply", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=told,
                stderr=told,
                pass_fds=(theirs,),
                env=environment,
                start_new_session=True,  # so that it ends together with the compilers it calls
            )
        os.close(theirs)
        self._answers = ours

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self, job: dict[str, Any], seconds: float, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Wait for the answer. `over` in it says that the time was over, and that the process must end."""
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
            if select.select([self._answers], [], [], 0.2)[0]:
                block = os.read(self._answers, 1 << 16)
                if not block:
                    return None
                line += block
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        os.close(self._answers)
