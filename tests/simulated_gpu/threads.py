"""The order between host threads: a thread that takes a lock follows the one that released it.

Locks and what Python builds of them (conditions, events, futures), queues, and starting and joining a thread pass
clocks to `order.Order`. Attributes that are read without a lock do not.
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
    """The interface of threading.Lock and RLock."""

    def __init__(self, order: Order, real: Any) -> None:
        self._order, self._real = order, real
        self._clock: np.ndarray | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._real.acquire(blocking, timeout))
        if taken:
            self._order.receive_clock(self._clock)
        return taken

    def release(self) -> None:
        self._publish_clock()
        self._real.release()

    def _publish_clock(self) -> None:
        clock = self._order.send_clock()
        self._clock = clock if self._clock is None else np.maximum(self._clock, clock)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return bool(self._real.locked())


class RLock(Lock):
    """Adds the methods that conditions need of a reentrant lock."""

    def _is_owned(self) -> bool:
        return bool(self._real._is_owned())

    def _release_save(self) -> Any:
        self._publish_clock()
        return self._real._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._real._acquire_restore(state)
        self._order.receive_clock(self._clock)


class Queue:
    """The interface of queue.SimpleQueue."""

    def __init__(self, order: Order, real: Any) -> None:
        self._order, self._real = order, real
        self.empty, self.qsize = real.empty, real.qsize

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._real.put((self._order.send_clock(), item))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        clock, item = self._real.get(block, timeout)
        self._order.receive_clock(clock)
        return item

    def get_nowait(self) -> Any:
        return self.get(False)


def replaced(order: Order, mode: Callable[[], AbstractContextManager[Any]]) -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of everything to patch. `mode` is entered on each new thread."""
    lock, rlock, begin = threading.Lock, threading.RLock, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
    start, join, simple = threading.Thread.start, threading.Thread.join, queue.SimpleQueue

    def start_thread(thread: Any) -> None:
        thread._clock = order.send_clock()
        start(thread)

    def bootstrap(thread: Any) -> None:
        with mode(), torch.autograd.set_multithreading_enabled(False):
            order.enter(thread.name)
            order.receive_clock(getattr(thread, "_said", None))
            try:
                begin(thread)
            finally:
                thread._last = order.send_clock()

    def join_thread(thread: Any, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive():
            order.receive_clock(getattr(thread, "_last", None))

    return [
        (threading, "Lock", lambda: Lock(order, lock())),
        (threading, "RLock", lambda: RLock(order, rlock())),
        (threading.Thread, "start", start_thread),
        (threading.Thread, "_bootstrap_inner", bootstrap),
        (threading.Thread, "join", join_thread),
        (queue, "SimpleQueue", lambda: Queue(order, simple())),
    ]
