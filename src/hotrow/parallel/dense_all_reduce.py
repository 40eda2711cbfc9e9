"""The tower's gradients, summed over ranks while backward still runs.

Parameters are assigned to buckets once, the last ones first because backward makes their gradients first. The buckets
never change. (DDP makes new ones after the first step: a resumed run would add in another order than an uninterrupted
one.)

A bucket's sum is a reduce-scatter and an all-gather, made of an all-to-all: rank r receives every rank's r-th piece,
adds them in rank order and sends the sum to all. It moves as many bytes as a ring all-reduce; the order of additions is
the ranks' order for every backend and size, and every rank has the same bits. The reduce-scatter begins when the
bucket's last gradient is there (a hook of the parameter), the all-gather right behind the next bucket's reduce-scatter,
when its own has mostly arrived. When backward ends, only the last bucket is left to wait for.

A parameter without a gradient (an unused part of a tower, an empty batch) takes part with zeros. The last bucket ends
with a mark for every parameter: whether it had a gradient. If no rank had one, the parameter has none afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotrow.parallel.exchange import Exchange
from hotrow.parallel.ranks import Ranks

BUCKET_BYTES = 1 << 20  # training waits for the last bucket; with 4 MiB 24 ms of a step of 330 did not overlap


class DenseGradients:
    """Sums of the gradients of some parameters over ranks. Called by the training thread."""

    def __init__(self, parameters: Sequence[Tensor], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.ranks = ranks
        groups = _cut(list(parameters)[::-1], bucket_bytes)
        channel = ranks.dense
        self.buckets = [
            Bucket(group, len(parameters) if group is groups[-1] else 0, channel.rank, channel.world)
            for group in groups
        ]
        self._begun = 0
        self._armed = False
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._ready(number))

    def arm(self) -> None:
        """The next backward is the last of this step: send its gradients as they are made."""
        self._armed, self._begun = True, 0
        for bucket in self.buckets:
            bucket.ready = 0

    def finish(self) -> None:
        """Wait until gradients are the sums over all ranks. All ranks call it, once a step."""
        while self._begun < len(self.buckets):
            self._begin_next()
        for bucket in self.buckets[-1:]:
            self._begin_all_gather(bucket)
        sums = [bucket.exchange.wait() for bucket in self.buckets if bucket.exchange is not None]
        marks = iter([mark > 0 for last in self.buckets[-1:] for mark in sums[-1][last.values :].tolist()])
        for bucket, total in zip(self.buckets, sums, strict=True):
            bucket.unpack(total, marks)
        self._armed, self._begun = False, 0

    def _ready(self, number: int) -> None:
        if not self._armed:
            return
        self.buckets[number].ready += 1
        # In order, whatever order the gradients come in: exchanges must be in the same order on all ranks.
        while self._begun < len(self.buckets) and self.buckets[self._begun].complete:
            self._begin_next()

    def _begin_next(self) -> None:
        bucket = self.buckets[self._begun]
        size = [bucket.piece] * self.ranks.dense.world
        marks = [p.grad is not None for b in self.buckets for p in b.parameters] if bucket.marked else []
        bucket.exchange = self.ranks.dense.begin_all_to_all(
            bucket.pack(marks), size, size, bucket.received, "gradients", own=False
        )
        self._begun += 1
        if self._begun > 1:
            self._begin_all_gather(self.buckets[self._begun - 2])

    def _begin_all_gather(self, bucket: Bucket) -> None:
        assert bucket.exchange is not None
        total = bucket.add_up(bucket.exchange.wait())
        bucket.exchange = self.ranks.dense.begin_all_gather(total, bucket.flat, "sums")


@dataclass
class Bucket:
    """Parameters whose gradients are sent together, in pieces of one size, one for each rank.

    The gradient of a single parameter is sent from its own memory and summed in it, if the pieces divide it exactly: so
    the large matrices, most of a tower, are not copied. Other gradients are packed into a buffer that is kept from step
    to step: memory of this size would otherwise go back to the system and be faulted in again.
    """

    parameters: list[Tensor]
    marked: int  # how many marks are sent behind the gradients
    rank: int
    world: int
    ready: int = 0
    exchange: Exchange | None = None
    received: Tensor = field(init=False)  # the others' pieces of this rank
    flat: Tensor = field(init=False)  # gradients of this rank, later the sums of all
    buffer: Tensor | None = None

    def __post_init__(self) -> None:
        self.values = sum(parameter.numel() for parameter in self.parameters)
        self.piece = -(-(self.values + self.marked) // self.world)
        self.size = self.piece * self.world
        self.received = torch.empty(self.size, device=self.parameters[0].device)

    @property
    def complete(self) -> bool:
        """Whether all its gradients are there."""
        return self.ready >= len(self.parameters)

    def pack(self, marks: list[bool]) -> Tensor:
        """The gradients of now one behind the other, then the marks, then zeros."""
        gradient = self.parameters[0].grad
        if gradient is not None and gradient.numel() == self.size and _is_contiguous_float32(gradient):
            self.flat = gradient.view(-1)
            return self.flat
        if self.buffer is None:
            self.buffer = torch.zeros_like(self.received)
        self.flat = self.buffer
        for parameter, place in self._places(self.flat):
            place.zero_() if parameter.grad is None else place.copy_(parameter.grad)
        if marks:
            self.flat[self.values :][: self.marked] = torch.tensor(marks, dtype=torch.float32)
        return self.flat

    def add_up(self, received: Tensor) -> Tensor:
        """The sum of all ranks' pieces, in rank order, in the place of this rank's."""
        here = self.flat[self.rank * self.piece :][: self.piece]
        pieces = list(received.split(self.piece))
        spare, pieces[self.rank] = pieces[self.rank], here
        total: Tensor = pieces[0]
        for number, piece in enumerate(pieces[1:], 2):
            total = torch.add(total, piece, out=here if number == self.world else spare)
        return total

    def unpack(self, sums: Tensor, marks: Iterator[bool]) -> None:
        """Gradients become the sums; parameters that have none on any rank keep none."""
        for parameter, place in self._places(sums):
            here = parameter.grad
            if next(marks) and (here is None or here.data_ptr() != place.data_ptr()):
                parameter.grad = place.to(parameter.dtype)

    def _places(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = flat[: self.values].split([parameter.numel() for parameter in self.parameters])
        return [(p, part.view(p.shape)) for p, part in zip(self.parameters, parts, strict=True)]


def _is_contiguous_float32(gradient: Tensor) -> bool:
    return gradient.dtype == torch.float32 and gradient.layout == torch.strided and gradient.is_contiguous()


def _cut(parameters: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Groups of at most `limit` bytes on one device each. A larger parameter is a group of its own."""
    groups: list[list[Tensor]] = []
    size = 0
    for parameter in parameters:
        if groups and size + 4 * parameter.numel() <= limit and groups[-1][0].device == parameter.device:
            groups[-1].append(parameter)
        else:
            groups.append([parameter])
            size = 0
        size += 4 * parameter.numel()
    return groups
