"""Authorization: decides which callers may load and unload models.

If the server has a token, calls must send it. Otherwise, calls are allowed on loopback and forbidden elsewhere. A
browser can send requests to loopback for any web page, so without a token a call is refused when its Origin is not this
server, or when its Host is not a loopback name (a page whose domain resolves to 127.0.0.1, known as DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from typing import NamedTuple

from hotrow.serve.protocol.tensors import invalid, shown


class Caller(NamedTuple):
    """The HTTP headers that identify the sender of a call."""

    authorization: str | None = None
    origin: str | None = None
    host: str | None = None


class Authorization:
    """The authorization rules of one front end."""

    def __init__(self, token: str | None, loopback: bool) -> None:
        self._token = None if token is None else token.encode()
        self._loopback = loopback  # whether the server listens on loopback only

    def check(self, caller: Caller) -> None:
        """Raise RefusedError unless the caller may change the server."""
        if self._token is None:
            if not self._loopback:
                raise invalid(
                    "this server listens beyond loopback and has no token, so models cannot be loaded or unloaded; "
                    "start it with --token-file, or load models at its start",
                    403,
                )
            if caller.host is not None and not is_loopback_host(caller.host):
                raise invalid(
                    f"Host is {shown(caller.host)}, which is not this machine's loopback; call localhost, or start the "
                    "server with --token-file",
                    403,
                )
            if caller.origin is not None and caller.origin.lower() != f"http://{caller.host}".lower():
                raise invalid("a web page may not load or unload models here; start the server with --token-file", 403)
            return
        scheme, _, given = (caller.authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token):
            raise invalid(
                "loading and unloading need the header 'Authorization: Bearer <token>' with the server's token", 401
            )


def is_loopback_host(host: str) -> bool:
    """Whether a Host header names loopback. No name is resolved: a name can resolve to anything.

    >>> [is_loopback_host(host) for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "evil.example:8000")]
    [True, True, True, False]
    """
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) and not host.endswith("]") else host
    name = name.strip("[]").rstrip(".").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
