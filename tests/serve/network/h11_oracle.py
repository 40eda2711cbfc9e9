"""h11 as a second parser: which requests it finds in a stream of bytes.

If a proxy and our server disagree about where a request ends, a client can smuggle a request past the proxy. So of
every stream our server must handle a prefix of the requests that h11 finds: the same methods, targets and bodies in the
same order. If it stops before h11 does, it must close the connection.
"""

from __future__ import annotations

from typing import NamedTuple

import h11


class Seen(NamedTuple):
    """A request that a parser has found."""

    method: str
    target: str
    body: bytes


def found_by_h11(data: bytes) -> tuple[list[Seen], bool]:
    """The complete requests that h11 finds, and whether it would read on behind them."""
    seen: list[Seen] = []
    while True:
        data = data.lstrip(b"\r\n")  # RFC 9112, 2.2: a server ignores empty lines before a request; h11 does not
        if not data:
            return seen, True
        reader = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 24)
        reader.receive_data(data)
        head, body = None, b""
        while True:
            try:
                event = reader.next_event()
            except h11.RemoteProtocolError:
                return seen, False
            if isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                break
            else:  # it needs more
                return seen, False
        assert head is not None
        seen.append(Seen(head.method.decode(), head.target.decode(), body))
        data = reader.trailing_data[0]
        if not _keeps(head):
            return seen, False


def _keeps(head: h11.Request) -> bool:
    """Whether another request may follow. h11 closes every HTTP/1.0 connection; RFC 9112, 9.3 keeps it open after a
    keep-alive header."""
    tokens: set[bytes] = set()
    codings = []
    for name, value in head.headers:
        if name == b"connection":
            tokens |= {part.strip().lower() for part in value.split(b",")}
        codings += [value] if name == b"transfer-encoding" else []
    if head.http_version >= b"1.1":
        return b"close" not in tokens
    return b"keep-alive" in tokens and b"close" not in tokens and not codings  # 6.1: close where 1.0 is chunked
