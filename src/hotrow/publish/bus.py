"""A bus: an append-only list of messages that one job writes and many servers read. One small protocol, three of them.

    dir:/path/to/folder              a folder on disk or on a shared file system; the default, nothing to install
    redis://host:6379/0?stream=ctr   Redis Streams; pip install hotrow[redis]
    kafka://host:9092/topic          a topic's partition 0; pip install hotrow[kafka]

Logins are in the address, passwords better in a file that it names (credentials.py).

Offsets are whole numbers that rise in the order of appends and need not be dense. A message that was appended is there,
unchanged, until retention removes it, oldest first; a reader that finds the tail above where it wants to be has missed
something. An append that failed may have arrived all the same: whoever reads a bus must bear duplicates. Several
processes may append at once. One object is used by one thread at a time; open one for each thread.

Beside the messages a bus has *marks*: a few named words of state (who holds the publisher), the last ones set.

Refusals and lost connections are BusError; trying again is for the caller (delivery.py).
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
    """What every bus does."""

    @property
    def limit(self) -> int:
        """The most bytes that one message may have."""

    def append(self, data: bytes) -> int:
        """Put a message at the end; its offset."""

    def read(self, offset: int, most_bytes: int = 64 << 20, wait: float = 0.0) -> list[Entry]:
        """Messages from `offset` on, in order: at least one if there is any within `wait` seconds."""

    def newest(self, count: int) -> list[Entry]:
        """The last `count` messages, in order; fewer where there are fewer."""

    def head(self) -> int:
        """The offset that is after every message of now: where a reader of new ones begins."""

    def tail(self) -> int:
        """The offset of the oldest message that is left; `head()` where there is none."""

    def set_mark(self, name: str, data: bytes | None) -> None:
        """Set or remove a mark."""

    def mark(self, name: str) -> bytes | None:
        """What a mark was last set to."""

    def close(self) -> None:
        """Let go of connections and files."""


class Retention(NamedTuple):
    """How long messages stay: as long as both say."""

    seconds: float
    size: int

    @staticmethod
    def of(options: dict[str, str]) -> Retention:
        """Taken out of an address's options."""
        span, size = options.pop("keep", "1d"), options.pop("size", "16GiB")
        return Retention(parse_milliseconds(span, "keep") / 1000, parse_size(size, "size"))


def open_bus(address: str) -> Bus:
    """The bus at an address.

    Options stand behind a `?`: keep=1d and size=16GiB (how long messages stay), max_message=8MiB, and for a login
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
            raise OptionError(f"create={create} of bus={shown!r}: say yes or no")
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
            f"bus={shown!r}: {', '.join(map(repr, options))} is no option of it; there are keep=, size=, "
            "max_message=, for Redis stream=, for Kafka create=, tls=, ca=, sasl=, for both password_file="
        )
