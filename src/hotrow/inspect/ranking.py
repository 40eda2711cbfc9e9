"""Ranking: sums over all rows of a table, and the keys that were seen most often, chunk by chunk."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table as View

from hotrow.errors import OptionError, choices

Array = npt.NDArray[Any]


class Ranking:
    """The totals and hottest keys of a table. Without a `dim`, values and optimizer state cannot be distinguished, so
    there are no norms."""

    def __init__(self, top: int, dim: int | None) -> None:
        self.top, self.dim = top, dim
        self.rows, self.seen, self.last_step, self._norms = 0, 0, 0, 0.0
        self.hottest: list[tuple[int, int, int, float]] = []  # (seen, key, last step, norm)

    def norms(self, values: Array) -> Array:
        """The norm of each row's values; zeros if `dim` is not known."""
        norms: Array = np.linalg.norm(values[:, : self.dim or 0].astype(np.float64), axis=1)
        return norms

    def add(self, keys: Array, counts: Array, steps: Array, norms: Array) -> None:
        """Add a chunk of rows."""
        self.rows, self.seen = self.rows + len(keys), self.seen + int(counts.sum())
        self.last_step = max(self.last_step, int(steps.max(initial=0)))
        self._norms += float(norms.sum())
        best = np.argsort(counts, kind="stable")[::-1][: self.top]
        parts = zip(*(part[best].tolist() for part in (counts, keys, steps, norms)), strict=True)
        self.hottest = heapq.nlargest(self.top, [*self.hottest, *parts])

    def summary(self) -> str:
        """The totals in one line."""
        mean = f", mean norm {self._norms / max(1, self.rows):.4f}" if self.dim else ""
        return f"seen {self.seen:,} times{mean}, last step {self.last_step:,}"

    def view(self) -> View:
        """The hottest keys as a table."""
        view = View(title=f"hottest {len(self.hottest)} keys")
        for column in ("key", "seen", "share", "last step", *(["norm"] if self.dim else [])):
            view.add_column(column, justify="right")
        for times, key, step, norm in self.hottest:
            cells = [str(key), f"{times:,}", f"{times / max(1, self.seen):.2%}", f"{step:,}"]
            view.add_row(*cells, *([f"{norm:.4f}"] if self.dim else []))
        return view


def check_name(folder: Path, table: str | None, names: list[str]) -> None:
    """Raise if the folder has no such table."""
    if table is not None and table not in names:
        raise OptionError(f"{folder} has no table {table!r}; {choices(table, names)}")
