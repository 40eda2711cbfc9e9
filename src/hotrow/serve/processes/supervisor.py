"""The supervisor behind `hotrow serve`: it starts engines and front ends as processes, watches them, and ends them.

    engines (--processes)      models, rows, lanes            a Unix socket each
    front ends (--frontends)   HTTP, gRPC, metrics            the same ports, shared by SO_REUSEPORT

Order: ports are tried first (one in use is an error that names it, before a model is loaded), then engines load, then
front ends open; nobody can connect before there is something to answer. What dies is started again (child.py). At
the end (SIGTERM, Ctrl-C) front ends drain first, then engines, then it ends with 0. Sockets lie in a private temporary
folder. If the supervisor is killed, its children see their stdin end, and end.

The supervisor holds each port bound, without listening: a port stays ours while a front end starts again, and nobody
else's server can share it by chance.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from hotrow.errors import HotRowError, OptionError
from hotrow.serve.load_estimate import percentile
from hotrow.serve.processes.child import Child, end
from hotrow.serve.processes.mps import Mps
from hotrow.serve.processes.serve_options import PORTS, ServeOptions

POLL_SECONDS = 0.05


class Supervisor:
    """The supervisor. `run` is its life; it needs the main thread, for signals."""

    def __init__(self, options: ServeOptions, console: Console | None = None) -> None:
        self.options = options
        self.console = console or Console(stderr=True)
        self.folder = tempfile.mkdtemp(prefix="hotrow-serve-")
        self.engines: list[Child] = []
        self.frontends: list[Child] = []
        self.mps = Mps(self.folder)
        self.versions: dict[str, str] = {}
        self._stop = False
        self._held: list[socket.socket] = []
        self._status: Status | None = None
        self._speed = StatusLine()

    def run(self, ready: Callable[[dict[str, int]], None] = lambda ports: None) -> int:
        """Serve until SIGTERM or Ctrl-C; the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)
        try:
            ports = self._hold_ports()
            self._start(ports)
            if not self._stop:
                self._greet(ports)
                ready(ports)
            self._watch()
            return self._end()
        finally:
            if self._status is not None:
                self._status.stop()
            end([*self.frontends, *self.engines], 1.0)
            self.mps.stop()
            for held in self._held:
                held.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """End soon, as by SIGTERM."""
        self._stop = True

    def _told(self, number: int, _: object) -> None:
        self._stop = True

    # --- start ---

    def _hold_ports(self) -> dict[str, int]:
        ports = {}
        for name in PORTS:
            if (port := getattr(self.options, name)) is not None:
                held = hold_port(self.options.host, port, name)
                self._held.append(held)
                ports[name] = held.getsockname()[1]
        return ports

    def _start(self, ports: dict[str, int]) -> None:
        if self.options.hbm is not None and self.options.processes > 1:
            self._say(self.mps.start())
        for number in range(self.options.processes):
            told = asdict(self.options.engine(number, self._socket(number)))
            child = Child(f"engine {number}", "hotrow.serve.processes.engine_process", told, self._heard)
            child.environment = self.mps.environment
            self.engines.append(child)
            child.start()
        self._wait_for(self.engines)
        sockets = [self._socket(number) for number in range(self.options.processes)]
        for number in range(self.options.frontends):
            told = {"sockets": sockets, "options": asdict(self.options.front_end(ports, number == 0))}
            child = Child(f"front end {number}", "hotrow.serve.processes.frontend_process", told, self._heard)
            self.frontends.append(child)
            child.start()
        self._wait_for(self.frontends)

    def _wait_for(self, children: list[Child]) -> None:
        while not self._stop and not all(child.ready for child in children):
            for child in children:
                if child.failed is not None:
                    raise HotRowError(child.failed)
                self._tend(child)
            time.sleep(POLL_SECONDS)

    def _socket(self, number: int) -> str:
        return os.path.join(self.folder, f"engine-{number}.sock")

    # --- watch ---

    def _watch(self) -> None:
        shown = time.monotonic()
        while not self._stop:
            for child in (*self.engines, *self.frontends):
                self._tend(child)
            if time.monotonic() - shown >= 1.0:
                shown = time.monotonic()
                self._share_figures()
                if self._status is not None:
                    self._status.update(self._speed.line([child.figures for child in self.engines], self.versions))
            time.sleep(POLL_SECONDS)

    def _tend(self, child: Child) -> None:
        if (news := child.restart_if_due()) is not None:
            self._say(f"[yellow]{escape(news)}[/]")

    def _share_figures(self) -> None:
        """The front end with the metrics page learns what the others counted."""
        restarts = sum(child.restarts for child in self.engines)
        ours = [["hotrow_engine_restarts_total", restarts]]
        others = [child.figures["figures"] for child in self.frontends[1:] if child.figures]
        self.frontends[0].send({"others": [*others, ours]})

    def _heard(self, child: Child, said: dict[str, Any]) -> None:
        event = said.get("event")
        if event == "refused":
            self._say(f"[yellow]{child.name}: {escape(str(said['why']))}[/]")
        elif event == "stale":
            self._say(f"[bold red]{escape(said['model'])} is {said['age']:.1f} s old[/] {escape(str(said['why']))}")
        elif event == "fresh":
            self._say(f"{escape(said['model'])} is fresh again: {said['age']:.1f} s")
        elif event == "models":
            child.options["restore"] = said["versions"]  # its next life has what this one has
        elif event == "loaded":
            self.versions[said["model"]] = said["version"]
            self._say(f"{child.name}: model [bold]{escape(said['model'])}[/] version {escape(said['version'])}")
        elif event == "figures" and child in self.engines:
            self.versions.update({m["model"]: m["version"] for m in said["models"] if m["version"]})

    # --- end ---

    def _end(self) -> int:
        self._say("draining")
        patience = self.options.drain + 5.0
        good = end(self.frontends, patience)
        good = end(self.engines, patience) and good
        self._say("stopped" if good else "stopped; something did not end by itself in time")
        return 0 if good else 1

    # --- words ---

    def _greet(self, ports: dict[str, int]) -> None:
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        where = {"http": f"http://{host}", "grpc": f"grpc://{host}", "metrics": f"http://{host}"}
        ends = {"metrics": "/metrics"}
        models = ", ".join(f"{name} (version {version})" for name, version in sorted(self.versions.items())) or "none"
        self._say(f"[bold green]serving[/] {escape(models)}")
        for name, port in ports.items():
            self._say(f"  {name:<8}{where[name]}:{port}{ends.get(name, '')}")
        if self.console.is_terminal:
            self._status = self.console.status("waiting for requests")
            self._status.start()

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


