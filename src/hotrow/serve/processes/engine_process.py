"""EngineProcess: models, rows and lanes in one process, behind a Unix socket that front ends connect to.

Threads:
- a reader for each connection (engine_socket.py), which admits and enqueues requests (request_admission.py)
- lanes, which take batches from the queues, run them and send the answers (serve/batching/lanes.py)
- one for each command: load, unload, index, statistics, figures
- a clock, which sends the figures to all front ends once a second, and polls the repository if `poll` is set

`REPLY` frames with id 0 are notifications to front ends: `{"models": [...]}` whenever the models change, before any
answer that has a new version's number, and `{"figures": {...}}`.

To the supervisor the process writes a line of JSON on stdout for each event (listening, ready, refused, figures, ...).
It ends when its stdin ends, so no engine outlives its supervisor. On SIGTERM it drains: it answers the admitted
requests and exits with 0.

It is started as `python -m hotrow.serve.processes.engine_process`, with its EngineOptions as JSON in the first line of
stdin. They are not arguments because addresses may have passwords, and every user can see a process's arguments.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

import torch

from hotrow import _core
from hotrow.errors import OptionError
from hotrow.serve.batching.lanes import BatchKey, Lanes
from hotrow.serve.batching.miss_queue import MissQueue
from hotrow.serve.batching.tensorbatch import QueuedRequest, QueueLimits, TensorBatch
from hotrow.serve.batching.versions import Loader, Models
from hotrow.serve.processes.child_runtime import freeze_garbage_collector, read_options, report_event
from hotrow.serve.processes.devices import GPU_INSIDE
from hotrow.serve.processes.engine_options import EngineOptions
from hotrow.serve.processes.engine_socket import FrontendConnection
from hotrow.serve.processes.engine_status import EngineStatus
from hotrow.serve.processes.request_admission import RequestAdmission, Scanned
from hotrow.serve.processes.restore import Restore
from hotrow.serve.protocol import frames, lookup_frames
from hotrow.serve.protocol.request import RefusedError

log = logging.getLogger(__name__)

FIGURES_SECONDS = 1.0
SWITCH_SECONDS = 0.0005  # most time that a thread holds the interpreter lock while a lane with finished logits waits


class EngineProcess:
    """One engine. `report_event` tells the supervisor; a test passes its own."""

    def __init__(
        self,
        options: EngineOptions,
        loader: Loader | None = None,
        report_event: Callable[..., None] = lambda event, **content: None,
    ) -> None:
        self.options, self.report_event = options, report_event
        limits = QueueLimits(options.max_rows, options.max_wait, options.queue_rows, options.queue_bytes)
        self.tensorbatch = TensorBatch(limits, options.lanes, _send_refusal)
        self.misses = MissQueue(self.tensorbatch, options.miss_workers)
        self.models = Models(
            options.repository,
            loader or find_loader(options.loader),
            {"max_rows": options.max_rows, **options.options},
            self._models_changed,
        )
        self.restore = Restore(self.models, report_event)
        self.lanes = Lanes(options.lanes, options.threads, self.tensorbatch)
        self.admission = RequestAdmission(options, self.models, self.tensorbatch, self.misses)
        self.status = EngineStatus(self.models, self.tensorbatch, self.misses, self.lanes, options.stale_after)
        self.connections: set[FrontendConnection] = set()
        self.loaded = False  # whether the first load of all models has ended
        self._listener: socket.socket | None = None
        self._stopped = threading.Event()

    # --- start and stop ---

    def start(self) -> None:
        """Listen and load the models. A model that fails to load is reported by name; the others serve."""
        sys.setswitchinterval(SWITCH_SECONDS)
        self._listen()
        self.lanes.start()
        self.restore.begin(
            self.options.restore, self.options.models or self.models.names(), self.options.restore_releases
        )
        self.loaded = True
        self._models_changed()
        threading.Thread(target=self._run_clock, name="hotrow-clock", daemon=True).start()
        freeze_garbage_collector()
        self.report_event("ready", models={m.name: m.current.name for m in self.models.by_name.values() if m.current})

    def stop(self) -> bool:
        """Drain and end; returns whether everything admitted was answered."""
        self._stopped.set()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._listener.close()
        done = self.tensorbatch.drain(self.options.drain)
        self.misses.close()
        self.tensorbatch.close()
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
        self._listener.listen(64)  # after chmod: another user cannot connect in between
        threading.Thread(target=self._accept, name="hotrow-accept", daemon=True).start()
        self.report_event("listening", socket=self.options.socket)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            connection = FrontendConnection(accepted, self.receive, self.connections.discard)
            self.connections.add(connection)
            connection.send(frames.write_json(frames.REPLY, 0, self._description()))
            connection.start()

    def _run_clock(self) -> None:
        polled, rows_up = time.monotonic(), True
        while not self._stopped.wait(FIGURES_SECONDS):
            if self.status.rows_up != rows_up:
                rows_up = not rows_up
                self._broadcast(self._description())
            self.status.check_staleness(self.report_event)
            self.restore.retry()
            figures = self.status.figures()
            self._broadcast({"figures": figures})
            self.report_event("figures", **figures)
            if self.options.poll and time.monotonic() - polled >= self.options.poll:
                for problem in self.models.poll():
                    self.report_event("refused", why=problem)
                polled = time.monotonic()

    # --- frames from front ends ---

    def receive(self, connection: FrontendConnection, chunk: bytearray, scanned: list[Scanned]) -> None:
        """Handle the complete frames of one read: admit requests, run each command on a thread of its own."""
        requests = [frame for frame in scanned if frame[0] == frames.REQUEST]
        if requests:
            self.admission.receive(connection, chunk, requests)
        for frame in scanned:
            if frame[0] == lookup_frames.LOOKUP:
                self.admission.receive_lookup(connection, chunk, frame[2], frame[3])
            elif frame[0] != frames.REQUEST:
                self._start_command(connection, frame[1], frames.read_json(chunk, frame[2], frame[3]))

    def _start_command(self, connection: FrontendConnection, id: int, command: dict[str, Any]) -> None:
        def work() -> None:
            try:
                reply = {"result": self._run_command(command)}
            except RefusedError as error:
                reply = {"error": [error.status, error.message, error.retry_after]}
            except Exception as error:
                log.exception("command %s failed", command.get("op"))
                reply = {"error": [500, f"{type(error).__name__}: {error}", None]}
            connection.send(frames.write_json(frames.REPLY, id, reply))

        threading.Thread(target=work, name="hotrow-command", daemon=True).start()

    def _run_command(self, command: dict[str, Any]) -> Any:
        op, name = command.get("op"), str(command.get("name") or "")
        if op == "load":
            return self.models.load(name, command.get("version")).name
        if op == "unload":
            return self._unload(name)
        if op == "index":
            return self.status.index()
        if op == "statistics":
            return self.status.statistics(name, str(command.get("version") or ""))
        if op == "figures":
            return self.status.figures()
        raise RefusedError(400, f"unknown command {op!r}")

    def _unload(self, name: str) -> None:
        if "@" in name:
            self.models.unload(name)  # its requests in flight are answered by the stable version, or refused
            return
        self.restore.forget(name)
        model = self.models.unload(name)
        until = time.monotonic() + self.options.drain
        for group in (model.group, model.lookups):
            while self.tensorbatch.busy(group) and time.monotonic() < until:  # until its last answers are sent
                time.sleep(0.002)

    # --- messages to front ends ---

    def _description(self) -> dict[str, Any]:
        ready = self.loaded and not self.tensorbatch.draining
        return {"ready": ready, "rows_up": self.status.rows_up, "models": self.status.describe_models()}

    def _models_changed(self) -> None:
        self.admission.clear_routes()
        self.tensorbatch.drop_empty_queues(self._is_retired)
        self._broadcast(self._description())
        if self.loaded:
            self.report_event("models", versions=self.restore.in_service(), releases=self.restore.releases())

    def _is_retired(self, key: BatchKey) -> bool:
        """Whether the model or version of a queue is no longer loaded."""
        model = self.models.by_name.get(key.model.name)
        return model is not key.model or (key.pinned is not None and key.pinned not in model.versions.values())

    def _broadcast(self, content: Any) -> None:
        data = frames.write_json(frames.REPLY, 0, content)
        for connection in list(self.connections):
            connection.send(data)


def _send_refusal(request: QueuedRequest, why: RefusedError) -> None:
    request.content.sender.send(frames.write_refusal(request.content.id, why))


def find_loader(name: str) -> Loader:
    """The function `module:function`."""
    module, _, function = name.partition(":")
    try:
        loader: Loader = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"loader={name!r}: {error}; give module:function") from error
    return loader


def main() -> int:
    """Run an engine until SIGTERM or the end of stdin; returns the exit code."""
    given, supervisor = read_options()
    options = EngineOptions(**{**given, "models": tuple(given.get("models", ()))})
    logging.basicConfig(level=logging.INFO, format="engine %(process)d: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=_stop_at_end_of, args=(supervisor, stop), name="hotrow-stdin", daemon=True).start()
    torch.set_num_threads(options.threads)
    _core.set_threads(max(1, options.threads))
    sys.setswitchinterval(0.001)
    try:
        if options.device != "cpu":
            check_gpu(options.device)
        engine = EngineProcess(options, report_event=report_event)
        engine.start()
    except OptionError as error:
        report_event("failed", why=str(error))
        return 2
    stop.wait()
    return 0 if engine.stop() else 1


def check_gpu(device: str) -> None:
    """Compute something on this process's GPU, so that a GPU that torch cannot use is one error here, not one for each
    model. `device` is its name for the user."""
    try:
        torch.zeros(1, device=GPU_INSIDE).add_(1).item()
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises the latter
        why = str(error).strip().partition("\n")[0]
        raise OptionError(f"{device}: torch cannot compute on it: {why}; give other --devices (cpu: no GPU)") from error


def _stop_at_end_of(supervisor: BinaryIO, stop: threading.Event) -> None:
    for _ in supervisor:
        pass
    stop.set()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything has ended; torch's daemon threads need no finalizing
