"""Which row servers there are. `--rows WHERE` and `Memory(rows=WHERE)` take one of:

    10.0.0.1:8010,10.0.0.2:8010    addresses
    unix:/run/hotrow/rows.sock     a row server of this machine
    cluster.toml                   a file, read again when it changes
    dns:rows.prod:8010             all addresses of a name (a Kubernetes headless service), resolved again
    redis://host/0?set=rows        the members of a set in Redis, read again

Servers say themselves which shards they have. The file may say it too, and then both must agree:

    [[range]]
    shards = "0:512"
    servers = ["10.0.0.1:8010", "10.0.0.2:8010"]

or only `servers = [...]` without ranges. Options follow a question mark: `cluster.toml?token_file=/run/secrets/rows`,
`wire=fp16`, `hedge=off`, `local=off` for TCP
where shared memory would do, and `ca=/etc/rows-ca.pem` for TLS: the certificate authorities of the servers'
certificates.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from hotrow.config import check_options
from hotrow.credentials import Login, public, read_secret, split_login
from hotrow.errors import OptionError, StorageError, choices
from hotrow.tiers.host.store import SHARDS
from hotrow.tiers.rows.handshake import token_key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger(__name__)

WIRES = {"fp32": 0, "fp16": 1, "int8": 2}
OPTIONS = ("token_file", "wire", "hedge", "local", "ca")
DEFAULT_SET = "hotrow-rows"
REDIS_TIMEOUT = 2.0  # seconds of one command
Shards = tuple[int, int]


@dataclass(frozen=True)
class RowsAddress:
    """A parsed `rows=`: where the list of servers is, and how to read from them."""

    where: str
    token: str | None = None
    wire: str = "fp32"
    hedges: bool = True
    local: bool = True
    ca: str | None = None

    @staticmethod
    def parse(text: str) -> RowsAddress:
        """Parse and check everything that needs no network.

        >>> RowsAddress.parse("10.0.0.1:8010?wire=fp16").wire
        'fp16'
        """
        where, _, query = text.partition("?")
        given = dict(parse_qsl(query, keep_blank_values=True))
        own = given if not where.startswith(("redis:", "rediss:")) else {k: v for k, v in given.items() if k in OPTIONS}
        check_options("rows=", own, list(OPTIONS))
        if own is not given:
            rest = "&".join(f"{name}={value}" for name, value in given.items() if name not in OPTIONS)
            where += f"?{rest}" if rest else ""
        if (wire := own.get("wire", "fp32")) not in WIRES:
            raise OptionError(f"wire={wire}: {choices(wire, WIRES)}")
        for name in ("hedge", "local"):
            if own.get(name, "on") not in ("on", "off"):
                raise OptionError(f"{name}={own[name]}: give on or off")
        token_file = own.get("token_file")
        token = None if token_file is None else read_secret(token_file, "token_file=")
        token_key(token)
        found = RowsAddress(
            where, token, wire, own.get("hedge", "on") == "on", own.get("local", "on") == "on", own.get("ca")
        )
        if found.ca is not None and not os.path.isfile(found.ca):
            raise OptionError(f"ca={found.ca}: there is no such file; give certificate authorities in PEM")
        if where.endswith(".toml") or where.startswith(("dns:", "redis:", "rediss:")):
            if where.endswith(".toml"):
                found.servers()
            elif where.startswith("dns:"):
                check_address(where[len("dns:") :])
            return found
        for address in where.split(","):
            check_address(address)
        return found

    @property
    def changes(self) -> bool:
        """Whether the list may change while a server runs."""
        return self.where.endswith(".toml") or self.where.startswith(("dns:", "redis:", "rediss:"))

    def servers(self) -> dict[str, Shards | None]:
        """The servers that are listed now, each with the shards that the list says it has."""
        if self.where.endswith(".toml"):
            return read_cluster_file(self.where)
        if self.where.startswith("dns:"):
            return dict.fromkeys(_resolve(self.where[len("dns:") :]))
        if self.where.startswith(("redis:", "rediss:")):
            return dict.fromkeys(_redis_members(self.where))
        return dict.fromkeys(self.where.split(","))


def check_address(address: str, place: str = "") -> str:
    """HOST:PORT or unix:/path; anything else is an error, which begins with `place`.

    >>> check_address("10.0.0.1")
    Traceback (most recent call last):
    hotrow.errors.OptionError: '10.0.0.1' is no address of a row server; give HOST:PORT, or unix:/path/of/its/socket
    """
    if address.startswith("unix:/"):
        return address
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise OptionError(
            f"{place}{address!r} is no address of a row server; give HOST:PORT, or unix:/path/of/its/socket"
        )
    return address


def parse_shards(text: str, option: str = "shards") -> Shards:
    """A range of shards.

    >>> parse_shards("0:512")
    (0, 512)
    """
    begin, colon, end = text.partition(":")
    if not (colon and begin.isdigit() and end.isdigit() and 0 <= int(begin) < int(end) <= SHARDS):
        raise OptionError(f"{option} {text!r}: give BEGIN:END with 0 <= BEGIN < END <= {SHARDS}, such as 0:512")
    return int(begin), int(end)


def read_cluster_file(path: str) -> dict[str, Shards | None]:
    """The servers of a cluster.toml."""
    try:
        with open(path, "rb") as file:
            content: Mapping[str, Any] = tomllib.load(file)
    except OSError as error:
        raise OptionError(f"rows={path}: it cannot be read ({error.strerror}); give an existing file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"rows={path}: it is not TOML ({error})") from None
    check_options(path, content, ["range", "servers"])
    found: dict[str, Shards | None] = {}
    ranges = content.get("range", [])
    listed = content.get("servers", [])
    if not isinstance(ranges, list) or not all(isinstance(entry, dict) for entry in ranges):
        raise OptionError(f"{path}: give [[range]] tables, or servers = [...]")

    def add(addresses: Any, shards: Shards | None) -> None:
        if not isinstance(addresses, list):
            raise OptionError(f"{path}: servers is {addresses!r}; give servers = [...], a list of addresses")
        for address in addresses:
            if found.setdefault(check_address(str(address), f"{path}: "), shards) != shards:
                raise OptionError(f"{path}: {address} is there twice, with different shards; leave one of them out")

    for entry in ranges:
        check_options(f"[[range]] of {path}", entry, ["shards", "servers"])
        add(entry.get("servers", []), parse_shards(str(entry.get("shards", "")), f"{path}: shards"))
    add(listed, None)
    if not found:
        raise OptionError(f"{path} names no server; give servers = ['10.0.0.1:8010'], or [[range]] tables")
    return found


def _resolve(name: str) -> list[str]:
    host, _, port = check_address(name).rpartition(":")
    try:
        infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise StorageError(f"rows=dns:{name}: the name does not resolve ({error.strerror or error})") from None
    addresses = {str(info[4][0]) for info in infos}
    return sorted(f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in addresses)


class RedisSet(NamedTuple):
    """A set in Redis with the addresses of row servers."""

    client: Any
    name: str
    login: Login


def open_redis_set(url: str, option: str) -> RedisSet:
    """The set at redis://host/0?set=NAME. Nothing is connected yet. `option` is for the error text."""
    try:
        from redis import Redis
    except ModuleNotFoundError:
        raise OptionError(f"{option} needs the redis package: pip install 'hotrow[redis]'") from None
    place, _, query = url.partition("?")
    options = dict(parse_qsl(query))
    name = options.pop("set", DEFAULT_SET)
    rest = "&".join(f"{key}={value}" for key, value in options.items())
    address, login = split_login(place + (f"?{rest}" if rest else ""))
    try:
        client = Redis.from_url(
            address, username=login.user or None, password=login.password or None, socket_timeout=REDIS_TIMEOUT
        )
    except Exception as error:
        raise StorageError(f"{option}: {login.redact(error)}") from None
    return RedisSet(client, name, login)


def _redis_members(url: str) -> list[str]:
    client, name, login = open_redis_set(url, f"rows={public(url)}")
    try:
        try:
            members = [_text(member) for member in client.smembers(name)]
        finally:
            client.close()
    except Exception as error:
        raise StorageError(f"rows={public(url)}: {login.redact(error)}") from None
    found = []
    for member in sorted(members):
        try:
            found.append(check_address(member))
        except OptionError as error:  # of another program; the others are good
            log.warning("rows=%s: %s", public(url), error)
    return found


def _text(member: bytes | str) -> str:
    return member if isinstance(member, str) else member.decode(errors="backslashreplace")


def socket_path(address: str) -> str | None:
    """The path of a `unix:` address; None for another one."""
    return os.path.abspath(address[len("unix:") :]) if address.startswith("unix:") else None
