"""RawColumns: converts columns as in the training data to keys, by the model's saved feature spec.

A request is raw if it has the parameter `raw: true`, or if a tensor is BYTES, because keys are never strings. Its
tensors are columns of the spec, by their names in the data: numbers or strings, [rows] or [rows, 1], or [1] for all
rows. Lists are [rows, n], or `<column>` [elements] with `<column>.offsets` [rows + 1]. A JSON null or a float NaN is a
missing value.

The spec is the one of training, so serving computes the same features. Features of shared columns alone, such as a
user's history, are computed once and shared by all rows. The others are computed from columns of full length, because a
Cross may join a user's column and an item's.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

import numpy as np
import pyarrow as pa

from hotrow.batch import Jagged
from hotrow.errors import DataError, HotRowError, choices
from hotrow.features import FeatureSpec
from hotrow.features.histories import HISTORY_KINDS
from hotrow.serve.protocol.input_layout import checked_offsets
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.request import Array, Ids, Signature
from hotrow.serve.protocol.tensors import BYTES, DeclaredTensor, Elements, invalid, shown

_OFFSETS = ".offsets"
MOST_PARTS = 64  # combinations of shared columns whose parts of the spec are kept


class RawColumns:
    """A feature spec and the signature that its output must have. Any thread may call it."""

    def __init__(self, spec: FeatureSpec, signature: Signature, limits: Limits) -> None:
        self.spec, self.signature, self.limits = spec, signature, limits
        self._needed = list(spec.columns(labels=False))
        self._known = [*self._needed, *([spec.time] if spec.time is not None else [])]
        self._list_columns = {
            name for feature in spec.features if isinstance(feature, HISTORY_KINDS) for name in feature.inputs()
        }
        self._dense = frozenset(spec.dense_names)
        self._sources = {feature.name: spec.sources(feature.name) for feature in spec.features}
        self._parts: dict[frozenset[str], tuple[FeatureSpec | None, FeatureSpec | None]] = {}  # by shared columns

    def columns(
        self, tensors: Many[DeclaredTensor], elements: Many[Elements]
    ) -> tuple[int, tuple[Ids, ...], Array | None, bool]:
        """The number of rows, ids in the signature's order, dense features, and whether these are shared."""
        columns, counts = self._columns(tensors, elements)
        rows = self._common_rows(counts)
        shared = frozenset(name for name, count in counts.items() if count == 1 < rows)
        once, by_row = self._parts.get(shared) or self._split(shared)
        made: dict[str, Ids] = {}
        dense = None
        try:
            if by_row is not None:
                read = [name for name in by_row.columns(labels=False) if name in columns]
                full = {name: _repeat(columns[name], rows) if name in shared else columns[name] for name in read}
                if by_row.time in columns:
                    full.setdefault(by_row.time, columns[by_row.time])
                batch = by_row.apply(full, labels=False)
                made = {name: _ids(jagged) for name, jagged in {**batch.ids, **batch.numbers}.items()}
                dense = None if batch.dense is None or not self.signature.dense else batch.dense.numpy()
            if once is not None:
                batch = once.apply({name: columns[name] for name in shared}, labels=False)
                made |= {name: _shared_ids(jagged) for name, jagged in {**batch.ids, **batch.numbers}.items()}
        except HotRowError as error:
            raise invalid(str(error)) from error
        ids = tuple(self._made(name, made) for name in self.signature.columns)
        if dense is not None and not np.isfinite(dense).all():
            raise invalid("a dense feature is NaN or infinite; send finite numbers, or null where the spec fills in")
        return rows, ids, dense, False

    def _columns(
        self, tensors: Many[DeclaredTensor], elements: Many[Elements]
    ) -> tuple[dict[str, pa.Array], dict[str, int]]:
        by_name = {tensor.name: number for number, tensor in enumerate(tensors)}
        if len(by_name) != len(tensors):
            raise invalid("two inputs have one name; send each once")
        columns, counts = {}, {}
        for number, tensor in enumerate(tensors):
            name = tensor.name
            if name not in self._known:
                if name.endswith(_OFFSETS) and name.removesuffix(_OFFSETS) in by_name:
                    continue
                raise invalid(f"the model's feature spec has no column {shown(name)}; {choices(name, self._known)}")
            flat = _arrow(tensor, elements[number])
            offsets = by_name.get(name + _OFFSETS)
            columns[name] = (
                _lists(tensor, flat, name in self._list_columns)
                if offsets is None
                else _jagged(tensor, flat, tensors[offsets], elements[offsets])
            )
            counts[name] = len(columns[name])
        return columns, counts

    def _common_rows(self, counts: Mapping[str, int]) -> int:
        rows = max(counts.values(), default=0)
        if rows < 1 or min(counts.values()) < 1:
            raise invalid("a request has at least one row; send one or more")
        if rows > self.limits.rows:
            raise invalid(f"{rows} rows are more than the limit rows={self.limits.rows}; send several requests", 413)
        if any(count not in (1, rows) for count in counts.values()):
            named = ", ".join(f"{shown(name)} {count}" for name, count in counts.items())
            raise invalid(f"columns have different numbers of rows: {named}; each has {rows}, or 1 for all rows")
        return rows

    def _split(self, shared: frozenset[str]) -> tuple[FeatureSpec | None, FeatureSpec | None]:
        """The spec of the features that are computed once, and that of those computed for each row."""
        once = {name for name, sources in self._sources.items() if sources <= shared and name not in self._dense}
        parts = self.spec.part(once), self.spec.part(self._sources.keys() - once)
        if len(self._parts) < MOST_PARTS:
            self._parts[shared] = parts
        return parts

    def _made(self, name: str, made: Mapping[str, Ids]) -> Ids:
        if name not in made:
            raise invalid(
                f"the model's feature spec makes no feature {name!r}; export the model with the spec it trained on", 500
            )
        return made[name]


