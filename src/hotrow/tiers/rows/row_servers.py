"""RowServers: a tower server's connections to its row servers.

One thread for each server connects, proves the token and learns the server's shards. Then it pings the server every 50
ms; a ping that takes longer than a second, or a broken connection, closes all connections of that server, so lookups
go to a replica at once. The thread connects again with a pause of 0.1 to 0.5 s. A server on the same machine is read
through shared memory: the welcome names its local socket.

One more thread reads the list of servers again where it can change (cluster_file.py). A server that is new in the list
is connected. One that has left the list is kept until the listed servers have all shards, and its connections for some
seconds more, for batches that began before. A list that cannot be read changes nothing.

`lookup` runs on the caller's thread, in the core (core/rowserver/row_client.h), and takes any number of callers.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from hotrow import _core
from hotrow.backoff import Backoff
from hotrow.credentials import public
from hotrow.errors import ClosedError, HotRowError, StorageError
from hotrow.tiers.rows.client import POOLINGS, PooledFeature
from hotrow.tiers.rows.cluster_file import WIRES, RowsAddress, Shards, socket_path
from hotrow.tiers.rows.handshake import LOADING, NOT_LOADED, HandshakeError, Model, Welcome, greet, token_key
from hotrow.tiers.rows.topology import Topology

log = logging.getLogger(__name__)

PING_SECONDS = 0.05  # between two pings
ANSWER_SECONDS = 1.0  # that a ping may take
CONNECT_SECONDS = 2.0  # that connecting and each step of the handshake may take
FIRST_RETRY, LONGEST_RETRY = 0.1, 0.5  # a rolling restart ends the next server soon after this one is back
LEFT_SECONDS = 10.0  # that connections are kept to a server that has left the list
CLOSE_SECONDS = 10.0  # that `close` waits for lookups in progress
CHECK_SECONDS = 0.2  # between two looks at the servers' problems
READ_AGAIN_SECONDS = 1.0  # between two reads of the list of servers
LINKS = 8  # connections to each server: one for each lookup in progress, and for hedges
DESCRIPTORS = 64  # most that a local server sends
LOCAL_HOSTS = ("127.0.0.1", "localhost", "[::1]", "::1")


class LookupResult(NamedTuple):
    """Which ranges are late and why, and what the lookup cost."""

    late: list[int]
    errors: list[str]
    bytes: int
    hedges: int
    hedges_won: int
    retries: int


@dataclass
class _Server:
    """One server: its thread's state."""

    address: str
    number: int
    expected: Shards | None
    shards: Shards | None = None  # while connected
    problem: str = "not connected yet"
    listed: bool = True
    local: bool = False
    control: socket.socket | None = None  # of a local server: its end is the server's
    thread: threading.Thread | None = None


