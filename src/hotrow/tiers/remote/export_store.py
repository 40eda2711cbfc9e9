"""ExportStore: the rows of an exported version, read from its own segments on disk. It is never written.

It is the last of several stores: when the others are gone, it still answers, with the rows of the export's publication
(`Answer.lowest` says which). It takes 10 to 16 bytes of memory for each row, for the index of keys, and part of a
megabyte for each thread that reads.

A folder of its own has hard links to the segments, or copies of them if it is on another disk. Nothing is written into
the export.

Threads: any number may read at once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from typing import Any

import numpy as np
import torch

from hotrow.checksummed_json import FileFormat
from hotrow.config import Initial
from hotrow.errors import OptionError, StorageError
from hotrow.optim import SGD
from hotrow.tiers.host.store import Budget, HostStore
from hotrow.tiers.remote.read_only import ReadOnlyStore
from hotrow.tiers.remote.store import Answer, Keys, Marks, TableFormat, check_keys

MANIFEST = FileFormat("hotrow-export", (1,))  # docs/formats/export.md
PART = 4096  # keys between two checks of the deadline
BUFFER = 64 << 10  # bytes of a table's write buffer, which is not used


class ExportStore(ReadOnlyStore):
    """The rows in a version's folder (hotrow.tiers.remote.store.RemoteStore). The index is charged to `budget`.

    `scratch` is the folder for the links to its segments, by default a temporary one; its content is removed.
    """

    def __init__(self, path: str, budget: Budget | None = None, scratch: str | None = None, **options: Any) -> None:
        for name in options:
            raise OptionError(f"remote='export:...' has no option {name!r}")
        manifest = _read_manifest(path)
        self.path, self.publication = path, int(manifest["publication"])
        self.counters = {"reads": 0, "rows": 0, "late": 0, "bytes": 0}
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # left by a process that was killed
        self._links = tempfile.mkdtemp(prefix="hotrow-export-") if scratch is None else scratch
        self._stores: dict[str, HostStore] = {}
        self._forms: dict[str, TableFormat] = {}
        budget = budget or Budget()
        try:
            for saved in manifest["tables"]:
                name, dim, values = str(saved["name"]), int(saved["dim"]), str(saved["values"])
                store = HostStore(name, dim, SGD(), Initial.zeros(), 0, budget, values)
                store.attach(os.path.join(self._links, name), evicts=True, buffer=BUFFER)
                store.load_snapshot(os.path.join(path, "rows", name))
                self._stores[name], self._forms[name] = store, TableFormat(dim, values)
        except BaseException:
            self.close()
            raise

    @property
    def lowest(self) -> int:
        """The export's publication."""
        return self.publication

    def tables(self) -> dict[str, TableFormat]:
        """The export's tables."""
        return dict(self._forms)

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        """Rows of the keys (duplicates too), until `deadline` (time.monotonic())."""
        store = self._stores.get(table)
        if store is None:
            raise StorageError(f"the export {self.path} has no table {table!r}; it has {sorted(self._stores)}")
        keys = check_keys(keys)
        values, found = torch.zeros(len(keys), store.dim), torch.zeros(len(keys), dtype=torch.bool)
        late = np.zeros(len(keys), np.bool_)
        for at in range(0, len(keys), PART):
            if time.monotonic() >= deadline:
                late[at:] = True
                break
            part = slice(at, at + PART)
            store.read_into(torch.from_numpy(keys[part]), values[part], found[part])
        there = found.numpy()
        size = int(there.sum()) * store.row_bytes
        for name, more in (("reads", 1), ("rows", len(keys)), ("late", int(late.sum())), ("bytes", size)):
            self.counters[name] += more
        versions = np.where(there, np.int64(self.publication), np.int64(-1))
        return Answer(values.numpy(), there, late, versions, self.publication, size)

    def marks(self) -> Marks:
        """The export's publication."""
        return Marks(self.publication, self.publication)

    def health(self) -> dict[str, Any]:
        """The folder and the counters of reads."""
        return {"ok": True, "nodes": {self.path: "open"}, "complete": self.publication, **self.counters}

    def close(self) -> None:
        """Free the index and remove the links."""
        self._stores.clear()
        shutil.rmtree(self._links, ignore_errors=True)


def _read_manifest(path: str) -> dict[str, Any]:
    name = os.path.join(path, "manifest.json")
    try:
        with open(name, "rb") as file:
            return MANIFEST.load(file.read())
    except OSError as error:
        raise OptionError(
            f"remote='export:{path}': {error.strerror or error}: {name}; give the folder of an exported version, such "
            "as export:/repository/ctr/3, or export: for the version that is served"
        ) from None
    except ValueError as error:
        raise StorageError(f"{name} is corrupt: {error}; export the model again") from None
