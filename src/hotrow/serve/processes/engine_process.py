"""The engine process: models, rows and lanes behind a Unix socket that front ends connect to.

Life of a request here, in verbs: a connection's reader `scan`s frames out of what the socket gave, `admit`s them,
`look`s which have cold rows (these wait aside, miss_queue.py), and `put`s the others in their line; a lane `take`s a batch,
joins, runs and answers. Beside it: commands (load, unload, index, statistics) each on a thread of its own, and a clock
that pushes figures to everybody once a second and polls the repository if told.

Messages that nobody asked for (`REPLY` with id 0) tell front ends about models and figures: `{"models": [...]}`
whenever something changed, before any answer that carries a new version's number, and `{"figures": {...}}`.

To the supervisor the process writes a line of JSON on stdout for each event (listening, ready, refused, figures), and
it ends when its stdin does: no engine outlives its supervisor. SIGTERM drains: what was admitted is answered, then it
ends with 0.

Started as `python -m hotrow.serve.processes.engine_process`, with its EngineOptions as JSON in the first line on stdin: addresses
among them may have passwords, which must not be seen in the arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import torch

from hotrow import _core
from hotrow.errors import OptionError
from hotrow.serve.batching.lanes import BatchKey, Lanes, RequestFrame, refuse
from hotrow.serve.batching.miss_queue import MissQueue
from hotrow.serve.batching.tensorbatch import BatchQueue, QueuedRequest, QueueLimits, TensorBatch
from hotrow.serve.batching.versions import Loader, Model, Models, Version
from hotrow.serve.processes.child import freeze_garbage_collector, read_options
from hotrow.serve.processes.engine_options import EngineOptions
from hotrow.serve.processes.engine_socket import FrontendConnection
from hotrow.serve.processes.restore import Restore
from hotrow.serve.protocol import frames
from hotrow.serve.protocol.request import POLICIES, RefusedError
from hotrow.serve.updates.freshness import StalenessAlarm

log = logging.getLogger(__name__)

FIGURES_SECONDS = 1.0
SWITCH_SECONDS = 0.0005  # a thread keeps the interpreter from others no longer: a lane that has its logits wants it
DEADLINE = 1.0  # seconds, where neither request nor version nor option says


class Target(NamedTuple):
    """Where a request goes: known once for each model, signature and policy."""

    model: Model
    line: BatchQueue
    cold: bool  # whether its rows may be
    patient: bool
    deadline: float  # of requests that give none


class EngineProcess:
    """Everything of one process."""

    def __init__(
        self,
        options: EngineOptions,
        loader: Loader | None = None,
        tell: Callable[..., None] = lambda event, **content: None,
    ) -> None:
        self.options, self.tell = options, tell
        limits = QueueLimits(options.max_rows, options.max_wait, options.queue_rows, options.queue_bytes)
        self.queue = TensorBatch(limits, options.lanes, lambda ask, why: _send_refusal(ask, why))
        self.misses = MissQueue(self.queue, options.miss_workers)
        self.models = Models(
            options.repository,
            loader or find_loader(options.loader),
            {"max_rows": options.max_rows, **options.options},
            self._models_changed,
        )
        self.restore = Restore(self.models, tell)
        self.lanes = Lanes(options.lanes, options.threads, self.queue)
        self.alarms: dict[str, StalenessAlarm] = {}
        self.connections: set[FrontendConnection] = set()
        self.loaded = False  # whether the first load of all models is over
        self.started = time.time()
        self._lines: dict[tuple[int, int, int], Target] = {}
        self._listener: socket.socket | None = None
        self._stopped = threading.Event()

    # --- life ---

    def start(self) -> None:
        """Listen, and load what is to be loaded. Models that do not load are refused by name; the others serve."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._listen()
        self.lanes.start()
        self.restore.begin(self.options.restore, self.options.models or self.models.names())
        self.loaded = True
        self._models_changed()
        threading.Thread(target=self._tick, name="hotrow-clock", daemon=True).start()
        freeze_garbage_collector()
        self.tell("ready", models={m.name: m.current.name for m in self.models.by_name.values() if m.current})

    def stop(self) -> bool:
        """Drain and end; whether everything admitted was answered."""
        self._stopped.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        done = self.queue.drain(self.options.drain)
        self.misses.close()
        self.queue.close()
        self.lanes.join(1.0)
        for connection in list(self.connections):
            connection.close(flush=1.0)
        with suppress(OSError):
            os.unlink(self.options.socket)
        return done

    def _listen(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.options.socket)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.options.socket)
        os.chmod(self.options.socket, 0o600)
        self._listener.listen(64)  # before this nobody can connect, whoever may see the socket
        threading.Thread(target=self._accept, name="hotrow-accept", daemon=True).start()
        self.tell("listening", socket=self.options.socket)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            connection = FrontendConnection(accepted, self.receive, self._gone)
            self.connections.add(connection)
            connection.send(frames.write_json(frames.REPLY, 0, self.describe()))
            connection.start()

    def _gone(self, connection: FrontendConnection) -> None:
        self.connections.discard(connection)

    def _tick(self) -> None:
        polled = time.monotonic()
        while not self._stopped.wait(FIGURES_SECONDS):
            self._look_at_ages()
            self.restore.retry()
            figures = self.figures()
            self._broadcast({"figures": figures})
            self.tell("figures", **figures)
            if self.options.poll and time.monotonic() - polled >= self.options.poll:
                for problem in self.models.poll():
                    self.tell("refused", why=problem)
                polled = time.monotonic()

    def _look_at_ages(self) -> None:
        """Say it when a model that follows a bus has grown too old, and when it has not any more."""
        for model in self.models.by_name.values():
            follower = None if model.current is None else getattr(model.current.servable, "follower", None)
            if follower is None:
                continue
            alarm = self.alarms.setdefault(model.name, StalenessAlarm(self.options.stale_after))
            age = follower.age(time.time())
            if (news := alarm.update(age)) is not None:
                why = f" ({follower.state}{': ' + follower.why if follower.why else ''})" if news else ""
                log.warning("model %s answers from data that is %.1f s old%s", model.name, age, why)
                self.tell("stale" if news else "fresh", model=model.name, age=age, why=follower.why)

    # --- requests ---

    def receive(self, connection: FrontendConnection, chunk: bytearray, found: list[tuple[Any, ...]]) -> None:
        """Frames that a front end sent, whole."""
        now = self.queue.clock()
        targets: dict[int, tuple[Target, list[QueuedRequest]]] = {}
        for frame in found:
            if frame[0] != frames.REQUEST:
                self._command(connection, frame[1], frames.read_json(chunk, frame[2], frame[3]))
                continue
            try:
                target = self._target(frame)
            except RefusedError as error:
                connection.send(frames.write_refusal(frame[1], error))
                continue
            _, number, offset, length, _, _, rows, left, _, _, _, _ = frame
            deadline = now + (left * 1e-6 if left >= 0 else target.deadline)
            ask = QueuedRequest(
                RequestFrame(connection, number, chunk, offset, length), rows, length, deadline, target.patient
            )
            known = targets.get(id(target))
            if known is None:
                targets[id(target)] = (target, [ask])
            else:
                known[1].append(ask)
        for target, asks in targets.values():
            refused = self.queue.admit(target.model.group, asks)
            if refused:
                connection.send(b"".join([frames.write_refusal(ask.content.id, why) for ask, why in refused]))
            if target.cold and asks:
                asks = self._look(target.line, asks)
            if asks:
                self.queue.enqueue(target.line, asks)

    def _target(self, frame: tuple[Any, ...]) -> Target:
        """Where a request goes. Raises RefusedError."""
        if len(frame) == 5:
            raise RefusedError(400, f"malformed frame: {frame[4]}")
        _, _, _, _, number, fingerprint, rows, _, policy, ids, _, _ = frame
        if ids > frames.MOST_IDS // 2:
            raise RefusedError(413, f"{ids} ids in one request, spread over its rows; ask with fewer rows at once")
        pinned: Version | None
        if rows > self.options.max_rows:  # several batches must see one version
            model, pinned = self.models.resolve(number)
            if pinned is None and (serving := model.version_for(fingerprint)) is not None:
                number = serving.number
        known = self._lines.get((number, fingerprint, policy))
        if known is None:
            model, pinned = self.models.resolve(number)
            if policy > len(POLICIES):
                raise RefusedError(400, f"policy number {policy}; there are {len(POLICIES)}")
            version = model.version_for(fingerprint, pinned)
            if version is None:
                raise RefusedError(503, f"model {model.name!r} takes other inputs now; ask again", 0.1)
            chosen = self.options.policy or getattr(version.servable, "policy", None) or "initial"
            chosen = POLICIES[policy - 1] if policy else chosen
            line = self.queue.queue_of(model.group, BatchKey(model, pinned, fingerprint, chosen))
            known = Target(model, line, version.can_be_cold, chosen == "wait", self._deadline(version))
            self._lines[number, fingerprint, policy] = known
        return known

    def _deadline(self, version: Version) -> float:
        for seconds in (self.options.deadline, getattr(version.servable, "deadline", None)):
            if seconds is not None:
                return float(seconds)
        return DEADLINE

    def _look(self, line: BatchQueue, asks: list[QueuedRequest]) -> list[QueuedRequest]:
        key: BatchKey = line.key
        version = key.model.version_for(key.fingerprint, key.pinned)
        if version is None or not version.can_be_cold:
            return asks
        try:
            return self.misses.defer_cold(line, asks, version)
        except frames.FrameError as error:
            for ask in asks:
                refuse(self.queue, ask, RefusedError(400, str(error)))
            return []

    # --- commands ---

    def _command(self, connection: FrontendConnection, id: int, command: dict[str, Any]) -> None:
        def work() -> None:
            try:
                reply = {"result": self.obey(command)}
            except RefusedError as error:
                reply = {"error": [error.status, error.message, error.retry_after]}
            except Exception as error:
                log.exception("command %s failed", command.get("op"))
                reply = {"error": [500, f"{type(error).__name__}: {error}", None]}
            connection.send(frames.write_json(frames.REPLY, id, reply))

        threading.Thread(target=work, name="hotrow-command", daemon=True).start()

    def obey(self, command: dict[str, Any]) -> Any:
        """One command's result."""
        op, name = command.get("op"), str(command.get("name") or "")
        if op == "load":
            return self.models.load(name, command.get("version")).name
        if op == "unload":
            return self._unload(name)
        if op == "index":
            return self.index()
        if op == "statistics":
            return self.statistics(name, str(command.get("version") or ""))
        if op == "figures":
            return self.figures()
        raise RefusedError(400, f"unknown command {op!r}")

    def _unload(self, name: str) -> None:
        self.restore.forget(name)
        model = self.models.unload(name)
        until = time.monotonic() + self.options.drain
        while self.queue.busy(model.group) and time.monotonic() < until:  # its last answers leave
            time.sleep(0.002)

    # --- what others see ---

    def describe(self) -> dict[str, Any]:
        """For front ends: models, versions, their numbers and signatures."""
        return {
            "ready": self.loaded and not self.queue.draining,
            "models": [_describe(model) for model in self.models.by_name.values()],
        }

    def index(self) -> list[dict[str, str]]:
        """Every model and version in the repository."""
        entries = []
        for name in self.models.names():
            model = self.models.by_name.get(name)
            for version in self.models.available(name):
                ready = model is not None and version in model.versions
                why = "" if ready else "unloaded" if model is None else model.refused.get(version, "not in service")
                state = "READY" if ready else "UNAVAILABLE"
                entries.append({"name": name, "version": version, "state": state, "reason": why})
        return entries

    def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Triton's model_stats."""
        return [
            _statistics(model.name, v)
            for model in self.models.by_name.values()
            for v in model.versions.values()
            if name in ("", model.name) and version in ("", v.name)
        ]

    def figures(self) -> dict[str, Any]:
        """Everything that is counted."""
        counts = dataclasses.asdict(self.queue.counts)
        misses = dataclasses.asdict(self.misses.counts)
        return {
            "queue": {**self.queue.figures(), **counts, "aside": self.misses.waiting, "misses": misses},
            "latency": self.lanes.latency.counts,
            "models": [
                {
                    "model": model.name,
                    "version": model.current.name if model.current else "",
                    "pending": model.group.pieces,
                    "shed": model.group.shed,
                }
                for model in self.models.by_name.values()
            ],
            "versions": [
                {
                    "model": model.name,
                    "version": v.name,
                    "publication": v.publication,
                    "freshness": self._freshness(model, v),
                    **dataclasses.asdict(v.counts),
                    "tower": v.servable.figures() if hasattr(v.servable, "figures") else {},
                }
                for model in self.models.by_name.values()
                for v in model.versions.values()
            ],
        }

    def _freshness(self, model: Model, version: Version) -> dict[str, Any]:
        """How old a version is and was lately, and what its follower has done."""
        follower = getattr(version.servable, "follower", None)
        fresh = getattr(version.servable, "fresh", None)
        alarm = self.alarms.get(model.name)
        return {
            "age": None if fresh is None else fresh.age(time.time()),
            "ages": version.ages.percentiles(),
            "stale": alarm is not None and alarm.on and version is model.current,
            "follower": None if follower is None else follower.figures(),
        }

    def _models_changed(self) -> None:
        self._lines = {}
        self.queue.drop_empty_queues(self._stale)
        self._broadcast(self.describe())
        if self.loaded:
            self.tell("models", versions=self.restore.in_service())

    def _stale(self, key: BatchKey) -> bool:
        """Whether a line's model or version is no longer loaded."""
        model = self.models.by_name.get(key.model.name)
        return model is not key.model or (key.pinned is not None and key.pinned not in model.versions.values())

    def _broadcast(self, content: Any) -> None:
        data = frames.write_json(frames.REPLY, 0, content)
        for connection in list(self.connections):
            connection.send(data)


