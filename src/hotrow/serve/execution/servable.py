"""ServedVersion: adapts hr.Engine to the Servable protocol of lanes (serve/batching/versions.py).

Lanes call hr.Engine only through this module. `cold` and `prefetch` are for rows on SSD or in a remote store.

A version with a bus follows it (serve/updates/follower.py). Its engine applies publications. If retention has removed
publications that it still needed, the engine of a newer export replaces it. A batch reads `engine` once, so one engine
answers all of it. The old engine is closed while its last batches end.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.config import Memory
from hotrow.errors import ClosedError, OptionError, StorageError
from hotrow.publish.publication import Publication
from hotrow.serve.execution.towers import TowerOptions, Towers
from hotrow.serve.execution.two_part_tower import TwoPartTower
from hotrow.serve.graph.tower import OriginalTower
from hotrow.serve.graph.tower_graph import TowerGraph
from hotrow.serve.protocol.request import Array, Signature
from hotrow.serve.updates.follower import Follower
from hotrow.serve.updates.freshness import Freshness
from hotrow.tiers.host.store import count_cold
from hotrow.tiers.rows.tables import RowServerTables

if TYPE_CHECKING:
    from hotrow.serve.execution.engine import Engine

CATCH_UP = 60.0  # seconds that a version waits to catch up with its bus before it takes traffic
LADDER = (32, 128, 512, 1024, 4096, 16384)  # batch sizes that a GPU's lanes capture, up to the largest batch


class ServedVersion:
    """hr.Engine, as lanes call it."""

    def __init__(
        self, engine: Engine, open_engine: Callable[[Path], Engine] | None = None, tower_rows: int = 1024
    ) -> None:
        self.engine = engine
        self.tower_rows = tower_rows  # at once, for a lookup that wants logits too
        self.follower: Follower | None = None
        self._open_engine = open_engine
        self.signature: Signature = engine.signature
        known = {**engine.embeddings.features, **engine.embeddings.sequences}
        self.widths = tuple(known[name] for name in engine.signature.features)
        spec = engine.features
        self.features: str | None = None if spec is None else spec.to_json()
        self.policy: str = engine.source.policy
        self.deadline: float | None = engine.source.deadline
        self.can_be_cold = any(rows.store.evicts for rows in engine.embeddings.tables)

    @property
    def publication(self) -> int:
        """The newest publication that was applied; 0 without any."""
        return self.engine.publication

    @property
    def fresh(self) -> Freshness:
        """The publication in service and its watermark."""
        return self.engine.fresh

    def prepare_update(self, publication: Publication) -> Callable[[], None]:
        """Check a publication while batches run; returns the function that puts it in service between two batches.

        Raises StorageError while row servers do not have it yet: the follower tries again, and the publication in
        service keeps answering.
        """
        if publication.number > self.publication and not self.engine.wait_for_row_servers(publication.number):
            raise StorageError(
                f"the row servers do not have publication {publication.number} yet; look at the bus that they follow"
            )
        return self.engine.prepare_update(publication)

    def reopen(self, path: Path) -> None:
        """Load another export of the model while this one serves, then replace it. An error changes nothing."""
        if self._open_engine is None:
            raise OptionError(f"{self.engine} cannot open {path} by itself; load that version")
        engine = self._open_engine(path)
        if engine.signature != self.signature:
            engine.close()
            raise OptionError(f"{path} takes other inputs than {self.engine.source.path}; load it as a version")
        old, self.engine = self.engine, engine
        old.close()

    @property
    def waits_for_rows(self) -> bool:
        """Whether a batch reads its rows from other machines, by a deadline: `run`'s `until`."""
        return isinstance(self.engine.embeddings.remote, RowServerTables)

    @property
    def rows_up(self) -> bool:
        """Whether every row can be read now: each shard has a row server, and its history reaches back to the
        publication in service here. A version that is too far behind its row servers catches up with the bus first."""
        remote = self.engine.embeddings.remote
        return not isinstance(remote, RowServerTables) or remote.servers.can_read(self.publication)

    def run(self, batch: KeyedBatch, policy: str, until: float | None = None) -> tuple[Tensor, Any, bool, Freshness]:
        """Logits, late ids by row, whether compiled buckets computed all logits, and the freshness of the data."""
        try:
            logits, late, compiled, fresh = self.engine.answer(batch, policy, until)
        except ClosedError:  # `reopen` replaced it a moment ago
            logits, late, compiled, fresh = self.engine.answer(batch, policy, until)
        return logits, late.ids if late.by_row is None else late.by_row, compiled, fresh

    def lookup(
        self, batch: KeyedBatch, policy: str, tower: bool, until: float | None = None
    ) -> tuple[dict[str, Tensor], Tensor | None, Any, bool, Freshness]:
        """The vectors of a batch, as LookupReader.lookup (serve/batching/versions.py)."""
        try:
            vectors, answer = self.engine.answer_lookup(batch, policy, tower, self.tower_rows, until)
        except ClosedError:  # `reopen` replaced it a moment ago
            vectors, answer = self.engine.answer_lookup(batch, policy, tower, self.tower_rows, until)
        late = answer.late.ids if answer.late.by_row is None else answer.late.by_row
        return vectors, answer.logits if tower else None, late, answer.compiled, answer.fresh

    def figures(self) -> dict[str, Any]:
        """Counters and gauges of its tower and its cache."""
        towers, users, remote = self.engine.towers, self.engine.users, self.engine.embeddings.remote
        found = {
            "remote": None if remote is None or self.waits_for_rows else remote.figures(),
            "row_servers": remote.figures() if remote is not None and self.waits_for_rows else None,
            "users": None if users is None else users.figures(),
        }
        parts: dict[str, Any] = {"": towers}
        if isinstance(towers, TwoPartTower):
            parts = {"user ": towers.user, "": towers.candidates}
        compiled = {prefix: part for prefix, part in parts.items() if isinstance(part, Towers)}
        return {**found, **_compiled_figures(compiled)} if compiled else found

    def close(self) -> None:
        """Free rows and weights; end the threads and the compile process."""
        if self.follower is not None:
            self.follower.close()
        self.engine.close()

    def cold(self, batch: KeyedBatch) -> Array | None:
        """Which rows of a batch have keys that are on SSD only, without those of cached users, which are not read."""
        return cold_rows(self.engine.embeddings, self.engine.without_cached_users(batch))

    def prefetch(self, batch: KeyedBatch, patient: bool = False) -> None:
        """Read them into memory."""
        self.engine.warm(self.engine.without_cached_users(batch), patient)