class StatusLine:
    """What the engines did since the last line, in words."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float, float, list[int]] | None = None

    def line(self, figures: list[dict[str, Any]], versions: dict[str, str]) -> str:
        """One line for a terminal."""
        found = [f for f in figures if f]
        queue = [f["queue"] for f in found]
        latency = [sum(counts) for counts in zip(*[f["latency"] for f in found], strict=True)]
        now = (
            time.monotonic(),
            float(sum(q["admitted"] for q in queue)),
            float(sum(q["batches"] for q in queue)),
            float(sum(q["batch_rows"] for q in queue)),
            latency,
        )
        before, self._before = self._before, now
        models = "  ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        if before is None or len(before[4]) != len(latency) or now[1] < before[1]:
            return models
        seconds, requests, batches, rows = (a - b for a, b in zip(now[:4], before[:4], strict=True))
        recent = [max(0, a - b) for a, b in zip(latency, before[4], strict=True)]
        return (
            f"{models}  ·  {requests / seconds:,.0f} requests/s  ·  p99 {percentile(recent, 0.99) * 1e3:.1f} ms  ·  "
            f"{rows / max(1.0, batches):,.0f} rows a batch{_freshness(found, versions)}"
        )


def _freshness(figures: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The publication and the age of the models that follow a bus, for the status line."""
    words = []
    for name, version in sorted(versions.items()):
        parts = [v for f in figures for v in f["versions"] if (v["model"], v["version"]) == (name, version)]
        if not any(part["freshness"]["follower"] for part in parts):
            continue
        ages = [part["freshness"]["age"] for part in parts if part["freshness"]["age"] is not None]
        states = {part["freshness"]["follower"]["state"] for part in parts if part["freshness"]["follower"]}
        told = [f"publication {min(part['publication'] for part in parts)}"]
        told += [f"{max(ages):.1f} s old"] if ages else []
        told += sorted(states - {"following"})
        words.append(f"  ·  {name}: {', '.join(told)}" if len(versions) > 1 else f"  ·  {', '.join(told)}")
    return "".join(words)


def hold_port(host: str, port: int, name: str) -> socket.socket:
    """Bind a port without listening, so that front ends may share it and nobody else takes it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port:
            with socket.socket(family) as alone:  # without SO_REUSEPORT: fails if anybody has it
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                alone.bind((host, port))
                alone.listen(1)
        held = socket.socket(family)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"--{name} {port}: cannot listen on {host}:{port} ({error}); stop what listens there, or give another port"
        ) from error
    return held


def serve(options: ServeOptions) -> int:
    """What `hotrow serve` does."""
    with suppress(KeyboardInterrupt):
        return Supervisor(replace(options, repository=os.path.abspath(options.repository))).run()
    return 0
