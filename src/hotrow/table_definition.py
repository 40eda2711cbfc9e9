"""Table: a named space of rows of one dim, one initialiser and one optimizer, used by one or more features."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotrow.config import Initial, check_options
from hotrow.errors import OptionError, choices
from hotrow.optim import Optimizer
from hotrow.optim import from_dict as optimizer_from_dict
from hotrow.row_policies import Admission, Expiry

POOLINGS = ("sum", "mean", "none")
VALUES = ("fp32", "fp16", "int8")  # storage types of read-only rows
DTYPES = ("fp32", "fp16", "bf16")  # storage types of trained rows


@dataclass(frozen=True)
class Table:
    """A named space of rows. Several features may share it.

    `features` is a list of names (pooling "sum"), or a mapping of names to pooling: "sum", "mean", or "none" for
    a sequence, which the tower gets as [batch, length, dim] with a mask. Without `features` the table serves the
    feature of its own name. `optimizer` overrides the collection's. `admission` and `expiry` say which keys get a row
    and when a row is removed. With several ranks, `replicate` keeps all rows on every rank: for a small table whose
    rows are in most batches, that saves the exchange of rows.

    `dtype` is the type in which rows keep their values, in every tier: "fp32", or "bf16" and "fp16" in half the memory
    (optimizer state stays fp32). Updates are computed in fp32 and rounded stochastically, so small ones are not lost.

    `max_length` is the most events of a sequence: a number for all of the table's sequences, or by feature. The export
    of a Transformer over padded histories needs it (docs/serving.md).

    `values` makes the table read-only, as on a server: rows have no optimizer state, are stored as "fp32", "fp16" or
    "int8" in every tier, and are read as float32; `dtype` is then what they were trained in. `default` is the row (dim
    numbers, zeros if not given) that a reader may use instead of a row that is still on SSD.

    >>> Table("item", dim=32, features={"item_id": "sum", "history": "none"}).poolings["history"]
    'none'
    """

    name: str
    dim: int
    features: Sequence[str] | Mapping[str, str] | None = None
    initial: Initial = field(default_factory=Initial)
    optimizer: Optimizer | None = None
    admission: Admission | None = None
    expiry: Expiry | None = None
    replicate: bool = False
    dtype: str = "fp32"
    values: str | None = None
    default: Sequence[float] | None = None
    max_length: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "/" in self.name or self.name.startswith("."):
            raise OptionError(f"table name {self.name!r}: give a non-empty name without '/' or a leading '.'")
        if not isinstance(self.dim, int) or not 1 <= self.dim <= 65536:
            raise OptionError(f"table {self.name!r} has dim={self.dim!r}; give a whole number from 1 to 65536")
        if isinstance(self.features, str):
            raise OptionError(
                f"table {self.name!r}: features={self.features!r} is one string; write [{self.features!r}]"
            )
        if self.features is not None and len(self.poolings) != len(self.features):
            raise OptionError(f"table {self.name!r}: features={list(self.features)} names one twice; name each once")
        for feature, pooling in self.poolings.items():
            if pooling not in POOLINGS:
                raise OptionError(f"feature {feature!r} has pooling {pooling!r}; {choices(pooling, POOLINGS)}")
        self._check_values()
        self._check_max_length()

    def _check_values(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(f"table {self.name!r} has dtype={self.dtype!r}; {choices(str(self.dtype), DTYPES)}")
        if self.values is not None and self.values not in VALUES:
            raise OptionError(f"table {self.name!r} has values={self.values!r}; {choices(str(self.values), VALUES)}")
        if self.values is not None and (self.admission is not None or self.expiry is not None):
            raise OptionError(
                f"table {self.name!r} has values={self.values!r}, so it is only read: leave admission= and expiry= out"
            )
        if self.default is None:
            return
        if len(self.default) != self.dim or not all(math.isfinite(value) for value in self.default):
            raise OptionError(
                f"table {self.name!r} has dim={self.dim} and a default= of {len(self.default)} numbers; "
                f"give {self.dim} finite ones"
            )
        object.__setattr__(self, "default", tuple(float(value) for value in self.default))

    def _check_max_length(self) -> None:
        sequences = [feature for feature, pooling in self.poolings.items() if pooling == "none"]
        if isinstance(self.max_length, Mapping):
            for feature in self.max_length:
                if feature not in sequences:
                    raise OptionError(
                        f"table {self.name!r}: max_length= names {feature!r}, which is not one of its sequences "
                        f"({', '.join(sequences) or 'none'}); give it the pooling 'none', or leave it out"
                    )
        elif self.max_length is not None and not sequences:
            raise OptionError(
                f"table {self.name!r} has max_length={self.max_length!r} and no sequence; give a feature the pooling "
                "'none', or leave max_length= out"
            )
        for most in self.max_lengths.values():
            if not isinstance(most, int) or isinstance(most, bool) or most < 1:
                raise OptionError(f"table {self.name!r} has max_length={most!r}; give a whole number of 1 or more")

    @property
    def max_lengths(self) -> dict[str, int]:
        """The most events of each sequence that declares it.

        >>> Table("item", dim=4, features={"item": "sum", "seen": "none"}, max_length=200).max_lengths
        {'seen': 200}
        """
        if self.max_length is None:
            return {}
        if isinstance(self.max_length, Mapping):
            return dict(self.max_length)
        return {feature: self.max_length for feature, pooling in self.poolings.items() if pooling == "none"}

    @property
    def poolings(self) -> dict[str, str]:
        """Pooling by feature, in order."""
        if self.features is None:
            return {self.name: "sum"}
        if isinstance(self.features, Mapping):
            return dict(self.features)
        return dict.fromkeys(self.features, "sum")

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; `Table.from_dict` reads it back."""
        values: dict[str, Any] = {"name": self.name, "dim": self.dim, "features": self.poolings}
        values["initial"] = self.initial.to_dict()
        if self.optimizer is not None:
            values["optimizer"] = self.optimizer.to_dict()
        if self.admission is not None:
            values["admission"] = self.admission.to_dict()
        if self.expiry is not None:
            values["expiry"] = self.expiry.to_dict()
        if self.replicate:
            values["replicate"] = True
        if self.dtype != "fp32":
            values["dtype"] = self.dtype
        if self.values is not None:
            values["values"] = self.values
        if self.default is not None:
            values["default"] = list(self.default)
        if self.max_length is not None:
            values["max_length"] = dict(self.max_length) if isinstance(self.max_length, Mapping) else self.max_length
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Table:
        """From plain values, such as one of a job file's `[[tables]]`.

        >>> Table.from_dict({"name": "user", "dim": 8}).dim
        8
        """
        options = dict(values)
        check_options(f"table {options.get('name', '?')!r}", options, list(Table.__dataclass_fields__))
        for required in ("name", "dim"):
            if required not in options:
                raise OptionError(f"a table needs {required!r}; got {', '.join(options) or 'nothing'}")
        if "initial" in options:
            options["initial"] = Initial.from_dict(options["initial"])
        if "optimizer" in options:
            options["optimizer"] = optimizer_from_dict(options["optimizer"])
        if "admission" in options:
            options["admission"] = Admission.from_dict(options["admission"])
        if "expiry" in options:
            options["expiry"] = Expiry.from_dict(options["expiry"])
        return Table(**options)