def _ids(jagged: Jagged) -> Ids:
    offsets = None if jagged.offsets is None else jagged.offsets.numpy()
    return Ids(jagged.values.numpy(), offsets, None if jagged.weights is None else jagged.weights.numpy())


def _shared_ids(jagged: Jagged) -> Ids:
    weights = None if jagged.weights is None else jagged.weights.numpy()
    return Ids(jagged.values.numpy(), None, weights, shared=True)


def _arrow(tensor: DeclaredTensor, elements: Elements) -> pa.Array:
    if tensor.datatype == BYTES:
        return pa.array(elements, pa.string())
    return pa.array(elements, from_pandas=True)


def _lists(tensor: DeclaredTensor, flat: pa.Array, wanted: bool) -> pa.Array:
    """A [rows, n] tensor as lists of n. [rows] is returned unchanged, and so is [rows, 1] unless lists are wanted."""
    if len(tensor.shape) == 1 or (tensor.shape[1] == 1 and not wanted):
        return flat
    rows, width = tensor.shape
    if width == 0:
        return pa.array([[]] * min(rows, 1 << 20), pa.list_(flat.type))
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(width)), flat)


def _jagged(tensor: DeclaredTensor, flat: pa.Array, declared: DeclaredTensor, offsets: Elements) -> pa.Array:
    if declared.datatype not in ("INT64", "INT32") or len(declared.shape) != 1 or declared.size < 2:
        raise invalid(f"{shown(declared.name)} must be INT64 or INT32 of shape [rows + 1], with at least one row")
    assert isinstance(offsets, np.ndarray)
    checked = checked_offsets(offsets, tensor.size, declared.name)
    try:
        return pa.LargeListArray.from_arrays(pa.array(checked), flat)
    except pa.ArrowException as error:
        raise DataError(f"{shown(tensor.name)} and its offsets make no lists ({error})") from error


def _repeat(column: pa.Array, rows: int) -> pa.Array:
    return column.take(pa.array(np.zeros(rows, dtype=np.int64)))
