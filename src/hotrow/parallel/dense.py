"""The tower's gradients, summed over ranks while backward is still running.

Parameters are put into buckets once, last ones first because backward makes their gradients first, and the buckets
never change: DDP makes new ones after the first step, so that a resumed run would add in another order than one that
was not interrupted.

A bucket's sum is a reduce-scatter and an all-gather, made of an all-to-all: rank r gets everybody's r-th piece, adds
them up in rank order and gives the sum to all. It is as many bytes as a ring's all-reduce, the order of additions is
the ranks' order for every backend and size, and every rank has the same bits. The first half begins when the bucket's
last gradient is there (a hook of the parameter), the second right behind the first half of the next bucket, when its
own has mostly come; so what is left when backward is done is the last bucket.

A parameter without a gradient (an unused part of a tower, an empty batch) takes part with zeros and a mark; where no
rank has one, it has none afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotrow.parallel.exchange import Exchange
from hotrow.parallel.ranks import Ranks

BUCKET_BYTES = 1 << 20  # what the last bucket has is waited for; 4 MiB left 24 ms of a step of 330 without overlap


class DenseGradients:
    """Sums of the gradients of some parameters over ranks. Called by the training thread."""

    def __init__(self, parameters: Sequence[Tensor], ranks: Ranks, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.ranks = ranks
        self.buckets = [Bucket(part, ranks.world) for part in _cut(list(parameters)[::-1], bucket_bytes)]
        self._begun = 0
        self._armed = False
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, number=number: self._ready(number))

    def arm(self) -> None:
        """The next backward is the last of this step: its gradients may leave as they come."""
        self._armed, self._begun = True, 0
        for bucket in self.buckets:
            bucket.ready = 0

    def finish(self) -> None:
        """Gradients become the sums over all ranks. All ranks call it, once a step."""
        while self._begun < len(self.buckets):
            self._begin_next()
        for bucket in self.buckets[-1:]:
            self._give_sum(bucket)
        for bucket in self.buckets:
            assert bucket.exchange is not None
            bucket.unpack(bucket.exchange.wait())
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
        size = [bucket.piece] * self.ranks.world
        bucket.exchange = self.ranks.dense.begin_all_to_all(bucket.pack(), size, size, bucket.came, "gradients")
        self._begun += 1
        if self._begun > 1:
            self._give_sum(self.buckets[self._begun - 2])

    def _give_sum(self, bucket: Bucket) -> None:
        assert bucket.exchange is not None
        total = bucket.add_up(bucket.exchange.wait())
        bucket.exchange = self.ranks.dense.begin_all_gather(total, bucket.sums, "sums")


@dataclass
class Bucket:
    """Some parameters, and flat buffers: their gradients, a mark for each, zeros up to a multiple of the world.

    Buffers are kept from step to step: memory of this size is given back to the system and faulted in again otherwise.
    """

    parameters: list[Tensor]
    world: int
    ready: int = 0
    exchange: Exchange | None = None
    flat: Tensor = field(init=False)  # this rank's
    came: Tensor = field(init=False)  # everybody's piece of this rank
    sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        values = sum(parameter.numel() for parameter in self.parameters) + len(self.parameters)
        self.piece = -(-values // self.world)
        self.flat = torch.zeros(self.piece * self.world, device=self.parameters[0].device)
        self.came, self.sums = torch.empty_like(self.flat), torch.empty_like(self.flat)
        self.total = torch.empty_like(self.flat[: self.piece])

    @property
    def complete(self) -> bool:
        """Whether all its gradients are there."""
        return self.ready >= len(self.parameters)

    def pack(self) -> Tensor:
        """The buffer with the gradients of now."""
        marks = self.flat[sum(p.numel() for p in self.parameters) :]
        for number, (parameter, place) in enumerate(self._places(self.flat)):
            marks[number] = 0.0 if parameter.grad is None else 1.0
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(parameter.grad)
        return self.flat

    def add_up(self, came: Tensor) -> Tensor:
        """The sum of all ranks' pieces, in rank order."""
        first, *others = came.chunk(self.world)
        torch.add(first, others[0], out=self.total) if others else self.total.copy_(first)
        for piece in others[1:]:
            self.total += piece
        return self.total

    def unpack(self, sums: Tensor) -> None:
        """Gradients become the sums, in place; parameters that have none on any rank keep none."""
        marks = sums[sum(p.numel() for p in self.parameters) :][: len(self.parameters)].tolist()
        for (parameter, place), mark in zip(self._places(sums), marks, strict=True):
            if mark:
                parameter.grad = place.to(parameter.dtype)

    def _places(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = flat[: sum(sizes)].split(sizes)
        return [(p, part.view(p.shape)) for p, part in zip(self.parameters, parts, strict=True)]


def _cut(parameters: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Groups of at most `limit` bytes, of one device each; a parameter beyond that is alone."""
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
