"""RowsAhead: rows that owners send before their batch's turn, so that requesters wait for few on the turn.

    route   the owner notes the batch's keys: which earlier batches in flight have them
    stage   the owner sends the rows in DRAM that no batch in flight will change (stage thread, beside the computation)
    gather  on the turn the owner sends the other rows, and those that have changed since; a bit for each key says which

A requester gets the rows that one batch after another would have seen. That does not depend on which rows were sent
ahead: on the turn the owner compares each row's last step and count with the moment of the copy, and sends a row again
that an update, an expiry or an assignment has changed (core/plan/plan_ahead.cpp). A row travels twice only in that
case, and each of the two messages has one bit for each key.

A batch that was not staged (lookahead 0, an evaluation) sends all its rows on the turn.

Threads: as the verbs of tiers/plan.py. The training thread writes `done` and `step`, the stage thread reads them before
it copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hotrow import _core
from hotrow.tiers.batch_values import PackedRows, ReceivedRows, TransferStats, bytes_of_mask

if TYPE_CHECKING:
    from hotrow.tiers.sharded.plan import ClientTables


@dataclass
class AheadStream:
    """What the plans of a collection share: how far routing and training have come on this process."""

    keys: list[Any] = field(default_factory=list)  # a _core.InFlightKeys for each part of the tables
    noted: int = 0  # batches noted
    done: int = 0  # the last batch that is trained or dropped
    step: int = 0  # the last update that is complete
    floats_ahead: int = 0  # sent by this process before their batch's turn
    floats_on_turn: int = 0


class AheadOwner(Protocol):
    """An owner that can copy rows ahead of their batch's turn."""

    def note_in_flight(self, keys: Sequence[Any], number: int, done: int) -> None:
        """After route: note the requested keys under the batch's number."""

    def copy_ahead(self, done: int, step: int) -> Iterator[PackedRows]:
        """For each request the rows in DRAM that no batch after `done` has; `step` is the last complete update."""

    def copy_changed(self) -> Iterator[PackedRows]:
        """After fetch: for each request the rows that were not copied ahead, or have changed since."""


class AheadTransport(Protocol):
    """The exchanges of rows that are sent ahead."""

    def rows_ahead(self, packed: PackedRows) -> ReceivedRows:
        """Send rows ahead of the turn. Stage thread."""

    def rows_on_turn(
        self, packed: PackedRows, mask_bytes: Sequence[int], floats_of: Callable[[Sequence[Tensor]], list[int]]
    ) -> ReceivedRows:
        """Send rows on the turn. `mask_bytes` are the sizes of the masks that arrive, by owner. `floats_of` returns how
        many floats the rows are that belong to masks."""


class RowsAhead:
    """One plan's rows that are sent ahead. The plan calls it in the order of its verbs."""

    def __init__(self, stream: AheadStream, owner: AheadOwner, transport: AheadTransport) -> None:
        self.stream, self.owner, self.transport = stream, owner, transport
        self.staged = False
        self._number = 0  # the batch's number; 0: not noted
        self._buffers: list[Tensor] = []  # by part: the rows that this process requested

    def route(self, parts: int) -> None:
        """Note the batch's keys."""
        stream = self.stream
        while len(stream.keys) < parts:
            stream.keys.append(_core.InFlightKeys())
        stream.noted += 1
        self._number = stream.noted
        self.owner.note_in_flight(stream.keys, self._number, stream.done)

    def stage(self, parts: Sequence[ClientTables]) -> TransferStats:
        """Send rows ahead, and put those that arrive into their places."""
        done, step = self.stream.done, self.stream.step  # before the copy begins
        self._buffers, rows = [], 0
        for part, packed in zip(parts, self.owner.copy_ahead(done, step), strict=True):
            received = self.transport.rows_ahead(packed)
            self._buffers.append(torch.empty(part.requested_floats(), dtype=torch.float32))
            part.place_rows(received, self._buffers[-1])
            self.stream.floats_ahead += sum(packed.floats)
            rows += packed.rows.numel() + sum(one.numel() for one in received.rows)
        self.staged = True
        return TransferStats(bytes=4 * rows)

    def gather(self, parts: Sequence[ClientTables]) -> Iterator[Tensor]:
        """The rows that this process requested, part by part. Requires: `stage`, and the owner has fetched."""
        for part, packed, buffer in zip(parts, self.owner.copy_changed(), self._buffers, strict=True):
            self.stream.floats_on_turn += sum(packed.floats)
            mask_bytes = [bytes_of_mask(sum(counts)) for counts in part.sent_counts]
            part.place_rows(self.transport.rows_on_turn(packed, mask_bytes, part.masked_floats), buffer)
            yield buffer

    def updated(self, step: int) -> None:
        """An update is complete on this process."""
        self.stream.step = step

    def release(self) -> None:
        """The batch is trained or dropped."""
        self.stream.done = max(self.stream.done, self._number)
        self.staged, self._number, self._buffers = False, 0, []