def _compiled_figures(parts: Mapping[str, Towers]) -> dict[str, Any]:
    """The figures of a tower's compiled parts, added up. Shapes of buckets have the part's prefix."""
    metrics = [part.metrics() for part in parts.values()]
    eager: Counter[str] = Counter()
    for part in parts.values():
        eager.update(part.eager_ops())
    return {
        "buckets": {
            f"{prefix}{shape}": hits for prefix, part in parts.items() for shape, hits in part.counts.hits.items()
        },
        "padded_rows": sum([part.counts.padded_rows for part in parts.values()]),
        **{
            name: sum([one[name] for one in metrics])
            for name in ("compile_queue", "compile_seconds", "compiled_pieces")
        },
        "eager_ops": dict(eager),
        "compiler": next(iter(parts.values())).describe()["compiler"],
    }


def cold_rows(embeddings: Any, batch: KeyedBatch) -> Array | None:
    """Which rows of a batch have keys whose rows are only on SSD or in a remote store; None if there are none. One
    cheap call checks the case without any."""
    parts = [(rows.store, batch.ids[name].values) for rows in embeddings.tables for name in rows.table.poolings]
    if not (count_cold(parts) if embeddings.remote is None else embeddings.remote.cold(parts)):
        return None
    cold = np.zeros(batch.size, bool)
    for rows in embeddings.tables:
        for name in rows.table.poolings:
            ids = batch.ids[name]
            entries = _rows_of(ids, rows.cold(ids.values).numpy())
            if batch.user_of is not None and name in batch.user_features:
                cold |= np.isin(batch.user_of.numpy(), entries)
            else:
                cold[entries] = True
    return cold


def _rows_of(ids: Any, mask: Array) -> Array:
    """The rows whose ids are set in the mask."""
    positions = np.flatnonzero(mask)
    if ids.offsets is None:
        return positions
    return np.searchsorted(ids.offsets.numpy(), positions, side="right") - 1


def open_version(folder: Path, options: Mapping[str, Any]) -> ServedVersion:
    """Open the version in `folder` with the tiers in `options`, and follow its model's bus if it has one."""
    served = ServedVersion(
        _open_engine(folder, folder.name, options),
        lambda path: _open_again(folder, path, options),
        int(options.get("max_rows", 1024)),
    )
    bus = (options.get("bus") or {}).get(folder.parent.name)
    if bus is not None:
        served.follower = Follower(served, bus, folder.parent, _quarantine(bus))
        served.follower.start(wait=CATCH_UP)
    return served


def _open_again(folder: Path, path: Path, options: Mapping[str, Any]) -> Engine:
    """Open an engine of another export, to replace `folder`'s. The old engine is still open, so the new one has its
    own SSD folder."""
    return _open_engine(path, f"{folder.name}-from-{path.name}", options)


def _quarantine(bus: str) -> Path:
    """The folder for a bus's corrupt messages."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return cache / "hotrow" / "quarantine" / hashlib.sha256(bus.encode()).hexdigest()[:16]


def _open_engine(folder: Path, name: str, options: Mapping[str, Any]) -> Engine:
    from hotrow.serve.execution.engine import Engine

    def make_towers(original: OriginalTower) -> Towers:
        tower_options = TowerOptions(
            compile=bool(options.get("compile", True)),
            most_rows=int(options.get("max_rows", 1024)),
            lanes=int(options.get("lanes", 1)),
            threads=int(options.get("threads", 1)),
            cache=options.get("artifacts"),
        )
        towers = Towers(TowerGraph(original.program), original.weights, original.device, tower_options)
        towers.start()
        return towers

    tiers = {tier: options[tier] for tier in ("hbm", "dram", "ssd") if options.get(tier) is not None}
    remote = (options.get("remote") or {}).get(folder.parent.name)
    if remote is not None:
        tiers["remote"] = remote
    rows = options.get("rows") or {}
    if (row_servers := rows.get(folder.parent.name, rows.get(""))) is not None:  # "": of all models
        tiers["rows"] = row_servers
    if {"remote", "rows"} & tiers.keys() and "ssd" in tiers and options.get("ssd_limit") is not None:
        tiers["ssd_limit"] = options["ssd_limit"]
    if "ssd" in tiers:  # each version of each model has its own folder there
        tiers["ssd"] = str(Path(tiers["ssd"]) / folder.parent.name / name)
    precision, most = options.get("precision", "fp32"), int(options.get("max_rows", 1024))
    ladder = [size for size in LADDER if size < most] + [most]
    return Engine(
        folder.parent,
        folder.name,
        memory=Memory(**tiers),
        device=options.get("device"),
        towers=make_towers,
        precision=precision,
        ladder=ladder,
        lanes=int(options.get("lanes", 1)),
        user_cache=options.get("user_cache"),
    )
