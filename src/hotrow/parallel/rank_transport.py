"""RankTransport: exchanges keys, rows and gradients between the ranks of a job.

For each part of a batch the ranks exchange counts, and then keys with their numbers of occurrences. Rows and gradients
are sent in the type `wire`. Channel.sent counts the bytes: 8 for a key, 1 for its occurrences (4 if one is above 255),
and its row and its gradient. Every rank makes the same exchanges in the same order.

Batches that are routed ahead use the channel `route`, everything else uses `rows`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from hotrow.errors import GradientError, OptionError
from hotrow.parallel.exchange import Channel, Exchange
from hotrow.parallel.ownership import Roles
from hotrow.parallel.ranks import Ranks
from hotrow.tiers.batch_values import GradientSums, KeyRequest, PackedRows, ReceivedRows, RoutedBatch
from hotrow.tiers.sharded.transport import ExchangeRequests, ReceivedRequests

HEADER = 2  # numbers before the counts of a message: examples, bytes of a number of occurrences


class RankTransport:
    """An exchange between ranks (hotrow.tiers.sharded.transport.Transport)."""

    def __init__(self, ranks: Ranks, roles: Roles) -> None:
        self.ranks, self.rank, self.world = ranks, ranks.rank, ranks.world
        self.owner_of = roles.owner_of
        self._sending: tuple[Exchange, Tensor] | None = None  # gradients on their way, and their memory

    @property
    def wire(self) -> torch.dtype:
        """The ranks' wire, which may be set later."""
        return self.ranks.wire

    @contextmanager
    def routing(self, ahead: bool) -> Iterator[ExchangeRequests]:
        """Count a route that runs ahead, so that all ranks end at the same one (Ranks.routes)."""
        if ahead:
            with self.ranks.routes.in_order():
                yield self.exchange_missing()
        else:
            yield partial(self._exchange, self.ranks.rows)

    def exchange_missing(self) -> ExchangeRequests:
        """The exchange for a route of other ranks that this rank does not make. Ranks.routes does not count it."""
        return partial(self._exchange, self.ranks.route)

    def _exchange(self, channel: Channel, request: KeyRequest, size: int, replicated: bool) -> ReceivedRequests:
        """Send this rank's request to the owners; returns what all ranks request from this one."""
        counts, keys, occurrences = request
        send_keys = [sum(of_rank) for of_rank in counts]
        if not replicated:
            self.ranks.remote_keys += sum(send_keys) - send_keys[self.rank]
        if occurrences.numel() == 0 or int(occurrences.max()) < 256:
            occurrences = occurrences.to(torch.uint8)
        width = occurrences.element_size()
        headers = torch.tensor([number for of_rank in counts for number in (size, width, *of_rank)])
        row = [HEADER + len(counts[0])] * self.world
        received_headers = channel.all_to_all(headers, row, row, what="counts").view(self.world, -1).tolist()
        received_counts = [header[HEADER:] for header in received_headers]
        widths = [header[1] for header in received_headers]
        receive_keys = [sum(of_rank) for of_rank in received_counts]
        receive_bytes = [_bytes(n, width) for n, width in zip(receive_keys, widths, strict=True)]
        send_bytes = [_bytes(n, width) for n in send_keys]
        received = channel.all_to_all(_pack(keys, occurrences, send_keys), send_bytes, receive_bytes, what="keys")
        arrays = _unpack(received, receive_keys, widths, receive_bytes)
        sizes = [header[0] for header in received_headers]
        return ReceivedRequests(sizes, received_counts, [k for k, _ in arrays], [n for _, n in arrays])

    def routed(self, size: int, sizes: Sequence[int]) -> RoutedBatch:
        """This rank's part of the step's examples. Row ranks have none, and are left out of the sizes."""
        examples = sum(sizes)
        requesters = tuple(sizes[rank] for rank in self.ranks.roles.requesters)
        return RoutedBatch(size / examples if examples else 0.0, examples, examples == 0, requesters)

    def check_policy(self, late: str) -> None:
        """Only "wait": ranks always wait for their rows."""
        if late != "wait":
            raise OptionError(
                f"late={late!r} over ranks: a rank always waits for rows of other ranks; pass late='wait'"
            )

    def rows(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send rows to their requesters, in the type `wire`."""
        self._finish_sending()
        return self.ranks.rows.all_to_all(send.to(self.wire), send_counts, receive_counts, what="rows").float()

    def rows_ahead(self, packed: PackedRows) -> ReceivedRows:
        """Send rows before their batch's turn. Counted, so that all ranks end at the same one (Ranks.rows_ahead)."""
        with self.ranks.rows_ahead.in_order():
            return self._exchange_ahead(packed)

    def rows_ahead_missing(self) -> None:
        """Take part in an exchange of rows ahead that this rank does not make. What arrives is dropped."""
        nothing, zeros = torch.zeros(0), [0] * self.world
        self._exchange_ahead(PackedRows(nothing.to(torch.uint8), nothing, zeros, zeros))

    def _exchange_ahead(self, packed: PackedRows) -> ReceivedRows:
        channel = self.ranks.ahead
        sizes = torch.tensor(list(zip(packed.mask_bytes, packed.floats, strict=True)), dtype=torch.int64)
        two = [2] * self.world
        arrived = channel.all_to_all(sizes.view(-1), two, two, what="sizes").view(-1, 2).tolist()
        mask_bytes, floats = [masks for masks, _ in arrived], [rows for _, rows in arrived]
        masks = channel.begin_all_to_all(packed.masks, packed.mask_bytes, mask_bytes, what="masks")
        rows = channel.begin_all_to_all(packed.rows.to(self.wire), packed.floats, floats, what="rows")
        return ReceivedRows(list(masks.wait().split(mask_bytes)), list(rows.wait().float().split(floats)))

    def rows_on_turn(
        self, packed: PackedRows, mask_bytes: Sequence[int], floats_of: Callable[[Sequence[Tensor]], list[int]]
    ) -> ReceivedRows:
        """Send rows on their batch's turn. A rank that receives none does not wait for masks before it sends."""
        self._finish_sending()
        begin = self.ranks.rows.begin_all_to_all
        send, exchange = packed.rows.to(self.wire), begin(packed.masks, packed.mask_bytes, mask_bytes, what="masks")
        if not any(mask_bytes):
            rows = begin(send, packed.floats, list(mask_bytes), what="rows")
            masks = list(exchange.wait().split(list(mask_bytes)))
            return ReceivedRows(masks, list(rows.wait().float().split(list(mask_bytes))))
        masks = list(exchange.wait().split(list(mask_bytes)))
        floats = floats_of(masks)
        rows = begin(send, packed.floats, floats, what="rows")
        return ReceivedRows(masks, list(rows.wait().float().split(floats)))

    def gradients(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send sums, which have the type `wire`, to the owners. A rank that receives none does not wait: its dense step
        runs while they are sent. They are complete before the channel's next exchange is, which every rank makes."""
        self._finish_sending()
        exchange = self.ranks.rows.begin_all_to_all(send, send_counts, receive_counts, what="gradients")
        if any(receive_counts) or self.ranks.owns_rows:
            return exchange.wait().float()
        self._sending = (exchange, send)
        return torch.empty(0)

    def _finish_sending(self) -> None:
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None

    def presence(self, send: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
        """Send a byte for each key to the owners."""
        return self.ranks.rows.all_to_all(send, send_counts, receive_counts)

    def agree(self, sums: Sequence[GradientSums], scale: float) -> tuple[list[bool], float]:
        """Whether every key of all ranks has a gradient, by part, and the scale of rank 0, which row ranks do not know.
        If a gradient is not finite on any rank, all raise.

        Ranks also exchange their stop signals here, so that all stop after the same step.
        """
        not_finite, self.ranks.not_finite = self.ranks.not_finite, False
        finite = all(one.finite for one in sums) and not not_finite
        before = not not_finite and all(one.finite or one.overflowed for one in sums)
        stop_signal = self.ranks.stop_signal()
        everyones = self.ranks.rows.gather_numbers(
            finite, before, stop_signal, _bits(scale), *(one.all_present for one in sums)
        )
        self.ranks.stopping = max(self.ranks.stopping, *(wants for _, _, wants, *_ in everyones))
        bad = [rank for rank, (was_finite, *_) in enumerate(everyones) if not was_finite]
        self.ranks.failing = bool(bad)
        if bad:
            raise GradientError(self._why(bad, all(everyones[rank][1] for rank in bad)))
        present = [all(of_part) for of_part in zip(*(numbers[4:] for numbers in everyones), strict=True)]
        return present, _float(everyones[0][3])

    def _why(self, bad: Sequence[int], finite_before: bool) -> str:
        """The error text for ranks whose sums are not finite, or are not after rounding to the type `wire`."""
        ranks, wire = ", ".join(map(str, bad)), self.ranks.wire
        narrow = wire != torch.float32
        limit = f"{torch.finfo(wire).max:g}, the largest {str(wire).removeprefix('torch.')}"
        if finite_before and narrow:
            return (
                f"a sum of gradients on rank {ranks} is finite but beyond {limit} on the wire; no row was changed. "
                "Pass wire='fp32', or clip gradients"
            )
        also = f", pass wire='fp32' if rows are beyond {limit}" if narrow else ""
        return (
            f"the loss or a gradient is NaN or infinite on rank {ranks}; no row was changed. Lower the learning rate, "
            f"clip gradients{also}, or find the bad input with torch.autograd.set_detect_anomaly(True)"
        )


def _bits(number: float) -> int:
    """A float as the integer that has its bits."""
    return int(struct.unpack("=q", struct.pack("=d", number))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("=d", struct.pack("=q", bits))[0])


def _bytes(count: int, width: int) -> int:
    """Bytes of a message with `count` keys and their occurrences of `width` bytes each, rounded up to 8."""
    return count * 8 + -(-count * width // 8) * 8


def _pack(keys: Tensor, occurrences: Tensor, counts: Sequence[int]) -> Tensor:
    """For each rank its keys, then their occurrences, as bytes."""
    width = occurrences.element_size()
    send = torch.zeros(sum(_bytes(n, width) for n in counts), dtype=torch.uint8)
    at = taken = 0
    for n in counts:
        send[at : at + 8 * n] = keys[taken : taken + n].view(torch.uint8)
        send[at + 8 * n : at + (8 + width) * n] = occurrences[taken : taken + n].view(torch.uint8)
        at, taken = at + _bytes(n, width), taken + n
    return send


def _unpack(
    received: Tensor, counts: Sequence[int], widths: Sequence[int], sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Keys and occurrences (int32) from each rank."""
    arrays = []
    for message, n, width in zip(received.split(list(sizes)), counts, widths, strict=True):
        occurrences = message[8 * n : (8 + width) * n]
        arrays.append(
            (message[: 8 * n].view(torch.int64), occurrences.view(torch.int32) if width == 4 else occurrences.int())
        )
    return arrays
