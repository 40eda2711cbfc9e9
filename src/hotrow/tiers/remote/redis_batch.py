"""BatchRead: one batched read from Redis. One HMGET for each partition, all nodes at once, until a deadline.

The core decodes rows as bytes arrive (core/remote/redis_replies.h). A MOVED or ASK concerns one partition, whose HMGET
is sent again to the node that it names. A partition is late if its node is down or its reply did not come in time. It
is late, too, if its stamp (the field `here`) is missing: a master that restarted without its data must not look like a
table without rows.

A BatchRead belongs to one thread. Nodes are shared with all threads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow import _core
from hotrow.backoff import Backoff
from hotrow.errors import StorageError
from hotrow.tiers.remote.redis_connection import PipelinedRequest, command, exchange
from hotrow.tiers.remote.redis_nodes import Node, Nodes, key_slot
from hotrow.tiers.remote.store import TableFormat

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.5  # between two attempts after a transient error
# Transient errors: the cluster is electing a master, a node is loading, a key is between two nodes.
TRANSIENT = ("CLUSTERDOWN", "LOADING", "TRYAGAIN", "MASTERDOWN", "READONLY", "NOREPLICAS")


class RedisTable:
    """A table's format, and for each partition its hash's name, its slot, and the beginning of its HMGET."""

    def __init__(self, form: TableFormat, prefix: str) -> None:
        self.form = form
        self.names = [f"hr:{{{prefix}:{p:x}}}".encode() for p in range(1 << form.bits)]
        self.slots = [key_slot(name) for name in self.names]
        self.heads = [b"\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n$4\r\nhere\r\n" % (len(name), name) for name in self.names]


@dataclass
class PartitionRead:
    """The keys of one batch in one partition: order[begin:end]."""

    partition: int
    begin: int
    end: int
    node: Node | None = None  # where an ASK redirected us


class BatchRead:
    """One batched read: sends the HMGETs, follows redirections, and marks as late what did not come.

    `out` are the arrays for raw rows, versions and found flags, which the core fills as replies arrive.
    """

    def __init__(
        self, nodes: Nodes, table: RedisTable, order: NDArray[np.uint32], fields_out: memoryview, out: tuple[Any, ...]
    ) -> None:
        self.nodes = nodes
        self.table = table
        self.order = order
        self.fields = fields_out
        self.out = out
        self.late: NDArray[np.bool_] = np.zeros(len(order), np.bool_)
        self.redirects = 0
        self.lost = 0

    def run(self, reads: list[PartitionRead], deadline: float) -> None:
        """Read the partitions until each is answered, its node is down, or the deadline has passed."""
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        retried: set[Node] = set()
        while reads:
            requests, again = self._send(reads, deadline)
            started = time.monotonic()
            exchange([request for request, _, _ in requests], deadline)
            transient = False
            for request, node, sent in requests:
                retry, waits = self._handle_replies(request, node, sent, started, retried)
                again += retry
                transient |= waits
            reads = again
            if reads and time.monotonic() + (backoff.pause if transient else 0) >= deadline:
                self._mark_late(reads)
                return
            if transient:
                time.sleep(backoff.next())

    def _send(
        self, reads: list[PartitionRead], deadline: float
    ) -> tuple[list[tuple[PipelinedRequest, Node, list[PartitionRead]]], list[PartitionRead]]:
        by_node: dict[Node | None, list[PartitionRead]] = {}
        for read in reads:
            by_node.setdefault(read.node or self.nodes.owners[self.table.slots[read.partition]], []).append(read)
        requests = []
        for node, sent in by_node.items():
            connection = None if node is None else node.acquire(deadline)
            if node is None or connection is None:
                self._mark_late(sent)
                self.nodes.request_refresh()
                continue
            replies = _core.RowReplies(*self.out)
            pieces: list[Any] = []
            for read in sent:
                if read.node is not None:
                    pieces.append(command("ASKING"))
                    replies.expect_line()
                begin, end = read.begin, read.end
                pieces += (
                    b"*%d" % (end - begin + 3),
                    self.table.heads[read.partition],
                    self.fields[begin * 14 : end * 14],
                )
                replies.expect(self.order, begin, end, len(self.order))
            requests.append((PipelinedRequest(connection, pieces, replies), node, sent))
        return requests, []

    def _handle_replies(
        self, request: PipelinedRequest, node: Node, sent: list[PartitionRead], started: float, retried: set[Node]
    ) -> tuple[list[PartitionRead], bool]:
        """Which partitions to read again, and whether to wait before."""
        replies: Any = request.replies
        numbers = np.cumsum([1 + (read.node is not None) for read in sent]).tolist()  # commands up to each
        again: list[PartitionRead] = []
        transient = False
        if request.complete:
            node.release(request.connection)
        else:
            request.connection.close()
            missing = [read for read, number in zip(sent, numbers, strict=True) if number > replies.done]
            if request.error is not None and node not in retried:
                # The server may have closed this idle connection long ago. Try once more with a new one: connecting
                # fails at once if the node is down.
                retried.add(node)
                node.drop_connections()
                again += missing
            else:
                if request.error is not None:
                    node.mark_down(request.error)
                elif request.received_any:
                    node.record_reply()
                else:
                    node.record_silence(started)
                self.nodes.request_refresh()
                self._mark_late(missing)
        for number, raw in replies.errors:
            read = sent[next(i for i, upto in enumerate(numbers) if number < upto)]
            text = raw.decode(errors="replace")
            if text.startswith(("MOVED", "ASK ")):
                slot, target = self.nodes.redirect(text, node)
                self.redirects += 1
                if text.startswith("MOVED"):
                    self.nodes.record_move(slot, target)
                    read.node = None
                else:
                    read.node = target
                again.append(read)
            elif text.startswith(TRANSIENT):
                read.node = None
                transient = True
                self.nodes.request_refresh()
                again.append(read)
            elif text == "LOST":
                self.lost += read.end - read.begin
                self._mark_late([read])
            else:
                raise StorageError(f"Redis at {node} replied for {self.table.names[read.partition].decode()}: {text}")
        return again, transient

    def _mark_late(self, reads: list[PartitionRead]) -> None:
        found = self.out[2]
        for read in reads:
            places = self.order[read.begin : read.end]
            self.late[places] = found[places] == 0
