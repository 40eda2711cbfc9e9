"""What a table is: a named space of rows of one dim, one initialiser and one optimizer, fed by one or more features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotrow.config import Initial, check_options
from hotrow.errors import OptionError, choices
from hotrow.optim import Optimizer
from hotrow.optim import from_dict as optimizer_from_dict
from hotrow.table.policies import Admission, Expiry

POOLINGS = ("sum", "mean", "none")


@dataclass(frozen=True)
class Table:
    """A named space of rows. Several features may share it.

    `features` is a list of names (their ids are summed), or a mapping of names to pooling: "sum", "mean", or "none" for
    a sequence, which arrives at the tower as [batch, length, dim] with a mask. Without `features` the table feeds the
    feature of its own name. `optimizer` overrides the collection's. `admission` and `expiry` say which keys get a row
    and how long it stays. With several ranks, `replicate` keeps all rows on every rank: for a small table whose rows
    are in most batches, that spares sending them.

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
