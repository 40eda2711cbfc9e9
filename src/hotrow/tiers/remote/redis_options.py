"""RedisOptions, and the URLs that name Redis servers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hotrow.credentials import public, split_login
from hotrow.errors import OptionError, choices
from hotrow.tiers.remote.redis_nodes import Address


@dataclass(frozen=True)
class RedisOptions:
    """How to reach Redis. Times are in seconds, files are paths. An option in the URL overrides one given here."""

    timeout: float = 0.25  # a node that sends nothing for this long counts as down
    connect_timeout: float = 1.0
    write_timeout: float = 30.0  # for a write, retries and failovers included
    username: str = ""
    password: str = field(default="", repr=False)  # or in the environment, HOTROW_REMOTE_PASSWORD
    ca: str = ""  # TLS: certificate authorities, by default the system's
    cert: str = ""  # TLS: this client's certificate
    key: str = ""
    verify: bool = True  # TLS: whether to check the server's certificate
    replicas: int = 0  # how many replicas must have a write before it counts
    namespace: str = ""  # a prefix of all keys, so that several models can share a server

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "write_timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise OptionError(f"{name}={getattr(self, name)!r}: give seconds above 0")
        if self.replicas < 0:
            raise OptionError(f"replicas={self.replicas}: give 0 or how many replicas must have a write")


@dataclass(frozen=True)
class RedisAddress:
    """The servers that a URL names."""

    addresses: list[Address]
    cluster: bool
    tls: bool
    db: int


def read_url(url: str, options: RedisOptions) -> tuple[RedisAddress, RedisOptions]:
    """The servers and the options of a Redis URL.

    >>> address, options = read_url("redis+cluster://:secret@a:7000,b:7001?timeout=0.1", RedisOptions())
    >>> address.addresses, options.password, options.timeout
    ([('a', 7000), ('b', 7001)], 'secret', 0.1)
    """
    bare, login = split_login(url)
    parts, shown = urlsplit(bare), public(url)
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(RedisOptions)}
    given: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query):
        if name not in kinds:
            raise OptionError(f"remote={shown!r}: there is no option {name!r}; {choices(name, kinds)}")
        try:
            given[name] = text.lower() in ("1", "true", "yes") if kinds[name] is bool else kinds[name](text)
        except ValueError:
            raise OptionError(f"remote={shown!r}: {name}={text!r} is not a number") from None
    given |= {name: value for name, value in (("username", login.user), ("password", login.password)) if value}
    addresses = []
    for one in parts.netloc.split(","):
        host, _, port = one.rpartition(":") if ":" in one.rpartition("]")[2] else (one, "", "6379")
        if not host or not port.isdigit():
            raise OptionError(f"remote={shown!r} has no host:port; write redis://host:6379")
        addresses.append((host.strip("[]"), int(port)))
    db = parts.path.strip("/")
    if db and not db.isdigit():
        raise OptionError(
            f"remote={shown!r}: the part after the host is not a database number; write redis://host:6379/0"
        )
    cluster = parts.scheme.endswith("+cluster")
    if not cluster and len(addresses) > 1:
        raise OptionError("remote=: several hosts are for a cluster; write redis+cluster://host:port,host:port")
    if cluster and db not in ("", "0"):
        raise OptionError(f"remote=: a Redis cluster has no database {db}; leave it out, and use namespace=")
    return RedisAddress(addresses, cluster, parts.scheme.startswith("rediss"), int(db or 0)), replace(options, **given)
