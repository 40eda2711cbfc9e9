"""A bus: an append-only log of messages that one job writes and many servers read. One protocol, three implementations.

    dir:/path/to/folder              a folder on disk or on a shared file system; the default, nothing to install
    redis://host:6379/0?stream=ctr   Redis Streams; pip install hotrow[redis]
    kafka://host:9092/topic          a topic's partition 0; pip install hotrow[kafka]

Logins are part of the address. Keep a password in a file that the address names (credentials.py).

Offsets are whole numbers that increase with each append and may have gaps. An appended message stays, unchanged, until
retention removes it, oldest first. A reader whose position is below the tail has missed messages. An append that failed
may still have arrived, so readers must accept duplicates. Several processes may append at once. An object is used by
one thread at a time; open one per thread.

Besides messages a bus has *marks*: a few named values, such as the hold on the publisher. Only the last value is kept.

Rejected calls and lost connections raise BusError. The caller retries (delivery.py).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol
from urllib.parse import parse_qsl, urlsplit

from hotrow.credentials import kafka_settings, public, split_login
from hotrow.errors import OptionError
from hotrow.units import parse_milliseconds, parse_size

SCHEMES = ("dir", "redis", "rediss", "kafka")


class Entry(NamedTuple):
    """A message on a bus."""

    offset: int
    data: bytes


class Bus(Protocol):
    """The methods of every bus."""

    @property
    def limit(self) -> int:
        """The maximum size of a message in bytes."""

    def append(self, data: bytes) -> int:
        """Append a message; returns its offset."""

    def read(self, offset: int, most_bytes: int = 64 << 20, wait: float = 0.0) -> list[Entry]:
        """Messages from `offset` on, in order. Waits up to `wait` seconds for the first."""

    def newest(self, count: int) -> list[Entry]:
        """The last `count` messages, in order; fewer if the bus has fewer."""

    def head(self) -> int:
        """The offset after the newest message, where a reader of new messages starts."""

    def tail(self) -> int:
        """The offset of the oldest message; `head()` if there is none."""

    def set_mark(self, name: str, data: bytes | None) -> None:
        """Set or remove a mark."""

    def mark(self, name: str) -> bytes | None:
        """A mark's current value, or None."""

    def close(self) -> None:
        """Close connections and files."""


class Retention(NamedTuple):
    """How long messages are kept: until one of the two limits is passed."""

    seconds: float
    size: int

    @staticmethod
    def of(options: dict[str, str]) -> Retention:
        """Remove the retention from an address's options and return it."""
        span, size = options.pop("keep", "1d"), options.pop("size", "16GiB")
        return Retention(parse_milliseconds(span, "keep") / 1000, parse_size(size, "size"))


def open_bus(address: str) -> Bus:
    """The bus at an address.

    Options follow a `?`: keep=1d and size=16GiB (how long messages are kept), max_message=8MiB, and for a login
    password_file=/path.

    >>> import tempfile
    >>> bus = open_bus(f"dir:{tempfile.mkdtemp()}?keep=1h")
    >>> bus.append(b"first"), [entry.data for entry in bus.read(0)]
    (0, [b'first'])
    """
    scheme, shown = address.partition(":")[0], public(address)
    if scheme not in SCHEMES:
        raise OptionError(f"bus={shown!r}: give dir:/path, redis://host:6379/0?stream=name or kafka://host:9092/topic")
    bare, login = split_login(address)
    place, _, query = bare.partition("?")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise OptionError(f"bus={shown!r}: write its options as ?name=value&name=value") from None
    retention = Retention.of(options)
    limit = parse_size(options.pop("max_message", {"kafka": "900KiB"}.get(scheme, "8MiB")), "max_message")
    if limit < 1024:
        raise OptionError(f"max_message={limit} of bus={shown!r}: give 1KiB or more")
    if scheme == "dir":
        from hotrow.publish.directory_bus import DirectoryBus

        _no_more(shown, options)
        return DirectoryBus(place[len("dir:") :], limit, retention)
    if scheme == "kafka":
        from hotrow.publish.kafka_bus import KafkaBus

        create, security = options.pop("create", "yes"), kafka_settings(login, options, address)
        _no_more(shown, options)
        if create not in ("yes", "no"):
            raise OptionError(f"create={create} of bus={shown!r}: give yes or no")
        parts = urlsplit(place)
        if not parts.netloc or not parts.path.strip("/"):
            raise OptionError(f"bus={shown!r}: give brokers and a topic, such as kafka://host:9092/publications")
        return KafkaBus(parts.netloc, parts.path.strip("/"), limit, retention, create == "yes", security)
    from hotrow.publish.redis_bus import RedisBus

    stream = options.pop("stream", "hotrow")
    _no_more(shown, options)
    return RedisBus(place, stream, limit, retention, login)


def _no_more(shown: str, options: dict[str, str]) -> None:
    if options:
        raise OptionError(
            f"bus={shown!r}: {', '.join(map(repr, options))} is no option of a bus; the options are keep=, size=, "
            "max_message=, for Redis stream=, for Kafka create=, tls=, ca=, sasl=, for both password_file="
        )
