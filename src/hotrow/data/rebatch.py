"""Rebatch: batches of any size in, batches of one size out.

A slice of a batch is a view: its tensors share the memory of the input batch. Only an output batch that spans two
inputs is copied, once. The last batch of a stream may be short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import BatchError


@dataclass(frozen=True)
class BatchEnd:
    """Where an output batch ends: its last example is number `row` of input batch number `piece`."""

    piece: int
    row: int


def rebatch(pieces: Iterable[KeyedBatch], size: int) -> Iterator[tuple[KeyedBatch, BatchEnd]]:
    """Batches of `size` examples from all input batches, in order, each with the place where it ends.

    >>> pieces = [KeyedBatch({"a": Jagged(torch.arange(n))}) for n in (3, 2)]
    >>> [(batch.ids["a"].values.tolist(), cut.piece, cut.row) for batch, cut in rebatch(pieces, 2)]
    [([0, 1], 0, 1), ([2, 0], 1, 0), ([1], 1, 1)]
    """
    waiting: list[KeyedBatch] = []
    count = 0
    cut = BatchEnd(0, -1)
    for number, piece in enumerate(pieces):
        start = 0
        while count + piece.size - start >= size:
            stop = start + size - count
            cut = BatchEnd(number, stop - 1)
            yield join_batches([*waiting, slice_batch(piece, start, stop)]), cut
            waiting, count, start = [], 0, stop
        if start < piece.size:
            waiting.append(slice_batch(piece, start, piece.size))
            count += piece.size - start
            cut = BatchEnd(number, piece.size - 1)
    if waiting:
        yield join_batches(waiting), cut


def slice_batch(batch: KeyedBatch, start: int, stop: int) -> KeyedBatch:
    """Examples start to stop, as views.

    >>> slice_batch(KeyedBatch({"a": Jagged(torch.arange(5))}), 1, 3).ids["a"].values
    tensor([1, 2])
    """
    if start == 0 and stop == batch.size:
        return batch
    _check_users(batch)
    dense, labels, time = (
        None if part is None else part[start:stop] for part in (batch.dense, batch.labels, batch.time)
    )
    ids, numbers = (
        {name: _slice_jagged(jagged, start, stop) for name, jagged in columns.items()}
        for columns in (batch.ids, batch.numbers)
    )
    return KeyedBatch(ids, dense, labels, time, numbers)


def join_batches(batches: list[KeyedBatch]) -> KeyedBatch:
    """All examples of batches that have the same features.

    >>> one = KeyedBatch({"a": Jagged(torch.arange(2))})
    >>> join_batches([one, one]).ids["a"].values
    tensor([0, 1, 0, 1])
    """
    if len(batches) == 1:
        return batches[0]
    for batch in batches:
        _check_users(batch)
    return KeyedBatch(
        {name: _join_jagged([batch.ids[name] for batch in batches]) for name in batches[0].ids},
        _join_parts([batch.dense for batch in batches]),
        _join_parts([batch.labels for batch in batches]),
        _join_parts([batch.time for batch in batches]),
        {name: _join_jagged([batch.numbers[name] for batch in batches]) for name in batches[0].numbers},
    )


def _check_users(batch: KeyedBatch) -> None:
    if batch.user_of is not None:
        raise BatchError(
            "a batch with users is not cut or joined; make batches of the wanted size, or call share_users later"
        )


def _slice_jagged(jagged: Jagged, start: int, stop: int) -> Jagged:
    if jagged.offsets is None:
        ids, offsets = slice(start, stop), None
    else:
        ids = slice(int(jagged.offsets[start]), int(jagged.offsets[stop]))
        offsets = jagged.offsets[start : stop + 1] - ids.start
    return Jagged(jagged.values[ids], offsets, None if jagged.weights is None else jagged.weights[ids])


def _join_jagged(parts: list[Jagged]) -> Jagged:
    values = torch.cat([part.values for part in parts])
    weights = _join_parts([part.weights for part in parts])
    if all(part.offsets is None for part in parts):
        return Jagged(values, None, weights)
    offsets = torch.zeros(sum(part.size for part in parts) + 1, dtype=torch.int64)
    torch.cumsum(torch.cat([part.lengths() for part in parts]), 0, out=offsets[1:])
    return Jagged(values, offsets, weights)


def _join_parts(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), "a part is in some of the batches only"
    return torch.cat(present) if present else None
