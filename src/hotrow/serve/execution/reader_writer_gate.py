"""A reader-writer gate: batches read rows and weights concurrently, an update changes them exclusively.

A waiting writer has priority over new readers, so steady traffic cannot starve an update. Any thread may call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class ReaderWriterGate:
    """`shared()` for batches, `exclusive()` for an update.

    >>> gate = ReaderWriterGate()
    >>> with gate.shared(), gate.shared():
    ...     pass
    >>> with gate.exclusive():
    ...     pass
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = self._waiting_writers = 0
        self._writing = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Enter together with other readers; waits while a writer writes or waits."""
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting_writers and not self._writing)
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Enter exclusively: waits until all readers and other writers have left."""
        with self._condition:
            self._waiting_writers += 1
            self._condition.wait_for(lambda: not self._readers and not self._writing)
            self._waiting_writers -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._condition:
                self._writing = False
                self._condition.notify_all()
