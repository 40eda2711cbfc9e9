"""Registration: a row server keeps its address in a set in Redis, where tower servers look (`rows=redis://...`).

Tower servers find out by themselves whether a listed server answers, so an address that stays after a crash costs them
attempts to connect and nothing else. A server that ends in order removes its address.
"""

from __future__ import annotations

import logging
import threading
from typing import Any
from urllib.parse import parse_qsl

from hotrow.credentials import split_login
from hotrow.errors import OptionError

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0  # Redis may have lost the set
TIMEOUT = 2.0  # of one command


class Registration:
    """`url` is redis://host/0?set=NAME; `address` is what tower servers connect to."""

    def __init__(self, url: str, address: str) -> None:
        try:
            from redis import Redis
        except ModuleNotFoundError:
            raise OptionError("--register needs the redis package: pip install 'hotrow[redis]'") from None
        place, _, query = url.partition("?")
        options = dict(parse_qsl(query))
        self._set = options.pop("set", "hotrow-rows")
        rest = "&".join(f"{name}={value}" for name, value in options.items())
        where, self._login = split_login(place + (f"?{rest}" if rest else ""))
        self._redis: Any = Redis.from_url(
            where, username=self._login.user or None, password=self._login.password or None, socket_timeout=TIMEOUT
        )
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hotrow-rows-register", daemon=True)

    def start(self) -> None:
        """Register, and again every few seconds."""
        self._add()
        self._thread.start()

    def close(self) -> None:
        """Remove the address."""
        self._stop.set()
        if self._thread.is_alive():  # it may be registering
            self._thread.join(2 * TIMEOUT)
        try:
            self._redis.srem(self._set, self._address)
            self._redis.close()
        except Exception as error:
            log.warning("the address stays registered: %s", self._login.redact(error))

    def _run(self) -> None:
        while not self._stop.wait(AGAIN_SECONDS):
            self._add()

    def _add(self) -> None:
        try:
            self._redis.sadd(self._set, self._address)
        except Exception as error:
            log.warning("the address cannot be registered: %s", self._login.redact(error))
