"""Clients on the row server's machine: a Unix socket that only this user can open, then shared memory.

`LocalClients(path)` takes the path, and `start` listens. A client connects, proves the token as over TCP, and receives
the descriptors of a segment of shared memory (core/rowserver/shared_slots.h). From then on lookups pass no socket. The
connection stays open and idle: its end tells the server that the client has ended.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hotrow.errors import HotRowError, OptionError
from hotrow.tiers.rows.handshake import (
    CHALLENGE,
    ERROR,
    HEADER,
    HELLO,
    LONGEST,
    MAGIC,
    WELCOME,
    HandshakeError,
    receive_bytes,
)

HELLO_SECONDS = 5.0
MOST_GREETING = 64  # clients that have not proven themselves yet
Prove = Callable[[bytes, bytes], tuple[Any, bytes]]  # challenge, hello -> service, welcome


class LocalClients:
    """Listens at `path` and gives each client its shared memory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._greeting = threading.BoundedSemaphore(MOST_GREETING)
        _remove_left(path)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(path)
            os.chmod(path, 0o600)
        except OSError as error:
            self._listener.close()
            why = error.strerror or error
            raise OptionError(f"--listen unix:{path}: cannot listen there ({why}); give another path") from None

    def start(self, prove: Prove, add_local: Callable[[int, Any], list[int]]) -> None:
        """Accept clients."""
        self._prove, self._add_local = prove, add_local
        self._listener.listen(64)  # after chmod: another user cannot connect in between
        threading.Thread(target=self._accept, name="hotrow-rows-local", daemon=True).start()

    def close(self) -> None:
        """Accept no more clients."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with suppress(OSError):
            os.unlink(self.path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._greeting.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="hotrow-rows-greet", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(HELLO_SECONDS)
                challenge = secrets.token_bytes(32)
                connection.sendall(HEADER.pack(MAGIC, CHALLENGE, 0, 0, len(challenge), 0, 0) + challenge)
                magic, kind, _, _, size, _, _ = HEADER.unpack(receive_bytes(connection, HEADER.size, "client"))
                if magic != MAGIC or kind != HELLO or size > LONGEST:
                    return
                hello = receive_bytes(connection, size, "client")
                try:
                    service, welcome = self._prove(challenge, hello)
                except HotRowError as error:
                    text = str(error).encode()[:LONGEST]
                    connection.sendall(HEADER.pack(MAGIC, ERROR, 3, 0, len(text), 0, 0) + text)
                    return
                connection.sendall(HEADER.pack(MAGIC, WELCOME, 0, 0, len(welcome), 0, 0) + welcome)
                descriptors = self._add_local(os.dup(connection.fileno()), service)
                try:
                    socket.send_fds(connection, [b"s"], descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
        except (OSError, HandshakeError):
            return
        finally:
            self._greeting.release()


def _remove_left(path: str) -> None:
    """Remove the socket file that a process left behind; raise if the path is anything else."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OptionError(f"--listen unix:{path}: the file is there and no socket; give another path")
    except OSError:  # binding there tells more
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(HELLO_SECONDS)
        try:
            probe.connect(path)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                with suppress(OSError):
                    os.unlink(path)
                return
    raise OptionError(f"--listen unix:{path}: another process listens there; stop it, or give another path")
