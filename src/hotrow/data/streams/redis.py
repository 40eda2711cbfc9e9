"""A feed from a Redis stream. Each entry holds its events in one field (`value`, unless the address names another).

The address is `redis://host:6379/0?stream=clicks&field=value`, or with a login
`redis://user@host:6379/0?stream=clicks&password_file=/path`. A position is an entry's id. If that entry has been
trimmed and newer entries exist, entries between may have been trimmed too, so the feed raises instead of skipping
events. While the server is unreachable, the feed waits and retries.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any
from urllib.parse import parse_qsl

from hotrow.credentials import public, split_login
from hotrow.data.rejects import Rejects
from hotrow.data.streams.follow import ALL, TICK, Message, StreamPosition
from hotrow.data.streams.messages import decode
from hotrow.errors import DataError, OptionError

ENTRIES = 1000  # per XREAD
CONNECT_SECONDS = 30.0  # seconds without a server, at the start of a pass, before it is an error


class RedisFeed:
    """Follows a stream."""

    kind = "redis"

    def __init__(self, address: str) -> None:
        self.address = public(address)
        try:
            import redis
        except ModuleNotFoundError:
            raise OptionError(f"path={self.address!r} needs redis-py: pip install hotrow[redis]") from None
        bare, self._login = split_login(address)
        server, _, query = bare.partition("?")
        options = dict(parse_qsl(query))
        self.stream, self.field = options.pop("stream", ""), options.pop("field", "value").encode()
        if options or not self.stream:
            raise OptionError(
                f"path={self.address!r}: write redis://host:6379/0?stream=name, &field=name if not value, and for a "
                "login &password_file=/path"
            )
        self._errors: tuple[type[Exception], ...] = (redis.ConnectionError, redis.TimeoutError, OSError)
        try:
            self._redis: Any = redis.Redis.from_url(
                server,
                socket_connect_timeout=2,
                socket_timeout=10,
                username=self._login.user or None,
                password=self._login.password or None,
            )
        except ValueError:  # its message may contain parts of the address, such as the password
            raise OptionError(f"path={self.address!r} is no address; write redis://host:6379/0?stream=name") from None

    def read(self, position: StreamPosition, rejects: Rejects) -> Generator[list[Message], None, None]:
        """Entries after a position."""
        name, row = position.get(self.stream, ("0-0", ALL))
        checked = name == "0-0"
        begun = time.monotonic()
        while True:
            try:
                if not checked:
                    rest = self._remainder(name, row, rejects)
                    checked = True
                    if rest:
                        yield rest
                answer = self._redis.xread({self.stream: name}, ENTRIES, int(TICK * 1000))
            except self._errors as error:
                if not checked and time.monotonic() - begun > CONNECT_SECONDS:
                    why = self._login.redact(error)
                    raise DataError(f"{self.address} does not answer: {why}; start it, or check the address") from None
                yield []
                time.sleep(TICK)
                continue
            if isinstance(answer, dict):
                entries = [entry for part in answer.values() for some in part for entry in some]
            else:
                entries = answer[0][1] if answer else []
            messages = [message for entry in entries for message in self._message(entry[0], entry[1], rejects)]
            name = entries[-1][0].decode() if entries else name
            yield messages

    def _remainder(self, name: str, row: int, rejects: Rejects) -> list[Message]:
        """The remaining rows of the entry at the position. Raises if entries after it may have been trimmed."""
        found = self._redis.xrange(self.stream, name, name)
        if found:
            return [] if row == ALL else self._message(found[0][0], found[0][1], rejects, row)
        newest = self._redis.xrevrange(self.stream, count=1)
        if row == ALL and (not newest or newest[0][0].decode() == name):
            return []
        raise DataError(
            f"{self.address}: entry {name}, up to which events are trained on, is gone, so later ones may be too; "
            "keep entries longer (MAXLEN, MINID), or start without a cursor"
        )

    def _message(self, name: bytes, fields: dict[bytes, bytes], rejects: Rejects, first: int = 0) -> list[Message]:
        try:
            if self.field not in fields:
                raise ValueError(f"no field {self.field.decode()!r}; it has {', '.join(map(repr, fields))}")
            table = decode(fields[self.field])
        except ValueError as error:
            rejects.add(f"{self.address}, entry {name.decode()}", 1, None, str(error))
            return []
        return [Message(self.stream, name.decode(), table.slice(first), first)]
