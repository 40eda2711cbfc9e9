"""The nodes of a Redis server or cluster: which node owns a slot, which are up, and their connection pools.

A node that refuses, resets, or stays silent for `timeout` seconds is *down*: `acquire` then returns None at once, so
that one request waits for a dead server and not every one. Silence adds up over requests: with deadlines of 20 ms and a
timeout of 250 ms it takes a dozen requests without a byte, and a single byte sets the sum to 0. A monitor thread probes
nodes that are down, at intervals that double from 50 ms to 2 s; a node is up again when it answers a probe.

The slot map comes from CLUSTER SLOTS of any node that answers. A MOVED corrects one slot at once and makes the monitor
thread fetch the whole map. Readers wait for neither.

Threads: everything may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hotrow.backoff import Backoff
from hotrow.errors import StorageError
from hotrow.tiers.remote.redis_connection import Connection, NodeAccess, ReplyError, command

SLOTS = 16384
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
REFRESH_PAUSE = 0.1  # seconds between two fetches of the slot map
Address = tuple[str, int]


class Node:
    """One server: its free connections, and whether it is up."""

    def __init__(self, address: Address, access: NodeAccess, timeout: float, connect_timeout: float) -> None:
        self.address = address
        self.access = access
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.down = False
        self.failures = 0
        self.last_error = ""
        self.probe_at = 0.0
        self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.25)
        self._silence = 0.0  # seconds waited without a byte
        self._free: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def acquire(self, deadline: float) -> Connection | None:
        """A connection for this thread; None if the node is down, or no connection is ready before the deadline."""
        if self.down or self._closed:
            return None
        with self._lock:
            if self._free:
                return self._free.pop()
        started = time.monotonic()
        try:
            return self.connect(min(self.connect_timeout, deadline - started))
        except TimeoutError:
            self.record_silence(started)
        except OSError as error:
            self.mark_down(error)
        return None

    def connect(self, timeout: float) -> Connection:
        """A new connection."""
        return Connection(*self.address, self.access, timeout)

    def release(self, connection: Connection) -> None:
        """Put a connection that has answered everything back into the pool."""
        self._silence = 0.0
        with self._lock:
            if not self._closed:
                self._free.append(connection)
                return
        connection.close()

    def record_silence(self, since: float) -> None:
        """Not a byte has arrived since then."""
        self._silence += time.monotonic() - since
        if self._silence >= self.timeout:
            self.mark_down(TimeoutError(f"no answer in {self.timeout:g} s"))

    def record_reply(self) -> None:
        """At least one byte has arrived."""
        self._silence = 0.0

    def mark_down(self, error: Exception) -> None:
        """The node is down until a probe succeeds."""
        with self._lock:
            self.failures += 1
            self.last_error = str(error) or type(error).__name__
            if not self.down:
                self._backoff.reset()
                self.probe_at = time.monotonic() + self._backoff.next()
            self.down = True
        self.drop_connections()

    def probe(self) -> bool:
        """Send a PING; the node is up again if it answers. Returns whether it did."""
        try:
            connection = self.connect(self.connect_timeout)
            reply = connection.call([command("PING")], time.monotonic() + self.connect_timeout)[0]
            if isinstance(reply, ReplyError):
                connection.close()
                raise ConnectionError(str(reply))
        except OSError as error:
            self.last_error = str(error) or type(error).__name__
            self.probe_at = time.monotonic() + self._backoff.next()
            return False
        self.release(connection)
        self.down = False
        return True

    def drop_connections(self) -> None:
        """Close the free connections."""
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()

    def close(self) -> None:
        """Close the free connections and give out no others."""
        self._closed = True
        self.drop_connections()


class Nodes:
    """All nodes, and which of them owns a slot. Without `cluster` one node owns all. The monitor thread calls `tick`
    every second."""

    def __init__(
        self,
        seeds: list[Address],
        cluster: bool,
        access: NodeAccess,
        timeouts: tuple[float, float],
        tick: Callable[[], None],
    ) -> None:
        self.cluster = cluster
        self._make = lambda address: Node(address, access, *timeouts)
        self._connect_timeout = timeouts[1]
        self._seeds = seeds
        self._known: dict[Address, Node] = {address: self._make(address) for address in seeds}
        self.owners: list[Node | None] = [None] * SLOTS
        self.moves = 0  # slots that a MOVED has corrected
        self._lock = threading.Lock()
        self._stale = threading.Event()
        self._closing = threading.Event()
        self._tick = tick
        if cluster:
            self.refresh()
        else:
            self.owners = [self._known[seeds[0]]] * SLOTS
        if self.owners.count(None) == SLOTS:
            self.close()
            why = "; ".join(f"{node}: {node.last_error or 'no answer'}" for node in self._known.values())
            raise StorageError(
                f"no node of the Redis cluster reports its slots ({why}); check remote= and that it runs"
            )
        self._monitor = threading.Thread(target=self._run, name="hotrow-remote", daemon=True)
        self._monitor.start()

    def all(self) -> list[Node]:
        """The nodes that own a slot."""
        return list(dict.fromkeys(node for node in self.owners if node is not None))

    def at(self, host: str, port: int) -> Node:
        """The node at an address; made if it is not known."""
        with self._lock:
            return self._known.setdefault((host, port), self._make((host, port)))

    def redirect(self, text: str, source: Node) -> tuple[int, Node]:
        """Slot and node of "MOVED 3999 host:port" or "ASK ...". Without a host it is that of `source`."""
        _, slot, where = text.split()[:3]
        host, _, port = where.rpartition(":")
        return int(slot), self.at(host or source.address[0], int(port))

    def record_move(self, slot: int, node: Node) -> None:
        """A slot has another owner now."""
        self.moves += 1
        self.owners[slot] = node
        self._stale.set()

    def request_refresh(self) -> None:
        """The slot map may be wrong: make the monitor thread fetch it."""
        self._stale.set()

    def refresh(self) -> bool:
        """Fetch the slot map from the first node that answers."""
        for node in sorted(self._nodes(), key=lambda node: node.down):
            try:
                connection = node.connect(self._connect_timeout)
                reply = connection.call([command("CLUSTER", "SLOTS")], time.monotonic() + self._connect_timeout)[0]
                connection.close()
                if isinstance(reply, ReplyError):
                    raise ConnectionError(str(reply))
                self._set_slots(reply, node)
                return True
            except OSError as error:
                node.last_error = str(error) or type(error).__name__
        return False

    def _nodes(self) -> list[Node]:
        with self._lock:
            return list(self._known.values())

    def _set_slots(self, reply: Any, source: Node) -> None:
        owners: list[Node | None] = [None] * SLOTS
        for first, last, master, *_ in reply:
            host = (master[0] or b"").decode()
            node = self.at(host if host not in ("", "?") else source.address[0], master[1])
            owners[first : last + 1] = [node] * (last + 1 - first)
        self.owners = owners
        with self._lock:
            keep = set(self.all()) | {self._known[seed] for seed in self._seeds if seed in self._known}
            gone = [node for node in self._known.values() if node not in keep]
            for node in gone:
                del self._known[node.address]
        for node in gone:
            node.close()

    def _run(self) -> None:
        refreshed = ticked = 0.0
        while not self._closing.is_set():
            down = [node for node in self._nodes() if node.down]
            self._stale.wait(FIRST_PAUSE if down else 0.5)
            if self._closing.is_set():
                return
            now = time.monotonic()
            for node in down:
                if node.probe_at <= now and not node.probe():
                    self._stale.set()
            if self.cluster and (self._stale.is_set() or down) and now - refreshed >= REFRESH_PAUSE:
                self._stale.clear()
                self.refresh()
                refreshed = time.monotonic()
            elif self._stale.is_set():
                if not self.cluster:
                    self._stale.clear()
                self._closing.wait(FIRST_PAUSE)
            if time.monotonic() - ticked >= 1.0:
                self._tick()
                ticked = time.monotonic()

    def close(self) -> None:
        """Stop the monitor thread and close all connections."""
        self._closing.set()
        self._stale.set()
        monitor = getattr(self, "_monitor", None)
        if monitor is not None and monitor is not threading.current_thread():
            monitor.join(timeout=5)
        for node in self._nodes():
            node.close()


def key_slot(name: bytes) -> int:
    """The slot of a key: CRC16 (XMODEM) of the part between the first braces, or of the whole key.

    >>> key_slot(b"123456789"), key_slot(b"{user1000}.following") == key_slot(b"user1000")
    (12739, True)
    """
    begin = name.find(b"{")
    end = name.find(b"}", begin + 1) if begin >= 0 else -1
    if end > begin + 1:
        name = name[begin + 1 : end]
    crc = 0
    for byte in name:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1
        crc &= 0xFFFF
    return crc % SLOTS
