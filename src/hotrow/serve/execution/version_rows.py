"""A version's rows as a read-only collection: in this process, in remote stores, or on row servers.

Called when an engine is opened, on the caller's thread.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hotrow.config import Memory
from hotrow.nn import EmbeddingCollection
from hotrow.optim import SGD
from hotrow.serve.repository.manifest import Version
from hotrow.serve.updates.remote_fill import fill_local, is_local
from hotrow.tiers.remote.row_server_store import RowServerStore, url_of
from hotrow.tiers.remote.tables import RemoteTables
from hotrow.tiers.rows.cluster_file import RowsAddress
from hotrow.tiers.rows.handshake import Model, fingerprint
from hotrow.tiers.rows.row_servers import RowServers
from hotrow.tiers.rows.tables import RowServerTables

SERVERS_START = 60.0  # seconds that a version waits until every shard has a row server


def load_rows(version: Version, memory: Memory | None, device: str | torch.device | None) -> EmbeddingCollection:
    """The version's rows as a read-only collection."""
    memory = memory or Memory()
    tables = version.tables
    if memory.rows is not None:
        model, definitions = model_of(version), [on_disk.table for on_disk in tables]
        if memory.dram is None:
            return _open_row_servers(version, memory.rows, model)
        memory = replace(memory, rows=None, remote=[url_of(memory.rows, model, definitions), *memory.remotes])
    if memory.remote is not None:
        own = f"export:{version.path.resolve()}"
        memory = replace(memory, remote=[own if url == "export:" else url for url in memory.remotes])
    for url in filter(is_local, memory.remotes):
        fill_local(version, url)
    embeddings = EmbeddingCollection(
        [on_disk.table for on_disk in tables],
        optimizer=SGD(),
        memory=memory,
        seed=int(version.manifest["seed"]),
        device=device if memory.hbm is not None else None,
    )
    for on_disk, rows in zip(tables, embeddings.tables, strict=True) if memory.remote is None else ():
        rows.store.load_snapshot(str(on_disk.folder))
    return embeddings.eval()


def row_servers_below(embeddings: EmbeddingCollection) -> list[RowServers]:
    """The row servers below a collection, with a cache or without."""
    remote = embeddings.remote
    if isinstance(remote, RowServerTables):
        return [remote.servers]
    if isinstance(remote, RemoteTables) and isinstance(remote.store, RowServerStore):
        return [remote.store.servers]
    return []


def model_of(version: Version) -> Model:
    """What row servers must have."""
    tables = [on_disk.table for on_disk in version.tables]
    return Model(version.model, version.number, fingerprint(tables, int(version.manifest["seed"])))


def _open_row_servers(version: Version, address: str, model: Model) -> EmbeddingCollection:
    """The version's tables over row servers: no row is loaded here."""
    tables, seed = [on_disk.table for on_disk in version.tables], int(version.manifest["seed"])
    servers = RowServers(RowsAddress.parse(address), model, [table.dim for table in tables])
    try:
        servers.wait_until_complete(SERVERS_START)
        return EmbeddingCollection(tables, SGD(), seed=seed, row_servers=servers).eval()
    except BaseException:
        servers.close()
        raise
