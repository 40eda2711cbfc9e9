"""Nested columns: a field inside structs or lists of structs, by a path such as "events.item".

A log may store a history as one column, `events: list<struct<item, action, time>>`. The path "events.item" is then a
list column with the items of every example: as long as `events`, null where the struct or its field is null. A path
through a plain struct ("user.id") is a plain column. A column whose own name is "events.item" comes first.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from hotrow.errors import DataError, choices


def split_path(name: str, names: Iterable[str]) -> tuple[str, list[str]]:
    """The column that holds `name`, and the fields inside it; `name` and no fields unless it is a path.

    >>> split_path("events.item", ["events", "user"])
    ('events', ['item'])
    """
    known = set(names)
    if name in known:
        return name, []
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        root = ".".join(parts[:count])
        if root in known:
            return root, parts[count:]
    return name, []


def field_array(root: str, array: pa.Array, fields: list[str]) -> pa.Array:
    """The values of a field of a struct column, or of a column of lists of structs."""
    kind, t = array.type, pa.types
    if not fields or t.is_null(kind):
        return array
    if _is_list(kind):
        lengths = pc.list_value_length(array).fill_null(0)
        inside = field_array(root, array.flatten(), fields)
        ends = pc.cumulative_sum(lengths.cast(pa.int64()))
        offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
        mask = array.is_null() if array.null_count else None
        return pa.LargeListArray.from_arrays(offsets, inside, mask=mask)
    check_field(root, kind, fields[0])
    return field_array(f"{root}.{fields[0]}", pc.struct_field(array, fields[0]), fields[1:])


def field_type(root: str, kind: pa.DataType, fields: list[str]) -> pa.DataType:
    """The type of `field_array` for a column of this type."""
    if not fields or pa.types.is_null(kind):
        return kind
    if _is_list(kind):
        return pa.large_list(field_type(root, kind.value_type, fields))
    check_field(root, kind, fields[0])
    return field_type(f"{root}.{fields[0]}", kind.field(fields[0]).type, fields[1:])


def check_field(root: str, kind: pa.DataType, field: str) -> None:
    """Raise unless a type is a struct with exactly one field of this name."""
    if not pa.types.is_struct(kind):
        raise DataError(
            f"column {root!r} holds {kind} values and no fields, so it has no {field!r}; name the column itself"
        )
    names = [kind.field(i).name for i in range(kind.num_fields)]
    if names.count(field) != 1:
        fact = "has no" if field not in names else f"has {names.count(field)} fields named"
        raise DataError(f"column {root!r} {fact} {field!r}; {choices(field, names)}")


def _is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind))
