"""RankTransport: keys, rows and gradients travel between the ranks of a job.

For each part of a batch the ranks exchange counts and then keys, with how often each was seen. Rows and gradients
travel in the wire's type. What travels is measured in Channel.sent: 8 bytes a key, 1 for how often it was seen (4 where
a number is beyond 255), and its row and its gradient. Every rank makes the same exchanges in the same order.

Batches ahead are routed over the channel `route`, everything else goes over `rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from hotrow.errors import GradientError, OptionError
from hotrow.parallel.exchange import Channel
from hotrow.parallel.ownership import Roles
from hotrow.parallel.ranks import Ranks
from hotrow.tiers.batch_values import Request, Routed, Summed
from hotrow.tiers.sharded.transport import Deliver, Delivered

HEADER = 2  # numbers in front of a message's counts: examples, bytes of a number of sightings


class RankTransport:
    """An exchange between ranks (hotrow.tiers.sharded.transport.Transport)."""

    def __init__(self, ranks: Ranks, roles: Roles) -> None:
        self.ranks, self.rank, self.world = ranks, ranks.rank, ranks.world
        self.owner_of = roles.owner_of

    @property
    def wire(self) -> torch.dtype:
        """The ranks' wire, which may be set later."""
        return self.ranks.wire

    @contextmanager
    def routing(self, ahead: bool) -> Iterator[Deliver]:
        """A route ahead is counted, so that all ranks end at the same one (Ranks.routes)."""
        if ahead:
            with self.ranks.routes.one():
                yield self.making_up()
        else:
            yield partial(self._deliver, self.ranks.rows)

    def making_up(self) -> Deliver:
        """For a route of other ranks that this one does not make: Ranks.routes has been closed."""
        return partial(self._deliver, self.ranks.route)

    def _deliver(self, channel: Channel, request: Request, size: int, replicated: bool) -> Delivered:
        """Send this rank's request; what all ranks ask this one for."""
        counts, keys, seen = request
        give = [sum(of_rank) for of_rank in counts]
        if not replicated:
            self.ranks.remote_keys += sum(give) - give[self.rank]
        narrow = seen.numel() == 0 or int(seen.max()) < 256
        seen = seen.to(torch.uint8) if narrow else seen
        headers = torch.tensor([number for of_rank in counts for number in (size, seen.element_size(), *of_rank)])
        row = [HEADER + len(counts[0])] * self.world
        came = channel.all_to_all(headers, row, row, what="counts").view(self.world, -1).tolist()
        theirs, widths = [header[HEADER:] for header in came], [header[1] for header in came]
        take = [sum(of_rank) for of_rank in theirs]
        sizes = [_bytes(n, width) for n, width in zip(take, widths, strict=True)]
        send = [_bytes(n, seen.element_size()) for n in give]
        received = channel.all_to_all(_pack(keys, seen, give), send, sizes, what="keys")
        arrays = _unpack(received, take, widths, sizes)
        return Delivered([header[0] for header in came], theirs, [k for k, _ in arrays], [s for _, s in arrays])

    def routed(self, size: int, sizes: Sequence[int]) -> Routed:
        """This rank's part of the step's examples."""
        examples = sum(sizes)
        return Routed(size / examples if examples else 0.0, examples, examples == 0, tuple(sizes))

    def check_policy(self, late: str) -> None:
        """Ranks wait for their rows."""
        if late != "wait":
            raise OptionError(f"late={late!r} over ranks: rows of other ranks are waited for; pass late='wait'")

    def rows(self, send: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Rows to those that asked, in the wire's type."""
        return self.ranks.rows.all_to_all(send.to(self.wire), give, take, what="rows").float()

    def gradients(self, send: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Sums, which have the wire's type, to the owners."""
        return self.ranks.rows.all_to_all(send, give, take, what="gradients").float()

    def marks(self, send: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Bytes to the owners."""
        return self.ranks.rows.all_to_all(send, give, take)

    def agree(self, summed: Sequence[Summed]) -> list[bool]:
        """Whether every key of all ranks had a gradient, by part. Where one is not finite on any rank, all raise.

        A rank that wants to stop says so here, so that all hear of it in the same step.
        """
        spoiled, self.ranks.spoiled = self.ranks.spoiled, False
        finite = all(one.finite for one in summed) and not spoiled
        before = not spoiled and all(one.finite or one.overflowed for one in summed)
        wants_to_stop = self.ranks.wants_to_stop()
        said = self.ranks.rows.gather_numbers(finite, before, wants_to_stop, *(one.whole for one in summed))
        self.ranks.stopping = max(self.ranks.stopping, *(wants for _, _, wants, *_ in said))
        bad = [rank for rank, (was_finite, *_) in enumerate(said) if not was_finite]
        self.ranks.failing = bool(bad)
        if bad:
            raise GradientError(self._why(bad, all(said[rank][1] for rank in bad)))
        return [all(wholes) for wholes in zip(*(words[3:] for words in said), strict=True)]

    def _why(self, bad: Sequence[int], finite_before: bool) -> str:
        """What to say of ranks that have something that is not finite, or was not when it had been rounded."""
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


def _bytes(count: int, width: int) -> int:
    """Of a message with so many keys and their sightings of `width` bytes, up to a multiple of 8."""
    return count * 8 + -(-count * width // 8) * 8


def _pack(keys: Tensor, seen: Tensor, counts: Sequence[int]) -> Tensor:
    """For each rank its keys, then their sightings, as bytes."""
    width = seen.element_size()
    send = torch.zeros(sum(_bytes(n, width) for n in counts), dtype=torch.uint8)
    at = taken = 0
    for n in counts:
        send[at : at + 8 * n] = keys[taken : taken + n].view(torch.uint8)
        send[at + 8 * n : at + (8 + width) * n] = seen[taken : taken + n].view(torch.uint8)
        at, taken = at + _bytes(n, width), taken + n
    return send


def _unpack(
    received: Tensor, counts: Sequence[int], widths: Sequence[int], sizes: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Keys and sightings (int32) from each rank."""
    arrays = []
    for message, n, width in zip(received.split(list(sizes)), counts, widths, strict=True):
        seen = message[8 * n : (8 + width) * n]
        arrays.append((message[: 8 * n].view(torch.int64), seen.view(torch.int32) if width == 4 else seen.int()))
    return arrays
