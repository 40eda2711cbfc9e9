"""BoundedStore: a torch store whose calls end when its timeout is over, whatever the network does.

torch's TCPStore keeps its timeout only in `get` of an entry that does not exist. If the link to the store is down, any
call waits until TCP gives up, which takes 15 minutes. So a thread makes the calls, one after another, and the caller
waits for it as long as the timeout says. A call that came too late is still made when the link is up again; its answer
is dropped. So a store that did not answer may be asked again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from datetime import timedelta
from typing import Any

from hotrow.errors import RankError

GRACE_SECONDS = 1.0  # torch's own error at the timeout says more
Calls = queue.SimpleQueue["tuple[Callable[[], Any], Future[Any]] | None"]  # None: the store is no longer used


class BoundedStore:
    """`store` with calls that take at most its timeout. Any thread may call; calls are made in order."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seconds = store.timeout.total_seconds()
        self._calls: Calls = queue.SimpleQueue()
        threading.Thread(target=_make_calls, args=(self._calls,), name="hotrow-store", daemon=True).start()

    def clone(self) -> BoundedStore:
        """The same store over a connection of its own."""
        return BoundedStore(self._call(self._store.clone))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a call may take."""
        self._seconds = timeout.total_seconds()
        self._call(lambda: self._store.set_timeout(timeout))

    def check(self, names: list[str]) -> bool:
        """Whether all these entries exist."""
        return bool(self._call(lambda: self._store.check(names)))

    def set(self, name: str, value: str) -> None:
        """Write an entry."""
        self._call(lambda: self._store.set(name, value))

    def get(self, name: str) -> bytes:
        """Read an entry; waits until it exists."""
        return bytes(self._call(lambda: self._store.get(name)))

    def _call(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        try:
            return future.result(self._seconds + GRACE_SECONDS)
        except TooLate:
            if future.done():  # the call itself has raised it
                raise
            raise RankError(f"the store at which ranks meet has not answered for {self._seconds:g} s") from None

    def __del__(self) -> None:
        self._calls.put(None)


def _make_calls(calls: Calls) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, call, future  # else the thread keeps the store while it waits
