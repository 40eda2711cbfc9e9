"""A bus in Redis: one stream, with its marks in a hash beside it.

An entry's id is `milliseconds-sequence`. Its offset here is milliseconds * 2^20 + sequence, which keeps the order
(Redis gives one millisecond to at most a million entries). Redis ids increase even when its clock does not. A reader
blocks in XREAD, so it gets a message as soon as it is appended. Retention by age uses XTRIM MINID; retention by size
uses the stream's size as Redis reports it. Use a Redis that persists its data (appendonly yes) and does not evict keys:
readers treat a lost stream as if they had fallen behind.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from hotrow.credentials import Login
from hotrow.errors import BusError, OptionError
from hotrow.publish.bus import Entry, Retention

_BITS = 20
_FIELD = b"m"
_READ_AT_ONCE = 64  # entries, which the server sends in one reply
_RETENTION_INTERVAL = 64


class RedisBus:
    """Messages as entries of a stream."""

    def __init__(self, address: str, stream: str, limit: int, retention: Retention, login: Login | None = None) -> None:
        try:
            import redis
        except ModuleNotFoundError:
            raise OptionError(f"bus={address!r} needs redis-py: pip install hotrow[redis]") from None
        self.address, self.stream, self.marks = address, stream, f"{stream}:marks"
        self.limit, self.retention, self._login = limit, retention, login or Login()
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        try:
            self._redis: Any = redis.Redis.from_url(
                address,
                socket_connect_timeout=2,
                socket_timeout=10,
                username=self._login.user or None,
                password=self._login.password or None,
            )
        except ValueError:  # its message may contain the password
            raise OptionError(f"bus={address!r} is not an address; write redis://host:6379/0?stream=name") from None
        self._appended = 0

    def append(self, data: bytes) -> int:
        """Append a message."""
        if len(data) > self.limit:
            raise BusError(f"a message of {len(data)} bytes is above max_message={self.limit} of {self.stream}")
        offset = _offset(self._call("append to", lambda: self._redis.xadd(self.stream, {_FIELD: data})))
        self._appended += 1
        if self._appended % _RETENTION_INTERVAL == 0:
            self.retain()
        return offset

    def read(self, offset: int, most_bytes: int = 64 << 20, wait: float = 0.0) -> list[Entry]:
        """Messages from an offset on."""
        end = time.monotonic() + wait
        count = max(1, min(_READ_AT_ONCE, most_bytes // self.limit))
        after = _id(offset - 1) if offset else "0-0"
        while True:
            left = end - time.monotonic()
            block = max(1, min(5000, int(left * 1000))) if left > 0 else None
            reply = self._call("read", functools.partial(self._redis.xread, {self.stream: after}, count, block))
            entries = reply[0][1] if isinstance(reply, list) and reply else _entries(reply)
            if entries or left <= 0:
                return [Entry(_offset(name), fields.get(_FIELD, b"")) for name, fields in entries]

    def newest(self, count: int) -> list[Entry]:
        """The last messages."""
        found = self._call("read", lambda: self._redis.xrevrange(self.stream, count=count))
        return [Entry(_offset(name), fields.get(_FIELD, b"")) for name, fields in reversed(found)]

    def head(self) -> int:
        """The offset after the newest message."""
        newest = self._call("read", lambda: self._redis.xrevrange(self.stream, count=1))
        return _offset(newest[0][0]) + 1 if newest else 0

    def tail(self) -> int:
        """The offset of the oldest message."""
        oldest = self._call("read", lambda: self._redis.xrange(self.stream, count=1))
        return _offset(oldest[0][0]) if oldest else 0

    def retain(self) -> None:
        """Remove messages older than keep=, or beyond size=."""
        oldest = int((time.time() - self.retention.seconds) * 1000)
        self._call("trim", lambda: self._redis.xtrim(self.stream, minid=f"{oldest}-0"))
        used = self._call("measure", lambda: self._redis.memory_usage(self.stream, samples=0)) or 0
        if used > self.retention.size:
            kept = self._redis.xlen(self.stream) * self.retention.size // used
            self._call("trim", lambda: self._redis.xtrim(self.stream, maxlen=max(1, kept), approximate=False))

    def set_mark(self, name: str, data: bytes | None) -> None:
        """Set or remove a mark."""
        if data is None:
            self._call("set a mark of", lambda: self._redis.hdel(self.marks, name))
        else:
            self._call("set a mark of", lambda: self._redis.hset(self.marks, name, data))

    def mark(self, name: str) -> bytes | None:
        """A mark's current value."""
        found: bytes | None = self._call("read a mark of", lambda: self._redis.hget(self.marks, name))
        return found

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _call(self, action: str, command: Callable[[], Any]) -> Any:
        try:
            return command()
        except self._errors as error:
            why = self._login.redact(error)
            raise BusError(f"cannot {action} the stream {self.stream} at {self.address}: {why}") from None


def _entries(reply: Any) -> list[Any]:
    """The entries of a RESP3 reply: a dict with a list of lists for each stream."""
    if not reply:
        return []
    (lists,) = reply.values()
    return list(lists[0]) if lists and isinstance(lists[0], list) else list(lists)


def _offset(name: bytes) -> int:
    milliseconds, _, sequence = name.decode().partition("-")
    return (int(milliseconds) << _BITS) + int(sequence)


def _id(offset: int) -> str:
    return f"{offset >> _BITS}-{offset & ((1 << _BITS) - 1)}"
