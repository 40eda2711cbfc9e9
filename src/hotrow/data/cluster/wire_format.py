"""Wire: a Part as one JSON text and a list of numpy arrays, and back.

That is all of a batch that travels between machines: names and layout in the text, tensors as plain arrays, no object
of ours. Ray keeps the arrays out of its pickles and in shared memory, so a batch is not copied on receipt: its tensors
are views of Ray's object store, which holds them as long as a batch needs them. They must not be written to, and no
stage does.
"""

from __future__ import annotations

import json
import warnings
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.data.split import Part

Arrays: TypeAlias = list[npt.NDArray[Any]]

with warnings.catch_warnings():  # torch warns once about an array that is read-only; this is that once
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"read-only", np.uint8))


def pack(part: Part) -> tuple[str, Arrays]:
    """The part without its error.

    >>> part = Part([KeyedBatch({"user": Jagged(torch.tensor([3, 4]))}, labels=torch.tensor([1.0, 0.0]))])
    >>> unpack(*pack(part)).batches[0].ids["user"].values
    tensor([3, 4])
    """
    arrays: Arrays = []

    def place(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        arrays.append(tensor.detach().cpu().contiguous().numpy())
        return len(arrays) - 1

    batches = [
        {
            "ids": {name: [place(j.values), place(j.offsets), place(j.weights)] for name, j in batch.ids.items()},
            "rest": [place(batch.dense), place(batch.labels), place(batch.time)],
        }
        for batch in part.batches
    ]
    marks = [[place(torch.from_numpy(mark)) for mark in found] for found in part.marks]
    return json.dumps({"batches": batches, "marks": marks, "notes": part.notes}), arrays


def unpack(text: str, arrays: Arrays) -> Part:
    """The part that `pack` took apart; its tensors are views of the arrays."""
    head = json.loads(text)

    def tensor(place: int | None) -> Tensor | None:
        return None if place is None else torch.from_numpy(arrays[place])

    def jagged(places: list[int | None]) -> Jagged:
        values, offsets, weights = (tensor(place) for place in places)
        assert values is not None
        return Jagged(values, offsets, weights)

    return Part(
        batches=[
            KeyedBatch({name: jagged(places) for name, places in batch["ids"].items()}, *map(tensor, batch["rest"]))
            for batch in head["batches"]
        ],
        marks=[tuple(arrays[place] for place in found) for found in head["marks"]],
        notes=head["notes"],
    )
