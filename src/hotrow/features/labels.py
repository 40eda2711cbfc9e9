"""Label: a column that holds the label of one task, and the checks of its values.

A spec with one plain column of labels (`label="click"`) gives labels `[batch]`, each 0 or 1 and never missing. A spec
with a list of labels gives `[batch, tasks]` in the order of the list. There a null or a NaN is a label that is missing,
which training leaves out of this task (task.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotrow.errors import OptionError
from hotrow.features.columns import Column
from hotrow.features.numbers import labels_of, numbers
from hotrow.features.row_error import refuse_rows
from hotrow.task import Task

FloatArray = npt.NDArray[np.float32]
LARGEST_COUNT = 1 << 24  # float32 holds every whole number up to here


@dataclass(frozen=True)
class Label:
    """The label of the task `name`, of the `kind` that the task has, in a column that is called `column`.

    Without `column` the column is called as the task.

    >>> Label("orders", "count").column
    'orders'
    """

    name: str
    kind: str = "binary"
    column: str = ""

    def __post_init__(self) -> None:
        Task(self.name, self.kind)  # checks both
        if not isinstance(self.column, str):
            raise OptionError(f"label {self.name!r} has column={self.column!r}; give the name of a column")
        object.__setattr__(self, "column", self.column or self.name)

    def values(self, column: Column) -> FloatArray:
        """The labels of a column as float32, NaN where missing.

        >>> import pyarrow as pa
        >>> Label("orders", "count").values(Column("orders", pa.array([2, None])))
        array([ 2., nan], dtype=float32)
        """
        values, missing = numbers(column, f"label {self.name!r}")
        if self.kind == "binary":
            bad, wants = (values != 0) & (values != 1), "0 or 1"
        elif self.kind == "count":
            bad = (values < 0) | (values > LARGEST_COUNT) | (values != np.floor(values))
            wants = f"a whole number from 0 to {LARGEST_COUNT}"
        else:
            with np.errstate(over="ignore"):
                bad, wants = ~np.isfinite(values.astype(np.float32)), "a number that float32 holds"
        fact = f"the label is {{}}; a label of kind {self.kind} is {wants}, or missing"
        refuse_rows(column.name, bad & ~missing, column.array, fact)
        return values.astype(np.float32)


LabelOption = str | Sequence[str | Label] | Mapping[str, str | Label]


def check_label_option(option: object) -> str | tuple[Label, ...] | None:
    """The `label=` of a spec: None, one plain column, or labels by task.

    >>> check_label_option(["click", Label("dwell", "regression")])[1].kind
    'regression'
    >>> check_label_option({"click": "is_click"})
    (Label(name='click', kind='binary', column='is_click'),)
    """
    if option is None or (isinstance(option, str) and option):
        return option
    if isinstance(option, Mapping):
        named = [_named(name, value) for name, value in option.items()]
    elif isinstance(option, Sequence) and not isinstance(option, str):
        named = [one if isinstance(one, Label) else Label(one) for one in option]
    else:
        named = []
    if not named:
        raise OptionError(
            f"label={option!r}; give the name of a column, a list of hr.features.Label, a mapping from task to column, "
            "or None"
        )
    for value, what in (("name", "task"), ("column", "column")):
        seen = [getattr(label, value) for label in named]
        if twice := sorted({one for one in seen if seen.count(one) > 1}):
            raise OptionError(f"{what} {twice[0]!r} has {seen.count(twice[0])} labels; give each {what} one")
    return tuple(named)


def read_labels(labels: str | tuple[Label, ...], raw: Mapping[str, Column]) -> FloatArray:
    """The labels of these columns: `[batch]` of one plain column, else `[batch, tasks]`."""
    if isinstance(labels, str):
        return labels_of(raw[labels])
    return np.stack([label.values(raw[label.column]) for label in labels], axis=1)


def _named(name: object, value: object) -> Label:
    if isinstance(value, str) and isinstance(name, str):
        return Label(name, column=value)
    if isinstance(value, Label) and value.name == name:
        return value
    raise OptionError(f"label={{{name!r}: {value!r}}}; map the name of a task to a column, or to its own Label")
