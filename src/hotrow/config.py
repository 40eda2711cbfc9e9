"""Options that several packages take: memory budgets and the initial values of rows.

Each is a frozen dataclass that checks its values when it is made, so code that receives one need not check again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hotrow.errors import OptionError, choices
from hotrow.units import parse_size

HBM_POLICIES = ["lfu", "lru"]


@dataclass(frozen=True)
class Memory:
    """How much memory rows may take in each tier. A tier left out is not used; without `dram`, DRAM has no limit.

    `hbm` is a cache in GPU memory over the lower tiers; a cached row keeps its slot in DRAM. `hbm_policy` decides which
    rows are evicted: "lfu" the least frequently used (a use counts half after 512 batches), "lru" the least recently
    used. Results are the same.

    `ssd` is a folder for the rows that exceed `dram`. It belongs to one process at a time, and its contents are needed
    only while that process runs; durable state is in checkpoints.

    `remote` is a store outside the process (`redis://host:6379`, `rocksdb:/folder`, docs/remote.md) that has all rows;
    `dram` is a cache over it. Rows are then read-only, so `remote` is for serving.

    `rows` names row servers (`hotrow rows`) that have all rows: addresses, a cluster.toml, or another list of them
    (docs/fleet.md). They are read-only, too, and no row is kept here.

    >>> Memory(dram="4GiB").dram_bytes
    4294967296
    """

    dram: str | int | None = None
    hbm: str | int | None = None
    ssd: str | os.PathLike[str] | None = None
    remote: str | None = None
    hbm_policy: str = "lfu"
    rows: str | None = None

    def __post_init__(self) -> None:
        if self.hbm_policy not in HBM_POLICIES:
            raise OptionError(f"hbm_policy={self.hbm_policy!r}: {choices(str(self.hbm_policy), HBM_POLICIES)}")
        if self.dram is not None:
            parse_size(self.dram, "dram")
        if self.hbm is not None:
            parse_size(self.hbm, "hbm")
        if self.ssd is not None and (not isinstance(self.ssd, (str, os.PathLike)) or not str(self.ssd)):
            raise OptionError(f"ssd={self.ssd!r}: give a folder on a local disk, such as ssd='/data/rows'")
        if self.ssd is not None and self.dram is None:
            raise OptionError(f"ssd={str(self.ssd)!r} without dram=: say how much DRAM the cache over it may take")
        if self.remote is not None and self.dram is None:
            raise OptionError(
                "remote= without dram=: say how much DRAM the cache over it may take, such as dram='4GiB'"
            )
        if self.rows is not None and self.remote is not None:
            raise OptionError("rows= with remote=: both have all rows; leave one of them out")
        for tier in ("dram", "ssd", "hbm"):
            if self.rows is not None and getattr(self, tier) is not None:
                raise OptionError(
                    f"{tier}={getattr(self, tier)!r} with rows=: the row servers hold all rows; leave one of them out"
                )
        for tier in ("hbm", "ssd"):
            if self.remote is not None and getattr(self, tier) is not None:
                raise OptionError(
                    f"{tier}={getattr(self, tier)!r} with remote=: over a remote store DRAM is the cache; "
                    "leave one of them out"
                )

    @property
    def hbm_bytes(self) -> int:
        """The HBM budget in bytes; 0 means that HBM is not used."""
        return 0 if self.hbm is None else parse_size(self.hbm, "hbm")

    @property
    def dram_bytes(self) -> int:
        """The DRAM budget in bytes; 0 means no limit."""
        return 0 if self.dram is None else parse_size(self.dram, "dram")


@dataclass(frozen=True)
class Initial:
    """The values a new row starts with: `zeros`, `constant`, `uniform` or `normal`.

    They are drawn from a counter-based generator keyed by (seed, table, key): the same for any order of arrival, thread
    count, tier and rank.

    >>> Initial.uniform(-0.1, 0.1)
    Initial(kind='uniform', a=-0.1, b=0.1)
    """

    kind: str = "uniform"
    a: float = -0.05
    b: float = 0.05

    def __post_init__(self) -> None:
        if self.kind not in _INITIAL_KINDS:
            raise OptionError(f"initial kind={self.kind!r}: {choices(self.kind, _INITIAL_KINDS)}")
        for value in (self.a, self.b):
            if not isinstance(value, (int, float)) or not abs(value) <= _FLOAT_MAX:
                raise OptionError(f"initial values must be finite float32 numbers, got {self.a!r} and {self.b!r}")
        if self.kind == "uniform" and self.b - self.a > _FLOAT_MAX:
            raise OptionError(f"uniform from {self.a} to {self.b}: the width is beyond float32")
        if self.kind == "uniform" and self.a > self.b:
            raise OptionError(f"uniform from {self.a} to {self.b}: give the lower bound first")
        if self.kind == "normal" and self.b < 0:
            raise OptionError(f"normal with standard deviation {self.b}: give one that is not negative")

    @staticmethod
    def zeros() -> Initial:
        """All zeros."""
        return Initial("zeros", 0.0, 0.0)

    @staticmethod
    def constant(value: float) -> Initial:
        """All the same value."""
        return Initial("constant", value, 0.0)

    @staticmethod
    def uniform(low: float, high: float) -> Initial:
        """Uniform in [low, high)."""
        return Initial("uniform", low, high)

    @staticmethod
    def normal(mean: float = 0.0, std: float = 0.01) -> Initial:
        """Normal with that mean and standard deviation."""
        return Initial("normal", mean, std)

    def to_core(self) -> tuple[int, float, float]:
        """For core/random/initializer.h: the kind's number and its two values."""
        return _INITIAL_KINDS.index(self.kind), self.a, self.b

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; `Initial.from_dict` reads it back."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Initial:
        """From plain values, such as a job file's `initial = { kind = "normal", a = 0.0, b = 0.01 }`."""
        check_options("initial", values, ["kind", "a", "b"])
        return Initial(**values)


_FLOAT_MAX = 3.4028234663852886e38
_INITIAL_KINDS = ["zeros", "constant", "uniform", "normal"]


def check_options(where: str, given: Mapping[str, Any], known: list[str]) -> None:
    """Raise for the first unknown option, and name the nearest known one."""
    for option in given:
        if option not in known:
            raise OptionError(f"{where} has no option {option!r}; {choices(option, known)}")
