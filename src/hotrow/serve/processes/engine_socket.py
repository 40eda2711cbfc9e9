"""Connection: a front end's socket as an engine sees it: frames in without copies, answers out without waiting.

A thread of its own receives into large chunks and gives whole frames on as (chunk, offset, length): a request's bytes
stay where the kernel put them until they are joined. A chunk is written front to back and never again, so it may be
read at any time; it is freed with its last request. Only a frame that is cut by a chunk's end is moved, to the next
chunk.

`send` is called by lanes. It gives the kernel what it takes at once (nearly always all of it), and leaves the rest to a
writer thread, so that a front end that does not read cannot hold up a lane. One that lets more than `MOST_UNSENT` bytes
lie is cut off.
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
MOST_UNSENT = 256 << 20


class FrontendConnection:
    """One front end."""

    def __init__(
        self,
        connected: socket.socket,
        receive: Callable[[FrontendConnection, bytearray, list[tuple[Any, ...]]], None],
        gone: Callable[[FrontendConnection], None],
    ) -> None:
        self._socket, self._receive, self._gone = connected, receive, gone
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self._unsent = bytearray()
        self._sending = threading.Condition()
        self._closed = False

    def start(self) -> None:
        """Begin to read and write."""
        threading.Thread(target=self._read, name="hotrow-reader", daemon=True).start()
        threading.Thread(target=self._write, name="hotrow-writer", daemon=True).start()

    def send(self, data: bytes) -> None:
        """To the front end, in the order of the calls. Does not block, does not raise."""
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
            if len(self._unsent) > MOST_UNSENT:
                log.warning("a front end does not read its answers; it is cut off")
                return self._end()
            self._sending.notify()

    def close(self, flush: float = 0.0) -> None:
        """End it, after what is unsent has left or `flush` seconds have passed."""
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
            log.warning("a front end sent what is no frame; it is cut off: %s", error)
        except Exception:
            log.exception("reading from a front end failed; it is cut off")
        finally:
            with self._sending:
                self._end()
            self._gone(self)

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
            # Nobody else sends while something is unsent, so what is sent here is the front of it.
            try:
                sent = self._socket.send(part)
            except OSError:
                return self.close()
            with self._sending:
                del self._unsent[:sent]
