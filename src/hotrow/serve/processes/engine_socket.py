"""FrontendConnection: an engine's side of a front end's socket: frames are read without copies, sends never block.

A reader thread receives into large chunks and passes complete frames on as (chunk, offset, length). A request's bytes
stay in their chunk until they are joined into a batch. Each byte of a chunk is written once, so frames may be read
from it at any time. A chunk is freed with its last request. Only a frame that crosses the end of a chunk is copied, to
the next chunk.

Lanes call `send`. It sends as much as the socket's buffer takes, which is nearly always everything, and leaves the rest
to a writer thread, so a front end that does not read cannot block a lane. A front end with more than `MAX_UNSENT_BYTES`
unread is disconnected.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from hotrow.serve.protocol import frames

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
SMALLEST_READ = 64 << 10
MAX_UNSENT_BYTES = 256 << 20


class FrontendConnection:
    """One front end's connection."""

    def __init__(
        self,
        connected: socket.socket,
        receive: Callable[[FrontendConnection, bytearray, list[tuple[Any, ...]]], None],
        on_close: Callable[[FrontendConnection], None],
    ) -> None:
        self._socket, self._receive, self._on_close = connected, receive, on_close
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self._unsent = bytearray()
        self._sending = threading.Condition()
        self._closed = False

    def start(self) -> None:
        """Start the reader and the writer thread."""
        threading.Thread(target=self._read, name="hotrow-reader", daemon=True).start()
        threading.Thread(target=self._write, name="hotrow-writer", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send to the front end, in the order of the calls. Never blocks, never raises."""
        with self._sending:
            if self._closed:
                return
            if not self._unsent:
                try:
                    sent = self._socket.send(data, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    sent = 0
                except OSError:
                    return self._end()
                if sent == len(data):
                    return
                data = data[sent:]
            self._unsent += data
            if len(self._unsent) > MAX_UNSENT_BYTES:
                log.warning("a front end does not read its answers; its connection is closed")
                return self._end()
            self._sending.notify()

    def close(self, flush: float = 0.0) -> None:
        """Close after everything is sent, or after `flush` seconds."""
        until = time.monotonic() + flush
        while self._unsent and not self._closed and time.monotonic() < until:
            time.sleep(0.002)
        with self._sending:
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._sending.notify()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            self._read_frames()
        except OSError:
            pass
        except (frames.FrameError, ValueError, KeyError) as error:
            log.warning("a front end sent a malformed frame; its connection is closed: %s", error)
        except Exception:
            log.exception("reading from a front end failed; its connection is closed")
        finally:
            with self._sending:
                self._end()
            self._on_close(self)

    def _read_frames(self) -> None:
        chunk = bytearray(CHUNK_BYTES)
        view = memoryview(chunk)
        begin = end = 0
        while count := self._socket.recv_into(view[end:]):
            end += count
            found, begin, wanted = frames.scan(chunk, begin, end)
            if found:
                self._receive(self, chunk, found)
            if len(chunk) - begin < wanted or len(chunk) - end < SMALLEST_READ:
                fresh = bytearray(max(CHUNK_BYTES, wanted + SMALLEST_READ))
                fresh[: end - begin] = view[begin:end]
                chunk, begin, end = fresh, 0, end - begin
                view = memoryview(chunk)

    def _write(self) -> None:
        while True:
            with self._sending:
                while not self._unsent and not self._closed:
                    self._sending.wait()
                if self._closed:
                    return
                part = bytes(self._unsent[: 1 << 20])
            # While something is unsent, `send` only appends. So the bytes sent here are the first of _unsent.
            try:
                sent = self._socket.send(part)
            except OSError:
                return self.close()
            with self._sending:
                del self._unsent[:sent]
