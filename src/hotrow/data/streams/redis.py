"""Events in a Redis stream, each entry with its events in one field (`value`, unless the address says otherwise).

`redis://host:6379/0?stream=clicks&field=value`, and with a login `redis://user@host:6379/0?stream=clicks&
password_file=/path`. A place is an entry's id. Where entries after it may have been trimmed
(the entry itself is gone, and there are others behind it), going on would skip events, and is an error. While the
server is away the feed waits: nothing is lost, it is still there.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any
from urllib.parse import parse_qsl

from hotrow.credentials import public, split_login
from hotrow.data.rejects import Rejects
from hotrow.data.streams.follow import ALL, TICK, Message, Place
from hotrow.data.streams.messages import decode
from hotrow.errors import DataError, OptionError

ENTRIES = 1000  # at once
AWAY = 30.0  # seconds without a server before it is an error at the start of a pass


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
        except ValueError:  # its words may have parts of what was written
            raise OptionError(f"path={self.address!r} is no address; write redis://host:6379/0?stream=name") from None

    def read(self, place: Place, rejects: Rejects) -> Generator[list[Message], None, None]:
        """Entries after a place."""
        name, row = place.get(self.stream, ("0-0", ALL))
        checked = name == "0-0"
        begun = time.monotonic()
        while True:
            try:
                if not checked:
                    rest = self._rest(name, row, rejects)
                    checked = True
                    if rest:
                        yield rest
                answer = self._redis.xread({self.stream: name}, ENTRIES, int(TICK * 1000))
            except self._errors as error:
                if not checked and time.monotonic() - begun > AWAY:
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

    def _rest(self, name: str, row: int, rejects: Rejects) -> list[Message]:
        """What is left of the entry that the place stands in; and that nothing behind it is lost."""
        found = self._redis.xrange(self.stream, name, name)
        if found:
            return [] if row == ALL else self._message(found[0][0], found[0][1], rejects, row)
        newest = self._redis.xrevrange(self.stream, count=1)
        if row == ALL and (not newest or newest[0][0].decode() == name):
            return []
        raise DataError(
            f"{self.address}: entry {name}, up to which events are learned from, is gone, so later ones may be too; "
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
