"""In process: the client calls the store itself. The limit of every transport."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from hotrow.bench.transports.transport import Keys, StoredRows, Values


@dataclass
class InProcess:
    """No server: `rows` is the client's own table, which the client's process sets before it connects."""

    name: ClassVar[str] = "in process"
    connections: ClassVar[int] = 1
    depth: ClassVar[int] = 1
    rows: StoredRows | None = None

    def serve(self, rows: StoredRows, port: int, ready: Callable[[], None]) -> None:
        """Nothing is served."""
        raise NotImplementedError("the store is called in process")

    def connect(self, port: int, dim: int, batch: int) -> Calls:
        """Calls of the store."""
        assert self.rows is not None
        return Calls(self.rows)


class Calls:
    """A Connection that reads the store on `receive`."""

    def __init__(self, rows: StoredRows) -> None:
        self._rows = rows
        self._sent: deque[Keys] = deque()

    def send(self, keys: Keys) -> None:
        """Remember the keys."""
        self._sent.append(keys)

    def receive(self) -> Values:
        """Read the rows of the oldest keys."""
        return self._rows.read(self._sent.popleft())


TRANSPORTS = (InProcess(),)
