"""RowServerProcess: `hotrow rows`. It loads versions, answers lookups, follows buses, and ends in order.

    start   bind the sockets (a port in use is an error before a row is loaded), load each model's newest intact
            version, catch up with its bus, accept clients. A model that does not load is reported; the others serve
    serve   a tower server names the version that it serves. One that is not loaded is loaded beside the others, and the
            tower server asks again until it is there. A version that no connection has used for a minute is dropped,
            unless it is its model's newest here
    stop    refuse lookups, so that clients go to replicas, send what is under way, end

`hotrow serve --processes N` starts the same as a child, and tells it its options on stdin (processes/child.py).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from hotrow import _core
from hotrow.errors import CheckpointError, HotRowError, OptionError
from hotrow.serve.repository.manifest import Repository, Version, candidates, open_version, warn_damaged
from hotrow.serve.repository.releases import read_release
from hotrow.serve.rows.local_clients import LocalClients
from hotrow.serve.rows.registration import Registration
from hotrow.serve.rows.row_server_options import RowServerOptions
from hotrow.serve.rows.served_rows import ServedRows
from hotrow.serve.rows.status_page import Sample, StatusPage
from hotrow.signals import StopSignals
from hotrow.table.ssd_folder import allow_many_files
from hotrow.tiers.rows.cluster_file import socket_path
from hotrow.tiers.rows.handshake import (
    LOADING,
    NOT_LOADED,
    HandshakeError,
    Model,
    Welcome,
    make_welcome,
    read_hello,
    token_key,
)
from hotrow.units import format_count, parse_size

log = logging.getLogger(__name__)

CATCH_UP = 60.0  # seconds that a version waits for its bus before it is served
UNUSED_SECONDS = 60.0  # after which an older version is dropped
CLOCK_SECONDS = 0.5
BACKLOG = 4096


class RowServerProcess:
    """A row server."""

    def __init__(self, options: RowServerOptions, console: Console | None = None) -> None:
        self.options = options
        self.console = console or Console(stderr=True, quiet=True)
        self.addresses: list[str] = []
        self.versions: dict[tuple[str, int], ServedRows] = {}
        self._loading: set[tuple[str, int]] = set()
        self._failed: dict[tuple[str, int], str] = {}  # why the last attempt to load a version failed
        self._lock = threading.Lock()
        self._key = token_key(options.token)
        self._stopped = threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="hotrow-rows-")
        self._local_path = ""
        self._locals: list[LocalClients] = []
        self._status: StatusPage | None = None
        self._registration: Registration | None = None
        self._server: Any = None

    # --- start and stop ---

    def start(self) -> None:
        """Load each model's newest version and accept clients."""
        listeners = self._bind()
        try:
            self._bind_locals()
            if self.options.metrics is not None:
                host = "127.0.0.1" if not self.addresses else self.addresses[0].rpartition(":")[0]
                self._status = StatusPage(host.strip("[]"), self.options.metrics, self._samples, self._why_not_ready)
            errors = [error for model in self.options.served_models() if (error := self._load_newest(model))]
            if errors and self.options.require_models and not self.versions:
                raise errors[0]
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        certificate, key = self.options.tls_cert or "", self.options.tls_key or ""
        try:
            self._server = _core.RowServer(self._prove, threads=self.options.threads, certificate=certificate, key=key)
        except RuntimeError as error:
            raise OptionError(f"--tls-cert, --tls-key: {error}") from None
        for listener in listeners:
            listener.listen(BACKLOG)
            listener.setblocking(False)
            self._server.listen(listener.detach())
        for local in self._locals:
            local.start(self._prove, self._server.add_local)
        self._local_path = self._locals[0].path if self._locals else ""
        if self.options.register is not None and self.options.advertise is not None:
            self._registration = Registration(self.options.register, self.options.advertise)
            self._registration.start()
        threading.Thread(target=self._run_clock, name="hotrow-rows-clock", daemon=True).start()

    def stop(self) -> None:
        """Refuse lookups, send what is under way, and end."""
        self._stopped.set()
        if self._registration is not None:
            self._registration.close()
        for local in self._locals:
            local.close()
        if self._server is not None:
            self._server.close(self.options.drain)
        for served in list(self.versions.values()):
            served.close()
        if self._status is not None:
            self._status.close()
        self._folder.cleanup()

    def _bind(self) -> list[socket.socket]:
        listeners = []
        for address in self.options.listen:
            if address.startswith("unix:"):
                continue
            host, _, port = address.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.socket(family)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((host.strip("[]"), int(port)))
            except OSError as error:
                listener.close()
                raise OptionError(
                    f"--listen {address}: cannot listen there ({error.strerror}); stop what does, or give another port"
                ) from None
            listeners.append(listener)
            self.addresses.append(f"{host}:{listener.getsockname()[1]}")
        return listeners

    def _bind_locals(self) -> None:
        paths = [path for address in self.options.listen if (path := socket_path(address)) is not None]
        for path in paths:
            self._locals.append(LocalClients(path))
            self.addresses.append(f"unix:{path}")
        if not paths:
            with suppress(OptionError):  # a TMPDIR that is too long: clients of this machine use TCP
                self._locals.append(LocalClients(os.path.join(self._folder.name, "rows.sock")))

    # --- versions ---

    def _load_newest(self, model: str) -> Exception | None:
        """Load the version that servers take for a model: the stable one of its release, else the newest that is
        intact. Returns the error if there is none."""
        damaged: Exception | None = None
        try:
            for version in self._in_order(Path(self.options.repository) / model):
                try:
                    self._load(version)
                    return None
                except CheckpointError as error:  # a damaged block of rows: an older version may be intact
                    warn_damaged(version.path, error)
                    damaged = damaged or error
        except (HotRowError, OSError, MemoryError) as error:
            damaged = damaged or error
        log.warning("%s does not load: %s", model, damaged)
        return damaged

    @staticmethod
    def _in_order(folder: Path) -> Iterator[Version]:
        stable = read_release(folder).stable
        if stable is not None:
            yield open_version(folder / str(stable))
        yield from candidates(folder)

    def _load(self, version: Version) -> None:
        began = time.monotonic()
        model, number = version.model, version.number
        memory = self.options.memory(model, number)
        served = ServedRows(version, self.options.shards, memory, parse_size(self.options.history, "history"))
        if (bus := self.options.buses().get(model)) is not None:
            served.follow(bus, CATCH_UP)
        with self._lock:
            self.versions[model, number] = served
        self._say(
            f"loaded {model} version {number}: {format_count(served.rows)} rows of shards "
            f"{self.options.shards[0]}:{self.options.shards[1]} at publication {served.fresh.publication}, in "
            f"{time.monotonic() - began:.1f} s"
        )

    def _load_beside(self, model: str, number: int) -> None:
        try:
            self._load(Repository(self.options.repository).open(model, number))
            why = ""
        except Exception as error:  # the next client that asks for it learns why
            why = str(error) or type(error).__name__
            log.warning("%s version %d does not load: %s", model, number, error)
        with self._lock:
            self._loading.discard((model, number))
            self._failed.pop((model, number), None)
            if why:
                self._failed[model, number] = why

    def _served(self, wanted: Model) -> ServedRows:
        """The rows that a client asks for; begins to load them if they are not here."""
        place = (wanted.name, wanted.version)
        with self._lock:
            served = self.versions.get(place)
            if served is None:
                if wanted.name not in self.options.served_models():
                    models = ", ".join(self.options.served_models())
                    raise HandshakeError(f"this row server has no model {wanted.name!r}; it serves {models}")
                failed = self._failed.get(place)
                if place not in self._loading:
                    self._loading.add(place)
                    threading.Thread(target=self._load_beside, args=place, name="hotrow-rows-load", daemon=True).start()
                raise HandshakeError(
                    f"version {wanted.version} of {wanted.name!r} "
                    + (f"{NOT_LOADED} {failed}; it is tried again" if failed else LOADING)
                )
        if served.fingerprint != wanted.fingerprint:
            raise HandshakeError(
                f"version {wanted.version} of {wanted.name!r} has other tables or another seed here than at the "
                "client; copy the same export to both"
            )
        return served

    def _drop_unused(self) -> None:
        now = time.monotonic()
        with self._lock:
            newest = {model: max(n for name, n in self.versions if name == model) for model, _ in self.versions}
            dropped = []
            for (model, number), served in list(self.versions.items()):
                if number == newest[model] or served.service.connections:
                    served.unused_since = None
                elif served.unused_since is None:
                    served.unused_since = now
                elif now - served.unused_since > UNUSED_SECONDS:
                    dropped.append(self.versions.pop((model, number)))
        for served in dropped:
            self._say(f"dropped {served.version.model} version {served.version.number}: no tower server uses it")
            served.close()

    # --- clients ---

    def _prove(self, challenge: bytes, hello: bytes) -> tuple[Any, bytes]:
        wanted, nonce = read_hello(challenge, hello, self._key)
        served = self._served(wanted)
        begin, end = self.options.shards
        return served.service, make_welcome(Welcome(begin, end, self._local_path), nonce, challenge, self._key)

    # --- figures ---

    def figures(self) -> dict[str, Any]:
        """Counters of the sockets and of each version."""
        with self._lock:
            versions = dict(self.versions)
        server = {} if self._server is None else self._server.figures()
        return {"server": server, "versions": {f"{m}/{n}": served.figures() for (m, n), served in versions.items()}}

    def _samples(self) -> list[Sample]:
        figures = self.figures()
        samples: list[Sample] = []
        for name, count in figures["server"].items():
            samples.append((f"hotrow_rows_{name}{'' if name == 'connections' else '_total'}", {}, count))
        for place, of in figures["versions"].items():
            model, _, version = place.partition("/")
            labels = {"model": model, "version": version}
            for name in ("lookups", "keys", "restored"):
                samples.append((f"hotrow_rows_{name}_total", labels, of[name]))
            samples.append(("hotrow_rows_publication", labels, of["publication"]))
            samples.append(("hotrow_rows_oldest_publication", labels, of["oldest"]))
            samples.append(("hotrow_rows_history_bytes", labels, of["history_bytes"]))
            samples.append(("hotrow_rows_rows", labels, of["rows"]))
            samples.append(("hotrow_rows_following", labels, int(of["state"] in ("", "following"))))
        return samples

    def _why_not_ready(self) -> str:
        if self._server is None:
            return "loading"
        if self._stopped.is_set():
            return "shutting down"
        with self._lock:
            behind = [s for s in self.versions.values() if s.follower is not None and s.follower.state == "catching up"]
        return f"{behind[0].version.model} catches up with its bus" if behind else ""

    def _run_clock(self) -> None:
        while not self._stopped.wait(CLOCK_SECONDS):
            with suppress(ValueError):  # no version yet
                self._drop_unused()

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def run(options: RowServerOptions) -> int:
    """Run `hotrow rows` until SIGTERM or Ctrl-C; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    allow_many_files()
    _core.set_threads(1)  # the server's own threads answer lookups
    console, stop = Console(stderr=True), threading.Event()
    server = RowServerProcess(options, console)
    with StopSignals(lambda _: stop.set()):
        try:
            with console.status("loading rows") if console.is_terminal else nullcontext():
                server.start()
            console.print(f"[bold green]serving rows[/] of shards {options.shards[0]}:{options.shards[1]}")
            for address in server.addresses:
                console.print(f"  {address}", highlight=False)
            while not stop.wait(0.2):
                pass
        finally:
            server.stop()
    return 0


def main() -> int:
    """Run as a child of the supervisor: options on stdin, events on stdout; ends when stdin ends."""
    from hotrow.serve.processes.child_runtime import read_options, report_event

    given, supervisor = read_options()
    logging.basicConfig(level=logging.INFO, format="rows %(process)d: %(message)s", stream=sys.stderr)
    stop = threading.Event()
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        server = RowServerProcess(RowServerOptions(**given))
    except OptionError as error:
        report_event("failed", why=str(error))
        return 2

    def wait_for_end() -> None:
        for _ in supervisor:
            pass
        stop.set()

    threading.Thread(target=wait_for_end, name="hotrow-stdin", daemon=True).start()
    allow_many_files()
    _core.set_threads(1)
    with StopSignals(lambda _: stop.set()):
        try:
            server.start()
        except OptionError as error:
            report_event("failed", why=str(error))
            return 2
        report_event("ready", addresses=server.addresses)
        while not stop.wait(1.0):
            report_event("figures", **server.figures())
        server.stop()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
