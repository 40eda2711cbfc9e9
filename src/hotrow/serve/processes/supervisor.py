"""Supervisor: `hotrow serve`. It starts engines and front ends as processes, restarts them when they die, ends them.

    row server                 rows, if several engines share them; one, in shared memory
    engines (--devices,        models, rows, lanes            a Unix socket each
     --processes for each)
    front ends (--frontends)   HTTP, gRPC, metrics            the same ports, shared by SO_REUSEPORT

At the start the supervisor binds the ports (a port in use is an error before a model is loaded), then engines load
their models, then front ends listen: no client can connect before the server can answer. A child that dies is restarted
(child.py). On SIGTERM or Ctrl-C the front ends drain, then the engines, and the supervisor exits with 0. Sockets are in
a private temporary folder. If the supervisor is killed, its children read end-of-file on stdin and end.

The supervisor keeps each port bound, without listening. So the port stays reserved while a front end restarts, and no
other server can share it by accident.
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
from hotrow.serve.processes.child import Child, stop_all
from hotrow.serve.processes.devices import Device, describe, shared_gpus
from hotrow.serve.processes.mps import Mps
from hotrow.serve.processes.serve_options import PORTS, ServeOptions
from hotrow.serve.processes.status_line import StatusLine

POLL_SECONDS = 0.05
_OF_ENGINE = {  # a figure of an engine's queue → the metric with the labels engine and device
    "admitted": "hotrow_engine_requests_total",
    "batch_rows": "hotrow_engine_rows_total",
    "queue_rows": "hotrow_engine_rows_in_flight",
}


class Supervisor:
    """Runs the server's processes. `run` must be called on the main thread, because it handles signals."""

    def __init__(self, options: ServeOptions, console: Console | None = None) -> None:
        self.options = options
        self.console = console or Console(stderr=True)
        self.folder = tempfile.mkdtemp(prefix="hotrow-serve-")
        self.engines: list[Child] = []
        self.frontends: list[Child] = []
        self.row_servers: list[Child] = []  # one, if engines share their rows
        self.mps: dict[str, Mps] = {}  # by the device whose engines share it
        self.versions: dict[str, str] = {}
        self._stop = False
        self._held_ports: list[socket.socket] = []
        self._status: Status | None = None
        self._status_line = StatusLine()

    def run(self, ready: Callable[[dict[str, int]], None] = lambda ports: None) -> int:
        """Serve until SIGTERM or Ctrl-C; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        try:
            ports = self._hold_ports()
            self._start(ports)
            if not self._stop:
                self._print_addresses(ports)
                ready(ports)
            self._watch()
            return self._end()
        finally:
            if self._status is not None:
                self._status.stop()
            stop_all([*self.frontends, *self.engines, *self.row_servers], 1.0)
            for mps in self.mps.values():
                mps.stop()
            for held in self._held_ports:
                held.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """End as on SIGTERM."""
        self._stop = True

    def _on_signal(self, number: int, _: object) -> None:
        self._stop = True

    # --- start ---

    def _hold_ports(self) -> dict[str, int]:
        ports = {}
        for name in PORTS:
            if (port := getattr(self.options, name)) is not None:
                held = hold_port(self.options.host, port, name)
                self._held_ports.append(held)
                ports[name] = held.getsockname()[1]
        return ports

    def _start(self, ports: dict[str, int]) -> None:
        devices = self.options.engine_devices
        for line in describe(self.options.placement, devices):
            self._print(escape(line))
        if len(devices) > 1 and not self.options.rows:
            self._print(self._where_rows_are())
        shared = self._start_row_server() if self.options.shares_rows else None
        self._start_mps()
        for number, device in enumerate(devices):
            options = asdict(self.options.engine(number, self._socket(number), shared))
            name = f"engine {number}" if device.gpu is None else f"engine {number} on {device.name}"
            child = Child(name, "hotrow.serve.processes.engine_process", options, self._on_event)
            child.environment = dict(device.environment)  # of every start: a restarted engine has the same device
            if device.name in self.mps:
                child.environment.update(self.mps[device.name].environment)
            self.engines.append(child)
            child.start()
        self._wait_for(self.engines)
        sockets = [self._socket(number) for number in range(len(devices))]
        for number in range(self.options.frontends):
            options = {"sockets": sockets, "options": asdict(self.options.front_end(ports, number == 0))}
            child = Child(f"front end {number}", "hotrow.serve.processes.frontend_process", options, self._on_event)
            self.frontends.append(child)
            child.start()
        self._wait_for(self.frontends)

    def _where_rows_are(self) -> str:
        """For several engines that hold rows: whether each has its own."""
        dram = "all of them in DRAM" if self.options.dram is None else f"--dram {self.options.dram}"
        if self.options.shares_rows:
            return f"the engines share the rows of one row server: {dram}"
        return f"each engine has its own copy of the rows: {dram}{'' if self.options.dram is None else ' each'}"

    def _start_row_server(self) -> str:
        """Start the row server that all engines share; returns its socket."""
        socket = os.path.join(self.folder, "rows.sock")
        options = self.options.row_server(socket)
        child = Child("row server", "hotrow.serve.rows.row_server_process", options, self._on_event)
        child.environment = Device().environment  # no GPU
        self.row_servers.append(child)
        child.start()
        self._wait_for(self.row_servers)
        return socket

    def _start_mps(self) -> None:
        """Start an MPS for each GPU with several engines. One that runs already is for all GPUs."""
        for device in shared_gpus(self.options.engine_devices):
            assert device.gpu is not None
            mps = self.mps[device.name] = Mps(os.path.join(self.folder, f"gpu-{device.gpu.index}"), device.gpu.uuid)
            self._print(f"{device.name}: {escape(mps.start())}")

    def _wait_for(self, children: list[Child]) -> None:
        while not self._stop and not all(child.ready for child in children):
            for child in children:
                if child.failed is not None:
                    raise HotRowError(child.failed)
                self._restart_if_due(child)
            time.sleep(POLL_SECONDS)

    def _socket(self, number: int) -> str:
        return os.path.join(self.folder, f"engine-{number}.sock")

    # --- watch ---

    def _watch(self) -> None:
        shown = time.monotonic()
        devices = [device.name for device in self.options.engine_devices]
        while not self._stop:
            for child in (*self.row_servers, *self.engines, *self.frontends):
                self._restart_if_due(child)
            if time.monotonic() - shown >= 1.0:
                shown = time.monotonic()
                self._share_figures()
                if self._status is not None:
                    self._status.update(
                        self._status_line.line([child.figures for child in self.engines], self.versions, devices)
                    )
            time.sleep(POLL_SECONDS)

    def _restart_if_due(self, child: Child) -> None:
        if (message := child.restart_if_due()) is not None:
            self._print(f"[yellow]{escape(message)}[/]")

    def _share_figures(self) -> None:
        """Send the figures of the others to the front end with the metrics page."""
        ours: list[list[Any]] = [["hotrow_engine_restarts_total", sum(child.restarts for child in self.engines)]]
        for number, (child, device) in enumerate(zip(self.engines, self.options.engine_devices, strict=True)):
            labels = (str(number), device.name)
            ours.append(["hotrow_engine_up", *labels, float(child.alive and child.ready)])
            queue = child.figures.get("queue", {})
            ours += [[metric, *labels, queue[name]] for name, metric in _OF_ENGINE.items() if name in queue]
        others = [child.figures["figures"] for child in self.frontends[1:] if child.figures]
        self.frontends[0].send({"others": [*others, ours]})

    def _on_event(self, child: Child, content: dict[str, Any]) -> None:
        event = content.get("event")
        if event == "refused":
            self._print(f"[yellow]{child.name}: {escape(str(content['why']))}[/]")
        elif event == "stale":
            self._print(
                f"[bold red]{escape(content['model'])} is {content['age']:.1f} s old[/] {escape(str(content['why']))}"
            )
        elif event == "fresh":
            self._print(f"{escape(content['model'])} is fresh again: {content['age']:.1f} s")
        elif event == "failed" and child.restarts:  # at the first start it is the server's error
            self._print(f"[yellow]{child.name}: {escape(str(content['why']))}[/]")
        elif event == "models":
            child.options["restore"] = content["versions"]  # loaded after a restart
            child.options["restore_releases"] = content["releases"]
        elif event == "loaded":
            self.versions[content["model"]] = content["version"]
            self._print(f"{child.name}: model [bold]{escape(content['model'])}[/] version {escape(content['version'])}")
        elif event == "figures" and child in self.engines:
            self.versions.update({m["model"]: m["version"] for m in content["models"] if m["version"]})

    # --- end ---

    def _end(self) -> int:
        self._print("draining")
        timeout = self.options.drain + 5.0
        clean = stop_all(self.frontends, timeout)
        clean = stop_all(self.engines, timeout) and clean
        clean = stop_all(self.row_servers, timeout) and clean
        self._print("stopped" if clean else "stopped; something did not end by itself in time")
        return 0 if clean else 1

    # --- output ---

    def _print_addresses(self, ports: dict[str, int]) -> None:
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        where = {"http": f"http://{host}", "grpc": f"grpc://{host}", "metrics": f"http://{host}"}
        ends = {"metrics": "/metrics"}
        models = ", ".join(f"{name} (version {version})" for name, version in sorted(self.versions.items())) or "none"
        self._print(f"[bold green]serving[/] {escape(models)}")
        for name, port in ports.items():
            self._print(f"  {name:<8}{where[name]}:{port}{ends.get(name, '')}")
        if self.console.is_terminal:
            self._status = self.console.status("waiting for requests")
            self._status.start()

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def hold_port(host: str, port: int, name: str) -> socket.socket:
    """Bind a port without listening, so that front ends can share it and no other program can take it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if port:
            with socket.socket(family) as exclusive:  # without SO_REUSEPORT: fails if another program has the port
                exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                exclusive.bind((host, port))
                exclusive.listen(1)
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
    """Run `hotrow serve`; returns the exit code."""
    with suppress(KeyboardInterrupt):
        return Supervisor(replace(options, repository=os.path.abspath(options.repository))).run()
    return 0
