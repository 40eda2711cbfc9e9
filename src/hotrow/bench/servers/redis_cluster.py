"""Redis servers on this machine, for benchmarks and tests: one server, or a cluster of masters and replicas.

They listen on free loopback ports, keep nothing on disk, and end with the `with` block, or with this process.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any

from hotrow import child_process
from hotrow.errors import OptionError, StorageError
from hotrow.tiers.remote.redis_connection import Connection, NodeAccess, Reply, ReplyError, command

HOST = "127.0.0.1"
SLOTS = 16384
START = 20.0  # seconds, on a busy machine


def installed() -> bool:
    """Whether redis-server is installed."""
    return shutil.which("redis-server") is not None


def free_ports(count: int) -> list[int]:
    """Ports that are free at this moment."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Server:
    """One redis-server process."""

    def __init__(
        self, folder: str, port: int, options: list[str], access: NodeAccess | None = None, tls: bool = False
    ) -> None:
        self.port = port
        self.access = access or NodeAccess()
        where = ["--port", "0", "--tls-port", str(port)] if tls else ["--port", str(port)]
        fixed = ["--bind", HOST, "--dir", folder, "--save", "", "--appendonly", "no", "--logfile", f"{port}.log"]
        self.arguments = ["redis-server", *where, *fixed, *options]
        self.process: subprocess.Popen[Any] | None = None
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self.process = child_process.start(self.arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: self.call("PING") == b"PONG", f"redis-server on port {self.port} to answer")

    def call(self, *parts: bytes | str | int, timeout: float = 5.0) -> Reply:
        """The reply to one command; raises if it is an error."""
        connection = Connection(HOST, self.port, self.access, timeout)
        try:
            reply = connection.call([command(*parts)], time.monotonic() + timeout)[0]
        finally:
            connection.close()
        if isinstance(reply, ReplyError):
            raise reply
        return reply

    def pause(self) -> None:
        """SIGSTOP: the kernel still accepts connections, but the server never answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class RedisServers:
    """One server, or with `masters` a cluster with `replicas` of each."""

    def __init__(self, masters: int = 0, replicas: int = 0, options: list[str] | None = None, **access: Any) -> None:
        if not installed():
            raise OptionError("there is no redis-server to start; install it: apt-get install redis-server")
        self.folder = tempfile.mkdtemp(prefix="hotrow-redis-")
        self.servers: list[Server] = []
        try:
            count = max(1, masters * (1 + replicas))
            ports = free_ports(2 * count)
            for port, bus in zip(ports[::2], ports[1::2], strict=True):
                more = list(options or [])
                if masters:
                    more += ["--cluster-enabled", "yes", "--cluster-config-file", f"{port}.conf"]
                    more += ["--cluster-port", str(bus), "--cluster-node-timeout", "1500"]
                    more += ["--repl-diskless-sync-delay", "0", "--cluster-require-full-coverage", "no"]
                self.servers.append(Server(self.folder, port, more, **access))
            if masters:
                self._join(masters, ports)
        except BaseException:
            self.close()
            raise

    def _join(self, masters: int, ports: list[int]) -> None:
        for number, server in enumerate(self.servers):
            server.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for number, server in enumerate(self.servers[:masters]):
            first, last = (SLOTS * at // masters for at in (number, number + 1))
            server.call("CLUSTER", "ADDSLOTSRANGE", first, last - 1)
        for port, bus in zip(ports[2::2], ports[3::2], strict=True):
            self.servers[0].call("CLUSTER", "MEET", HOST, port, bus)
        nodes = len(self.servers)
        until(
            lambda: all(f"cluster_known_nodes:{nodes}\r" in _text(s.call("CLUSTER", "INFO")) for s in self.servers),
            "the nodes to know each other",
        )
        for number, server in enumerate(self.servers[masters:]):
            server.call("CLUSTER", "REPLICATE", self.id(self.servers[number % masters]))
        until(lambda: all(self.ready(server) for server in self.servers), "the cluster to be ready")
        if nodes > masters:
            each = (nodes - masters) // masters
            until(
                lambda: all(server.call("WAIT", each, 100) == each for server in self.servers[:masters]),
                "the replicas to follow",
            )

    @staticmethod
    def id(server: Server) -> bytes:
        """A node's name in its cluster."""
        name: bytes = server.call("CLUSTER", "MYID")
        return name

    @staticmethod
    def ready(server: Server) -> bool:
        """Whether the server knows the owner of every slot."""
        info = _text(server.call("CLUSTER", "INFO"))
        return "cluster_state:ok" in info and f"cluster_slots_ok:{SLOTS}" in info

    @property
    def url(self) -> str:
        """The address for `remote=`."""
        if len(self.servers) == 1:
            return f"redis://{HOST}:{self.servers[0].port}"
        return "redis+cluster://" + ",".join(f"{HOST}:{server.port}" for server in self.servers)

    def close(self) -> None:
        """Kill all servers and remove their folder."""
        for server in self.servers:
            server.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RedisServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def until(condition: Any, what: str, seconds: float = START) -> None:
    """Wait until `condition` holds; raise after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except (OSError, ReplyError):
            pass
        if time.monotonic() > deadline:
            raise StorageError(f"waited {seconds:g} s for {what}")
        time.sleep(0.02)


def _text(reply: Reply) -> str:
    text: str = reply.decode()
    return text