def _send_refusal(ask: QueuedRequest, why: RefusedError) -> None:
    ask.content.sender.send(frames.write_refusal(ask.content.id, why))


def _describe(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "number": model.number,
        "current": model.current.name if model.current else None,
        "refused": model.refused,
        "versions": [
            {
                "name": v.name,
                "number": v.number,
                "features": list(v.signature.features),
                "sequences": sorted(v.signature.sequences),
                "dense": v.signature.dense,
                "tasks": v.signature.tasks,
                "spec": getattr(v.servable, "features", None),
                "config": getattr(v.servable, "config", None) or {},
            }
            for v in model.versions.values()
        ],
    }


def _statistics(name: str, version: Version) -> dict[str, Any]:
    c = version.counts

    def spent(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": int(seconds * 1e9)}

    total = c.queue_seconds + c.join_seconds + c.run_seconds + c.answer_seconds
    return {
        "name": name,
        "version": version.name,
        "last_inference": int(c.last * 1e3),
        "inference_count": c.rows,
        "execution_count": c.executions,
        "inference_stats": {
            "success": spent(c.requests, total),
            "fail": spent(c.failed, 0.0),
            "queue": spent(c.requests, c.queue_seconds),
            "compute_input": spent(c.requests, c.join_seconds),
            "compute_infer": spent(c.requests, c.run_seconds),
            "compute_output": spent(c.requests, c.answer_seconds),
        },
        "batch_stats": [
            {"batch_size": 1 << power, "compute_infer": spent(int(count), seconds)}
            for power, (count, seconds, _) in sorted(version.sizes.items())
        ],
    }


def find_loader(name: str) -> Loader:
    """module:function."""
    module, _, function = name.partition(":")
    try:
        loader: Loader = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"loader={name!r}: {error}; give module:function") from error
    return loader


_telling = threading.Lock()


def tell(event: str, **content: Any) -> None:
    """A line for the supervisor."""
    with _telling, suppress(BrokenPipeError, ValueError):
        sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
        sys.stdout.flush()


def main() -> int:
    """The process."""
    given, said = read_options()
    options = EngineOptions(**{**given, "models": tuple(given.get("models", ()))})
    logging.basicConfig(level=logging.INFO, format="engine %(process)d: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_end_with_supervisor, args=(stop, said), name="hotrow-stdin", daemon=True).start()
    torch.set_num_threads(options.threads)
    _core.set_threads(max(1, options.threads))
    sys.setswitchinterval(0.001)
    try:
        engine = EngineProcess(options, tell=tell)
        engine.start()
    except OptionError as error:
        tell("failed", why=str(error))
        return 2
    stop.wait()
    return 0 if engine.stop() else 1


def _end_with_supervisor(stop: threading.Event, said: BinaryIO) -> None:
    for _ in said:
        pass
    stop.set()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all that matters has ended; daemon threads inside torch need no finalizing
