"""Gloo: torch.distributed send and recv between two processes, which ranks have already.

Gloo must know the size of a message before it arrives. So every batch size has a process group, that is, TCP
connections and a server thread of its own, and no message is spent on sizes. A server thread keeps the next receive
posted, and sends from as many buffers as there are batches in flight.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hotrow.bench.transports.transport import Keys, StoredRows, Values

SIZES = (512, 8192)
CLIENT, SERVER = 0, 1
TIMEOUT = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Gloo:
    """One pair of connections for each batch size, several batches in flight."""

    name: ClassVar[str] = "gloo"
    connections: ClassVar[int] = 1
    depth: int = 4

    def serve(self, rows: StoredRows, port: int, ready: Callable[[], None]) -> None:
        """One thread for each batch size."""
        ready()
        for batch, group in meet(port, SERVER).items():
            threading.Thread(target=self._answer, args=(rows, batch, group), daemon=True).start()
        threading.Event().wait()

    def _answer(self, rows: StoredRows, batch: int, group: Any) -> None:
        keys = [torch.empty(batch, dtype=torch.int64) for _ in range(self.depth)]
        values = [torch.empty(batch, rows.dim) for _ in range(self.depth)]
        receiving = deque(_receive(part, CLIENT, group) for part in keys)
        sending: list[Any] = [None] * self.depth
        slot = 0
        while True:
            receiving.popleft().wait()
            if sending[slot] is not None:
                sending[slot].wait()
            rows.read_into(keys[slot].numpy(), values[slot])
            sending[slot] = dist.isend(values[slot], CLIENT, group)
            receiving.append(_receive(keys[slot], CLIENT, group))
            slot = (slot + 1) % self.depth

    def connect(self, port: int, dim: int, batch: int) -> GlooConnection:
        """The group of this batch size."""
        if port not in _met:
            _met[port] = meet(port, CLIENT)
        return GlooConnection(_met[port][batch], self.depth, dim, batch)


_met: dict[int, dict[int, Any]] = {}  # the groups of this process by port: a process meets once


def meet(port: int, rank: int) -> dict[int, Any]:
    """Both processes' groups by batch size."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = TCPStore("127.0.0.1", port, 2, is_master=rank == SERVER, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    return {batch: dist.new_group([CLIENT, SERVER], timeout=TIMEOUT, backend="gloo") for batch in SIZES}


def _receive(into: torch.Tensor, source: int, group: Any) -> Any:
    return dist.irecv(into, source, group)


class GlooConnection:
    """The client's side. The receive of an answer is posted before its request is sent."""

    def __init__(self, group: Any, depth: int, dim: int, batch: int) -> None:
        self._group = group
        self._values = deque(torch.empty(batch, dim) for _ in range(depth + 1))  # one more: the answer being read
        self._in_flight: deque[tuple[Any, Any, torch.Tensor]] = deque()

    def send(self, keys: Keys) -> None:
        """Post the receive, then the send."""
        values = self._values.popleft()
        self._values.append(values)
        answer = _receive(values, SERVER, self._group)
        self._in_flight.append((dist.isend(torch.from_numpy(keys), SERVER, self._group), answer, values))

    def receive(self) -> Values:
        """Wait for the oldest answer."""
        request, answer, values = self._in_flight.popleft()
        answer.wait()
        request.wait()
        rows: Values = values.numpy()
        return rows


TRANSPORTS = (Gloo(),)
