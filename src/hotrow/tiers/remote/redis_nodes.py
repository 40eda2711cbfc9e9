"""The nodes of a Redis server or cluster: who has which slot, who is up, and connections to them.

A node that refuses, resets, or stays silent for `timeout` seconds is *down*: `take` then says no at once, so a dead
server is waited for once and not by every request. Silence is counted over requests: with deadlines of 20 ms and a
timeout of 250 ms, it takes a dozen requests without a byte, and a single byte begins the count anew. A keeper thread
probes nodes that are down, at intervals that double from 50 ms to 2 s, and they are up again when a probe is answered.

A cluster's slots are taken from CLUSTER SLOTS of whichever node answers; MOVED corrects one slot at once and asks the
keeper for the whole map. Readers never wait for either.

Threads: everything may be called from any thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from hotrow.errors import StorageError
from hotrow.tiers.remote.redis_connection import Access, Connection, ReplyError, command

SLOTS = 16384
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
REFRESH_PAUSE = 0.1  # seconds between two askings for the map
Address = tuple[str, int]


class Node:
    """One server: connections that are free, and whether it is up."""

    def __init__(self, address: Address, access: Access, timeout: float, connect_timeout: float) -> None:
        self.address = address
        self.access = access
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.down = False
        self.failures = 0
        self.last_error = ""
        self.probe_at = 0.0
        self._pause = FIRST_PAUSE
        self._silence = 0.0  # seconds waited in vain
        self._free: list[Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def take(self, deadline: float) -> Connection | None:
        """A connection for this thread; None where the node is down, or does not let us in before the deadline."""
        if self.down or self._closed:
            return None
        with self._lock:
            if self._free:
                return self._free.pop()
        started = time.monotonic()
        try:
            return self.connect(min(self.connect_timeout, deadline - started))
        except TimeoutError:
            self.silent(started)
        except OSError as error:
            self.fail(error)
        return None

    def connect(self, timeout: float) -> Connection:
        """A new connection."""
        return Connection(*self.address, self.access, timeout)

    def give(self, connection: Connection) -> None:
        """It answered everything: keep it for the next one."""
        self._silence = 0.0
        with self._lock:
            if not self._closed:
                self._free.append(connection)
                return
        connection.close()

    def silent(self, since: float) -> None:
        """Not a byte came since then."""
        self._silence += time.monotonic() - since
        if self._silence >= self.timeout:
            self.fail(TimeoutError(f"no answer in {self.timeout:g} s"))

    def heard(self) -> None:
        """Something came, if not all of it."""
        self._silence = 0.0

    def fail(self, error: Exception) -> None:
        """It is down until a probe succeeds."""
        with self._lock:
            self.failures += 1
            self.last_error = str(error) or type(error).__name__
            if not self.down:
                self._pause = FIRST_PAUSE
                self.probe_at = time.monotonic() + self._pause
            self.down = True
        self.drop_connections()

    def probe(self) -> bool:
        """Whether it answers; if so, it is up again."""
        try:
            connection = self.connect(self.connect_timeout)
            reply = connection.call([command("PING")], time.monotonic() + self.connect_timeout)[0]
            if isinstance(reply, ReplyError):
                connection.close()
                raise ConnectionError(str(reply))
        except OSError as error:
            self.last_error = str(error) or type(error).__name__
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)
            self.probe_at = time.monotonic() + self._pause * random.uniform(0.75, 1.0)
            return False
        self.give(connection)
        self.down = False
        return True

    def drop_connections(self) -> None:
        """Those that are free."""
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()

    def close(self) -> None:
        """For good."""
        self._closed = True
        self.drop_connections()


class Nodes:
    """All nodes, and which of them has a slot. Without `cluster` there is one, which has all."""

    def __init__(
        self,
        seeds: list[Address],
        cluster: bool,
        access: Access,
        timeouts: tuple[float, float],
        tick: Callable[[], None],
    ) -> None:
        self.cluster = cluster
        self._make = lambda address: Node(address, access, *timeouts)
        self._connect_timeout = timeouts[1]
        self._seeds = seeds
        self._known: dict[Address, Node] = {address: self._make(address) for address in seeds}
        self.owners: list[Node | None] = [None] * SLOTS
        self.moves = 0  # of slots, that a server told us of
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
            raise StorageError(f"no node of the Redis cluster tells its slots ({why}); check remote= and that it runs")
        self._keeper = threading.Thread(target=self._keep, name="hotrow-remote", daemon=True)
        self._keeper.start()

    def all(self) -> list[Node]:
        """Those with a slot."""
        return list(dict.fromkeys(node for node in self.owners if node is not None))

    def at(self, host: str, port: int) -> Node:
        """The node at an address, new or known."""
        with self._lock:
            return self._known.setdefault((host, port), self._make((host, port)))

    def redirect(self, text: str, asked: Node) -> tuple[int, Node]:
        """Slot and node of "MOVED 3999 host:port" or "ASK ..."; without a host, the host that was asked is meant."""
        _, slot, where = text.split()[:3]
        host, _, port = where.rpartition(":")
        return int(slot), self.at(host or asked.address[0], int(port))

    def moved(self, slot: int, node: Node) -> None:
        """A slot has another owner."""
        self.moves += 1
        self.owners[slot] = node
        self._stale.set()

    def suspect(self) -> None:
        """The map may be wrong: look again soon."""
        self._stale.set()

    def refresh(self) -> bool:
        """Take the map from the first node that tells it."""
        for node in sorted(self._nodes(), key=lambda node: node.down):
            try:
                connection = node.connect(self._connect_timeout)
                reply = connection.call([command("CLUSTER", "SLOTS")], time.monotonic() + self._connect_timeout)[0]
                connection.close()
                if isinstance(reply, ReplyError):
                    raise ConnectionError(str(reply))
                self._take_map(reply, node)
                return True
            except OSError as error:
                node.last_error = str(error) or type(error).__name__
        return False

    def _nodes(self) -> list[Node]:
        with self._lock:
            return list(self._known.values())

    def _take_map(self, reply: Any, asked: Node) -> None:
        owners: list[Node | None] = [None] * SLOTS
        for first, last, master, *_ in reply:
            host = (master[0] or b"").decode()
            node = self.at(host if host not in ("", "?") else asked.address[0], master[1])
            owners[first : last + 1] = [node] * (last + 1 - first)
        self.owners = owners
        with self._lock:
            keep = set(self.all()) | {self._known[seed] for seed in self._seeds if seed in self._known}
            gone = [node for node in self._known.values() if node not in keep]
            for node in gone:
                del self._known[node.address]
        for node in gone:
            node.close()

    def _keep(self) -> None:
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
        """Hang up everywhere."""
        self._closing.set()
        self._stale.set()
        keeper = getattr(self, "_keeper", None)
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(timeout=5)
        for node in self._nodes():
            node.close()


def key_slot(name: bytes) -> int:
    """The slot of a key: CRC16 (XMODEM) of what stands between the first braces, or of all of it.

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
