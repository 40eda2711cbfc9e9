"""Layout: the role of each input tensor, the number of rows of a request, and the columns of its Request.

A model's inputs are named after its signature. For a key feature `item`:

    item                    INT64 [rows] or [rows, 1]: one id per row; [rows, n]: n ids per row
    item + item.offsets     INT64 [ids], and INT64 or INT32 [rows + 1]: any number of ids per row
    item.weights            FP32, one for each id, in the same order

A number feature (`Signature.numbers`, such as the time of each event) is sent like a sequence. `dense` is FP32
[rows, width]. `keys` is INT64 [rows, f]: one id per row for each of the f features that have no tensor of their own, in
the signature's order. A client with 26 such features sends one tensor.

**rows** is the largest first size among all tensors (of a jagged one: offsets minus one). Every tensor has that many
rows, or exactly one row, which is then used for all (`shared`: the user's features, sent once). Everything else is
an error. So is a plain [n] with n > 1 for a feature that the model uses as a sequence: it could mean n rows or one
row with n ids. It needs offsets, or the shape [1, n] or [n, 1].

An InputPlan depends only on names, types and shapes. Clients repeat these, so inference_json.py caches plans. For a
repeated request only the data is checked: offsets that increase, finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotrow.errors import choices
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.request import Array, Ids, PackedIds, Signature
from hotrow.serve.protocol.tensors import DeclaredTensor, invalid, shown

KEYS, DENSE = "keys", "dense"
_VALUES, _OFFSETS, _WEIGHTS = 0, 1, 2


@dataclass(frozen=True)
class Column:
    """The source of one feature's ids: a tensor, by its index among the inputs, or a column of `keys`."""

    index: int
    packed: int | None = None
    offsets: int | None = None
    weights: int | None = None
    row_offsets: Array | None = None  # the offsets of a [rows, n] tensor
    shared: bool = False

    @property
    def one_id_per_row(self) -> bool:
        """Whether the tensor has one id per row, no offsets and no weights."""
        extras = (self.packed, self.offsets, self.weights, self.row_offsets)
        return not self.shared and all(extra is None for extra in extras)


@dataclass(frozen=True)
class InputPlan:
    """How a request's tensors become columns: everything but their elements."""

    names: tuple[str, ...]  # the tensors' names, for messages
    rows: int
    columns: tuple[Column, ...]
    one_id_per_row: bool  # whether every feature is one id per row from a tensor of its own, in the signature's order
    keys: tuple[int, int, int] | None  # index, rows, features
    dense: tuple[int, int, int] | None  # index, rows, width
    one_array: bool = False  # whether the tensors of all features are read as one array

    @property
    def is_matrix(self) -> bool:
        """Whether `keys` has the ids of all features and rows, and so is the request's matrix."""
        return self.keys is not None and self.keys[1:] == (self.rows, len(self.columns))

    def matrix(self, elements: Sequence[Array]) -> Array:
        """The ids of all features, [rows, features]. Requires: `is_matrix`."""
        assert self.keys is not None
        index, rows, features = self.keys
        return elements[index].reshape(rows, features)

    def as_one_array(self) -> InputPlan:
        """This plan, with the features' tensors read as one array.

        Requires: `one_id_per_row`, and the tensors are contiguous in the body.
        """
        dense = self.dense and (self.dense[0] - len(self.columns) + 1, *self.dense[1:])
        return replace(self, one_array=True, dense=dense)

    def ids(self, elements: Sequence[Array]) -> Sequence[Ids]:
        """The ids of every feature.

        Requires: `elements` are the declared tensors, flat, in order; with `one_array`: that array, then the others.
        """
        if self.one_array:
            return PackedIds(elements[0].reshape(-1, self.rows))
        packed: Array | None = None
        if self.keys is not None:
            index, rows, features = self.keys
            packed = np.ascontiguousarray(elements[index].reshape(rows, features).T)
            if features == len(self.columns) and rows == self.rows:
                return PackedIds(packed)
        elif self.one_id_per_row:
            return tuple(map(Ids, elements[: len(self.columns)]))
        ids = []
        for column in self.columns:
            if column.packed is not None:
                assert packed is not None
                ids.append(Ids(packed[column.packed], shared=column.shared))
            else:
                ids.append(self._column_ids(column, elements))
        return tuple(ids)

    def dense_of(self, elements: Sequence[Array]) -> Array | None:
        """The dense features, finite."""
        if self.dense is None:
            return None
        index, rows, width = self.dense
        dense = elements[index].reshape(rows, width)
        # A finite sum has finite elements, and is one operation instead of two. The sum may overflow: then check all.
        if not math.isfinite(np.add.reduce(elements[index])) and not np.isfinite(dense).all():
            row, column = (int(at[0]) for at in np.nonzero(~np.isfinite(dense)))
            raise invalid(
                f"'dense' is {dense[row, column]} at row {row}, column {column}; send finite numbers "
                "(what the training data had for a missing one, often 0)"
            )
        return dense

    @property
    def dense_shared(self) -> bool:
        """Whether one row of dense features is used for all rows."""
        return self.dense is not None and self.dense[1] == 1 < self.rows

    def _column_ids(self, column: Column, elements: Sequence[Array]) -> Ids:
        values = elements[column.index]
        offsets, weights = column.row_offsets, None
        if column.offsets is not None:
            offsets = checked_offsets(elements[column.offsets], values.size, self.names[column.offsets])
        if column.weights is not None:
            weights = elements[column.weights]
            if not np.isfinite(weights).all():
                raise invalid(f"{shown(self.names[column.weights])} has NaN or infinite elements; send finite weights")
        return Ids(values, None if column.shared else offsets, weights, column.shared)


