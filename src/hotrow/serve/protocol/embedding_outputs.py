"""Embedding outputs: the looked-up vectors that a request may ask for beside, or instead of, the tower's outputs.

For a model with the pooled features `user` (dim 4) and `item` (dim 8), and the sequence `history` (dim 8):

    embeddings                 [rows, 12]          the pooled features side by side, in the model's order
    embeddings.user            [rows, 4]           one feature
    embeddings.history         [rows, length, 8]   a sequence: zeros after its ids; length is the request's longest
    embeddings.history_mask    [rows, length]      BOOL: where the sequence has an id

The names after the dot are those of `Engine.lookup`, and so are the values, bit for bit. A request does not see the
other requests of its batch: its length is that of its own sequences. Vectors are FP32, or FP16 if the request asks.

In frames an output is a number: 0 is `embeddings`; feature i has 1 + 2i, and the mask of sequence i has 2 + 2i.

EmbeddingOutputs lists a model's outputs. Wanted is what one request asks for. Both are values; any thread may use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hotrow.serve.protocol.request import Ids, Signature, Wanted

EMBEDDINGS = "embeddings"
FP32, FP16, BOOL = "FP32", "FP16", "BOOL"


class EmbeddingOutput(NamedTuple):
    """One output. `shape` has -1 for rows and length."""

    name: str
    number: int
    features: tuple[int, ...]  # the features that it is made of
    shape: tuple[int, ...]
    is_mask: bool = False


@dataclass(frozen=True)
class Place:
    """Where a pooled feature is in `embeddings`: its columns from `offset` to `offset + width`."""

    name: str
    offset: int
    width: int


class EmbeddingOutputs:
    """The embedding outputs of a model whose features have these widths, in the signature's order. Without widths the
    model answers no lookups, and there are none.

    >>> outputs = EmbeddingOutputs(Signature(("user", "seen"), frozenset(["seen"]), 0), (4, 8))
    >>> [(output.name, output.shape) for output in outputs.by_name.values()]
    [('embeddings', (-1, 4)), ('embeddings.user', (-1, 4)), ('embeddings.seen', (-1, -1, 8)), \
('embeddings.seen_mask', (-1, -1))]
    """

    def __init__(self, signature: Signature, widths: Sequence[int]) -> None:
        self.signature, self.widths = signature, tuple(widths)
        self.by_name: dict[str, EmbeddingOutput] = {}
        self.places: list[Place] = []
        if self.widths:
            self._list()

    def _list(self) -> None:
        features, sequences = self.signature.features, self.signature.sequences
        pooled = tuple(number for number, name in enumerate(features) if name not in sequences)
        offset = 0
        for number in pooled:
            self.places.append(Place(features[number], offset, self.widths[number]))
            offset += self.widths[number]
        outputs = [EmbeddingOutput(EMBEDDINGS, 0, pooled, (-1, offset))] if pooled else []
        for number, (feature, width) in enumerate(zip(features, self.widths, strict=True)):
            name, own = f"{EMBEDDINGS}.{feature}", 1 + 2 * number
            if feature in sequences:
                outputs.append(EmbeddingOutput(name, own, (number,), (-1, -1, width)))
                outputs.append(EmbeddingOutput(f"{name}_mask", own + 1, (number,), (-1, -1), is_mask=True))
            else:
                outputs.append(EmbeddingOutput(name, own, (number,), (-1, width)))
        self.by_name = {output.name: output for output in outputs}
        self._by_number = {output.number: output for output in outputs}

    def features(self, wanted: Wanted) -> frozenset[int]:
        """The features that these outputs are made of."""
        return frozenset(number for output in wanted.outputs for number in self._by_number[output].features)

    def datatype(self, output: EmbeddingOutput, half: bool = False) -> str:
        """The protocol's name of the output's type."""
        return BOOL if output.is_mask else FP16 if half else FP32

    def elements(self, output: EmbeddingOutput, rows: int, ids: Sequence[Ids]) -> int:
        """How many elements the output of this request has."""
        if len(output.shape) == 2 and not output.is_mask:
            return rows * output.shape[1]
        length = longest(ids[output.features[0]])
        return rows * length * (1 if output.is_mask else output.shape[2])

    def answer_bytes(self, wanted: Wanted, rows: int, ids: Sequence[Ids]) -> int:
        """The bytes of all outputs of this request."""
        total = 0
        for number in wanted.outputs:
            output = self._by_number[number]
            total += self.elements(output, rows, ids) * (1 if output.is_mask else 2 if wanted.half else 4)
        return total


def longest(ids: Ids) -> int:
    """The length to which the sequences of a request are padded: the most ids of a row, and at least 1."""
    if ids.offsets is not None:
        return max(1, int(np.diff(ids.offsets).max())) if len(ids.offsets) > 1 else 1
    return max(1, len(ids.values)) if ids.shared else 1


def known_outputs(signature: Signature, outputs: Sequence[int]) -> bool:
    """Whether a model with this signature has all outputs with these numbers."""
    count = len(signature.features)
    masks = {2 + 2 * number for number, name in enumerate(signature.features) if name in signature.sequences}
    vectors = set(range(1, 1 + 2 * count, 2)) | ({0} if len(signature.sequences) < count else set())
    return bool(outputs) and set(outputs) <= masks | vectors