class RowServers:
    """The row servers of one model's version. `dims` are its tables' dims, in order."""

    def __init__(self, address: RowsAddress, model: Model, dims: Sequence[int], links: int = LINKS) -> None:
        self.address, self.model, self.links = address, model, links
        self.client = _core.RowClient(list(dims), WIRES[address.wire], address.hedges)
        self.counters = dict.fromkeys(
            ("lookups", "keys", "pooled", "late", "bytes", "hedges", "hedges_won", "retries"), 0
        )
        self.problem = ""  # of the list of servers
        self._key = token_key(address.token)
        self._lock = threading.Lock()  # guards the servers, the topology's making and the counters
        self._changed = threading.Condition(self._lock)
        self._servers: dict[str, _Server] = {}
        self._left: list[_Server] = []  # that have left the list; batches may still read from them
        self._lookups = 0  # in progress
        self._closed = False
        self._stop = threading.Event()
        self.topology = Topology.of({})
        self._update_list(self._first_list())
        self._watcher: threading.Thread | None = None
        if address.changes:
            self._watcher = threading.Thread(target=self._watch_list, name="hotrow-rows-list", daemon=True)
            self._watcher.start()

    # --- what lanes call ---

    def lookup(
        self,
        topology: Topology,
        tables: Sequence[int],
        counts: Sequence[Sequence[int]],
        keys: Tensor,
        publication: int,
        seconds: float,
        out: Tensor,
        found: Tensor | None = None,
        pooled: Sequence[PooledFeature] = (),
    ) -> LookupResult:
        """Read rows into `out`, float32. `keys` (int64) are sorted by range of the topology, then by table; `counts`
        has their number by range and table. `pooled` features get their vectors from the only range."""
        address = 0 if found is None else found.data_ptr()
        addresses = [
            (
                f.table,
                POOLINGS[f.pooling],
                f.ids.size,
                f.ids.offsets.data_ptr(),
                f.ids.values.data_ptr(),
                f.vectors.data_ptr(),
            )
            for f in pooled
            if f.ids.offsets is not None
        ]
        with self._lock:
            if self._closed:
                raise ClosedError("the connections to the row servers are closed; make a new hr.Engine")
            self._lookups += 1
        try:
            result = LookupResult(
                *self.client.lookup(
                    topology.servers,
                    tables,
                    counts,
                    keys.data_ptr(),
                    publication,
                    seconds,
                    out.data_ptr(),
                    address,
                    addresses,
                )
            )
        finally:
            with self._changed:
                self._lookups -= 1
                if self._closed:
                    self._changed.notify_all()
        with self._lock:
            counters = self.counters
            counters["lookups"] += 1
            counters["keys"] += keys.numel() + sum([feature.ids.values.numel() for feature in pooled])
            counters["pooled"] += len(pooled)
            counters["late"] += sum([sum(counts[number]) for number in result.late])
            for name in ("bytes", "hedges", "hedges_won", "retries"):
                counters[name] += getattr(result, name)
        return result

    # --- what the engine asks ---

    def wait_until_complete(self, seconds: float) -> None:
        """Wait until every shard has a server; raise StorageError, with each server's problem, if one has none.

        The time begins again while a server loads the version. A server of this machine that cannot load it is not
        waited for: others may get the version later, but this one's repository is ours.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while self.topology.missing:
                problems = [server.problem for server in self._servers.values() if server.shards is None]
                if any(problem.endswith(LOADING) for problem in problems):
                    deadline = time.monotonic() + seconds
                alone = all(address.startswith("unix:") for address in self._servers) and not self.address.changes
                refused = alone and all(NOT_LOADED in problem for problem in problems)
                left = deadline - time.monotonic()
                if refused or left <= 0:
                    raise StorageError(self.describe_problems())
                self._changed.wait(min(left, CHECK_SECONDS))

    def wait_for(self, publication: int, seconds: float) -> bool:
        """Wait until each range has a server with this publication; returns whether that is so."""
        deadline = time.monotonic() + seconds
        while not self._stop.is_set():
            if self.newest_everywhere >= publication:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(PING_SECONDS / 5)
        return False

    @property
    def newest_everywhere(self) -> int:
        """The newest publication that each range has on some server, as of their last answers; -1 if one has none."""
        servers = self.topology.servers
        return min([max([self._publication(n) for n in numbers], default=-1) for numbers in servers], default=-1)

    def can_read(self, publication: int) -> bool:
        """Whether each range has a server whose history reaches back to this publication, as of their last answers."""
        servers = self.topology.servers
        return all(any(self.client.server(n)["oldest"] <= publication for n in numbers) for numbers in servers)

    def _publication(self, number: int) -> int:
        return int(self.client.server(number)["publication"])

    def describe_problems(self) -> str:
        """Which shards have no server, and why, with the cure."""
        with suppress(RuntimeError):
            missing = ", ".join(f"{begin}:{end}" for begin, end in self.topology.missing)
            servers = list(self._servers.values())
            why = "; ".join(f"{s.address}: {s.problem}" for s in servers if s.shards is None)
            if self.problem or not servers:
                why = self.problem or f"{public(self.address.where)} names no server"
            listed = f" ({why})" if why else ""
            return (
                f"no row server has the shards {missing} of model {self.model.name!r} version {self.model.version}"
                f"{listed}; start one with `hotrow rows REPOSITORY --shards {missing.split(',')[0]} --listen HOST:PORT`"
            )
        return "the list of row servers is changing"

    def figures(self) -> dict[str, Any]:
        """For metrics: counters, and the state of each server."""
        with self._lock:
            counters = dict(self.counters)
            servers = list(self._servers.values())
        states = {server.address: self.client.server(server.number) for server in servers}
        return {
            **counters,
            "up": int(not self.topology.missing),
            "ranges": len(self.topology.servers),
            "ranges_up": sum(bool(numbers) for numbers in self.topology.servers),
            "publication": self.newest_everywhere,
            "hedge_seconds": self.client.hedge_seconds,
            "servers": {
                server.address: {
                    "up": int(server.shards is not None),
                    "shards": "" if server.shards is None else f"{server.shards[0]}:{server.shards[1]}",
                    "local": int(server.local),
                    "problem": server.problem,
                    **{
                        name: states[server.address][name] for name in ("publication", "in_flight", "seconds", "errors")
                    },
                }
                for server in servers
            },
        }

    def close(self) -> None:
        """Let lookups in progress end, and close all connections. Later lookups raise ClosedError."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._lookups, CLOSE_SECONDS)
        self._stop.set()
        servers = [*self._servers.values(), *self._left]
        for server in servers:
            self._close_server(server)
        for server in servers:
            if server.thread is not None and server.thread is not threading.current_thread():
                server.thread.join(5.0)

    # --- the list of servers ---

    def _first_list(self) -> dict[str, Shards | None]:
        try:
            return self.address.servers()
        except StorageError as error:  # DNS or Redis may come later
            self.problem = str(error)
            return {}

    def _watch_list(self) -> None:
        while not self._stop.wait(READ_AGAIN_SECONDS):
            try:
                self._update_list(self.address.servers())
                self.problem = ""
            except (HotRowError, OSError) as error:  # the list in use stays
                if str(error) != self.problem:
                    log.warning("the list of row servers cannot be read: %s", error)
                self.problem = str(error)

    def _update_list(self, listed: dict[str, Shards | None]) -> None:
        with self._lock:
            for server in self._servers.values():
                server.listed = server.address in listed
            for address, expected in listed.items():
                known = self._servers.get(address)
                if known is not None:
                    known.expected = expected
                    continue
                server = _Server(address, self.client.add_server(), expected)
                self._servers[address] = server
                server.thread = threading.Thread(
                    target=self._run, args=(server,), name=f"hotrow-rows-{address}", daemon=True
                )
                server.thread.start()
        self._make_topology()

    def _make_topology(self) -> None:
        """The listed servers if they have all shards, else with those that have left the list."""
        with self._changed:
            connected = {server.number: server for server in self._servers.values() if server.shards is not None}
            listed = Topology.of({n: s.shards for n, s in connected.items() if s.listed and s.shards is not None})
            complete = not listed.missing
            if complete:
                made = listed
            else:
                made = Topology.of({n: s.shards for n, s in connected.items() if s.shards is not None})
            if (made.servers, made.bounds) != (self.topology.servers, self.topology.bounds):
                self.topology = made
            left = [server for server in self._servers.values() if not server.listed] if complete else []
            for server in left:
                del self._servers[server.address]
            self._left += [server for server in left if server.shards is not None]
            self._changed.notify_all()
        for server in left:  # its thread closes its connections
            log.info("row server %s has left the list", server.address)

    # --- one server: its thread ---

    def _run(self, server: _Server) -> None:
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        while self._is_wanted(server):
            try:
                self._connect(server)
            except (OSError, HotRowError, ValueError, RuntimeError) as error:
                self._close_server(server)
                self._note_problem(server, _reason(error))
                self._stop.wait(backoff.next())
                continue
            backoff.reset()
            log.info("row server %s is connected", server.address)
            self._make_topology()
            self._note_problem(server, self._watch(server))
            if server in self._left:
                self._stop.wait(LEFT_SECONDS)
                self._left.remove(server)
            self._close_server(server)
            self._stop.wait(backoff.next())

    def _is_wanted(self, server: _Server) -> bool:
        return not self._stop.is_set() and self._servers.get(server.address) is server

    def _watch(self, server: _Server) -> str:
        """Ping until the server does not answer; returns what is wrong."""
        while self._is_wanted(server):
            if server.control is not None and _has_ended(server.control):
                return "it ended"
            if not self.client.ping(server.number, ANSWER_SECONDS):
                return f"it did not answer a ping within {ANSWER_SECONDS:g} s, or its connection broke"
            if server.control is None and self.client.server(server.number)["connections"] < self.links:
                try:  # some broke
                    self._add(server, self._greet(server.address)[0], False)
                except (OSError, HotRowError, RuntimeError) as error:
                    return _reason(error)
            self._stop.wait(PING_SECONDS)
        return "closed"

    def _connect(self, server: _Server) -> None:
        connection, welcome = self._greet(server.address)
        shards = (welcome.begin, welcome.end)
        if server.expected is not None and server.expected != shards:
            begin, end = server.expected
            raise HandshakeError(
                f"it has the shards {shards[0]}:{shards[1]} and the list says {begin}:{end}; correct one of them"
            )
        local = self._greet_local(server.address, welcome, connection)
        if local is not None:
            server.control, descriptors = local
            self.client.add_slots(server.number, descriptors)
        else:
            self._add(server, connection, True)
            for _ in range(self.links):
                self._add(server, self._greet(server.address)[0], False)
        if not self.client.ping(server.number, ANSWER_SECONDS):
            self._close_server(server)
            raise HandshakeError("it does not answer a ping")
        server.local, server.problem, server.shards = local is not None, "", shards

    def _add(self, server: _Server, connection: Any, for_pings: bool) -> None:
        if isinstance(connection, socket.socket):
            self.client.add_socket(server.number, connection.detach(), for_pings)
        else:
            self.client.add_tls(server.number, connection, for_pings)

    def _greet(self, address: str) -> tuple[Any, Welcome]:
        """A connection that has proven itself: a socket, or with TLS a TlsConnection of the core."""
        path = socket_path(address)
        if path is None:
            host, _, port = address.rpartition(":")
            connection: Any = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
            if self.address.ca is not None:
                connection = _core.TlsConnection(
                    connection.detach(), self.address.ca, host.strip("[]"), CONNECT_SECONDS
                )
        else:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(CONNECT_SECONDS)
            connection.connect(path)
        try:
            return connection, greet(connection, self.model, self._key)
        except BaseException:
            if isinstance(connection, socket.socket):
                connection.close()
            raise

    def _greet_local(self, address: str, welcome: Welcome, connection: Any) -> tuple[socket.socket, list[int]] | None:
        """The control socket and the descriptors of shared memory, if the server is on this machine."""
        if socket_path(address) is None:
            host = address.rpartition(":")[0]
            if not (self.address.local and welcome.local and host in LOCAL_HOSTS) or not os.access(
                welcome.local, os.W_OK
            ):
                return None
            try:
                control, there = self._greet(f"unix:{welcome.local}")
            except (OSError, HotRowError):  # of another user: TCP works all the same
                return None
            if there != welcome:  # the address is a tunnel to another machine that has the same path
                control.close()
                return None
            if isinstance(connection, socket.socket):
                connection.close()
        else:
            control = connection
        _, descriptors, _, _ = socket.recv_fds(control, 1, DESCRIPTORS)
        return control, list(descriptors)

    def _close_server(self, server: _Server) -> None:
        self.client.disconnect(server.number)
        if server.control is not None:
            server.control.close()
            server.control = None
        if server.shards is not None:
            server.shards = None
            self._make_topology()

    def _note_problem(self, server: _Server, problem: str) -> None:
        if problem != server.problem and self._is_wanted(server):
            log.warning("row server %s: %s", public(server.address), problem)
        server.problem = problem


def _has_ended(control: socket.socket) -> bool:
    """Whether the other process has closed its end, or close() of this one has."""
    try:
        control.setblocking(False)
        return control.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
