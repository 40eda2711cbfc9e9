"""What the host's threads know of each other: who takes a lock comes after who gave it back.

Locks, and what Python makes of them (conditions, events, futures), tell that to `order.Order`; so do queues, and
starting and joining a thread. Attributes that are read without a lock do not.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from simulated_gpu.order import Order


class Lock:
    """Has the calls of threading.Lock and RLock."""

    def __init__(self, order: Order, real: Any) -> None:
        self._order, self._real = order, real
        self._said: np.ndarray | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._real.acquire(blocking, timeout))
        if taken:
            self._order.hear(self._said)
        return taken

    def release(self) -> None:
        self._tell()
        self._real.release()

    def _tell(self) -> None:
        said = self._order.heard()
        self._said = said if self._said is None else np.maximum(self._said, said)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return bool(self._real.locked())


class RLock(Lock):
    """With what conditions ask of one that may be taken twice."""

    def _is_owned(self) -> bool:
        return bool(self._real._is_owned())

    def _release_save(self) -> Any:
        self._tell()
        return self._real._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._real._acquire_restore(state)
        self._order.hear(self._said)


class Queue:
    """Has the calls of queue.SimpleQueue."""

    def __init__(self, order: Order, real: Any) -> None:
        self._order, self._real = order, real
        self.empty, self.qsize = real.empty, real.qsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._real.put((self._order.heard(), item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        said, item = self._real.get(block, timeout)
        self._order.hear(said)
        return item

    def get_nowait(self) -> Any:
        return self.get(False)


def replaced(order: Order, mode: Callable[[], AbstractContextManager[Any]]) -> list[tuple[Any, str, Any]]:
    """What to put in the place of what; `mode` is entered on each new thread."""
    lock, rlock, begin = threading.Lock, threading.RLock, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    start, join, simple = threading.Thread.start, threading.Thread.join, queue.SimpleQueue

    def start_thread(thread: Any) -> None:
        thread._said = order.heard()
        start(thread)

    def bootstrap(thread: Any) -> None:
        with mode(), torch.autograd.set_multithreading_enabled(False):
            order.enter(thread.name)
            order.hear(getattr(thread, "_said", None))
            try:
                begin(thread)
            finally:
                thread._last = order.heard()

    def join_thread(thread: Any, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            order.hear(getattr(thread, "_last", None))

    return [
        (threading, "Lock", lambda: Lock(order, lock())),
        (threading, "RLock", lambda: RLock(order, rlock())),
        (threading.Thread, "start", start_thread),
        (threading.Thread, "_bootstrap_inner", bootstrap),
        (threading.Thread, "join", join_thread),
        (queue, "SimpleQueue", lambda: Queue(order, simple())),
    ]
