"""Wire format: a DecodedUnit as one JSON text and a list of numpy arrays, and back.

The text holds names and layout, the arrays hold the tensors; no HotRow object is pickled. Ray keeps the arrays in its
shared-memory object store, so the receiver copies nothing: a batch's tensors are views of the store, which keeps them
alive as long as the batch. They are read-only, and no stage writes to them.
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
from hotrow.data.split import DecodedUnit

Arrays: TypeAlias = list[npt.NDArray[Any]]

with warnings.catch_warnings():  # torch warns once a process about a read-only array: trigger and hide it here
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"read-only", np.uint8))


def pack(part: DecodedUnit) -> tuple[str, Arrays]:
    """The decoded unit, without its error.

    >>> part = DecodedUnit([KeyedBatch({"user": Jagged(torch.tensor([3, 4]))}, labels=torch.tensor([1.0, 0.0]))])
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
            "numbers": {name: [place(j.values), place(j.offsets), None] for name, j in batch.numbers.items()},
            "rest": [place(batch.dense), place(batch.labels), place(batch.time)],
        }
        for batch in part.batches
    ]
    positions = [[place(torch.from_numpy(mark)) for mark in found] for found in part.positions]
    return json.dumps({"batches": batches, "positions": positions, "notes": part.notes}), arrays


def unpack(text: str, arrays: Arrays) -> DecodedUnit:
    """The decoded unit that `pack` serialized. Its tensors are views of the arrays."""
    header = json.loads(text)

    def tensor(place: int | None) -> Tensor | None:
        return None if place is None else torch.from_numpy(arrays[place])

    def jagged(places: list[int | None]) -> Jagged:
        values, offsets, weights = (tensor(place) for place in places)
        assert values is not None
        return Jagged(values, offsets, weights)

    def keyed(batch: dict[str, Any]) -> KeyedBatch:
        dense, labels, time = map(tensor, batch["rest"])
        ids, numbers = ({name: jagged(at) for name, at in batch[kind].items()} for kind in ("ids", "numbers"))
        return KeyedBatch(ids, dense, labels, time, numbers)

    return DecodedUnit(
        batches=[keyed(batch) for batch in header["batches"]],
        positions=[tuple(arrays[place] for place in found) for found in header["positions"]],
        notes=header["notes"],
    )
