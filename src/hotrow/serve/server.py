"""The supervisor behind `hotrow serve`: it starts engines and front ends as processes, watches them, and ends them.

    engines (--processes)      models, rows, lanes            a Unix socket each
    front ends (--frontends)   HTTP, gRPC, metrics            the same ports, shared by SO_REUSEPORT

Order: ports are tried first (one in use is an error that names it, before a model is loaded), then engines load, then
front ends open; nobody can connect before there is something to answer. What dies is started again (processes.py). At
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from hotrow.config import parse_size
from hotrow.errors import OptionError, choices
from hotrow.publish.bus import SCHEMES
from hotrow.serve.load import percentile
from hotrow.serve.mps import Mps
from hotrow.serve.processes import Child, end
from hotrow.serve.request import POLICIES
from hotrow.table.remote_plan import is_local, named
from hotrow.tiers.remote import SCHEMES as REMOTE_SCHEMES

POLL_SECONDS = 0.05
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True)
class ServeOptions:
    """The options of `hotrow serve`. Sizes are as a person writes them; times in seconds."""

    repository: str
    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    http: int | None = 8000
    grpc: int | None = 8001
    metrics: int | None = 8002
    lanes: int = 1
    threads: int | None = None  # of each lane; None shares the cores
    processes: int = 1
    frontends: int = 1
    dram: str | None = None
    ssd: str | None = None
    hbm: str | None = None
    deadline: float | None = None  # None: the version's
    policy: str | None = None  # likewise
    compile: bool = True
    artifacts: str | None = None  # the folder of compiled buckets; None: the user's cache
    precision: str = "fp32"  # of towers on a GPU
    max_batch: int = 1024  # rows
    max_wait: float = 0.002
    poll: float = 0.0
    bus: tuple[str, ...] = ()  # addresses, or model=address
    remote: tuple[str, ...] = ()  # likewise
    stale_after: float | None = None
    token: str | None = None
    drain: float = 10.0
    loader: str | None = None
    limits: dict[str, Any] = field(default_factory=dict)  # the front ends', limits.py

    def __post_init__(self) -> None:
        if not os.path.isdir(self.repository):
            raise OptionError(
                f"there is no repository {self.repository!r}; export a model into it: hr.export(model, "
                f"'{self.repository}/ctr')"
            )
        for name in ("lanes", "processes", "frontends", "max_batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"--{name.replace('_', '-')} {getattr(self, name)}: give 1 or more")
        for name in ("deadline", "drain"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise OptionError(f"--{name} {getattr(self, name)}: give seconds above 0")
        if self.precision not in PRECISIONS:
            raise OptionError(f"--precision {self.precision}: {choices(self.precision, PRECISIONS)}")
        if self.policy is not None and self.policy not in POLICIES:
            raise OptionError(f"--policy {self.policy}: {choices(self.policy, POLICIES)}")
        for name in ("dram", "hbm"):
            if (size := getattr(self, name)) is not None:
                parse_size(size, name)
        if self.stale_after is not None and not (self.stale_after > 0 and self.bus):
            raise OptionError(
                f"--stale-after {self.stale_after:g}s: give seconds above 0, and the bus that the model follows (--bus)"
            )
        self.buses()
        self.remotes()
        if self.remote and self.dram is None:
            raise OptionError("--remote without --dram: say how much memory the cache over it may take: --dram 4GiB")
        for name in ("ssd", "hbm"):
            if self.remote and getattr(self, name) is not None:
                raise OptionError(
                    f"--{name} with --remote: over a remote store DRAM is the cache; leave one of them out"
                )
        if self.processes > 1 and any(is_local(url) for url in self.remotes().values()):
            raise OptionError(
                f"--remote rocksdb:... with --processes {self.processes}: RocksDB lets one process open a folder; use "
                "more --lanes instead"
            )
        if self.ssd is not None and self.dram is None:
            raise OptionError("--ssd without --dram: say how much memory rows may take, such as --dram 4GiB")

    def buses(self) -> dict[str, str]:
        """The bus of each model that follows one. An address without a model is for the only one there is."""
        return self._by_model("bus", self.bus, SCHEMES, "dir:/data/publications")

    def remotes(self) -> dict[str, str]:
        """The remote store of each model that has one; likewise."""
        return self._by_model("remote", self.remote, REMOTE_SCHEMES, "redis://10.0.0.1:6379")

    def _by_model(self, option: str, all_given: Sequence[str], schemes: Sequence[str], example: str) -> dict[str, str]:
        from hotrow.serve.repository import Repository

        found: dict[str, str] = {}
        names = list(self.models) or Repository(self.repository).models() if all_given else []
        for given in all_given:
            name, _, address = given.partition("=")
            if ":" in name or not address:
                name, address = "", given
            shown = f"--{option} {name + '=' if name else ''}{named(address)}"
            if not name:
                if len(names) != 1:
                    raise OptionError(
                        f"{shown}: the repository has {', '.join(names) or 'no model'}; say which model follows it, "
                        f"such as --{option} ctr={example}"
                    )
                name = names[0]
            elif name not in names:
                raise OptionError(f"{shown}: there is no model {name!r}; {choices(name, names)}")
            if name in found:
                raise OptionError(f"{shown}: model {name!r} follows {named(found[name])} already")
            if address.partition(":")[0] not in schemes:
                raise OptionError(f"{shown}: {choices(address.partition(':')[0], schemes)}, such as {example}")
            found[name] = address
        return found

    def lane_threads(self) -> int:
        """Of each lane: what it was told, or its share of the cores. Front ends get cores of their own where there are
        more than four; with fewer, a lane that uses them all is faster (2,400 against 2,150 requests/s on two)."""
        if self.threads is not None:
            return max(1, self.threads)
        cores = len(os.sched_getaffinity(0))
        return max(1, (cores - self.frontends if cores > 4 else cores) // (self.lanes * self.processes))


class Server:
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
        self._speed = Speed()

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
        for name in ("http", "grpc", "metrics"):
            if (port := getattr(self.options, name)) is not None:
                held = hold_port(self.options.host, port, name)
                self._held.append(held)
                ports[name] = held.getsockname()[1]
        return ports

    def _start(self, ports: dict[str, int]) -> None:
        if self.options.hbm is not None and self.options.processes > 1:
            self._say(self.mps.start())
        for number in range(self.options.processes):
            options = self._engine_options(number)
            child = Child(f"engine {number}", "hotrow.serve.engine_process", options, self._heard)
            child.environment = self.mps.environment
            self.engines.append(child)
            child.start()
        self._wait_for(self.engines)
        for number in range(self.options.frontends):
            options = self._frontend_options(ports, number)
            child = Child(f"front end {number}", "hotrow.serve.frontend_process", options, self._heard)
            self.frontends.append(child)
            child.start()
        self._wait_for(self.frontends)

    def _wait_for(self, children: list[Child]) -> None:
        while not self._stop and not all(child.ready for child in children):
            for child in children:
                if child.failed is not None:
                    raise OptionError(child.failed)
                self._tend(child)
            time.sleep(POLL_SECONDS)

    def _engine_options(self, number: int) -> dict[str, Any]:
        options = self.options
        tiers = {name: value for name in ("dram", "ssd", "hbm") if (value := getattr(options, name)) is not None}
        if "ssd" in tiers and options.processes > 1:
            tiers["ssd"] = os.path.join(tiers["ssd"], f"engine-{number}")
        says = {
            "socket": self._socket(number),
            "repository": options.repository,
            "models": list(options.models),
            "stale_after": options.stale_after,
            "options": {
                **tiers,
                "bus": options.buses(),
                "remote": options.remotes(),
                "compile": options.compile,
                "artifacts": options.artifacts,
                "precision": options.precision,
                "lanes": options.lanes,
                "threads": options.lane_threads(),
            },
            "lanes": options.lanes,
            "threads": options.lane_threads(),
            "policy": options.policy,
            "max_rows": options.max_batch,
            "max_wait": options.max_wait,
            "deadline": options.deadline,
            "poll": options.poll,
            "drain": options.drain,
        }
        return says if options.loader is None else {**says, "loader": options.loader}

    def _frontend_options(self, ports: dict[str, int], number: int) -> dict[str, Any]:
        return {
            "sockets": [self._socket(engine) for engine in range(self.options.processes)],
            "limits": self.options.limits,
            "options": {
                "host": self.options.host,
                "http_port": ports.get("http"),
                "grpc_port": ports.get("grpc"),
                "metrics_port": ports.get("metrics") if number == 0 else None,  # one page has the figures of all
                "token": self.options.token,
                "drain_seconds": self.options.drain,
                "reuse_port": True,
            },
        }

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
        if (news := child.tend()) is not None:
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


class Speed:
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
        return Server(replace(options, repository=os.path.abspath(options.repository))).run()
    return 0
