"""Ranks with a job token exchange over connections of their own (core/exchange/socket_exchange.h).

`connect_sockets` connects every pair of ranks once for each channel. Each rank listens on the address by which it
reaches the store, and rank b connects to each rank a < b. Before a connection is used, both sides prove that they have
the job token (docs/decisions/0010-job-token.md). What a stranger sends is dropped; it can neither join nor delay ranks
by more than its share of the machine. When all are connected, the listener is closed: while ranks train, no port is
open but the store's.

All ranks call `connect_sockets` in the same order, from one thread.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hotrow import _core
from hotrow.backoff import Backoff
from hotrow.errors import RankError
from hotrow.parallel.job_token import is_proof, prove
from hotrow.parallel.meeting import LEAST_WAIT, Meeting

if TYPE_CHECKING:
    from hotrow.parallel.exchange import Channel

LONGEST_LINE = 1024
PROOF_SECONDS = 10.0  # a connection that has not proven itself by then is closed
MOST_UNPROVEN = 64
FIRST_RETRY, LONGEST_RETRY = 0.01, 0.5  # seconds between two tries to connect
TCP_RTO_MAX_MS = 44  # of Linux; Python has no name for it
LONGEST_TRY = 24 * 3600.0
Pair = tuple[str, int]  # a channel's name and the other rank


def connect_sockets(channels: Sequence[Channel], meeting: Meeting, timeouts: Sequence[float], patience: float) -> None:
    """Make the channels exchange over authenticated connections. `timeouts` are the channels' own; `patience` is how
    many seconds ranks may take to connect."""
    seconds = max(patience, LEAST_WAIT)
    meeting.rounds += 1
    connecting = _Connecting(meeting, channels, seconds)
    try:
        sockets = connecting.run()
    finally:
        connecting.close()
    for channel, timeout in zip(channels, timeouts, strict=True):
        if channel.is_member:
            exchange = _core.SocketExchange(channel.rank, channel.world, timeout)
            others = [sockets.get((channel.name, rank)) for rank in channel.members]
            for other in others:
                if other is not None:
                    _keep_trying(other, timeout)
            exchange.connect([-1 if other is None else other.detach() for other in others])
            channel.use_core_exchange(exchange)


def _keep_trying(connection: socket.socket, timeout: float) -> None:
    """While a link is down, have TCP try again every second, for as long as the channel waits. By itself it doubles its
    pauses, so a link that was down for 40 s may be used again only after 80, and it gives up after 15 minutes."""
    with suppress(OSError, AttributeError):  # not Linux, or the second before Linux 6.15
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(timeout, LONGEST_TRY) * 1000))
        connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)


class _Connecting:
    """One round of connecting."""

    def __init__(self, meeting: Meeting, channels: Sequence[Channel], seconds: float) -> None:
        assert meeting.key is not None
        self.meeting, self.key, self.rank = meeting, meeting.key, meeting.rank
        self.deadline, self.seconds = time.monotonic() + seconds, seconds
        self.job = f"round {meeting.rounds}"
        pairs = [(c.name, rank) for c in channels if c.is_member for rank in c.members if rank != self.rank]
        self.to_connect = [pair for pair in pairs if pair[1] < self.rank]
        self.expected = {pair for pair in pairs if pair[1] > self.rank}  # which connect to this rank
        self.missing = set(self.expected)
        self.sockets: dict[Pair, socket.socket] = {}
        self._changed = threading.Condition()
        self._unproven = threading.Semaphore(MOST_UNPROVEN)
        self._ended = False
        family = socket.AF_INET6 if ":" in meeting.address else socket.AF_INET
        self.listener = socket.create_server((meeting.address, 0), family=family, backlog=256)
        self._acceptor = threading.Thread(target=self._accept, name="hotrow-accept", daemon=True)

    def run(self) -> dict[Pair, socket.socket]:
        """Connect and be connected to; returns the proven connections."""
        self._acceptor.start()
        store, port = self.meeting.store, self.listener.getsockname()[1]
        store.set(self._entry(self.rank), json.dumps([self.meeting.address, port]))
        for channel, other in self.to_connect:
            self.sockets[channel, other] = self._connect(channel, other)
        with self._changed:
            if not self._changed.wait_for(lambda: not self.missing, self.deadline - time.monotonic()):
                late = sorted({str(other) for _, other in self.missing})
                raise RankError(
                    f"rank {self.rank} has waited {self.seconds:g} s for rank {', '.join(late)} to connect to "
                    f"{self.meeting.address}; look at the errors there, and whether a firewall lies between"
                )
            self._ended = True
            return self.sockets

    def close(self) -> None:
        """Stop listening."""
        with self._changed:
            self._ended = True
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # ends accept()
        self.listener.close()

    def _entry(self, rank: int) -> str:
        return f"hotrow/address/{self.meeting.rounds}/{rank}"

    def _connect(self, channel: str, other: int) -> socket.socket:
        """Connect to a rank, and try again while it cannot be reached: a link may be down for a moment."""
        host, port = json.loads(self.meeting.store.get(self._entry(other)))
        backoff = Backoff(FIRST_RETRY, LONGEST_RETRY)
        while True:
            try:
                return self._connect_once((str(host), int(port)), channel, other)
            except OSError as error:
                if time.monotonic() > self.deadline:
                    raise RankError(
                        f"rank {self.rank} could not connect to rank {other} at {host}:{port} within {self.seconds:g} "
                        f"s: {error.strerror or error}; look at the network between the two, and for a firewall"
                    ) from None
                time.sleep(backoff.next())

    def _connect_once(self, place: tuple[str, int], channel: str, other: int) -> socket.socket:
        connection = socket.create_connection(place, timeout=PROOF_SECONDS)
        try:
            lines = _Lines(connection)
            hello = lines.write(
                {"job": self.job, "from": self.rank, "to": other, "channel": channel, "random": secrets.token_hex(32)}
            )
            reply = lines.read()
            proof = bytes.fromhex(str(reply.value.get("proof", "")))
            if not is_proof(proof, self.key, b"listener", hello, str(reply.value.get("random")).encode()):
                raise RankError(
                    f"the process at {place[0]}:{place[1]}, where rank {other} should listen, does not have this job's "
                    "token; start all ranks with the same one"
                )
            lines.write({"proof": prove(self.key, b"connector", hello, reply.line).hex()})
            if lines.read().value != {"ok": True}:
                raise OSError("the other rank refused the connection")
            connection.settimeout(None)
            return connection
        except ValueError as error:
            connection.close()
            raise OSError(f"it does not answer as a rank does ({error})") from None
        except BaseException:
            connection.close()
            raise

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            if not self._unproven.acquire(timeout=PROOF_SECONDS):
                connection.close()
                continue
            threading.Thread(target=self._admit, args=(connection,), name="hotrow-admit", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Let the other side prove itself; close the connection if it does not."""
        try:
            pair = self._check(connection)
            with self._changed:
                if self._ended or pair not in self.expected:
                    raise ValueError("this rank expects no such connection")
                _Lines(connection).write({"ok": True})
                connection.settimeout(None)
                if (before := self.sockets.get(pair)) is not None:
                    before.close()  # the other side did not hear that it was accepted, and tries again
                self.missing.discard(pair)
                self.sockets[pair] = connection
                self._changed.notify_all()
        except (OSError, ValueError, TypeError, RecursionError):  # whatever a stranger sends
            connection.close()
        finally:
            self._unproven.release()

    def _check(self, connection: socket.socket) -> Pair:
        lines = _Lines(connection)
        hello = lines.read()
        mine = secrets.token_hex(32)
        proof = prove(self.key, b"listener", hello.line, mine.encode()).hex()
        reply = lines.write({"random": mine, "proof": proof})
        theirs = bytes.fromhex(str(lines.read().value.get("proof", "")))
        if not is_proof(theirs, self.key, b"connector", hello.line, reply):
            raise ValueError("it does not have the job token")
        value = hello.value
        if value.get("job") != self.job or value.get("to") != self.rank:
            raise ValueError("it looks for another rank")
        return str(value.get("channel")), int(value.get("from", -1))


class _Line:
    def __init__(self, line: bytes) -> None:
        self.line = line
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        self.value: dict[str, Any] = value


class _Lines:
    """Lines of JSON over a connection, until a deadline that no sender can put off. Reads no byte beyond a line, since
    what follows the last one belongs to the exchange."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, time.monotonic() + PROOF_SECONDS

    def write(self, value: dict[str, Any]) -> bytes:
        """Send a value; returns its line."""
        line = json.dumps(value).encode() + b"\n"
        self.connection.settimeout(max(0.01, self.deadline - time.monotonic()))
        self.connection.sendall(line)
        return line

    def read(self) -> _Line:
        """Receive a value. Raises ValueError for what is none, OSError at the deadline."""
        line = bytearray()
        while not line.endswith(b"\n"):
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it did not answer in time")
            self.connection.settimeout(left)
            byte = self.connection.recv(1)
            if not byte:
                raise ConnectionResetError("it closed the connection")
            line += byte
            if len(line) > LONGEST_LINE:
                raise ValueError("a line is too long")
        return _Line(bytes(line))
