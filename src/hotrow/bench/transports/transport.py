"""What a transport is: a server of rows, and connections that pipeline batches of keys to it.

A request is int64 keys [n], an answer float32 rows [n, dim]. Whether each key has a row is not sent: it would be n bits
more for every transport. Both sides keep freed memory, so that no transport pays page faults for each new buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hotrow.config import Initial
from hotrow.optim import RowWiseAdagrad
from hotrow.tiers.host.store import Budget, HostStore

Keys = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

CHUNK = 65536
PERIOD = 1009  # rows repeat after so many keys


class Connection(Protocol):
    """A connection for batches of one size. Answers arrive in the order of their requests."""

    def send(self, keys: Keys) -> None:
        """Send a batch without waiting for its answer. `keys` stay unchanged until then."""

    def receive(self) -> Values:
        """Wait for the oldest answer: float32 [n, dim], valid until the next call."""


class Transport(Protocol):
    """How keys reach a server and rows return. Pickled into both processes."""

    @property
    def name(self) -> str:
        """Its name in the results."""

    @property
    def connections(self) -> int:
        """How many connections a client opens to keep the server busy."""

    @property
    def depth(self) -> int:
        """How many batches are in flight on each of them."""

    def serve(self, rows: StoredRows, port: int, ready: Callable[[], None]) -> None:
        """Answer clients on 127.0.0.1:port until the process ends. Calls `ready` when clients may connect."""

    def connect(self, port: int, dim: int, batch: int) -> Connection:
        """A new connection for batches of `batch` keys."""


class StoredRows:
    """A table of `count` rows in DRAM, as a row server has it: read-only float32 values."""

    def __init__(self, count: int, dim: int) -> None:
        self.dim = dim
        self._store = HostStore("rows", dim, RowWiseAdagrad(lr=0.01), Initial(), 0, Budget(), values="fp32")
        for first in range(0, count, CHUNK):
            keys = np.arange(first, min(count, first + CHUNK))
            self._store.assign(torch.from_numpy(keys), torch.from_numpy(expected(keys, dim)))

    @property
    def core(self) -> Any:
        """The table of the core."""
        return self._store.core

    def read(self, keys: Keys) -> Values:
        """The rows of the keys, in new memory."""
        out = np.empty((len(keys), self.dim), np.float32)
        self.read_into(keys, torch.from_numpy(out))
        return out

    def read_into(self, keys: Keys, out: torch.Tensor) -> None:
        """The rows of the keys, into float32 [n, dim]."""
        self._store.read_into(torch.from_numpy(keys), out, torch.empty(len(keys), dtype=torch.bool))


def expected(keys: Keys, dim: int) -> Values:
    """The rows of the keys."""
    rows: Values = ((keys % PERIOD)[:, None] + np.arange(dim)).astype(np.float32)
    return rows


def retry(connect: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Call `connect` until it raises no ConnectionError: a server may call `ready` just before it listens."""
    until = time.monotonic() + seconds
    while True:
        try:
            return connect()
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
