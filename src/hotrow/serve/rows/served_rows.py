"""ServedRows: one version's rows of some shards on a row server. They follow the model's bus.

The rows are in a read-only collection (DRAM over SSD). The core's RowService reads them at a named publication. A
publication is prepared beside lookups: its rows of these shards are checked and converted, and the old values are kept
for lookups at earlier publications. The cut-over changes the rows while no lookup reads (core/rowserver/row_service.h).

If the bus no longer has a publication that these rows need, the newest snapshot or export replaces all of them.

One thread, the follower's, changes the rows; any thread may read the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hotrow import _core
from hotrow.config import Memory
from hotrow.errors import OptionError, PublishError
from hotrow.nn import EmbeddingCollection
from hotrow.optim import SGD
from hotrow.publish.publication import Publication
from hotrow.serve.execution.version_rows import model_of
from hotrow.serve.repository.manifest import Version, open_version
from hotrow.serve.rows.shards import Shards, load_rows, part_of
from hotrow.serve.updates.cut_over import PreparedUpdate, prepare
from hotrow.serve.updates.follower import Follower
from hotrow.serve.updates.freshness import Freshness

HISTORY_PUBLICATIONS = 256


class ServedRows:
    """A version's rows of the shards from `shards[0]` to before `shards[1]`."""

    def __init__(
        self,
        version: Version,
        shards: Shards,
        memory: Memory,
        history_bytes: int,
        history_publications: int = HISTORY_PUBLICATIONS,
    ) -> None:
        self.version, self.shards, self.memory = version, shards, memory
        self.fingerprint = model_of(version).fingerprint
        self.embeddings = _load(version, shards, memory)
        self.fresh = _fresh_of(version)
        self.service = _core.RowService(self._cores(), self.fresh.publication, history_publications, history_bytes)
        self.follower: Follower | None = None
        self.unused_since: float | None = None  # time.monotonic()

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum([len(rows) for rows in self.embeddings.tables])

    def follow(self, bus: str, wait: float, quarantine: Path | None = None) -> None:
        """Follow a bus, and wait up to `wait` seconds to catch up."""
        self.follower = Follower(self, bus, self.version.path.parent, quarantine)
        self.follower.start(wait)

    def prepare_update(self, publication: Publication) -> Callable[[], None]:
        """Check a publication beside lookups; returns the function that puts it in service."""
        if publication.number <= self.fresh.publication:
            return lambda: self._set_watermark(publication)
        if publication.previous != self.fresh.publication:
            raise PublishError(
                f"publication {publication.number} follows {publication.previous}, but {self.fresh.publication} is in "
                "service; apply those between first"
            )
        update = prepare(part_of(publication, self.shards), self.embeddings)
        numbers = {id(rows.store): number for number, rows in enumerate(self.embeddings.tables)}
        changed = [(numbers[store], keys.contiguous().numpy()) for store, keys in update.changed_keys.items()]
        before = self.service.prepare(changed)
        return lambda: self._cut_over(update, before)

    def reopen(self, path: Path) -> None:
        """Load another export of the model while these rows serve, then replace them. An error changes nothing."""
        version = open_version(path)
        if model_of(version).fingerprint != self.fingerprint:
            raise OptionError(f"{path} has other tables than {self.version.path}; serve it as a version")
        memory = self.memory
        if memory.ssd is not None:  # the rows in service still use theirs
            memory = Memory(dram=memory.dram, ssd=f"{memory.ssd}-from-{version.number}")
        embeddings = _load(version, self.shards, memory)
        self.service.begin_cut_over()
        try:
            self.embeddings = embeddings
            self.service.replace_tables(self._cores())
            self.fresh = _fresh_of(version)
        finally:
            self.service.end_cut_over(self.fresh.publication, None)

    def figures(self) -> dict[str, Any]:
        """Counters of lookups and of the follower."""
        follower = self.follower
        return {
            **self.service.figures(),
            "publication": self.fresh.publication,
            "oldest": self.service.oldest,
            "rows": self.rows,
            "connections": self.service.connections,
            "state": "" if follower is None else follower.state,
            "follower": {} if follower is None else follower.figures(),
        }

    def close(self) -> None:
        """Refuse further lookups and end the follower. Connections keep the rows until they are closed."""
        self.service.retire()
        if self.follower is not None:
            self.follower.close()

    def _cores(self) -> list[Any]:
        return [rows.store.core for rows in self.embeddings.tables]

    def _set_watermark(self, publication: Publication) -> None:
        if publication.number == self.fresh.publication and publication.watermark is not None:
            self.fresh = self.fresh._replace(watermark=publication.watermark)

    def _cut_over(self, update: PreparedUpdate, before: Any) -> None:
        self.service.begin_cut_over()
        try:
            update.apply_rows()
        except BaseException:
            self.service.abandon_cut_over()
            raise
        self.service.end_cut_over(update.fresh.publication, before)
        self.fresh = update.fresh


def _fresh_of(version: Version) -> Freshness:
    return Freshness.of(int(version.manifest["publication"]), version.manifest["trained"]["watermark"])


def _load(version: Version, shards: Shards, memory: Memory) -> EmbeddingCollection:
    embeddings = EmbeddingCollection(
        [on_disk.table for on_disk in version.tables],
        optimizer=SGD(),
        memory=memory,
        seed=int(version.manifest["seed"]),
    )
    for on_disk, rows in zip(version.tables, embeddings.tables, strict=True):
        load_rows(on_disk, rows, shards)
    return embeddings.eval()
