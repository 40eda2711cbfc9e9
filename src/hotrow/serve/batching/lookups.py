"""Lookups on a lane: requests for embedding outputs, joined → rows at one publication → outputs → one answer each.

A lookup is never split into pieces, however many rows it has, so that one publication answers all of it. If it wants
logits too, its tower runs over at most as many rows at once as a batch has. Lookups of one model that want the same
outputs share a batch. Their admission control and their share of the lanes are apart from those of predictions
(Model.lookups), because a row without a tower takes much less time.

Lanes call `run`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.errors import OptionError
from hotrow.serve.batching.tensorbatch import Piece
from hotrow.serve.batching.versions import Version
from hotrow.serve.protocol import user_join
from hotrow.serve.protocol.frames import AnswerFrame
from hotrow.serve.protocol.lookup_frames import write_vectors
from hotrow.serve.protocol.request import Array, Signature, Wanted
from hotrow.serve.updates.freshness import Freshness

if TYPE_CHECKING:
    from hotrow.serve.batching.lanes import BatchKey


class LookupResult(NamedTuple):
    """What a version found for joined rows. `vectors` are named as by Engine.lookup."""

    vectors: Mapping[str, Tensor]
    logits: Array  # [0] if they were not asked for
    late: Any
    compiled: bool
    fresh: Freshness


def join(pieces: Sequence[Piece], version: Version, key: BatchKey) -> KeyedBatch:
    """The batch of these pieces. Lookups without a tower have no dense features."""
    signature = version.signature
    if key.wanted is not None and not key.wanted.logits:
        signature = replace(signature, dense=0)
    slices = [
        (c.chunk, c.offset, c.length, piece.first, piece.rows) for piece in pieces for c in [piece.request.content]
    ]
    return user_join.join(slices, signature, key.fingerprint)


def run(batch: KeyedBatch, version: Version, key: BatchKey, until: float | None) -> LookupResult:
    """Read the rows of a joined batch, and run its tower if the key says so. `until` as in Version.run."""
    assert key.wanted is not None
    vectors, logits, late, compiled, fresh = version.servable.lookup(batch, key.policy, key.wanted.logits, until)
    values = np.empty(0, np.float32)
    if logits is not None:
        values = logits.float().cpu().numpy()
        if len(values) != batch.size:
            raise OptionError(f"the tower gave {len(values)} logits for {batch.size} rows")
    return LookupResult(vectors, values, late, compiled, fresh)


def answers(
    pieces: Sequence[Piece], batch: KeyedBatch, result: LookupResult, version: Version, wanted: Wanted, late: list[int]
) -> list[bytes]:
    """The answer of each piece, which is a whole request, as a frame."""
    outputs = [_Output.of(number, version.signature, batch, result.vectors) for number in wanted.outputs]
    publication, watermark, highest = result.fresh
    bounds = list(itertools.accumulate((piece.rows for piece in pieces), initial=0))
    found = []
    for piece, (begin, end), late_ids in zip(pieces, itertools.pairwise(bounds), late, strict=True):
        content = piece.request.content
        answer = AnswerFrame(
            result.logits[begin:end], version.number, publication, late_ids, result.compiled, highest, watermark
        )
        vectors = [output.rows(begin, end, content.half) for output in outputs]
        found.append(write_vectors(content.id, answer, vectors))
    return found


class _Output(NamedTuple):
    """An output of a whole batch. A sequence's or mask's answer is cut to the longest sequence of its own rows."""

    values: Tensor
    lengths: Array | None = None

    @staticmethod
    def of(number: int, signature: Signature, batch: KeyedBatch, vectors: Mapping[str, Tensor]) -> _Output:
        """The output with this number (embedding_outputs.py)."""
        if number == 0:
            pooled = [vectors[name] for name in signature.features if name not in signature.sequences]
            return _Output(torch.cat(pooled, dim=1))
        name = signature.features[(number - 1) // 2]
        lengths = _lengths(batch, name) if name in signature.sequences else None
        return _Output(vectors[name if number % 2 else f"{name}_mask"], lengths)

    def rows(self, begin: int, end: int, half: bool) -> Array:
        """These rows, float32 or with `half` float16; a mask is bool."""
        values = self.values[begin:end]
        if self.lengths is not None:
            values = values[:, : max(1, int(self.lengths[begin:end].max()))]
        if values.dtype != torch.bool:
            values = values.to(torch.float16 if half else torch.float32)
        array: Array = values.contiguous().numpy()
        return array


def _lengths(batch: KeyedBatch, name: str) -> Array:
    """The length of each row's sequence."""
    lengths = batch.ids[name].lengths()
    if batch.user_of is not None and name in batch.user_features:
        lengths = lengths[batch.user_of]
    found: Array = lengths.numpy()
    return found
