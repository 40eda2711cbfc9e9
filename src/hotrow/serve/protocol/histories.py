"""The limits of a model's histories: the most entries of a row, and columns that must be aligned.

A request is checked when it is parsed (`check_columns`, HTTP status 400), and a batch when an engine gets it
(`check_batch`, BatchError). Both have the same rules and the same messages.

Every function here is pure; any thread may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hotrow.batch import KeyedBatch
from hotrow.errors import BatchError
from hotrow.serve.protocol.request import Array, Ids, Signature
from hotrow.serve.protocol.tensors import invalid

Lengths = Callable[[str], Array | None]  # entries of each row of a column; one number if they are all equal


def check_columns(signature: Signature, ids: Sequence[Ids]) -> None:
    """Refuse a request with too long or unaligned histories. `ids` are all columns of the signature, in order."""
    if not signature.max_lengths and not signature.aligned:
        return
    by_name = dict(zip(signature.columns, ids, strict=True))
    fault = _fault(signature, lambda name: _lengths(by_name[name]))
    if fault:
        raise invalid(fault)


def check_batch(signature: Signature, batch: KeyedBatch) -> None:
    """Refuse a batch with too long or unaligned histories. Columns that the batch lacks are not checked."""
    if not signature.max_lengths and not signature.aligned:
        return

    def lengths(name: str) -> Array | None:
        column = batch.ids.get(name) or batch.numbers.get(name)
        if column is None:
            return None
        return np.ones(1, np.int64) if column.offsets is None else np.diff(column.offsets.numpy())

    fault = _fault(signature, lengths)
    if fault:
        raise BatchError(fault)


def _fault(signature: Signature, lengths: Lengths) -> str:
    """What is wrong with a request or batch, or an empty string."""
    for name, most in signature.max_lengths.items():
        found = lengths(name)
        if found is not None and found.size and int(found.max()) > most:
            row = int(found.argmax())
            return (
                f"{name!r} has {int(found[row])} entries in row {row}, and the model was exported with "
                f"max_length={most}; give the newest {most}"
            )
    for group in signature.aligned:
        known = [(name, found) for name in group if (found := lengths(name)) is not None]
        for name, found in known[1:]:
            first, expected = known[0]
            if 1 in (found.size, expected.size) or found.size == expected.size:
                differs = np.atleast_1d(found != expected)
                if not differs.any():
                    continue
                row = int(differs.argmax())
                one, other = (int(part[min(row, part.size - 1)]) for part in (expected, found))
                return (
                    f"{first!r} and {name!r} are columns of one history, but row {row} has {one} and {other} entries; "
                    "give both the same number"
                )
            return f"{first!r} has {expected.size} rows and {name!r} has {found.size}; give both the same number"
    return ""


def _lengths(ids: Ids) -> Array:
    if ids.shared:
        return np.array([len(ids.values)])
    if ids.offsets is None:
        return np.ones(1, np.int64)
    found: Array = np.diff(ids.offsets)
    return found
