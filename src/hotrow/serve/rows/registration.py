"""Registration: a row server keeps its address in a set in Redis, where tower servers look (`rows=redis://...`).

Tower servers find out by themselves whether a listed server answers, so an address that stays after a crash costs them
attempts to connect and nothing else. A server that ends in order removes its address.
"""

from __future__ import annotations

import logging
import threading

from hotrow.tiers.rows.cluster_file import REDIS_TIMEOUT, open_redis_set

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0  # Redis may have lost the set


class Registration:
    """`url` is redis://host/0?set=NAME; `address` is what tower servers connect to."""

    def __init__(self, url: str, address: str) -> None:
        self._redis, self._set, self._login = open_redis_set(url, "--register")
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
            self._thread.join(2 * REDIS_TIMEOUT)
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
