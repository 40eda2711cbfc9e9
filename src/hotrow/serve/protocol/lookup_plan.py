"""LookupPlan: the ids of a request that asks for embedding outputs only, and so runs no tower.

Such a request sends the features whose vectors it wants, and may leave out the others and `dense`:

    keys          a tensor for each wanted feature, or `keys` with a column for each that has no tensor of its own
    raw columns   the columns from which the feature spec computes the wanted features

Tensors of the model's other inputs are ignored, so a client may send what it sends for a prediction. A `keys` tensor as
wide as a prediction's has the columns of a prediction's. The features that are not wanted go to the engine without ids:
they cost it no lookup.

A request that wants the tower's outputs too sends all inputs, and is planned as any other (input_layout.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotrow.errors import choices
from hotrow.features import FeatureSpec
from hotrow.serve.protocol.input_layout import DENSE, KEYS, InputPlan, Layout
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.raw_columns import RawColumns
from hotrow.serve.protocol.request import Array, Ids, Signature
from hotrow.serve.protocol.tensors import DeclaredTensor, Elements, invalid, shown

NO_IDS = Ids(np.empty(0, np.int64), shared=True)
_SUFFIXES = (".offsets", ".weights")


@dataclass(frozen=True)
class LookupPlan:
    """How a lookup's tensors become ids: by `inputs` if they are keys, by `raw` if they are raw columns."""

    kept: tuple[int, ...]  # the tensors that are read, by index
    tensors: tuple[DeclaredTensor, ...]  # these tensors
    features: tuple[int, ...]  # what they become, by number in the signature
    count: int  # of the signature's features
    wanted: frozenset[int]
    inputs: InputPlan | None = None
    raw: RawColumns | None = None

    def ids(self, elements: Sequence[Elements]) -> tuple[int, tuple[Ids, ...]]:
        """The number of rows, and the ids of every feature of the signature. Requires: `elements` has all tensors."""
        kept = [elements[index] for index in self.kept]
        if self.raw is not None:
            rows, found, _, _ = self.raw.columns(self.tensors, kept)
        else:
            assert self.inputs is not None
            arrays: Sequence[Array] = kept  # type: ignore[assignment]
            rows, found = self.inputs.rows, tuple(self.inputs.ids(arrays))
        ids = [NO_IDS] * self.count
        for number, one in zip(self.features, found, strict=True):
            if number in self.wanted:
                ids[number] = one
        return rows, tuple(ids)


def plan_keys(tensors: Sequence[DeclaredTensor], layout: Layout, limits: Limits, wanted: frozenset[int]) -> LookupPlan:
    """The plan of a lookup whose tensors are keys. `layout` is that of the model's predictions."""
    signature = layout.signature
    names = {tensor.name for tensor in tensors}
    unsent = [number for number, name in enumerate(signature.columns) if name not in names]
    keys = next((tensor for tensor in tensors if tensor.name == KEYS and layout.has_keys), None)
    features = tuple(sorted(wanted))
    if keys is not None and len(keys.shape) == 2 and keys.shape[1] == len(unsent):  # as wide as a prediction's
        features = tuple(range(len(signature.columns)))
    read = _inputs_of([signature.columns[number] for number in features])
    kept = []
    for index, tensor in enumerate(tensors):
        if tensor.name in read or tensor is keys:
            kept.append(index)
        elif tensor.name not in _inputs_of(signature.columns) and not (tensor.name == DENSE and signature.dense):
            raise invalid(f"the model has no input {shown(tensor.name)}; {choices(tensor.name, layout.inputs())}")
    if keys is not None and not any(number in features for number in unsent):
        kept.remove(tensors.index(keys))  # its columns are of features that are not wanted
    used = tuple(tensors[index] for index in kept)
    if not used:
        raise invalid(
            f"a lookup of {', '.join(signature.columns[number] for number in sorted(wanted))} has no tensor of these "
            "features; send one for each, or 'keys'"
        )
    plan = Layout(_part(signature, features), limits).plan(used)
    return LookupPlan(tuple(kept), used, features, len(signature.columns), wanted, inputs=plan)


def plan_raw(
    tensors: Sequence[DeclaredTensor], spec: FeatureSpec, signature: Signature, limits: Limits, wanted: frozenset[int]
) -> LookupPlan:
    """The plan of a lookup whose tensors are raw columns."""
    features = tuple(sorted(wanted))
    needed = spec.part(signature.columns[number] for number in features)
    if needed is None:
        raise invalid("the model's feature spec makes none of these features; send keys as INT64", 500)
    read, known = set(needed.columns(labels=False)), {*spec.columns(labels=False), spec.time}
    kept = []
    for index, tensor in enumerate(tensors):
        column = tensor.name
        if column not in known and column.endswith(_SUFFIXES[0]):
            column = column.removesuffix(_SUFFIXES[0])
        if column in read:
            kept.append(index)
        elif column not in known:
            names = [name for name in known if name is not None]
            raise invalid(f"the model's feature spec has no column {shown(tensor.name)}; {choices(column, names)}")
    if not kept:
        raise invalid(f"a lookup of these features needs the columns {', '.join(sorted(read))}; none was sent")
    used = tuple(tensors[index] for index in kept)
    raw = RawColumns(needed, _part(signature, features), limits)
    return LookupPlan(tuple(kept), used, features, len(signature.columns), wanted, raw=raw)


def _part(signature: Signature, features: Sequence[int]) -> Signature:
    """The signature of these features alone."""
    names = tuple(signature.columns[number] for number in features)
    numbers = tuple(name for name in names if name in signature.numbers)
    return replace(
        signature,
        features=tuple(name for name in names if name not in numbers),
        sequences=signature.sequences & set(names),
        dense=0,
        user=signature.user & set(names),
        numbers=numbers,
        aligned=(),
        max_lengths={},
    )


def _inputs_of(features: Sequence[str]) -> set[str]:
    return {name for feature in features for name in (feature, *(feature + suffix for suffix in _SUFFIXES))}
