"""RowServerStore: row servers as the remote store below a cache in DRAM, SSD or HBM. It is only read.

Its URL has the model that the servers must have, which `url_of` adds to the address of `--rows`:

    rows:10.0.0.1:8010,10.0.0.2:8010?token_file=rows.token&model=ctr&version=3&fingerprint=...&tables=user:4,item:4

Row servers answer at a named publication: the one that the reading process serves (`set_publication`), so that cached
rows and rows that were just read are of one publication.

Threads: any number may read at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, quote

import numpy as np
import torch

from hotrow.errors import StorageError
from hotrow.table_definition import Table
from hotrow.tiers.remote.read_only import ReadOnlyStore
from hotrow.tiers.remote.store import Answer, Keys, Marks, TableFormat, check_keys
from hotrow.tiers.rows.cluster_file import RowsAddress
from hotrow.tiers.rows.handshake import Model
from hotrow.tiers.rows.row_servers import RowServers
from hotrow.tiers.rows.topology import shards_of

SCHEME = "rows:"
START_SECONDS = 60.0
OWN = ("model", "version", "fingerprint", "tables")

_publications: dict[str, int] = {}  # by URL: the publication that the reader serves
_lock = threading.Lock()


def url_of(address: str, model: Model, tables: Sequence[Table]) -> str:
    """The URL of a model's rows at an address of `--rows`."""
    dims = ",".join(f"{quote(table.name, safe='')}:{table.dim}" for table in tables)
    own = f"model={quote(model.name)}&version={model.version}&fingerprint={model.fingerprint}&tables={dims}"
    return f"{SCHEME}{address}{'&' if '?' in address else '?'}{own}"


def set_publication(url: str, number: int) -> None:
    """From now on read at this publication."""
    with _lock:
        _publications[url] = number


class RowServerStore(ReadOnlyStore):
    """The rows of a model on row servers (hotrow.tiers.remote.store.RemoteStore)."""

    def __init__(self, url: str, **options: Any) -> None:
        where, _, query = url.removeprefix(SCHEME).partition("?")
        given = dict(parse_qsl(query, keep_blank_values=True))
        own = {name: given.pop(name) for name in OWN}
        rest = "&".join(f"{name}={value}" for name, value in given.items())
        pairs = [pair.rpartition(":") for pair in own["tables"].split(",")]
        self._dims = {name: int(dim) for name, _, dim in pairs}
        self._numbers = {name: number for number, name in enumerate(self._dims)}
        self._url = url
        model = Model(own["model"], int(own["version"]), own["fingerprint"])
        address = RowsAddress.parse(where + (f"?{rest}" if rest else ""))
        self.servers = RowServers(address, model, list(self._dims.values()))
        self.counters = {"reads": 0, "rows": 0, "late": 0, "bytes": 0}
        try:
            self.servers.wait_until_complete(START_SECONDS)
        except BaseException:
            self.servers.close()
            raise

    @property
    def lowest(self) -> int:
        """The publication that is read now."""
        return min(_publications.get(self._url, 0), max(0, self.servers.newest_everywhere))

    def tables(self) -> dict[str, TableFormat]:
        """The model's tables."""
        return {name: TableFormat(dim) for name, dim in self._dims.items()}

    def read(self, table: str, keys: Keys, deadline: float) -> Answer:
        """Rows of the keys (duplicates too), until `deadline` (time.monotonic())."""
        number = self._numbers.get(table)
        if number is None:
            raise StorageError(f"the row servers have no table {table!r}; they have {sorted(self._numbers)}")
        keys = check_keys(keys)
        topology, publication = self.servers.topology, _publications.get(self._url, 0)
        owners = topology.owner_of.numpy()[shards_of(keys)]
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=len(topology.servers)).tolist()
        out, found = torch.empty(len(keys), self._dims[table]), torch.zeros(len(keys), dtype=torch.bool)
        result = self.servers.lookup(
            topology,
            [number],
            [[count] for count in counts],
            torch.from_numpy(keys[order]),
            publication,
            max(0.0, deadline - time.monotonic()),
            out,
            found,
        )
        values, there = np.zeros((len(keys), self._dims[table]), np.float32), np.zeros(len(keys), np.bool_)
        late = np.isin(owners, result.late)
        values[order], there[order] = out.numpy(), found.numpy()
        there &= ~late
        values[~there] = 0
        self.counters["reads"] += 1
        self.counters["rows"] += len(keys)
        self.counters["late"] += int(late.sum())
        self.counters["bytes"] += result.bytes
        versions = np.where(there, np.int64(publication), np.int64(-1))
        return Answer(values, there, late, versions, publication, result.bytes)

    def marks(self) -> Marks:
        """The newest publication that every range of shards has."""
        newest = max(0, self.servers.newest_everywhere)
        return Marks(newest, newest)

    def health(self) -> dict[str, Any]:
        """Each server's state, and the counters of reads."""
        figures = self.servers.figures()
        nodes = {name: "up" if of["up"] else f"down ({of['problem']})" for name, of in figures["servers"].items()}
        return {"ok": bool(figures["up"]), "nodes": nodes, "complete": figures["publication"], **self.counters}

    def close(self) -> None:
        """Close the connections."""
        self.servers.close()
        with _lock:
            _publications.pop(self._url, None)
