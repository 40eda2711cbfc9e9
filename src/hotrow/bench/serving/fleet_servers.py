"""Servers of a fleet that are ended and started again on their ports: `hotrow rows`, `hotrow serve --rows`, nginx.

nginx runs with deploy/nginx.conf of the checkout. Only the ports, the servers and the paths differ, and the listener
speaks HTTP instead of TLS, so that the load costs less.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hotrow
from hotrow import child_process
from hotrow.bench.serving.serve_process import ServerError, ServerProcess
from hotrow.errors import OptionError

HOST = "127.0.0.1"
START_SECONDS = 300.0
NOBODY = 65534
NGINX = """
pid {folder}/nginx.pid;
error_log stderr warn;
worker_processes 1;
daemon off;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/hotrow.conf;
}}
"""


def steady_ports(count: int) -> list[int]:
    """Free ports below those that the kernel gives to outgoing connections, so that they stay free during a restart."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(15_000, 32_000)
        with suppress(OSError), socket.create_server((HOST, port)):
            if port not in found:
                found.append(port)
    return found


class Tower:
    """`hotrow serve --rows` on the same port at every start."""

    def __init__(self, repository: Path, rows: str, probe: bytes, *options: str) -> None:
        self.port, self.metrics = steady_ports(2)
        ports = ("--http", str(self.port), "--grpc", "-1", "--metrics", str(self.metrics))
        serve = (sys.executable, "-m", "hotrow", "serve", str(repository), "--rows", rows)
        self._command, self._probe = [*serve, *ports, "--no-compile", *options], probe
        self.server = self._new()

    def _new(self) -> ServerProcess:
        return ServerProcess("hotrow", self._command, self._probe, self.port)

    def __enter__(self) -> Tower:
        self.server.__enter__()
        return self

    def restart(self) -> None:
        """SIGTERM, and a new process when the old one has ended; returns when that one answers."""
        self.server.end()
        code = self.server.process.returncode if self.server.process is not None else 0
        if code:
            raise ServerError(f"a tower server ended with {code}: {self.server.text()[-2000:]}")
        self.server = self._new()
        self.server.__enter__()

    def __exit__(self, *_: object) -> None:
        self.server.end()

    def row_servers(self) -> dict[str, bool]:
        """The row servers' addresses, and whether it is connected to them."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.metrics}/metrics", timeout=30) as answer:
                text = answer.read().decode()
        except (OSError, urllib.error.URLError):
            return {}
        found = re.findall(r'^hotrow_row_server_up{.*server="([^"]*)".*} (\S+)$', text, re.M)
        return {address: float(up) > 0 for address, up in found}

    def wait_for_row_servers(self, count: int) -> None:
        """Until it is connected to that many."""
        until = time.monotonic() + START_SECONDS
        while sum(self.row_servers().values()) < count:
            if time.monotonic() > until:
                raise ServerError(f"a tower server is not connected to {count} row servers: {self.row_servers()}")
            time.sleep(0.1)


def check_nginx() -> tuple[str, Path]:
    """nginx, and the configuration for it."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not os.access(program, os.X_OK):
        raise OptionError("split/rolling needs nginx: apt-get install nginx")
    config = Path(hotrow.__file__).parents[2] / "deploy" / "nginx.conf"
    if not config.is_file():
        raise OptionError(f"split/rolling needs {config}: run it in a checkout of the repository")
    return program, config


def nginx_config(text: str, folder: Path, port: int, servers: Sequence[int]) -> str:
    """deploy/nginx.conf for these ports of servers over HTTP, without TLS."""
    text, listeners = re.subn(r"\n    listen [^;]*;", f"\n    listen {HOST}:{port};", text)
    text = re.sub(r"\n    ssl_[^;]*;", "", text.replace("/var/log/nginx/", f"{folder}/"))
    block = re.search(r"upstream hotrow_http {.*?\n}\n", text, re.S)
    if listeners != 1 or block is None:
        raise OptionError("deploy/nginx.conf must have one listener and an upstream hotrow_http")
    kinds = dict.fromkeys(re.findall(r"\n    server \S+ ([^;]*);", block[0]))
    bare = re.sub(r"\n    server [^;]*;", "", block[0])
    lines = "".join(f"    server {HOST}:{server} {kind};\n" for kind in kinds for server in servers)
    return text.replace(block[0], bare.replace("least_conn;\n", f"least_conn;\n{lines}"))


@contextmanager
def nginx(servers: Sequence[int]) -> Iterator[int]:
    """nginx in front of tower servers, never as root; its port."""
    program, config = check_nginx()
    folder = Path(tempfile.mkdtemp(prefix="hotrow-nginx-"))  # the user nobody can reach it
    (port,) = steady_ports(1)
    (folder / "hotrow.conf").write_text(nginx_config(config.read_text(), folder, port, servers))
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    if os.getuid() == 0:
        for path in (folder, *folder.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--pdeathsig=TERM"]
        command = ["setpriv", *user, *command]
    try:
        with open(folder / "output", "wb") as output:
            process = child_process.start(command, signal.SIGTERM, stdout=output, stderr=output, cwd="/")
        try:
            _wait_listening(process, port, folder / "output")
            yield port
        finally:
            process.terminate()
            process.wait(60)
    finally:
        shutil.rmtree(folder)


def _wait_listening(process: subprocess.Popen[Any], port: int, output: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection((HOST, port)):
            return
        time.sleep(0.05)
    raise ServerError(f"nginx did not start: {output.read_text(errors='replace')[-2000:]}")