def checked_offsets(offsets: Array, count: int, name: str) -> Array:
    """Offsets as int64, checked: they start at 0, never decrease and end at `count`."""
    if offsets[0] != 0 or offsets[-1] != count or (offsets[1:] < offsets[:-1]).any():
        some = offsets.tolist() if offsets.size <= 8 else [*offsets[:4].tolist(), "...", *offsets[-3:].tolist()]
        raise invalid(f"{shown(name)} must start at 0, never fall and end at the number of ids, {count}; got {some}")
    return offsets.astype(np.int64, copy=False)


class Layout:
    """The names of a signature's input tensors, and how they become columns.

    >>> layout = Layout(Signature(("user", "item"), frozenset(), 0), Limits())
    >>> layout.plan([DeclaredTensor("user", "INT64", (1,), 1), DeclaredTensor("item", "INT64", (50,), 50)]).rows
    50
    """

    def __init__(self, signature: Signature, limits: Limits) -> None:
        self.signature, self.limits, self.columns = signature, limits, signature.columns
        self._roles: dict[str, tuple[int, int]] = {}
        for number, name in enumerate(self.columns):
            self._roles[f"{name}.offsets"] = (_OFFSETS, number)
            self._roles[f"{name}.weights"] = (_WEIGHTS, number)
        for number, name in enumerate(self.columns):  # a feature's name has priority over another's suffix
            self._roles[name] = (_VALUES, number)
        self.has_keys = KEYS not in self._roles

    def plan(self, tensors: Sequence[DeclaredTensor]) -> InputPlan:
        """The plan of a request with these tensors. Errors say what to send instead."""
        by_role, keys, dense = self._tensors_by_role(tensors)
        counts = {tensors[index].name: tensors[index].shape[0] for index in (keys, dense) if index is not None}
        for number in by_role[_VALUES]:
            counts[self.columns[number]] = self._rows_of(number, by_role, tensors)
        rows = self._common_rows(counts)
        rest = [number for number in range(len(self.columns)) if number not in by_role[_VALUES]]
        self._check_keys(rest, None if keys is None else tensors[keys])
        columns = []
        for number, name in enumerate(self.columns):
            if number in by_role[_VALUES]:
                columns.append(self._column(number, by_role, tensors, counts[name] == 1 < rows))
            else:
                assert keys is not None
                columns.append(Column(keys, rest.index(number), shared=tensors[keys].shape[0] == 1 < rows))
        self._check_ids(columns, tensors, rows)
        return InputPlan(
            tuple(tensor.name for tensor in tensors),
            rows,
            tuple(columns),
            all(column.one_id_per_row and column.index == number for number, column in enumerate(columns)),
            None if keys is None else (keys, tensors[keys].shape[0], len(rest)),
            None if dense is None else (dense, tensors[dense].shape[0], self.signature.dense),
        )

    def _tensors_by_role(
        self, tensors: Sequence[DeclaredTensor]
    ) -> tuple[tuple[dict[int, int], ...], int | None, int | None]:
        """Indices of the tensors by role; checks their types and numbers of dimensions."""
        by_role: tuple[dict[int, int], ...] = ({}, {}, {})
        keys = dense = None
        seen: set[str] = set()
        for index, tensor in enumerate(tensors):
            if tensor.name in seen:
                raise invalid(f"two inputs are named {shown(tensor.name)}; send each once")
            seen.add(tensor.name)
            role = self._roles.get(tensor.name)
            if role is not None:
                by_role[role[0]][role[1]] = index
                _check_type(tensor, *_TYPES[role[0]])
            elif tensor.name == KEYS and self.columns:
                keys = index
                _check_type(tensor, ("INT64",), (2,))
            elif tensor.name == DENSE and self.signature.dense:
                dense = index
                _check_type(tensor, ("FP32",), (2,))
            else:
                raise invalid(f"the model has no input {shown(tensor.name)}; {choices(tensor.name, self.inputs())}")
        self._check_dense(None if dense is None else tensors[dense])
        for number in (by_role[_OFFSETS].keys() | by_role[_WEIGHTS].keys()) - by_role[_VALUES].keys():
            name = self.columns[number]
            raise invalid(
                f"input {shown(name)} has offsets or weights but no ids; send {shown(name)} INT64 [ids] with them"
            )
        return by_role, keys, dense

    def inputs(self) -> list[str]:
        """Every name that an input may have, without the suffixes."""
        names = list(self.columns)
        if self.columns and self.has_keys:
            names.append(KEYS)
        if self.signature.dense and DENSE not in self._roles:
            names.append(DENSE)
        return names

    def _rows_of(self, number: int, by_role: tuple[dict[int, int], ...], tensors: Sequence[DeclaredTensor]) -> int:
        tensor = tensors[by_role[_VALUES][number]]
        index = by_role[_OFFSETS].get(number)
        if index is None:
            if len(tensor.shape) == 1 and tensor.shape[0] > 1 and self._is_sequence(tensor.name):
                n = tensor.shape[0]
                raise invalid(
                    f"input {shown(tensor.name)} of shape [{n}] is a sequence: one row with {n} ids, or {n} rows with "
                    f"one? Send the shape [1, {n}] or [{n}, 1], or {shown(tensor.name + '.offsets')} of [rows + 1]"
                )
            return tensor.shape[0]
        if len(tensor.shape) != 1:
            raise invalid(
                f"input {shown(tensor.name)} has offsets and the shape {list(tensor.shape)}; with offsets send its "
                "ids as one list, [ids]"
            )
        return tensors[index].shape[0] - 1

    def _is_sequence(self, name: str) -> bool:
        return name in self.signature.sequences or name in self.signature.numbers

    def _common_rows(self, counts: dict[str, int]) -> int:
        """The number of rows, after checking that each count equals it or is 1."""
        rows = max(counts.values(), default=0)
        if rows == 0 or min(counts.values()) < 1:
            named = ", ".join(f"{shown(name)} {count}" for name, count in counts.items() if count < 1)
            raise invalid(f"a request has at least one row, but {named or 'no tensor'} has none; send one or more rows")
        if rows > self.limits.rows:
            raise invalid(f"{rows} rows are more than the limit rows={self.limits.rows}; send several requests", 413)
        if any(count not in (1, rows) for count in counts.values()):
            named = ", ".join(f"{shown(name)} {count}" for name, count in counts.items())
            raise invalid(
                f"inputs have different numbers of rows: {named}; each has {rows} (one entry per row) or 1 (the same "
                "for all). Ids that are not one per row need '<feature>.offsets' [rows + 1] or the shape [1, ids]"
            )
        return rows

    def _column(
        self, number: int, by_role: tuple[dict[int, int], ...], tensors: Sequence[DeclaredTensor], one: bool
    ) -> Column:
        index = by_role[_VALUES][number]
        tensor = tensors[index]
        weights = by_role[_WEIGHTS].get(number)
        if weights is not None and tensors[weights].size != tensor.size:
            raise invalid(
                f"{shown(tensors[weights].name)} has {tensors[weights].size} elements for {tensor.size} ids; "
                "send one weight for each id"
            )
        row_offsets = None
        if len(tensor.shape) == 2 and tensor.shape[1] != 1:
            row_offsets = np.arange(tensor.shape[0] + 1, dtype=np.int64) * tensor.shape[1]
        return Column(index, None, by_role[_OFFSETS].get(number), weights, row_offsets, one)

    def _check_keys(self, rest: list[int], keys: DeclaredTensor | None) -> None:
        names = [self.columns[number] for number in rest]
        if keys is None and rest:
            raise invalid(
                f"{len(names)} of the model's features were not sent: {_listed(names)}; send a tensor for each, or "
                f"all of them in 'keys' INT64 [rows, {len(names)}] (a feature without ids has the shape [1, 0])"
            )
        if keys is not None and keys.shape[1] != len(names):
            raise invalid(
                f"'keys' has {keys.shape[1]} columns, but {len(names)} features have no tensor of their own: "
                f"{_listed(names)}; send one column for each, in this order"
            )

    def _check_dense(self, dense: DeclaredTensor | None) -> None:
        width = self.signature.dense
        if width and dense is None:
            raise invalid(f"the input 'dense' is missing; send FP32 [rows, {width}], or [1, {width}] for all rows")
        if dense is not None and dense.shape[1] != width:
            raise invalid(f"'dense' has {dense.shape[1]} columns and the model takes {width}; send [rows, {width}]")

    def _check_ids(self, columns: Sequence[Column], tensors: Sequence[DeclaredTensor], rows: int) -> None:
        ids = 0
        for name, column in zip(self.columns, columns, strict=True):
            count = tensors[column.index].shape[0] if column.packed is not None else tensors[column.index].size
            ids += count * rows if column.shared and name not in self.signature.user else count
        if ids > self.limits.ids:
            raise invalid(
                f"the request has {ids} ids once its shared ids are repeated for each of its {rows} rows; the limit is "
                f"ids={self.limits.ids}: send fewer rows at a time",
                413,
            )


_TYPES = {_VALUES: (("INT64",), (1, 2)), _OFFSETS: (("INT64", "INT32"), (1,)), _WEIGHTS: (("FP32",), (1, 2))}


def _check_type(tensor: DeclaredTensor, datatypes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    if tensor.datatype not in datatypes:
        raise invalid(
            f"input {shown(tensor.name)} is {tensor.datatype}; send {' or '.join(datatypes)} (raw columns: set the "
            "request's parameter raw to true)"
        )
    if len(tensor.shape) not in sizes:
        raise invalid(f"input {shown(tensor.name)} has the shape {list(tensor.shape)}; send {_shapes(sizes)}")


def _shapes(sizes: tuple[int, ...]) -> str:
    return " or ".join("one size, [n]" if size == 1 else "two sizes, [rows, n]" for size in sizes)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) if len(names) <= 30 else ", ".join(map(repr, names[:30])) + ", ..."
