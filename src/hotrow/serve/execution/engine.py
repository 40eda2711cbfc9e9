"""Engine: one version of a model in this process. Keys or raw columns in, probabilities out, as the trainer would say.

    find → pad → run → split

`find` reads the rows of a batch down the tiers (no row is created and no count touched), `pad` gives sequences one
length, `run` is the tower: the original graph, or whatever `towers` is (buckets, buckets.py), `split` gives each
question its part. The server joins requests before and splits answers after (tensorbatch.py); in process there is one.

The version's rows become a collection that is never trained: all in DRAM, or with `memory=` in a budget over an SSD
folder, whose segments are links to the repository's where the disk is the same, or cached in HBM. Nothing is ever
written into the repository.

Any thread may call anything here, several at once: lanes do. Rows in DRAM and SSD are read side by side. On a GPU
`lanes` of captured graphs (device_lane.py) take batches of one id a feature; other batches look their rows up one at a
time there, and towers run side by side.
`apply` puts a publication in service between two batches (cut_over.py says how), from one thread; `replace_weights` is
seen by batches whole or not at all. `close` waits for nobody: batches that are under way end well.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.config import Memory
from hotrow.errors import BatchError, CheckpointError, ClosedError, LeftError, OptionError, PublishError
from hotrow.features import FeatureSpec
from hotrow.nn import EmbeddingCollection
from hotrow.optim import SGD
from hotrow.publish.publication import Publication
from hotrow.serve.execution.towers import Crossing, Towers
from hotrow.serve.graph import graph_archive
from hotrow.serve.graph.tower import OriginalTower, Tower, TowerInputs
from hotrow.serve.protocol.request import Signature
from hotrow.serve.repository.manifest import (
    MANIFEST,
    TOWER,
    Version,
    candidates,
    check_name,
    check_version,
    open_version,
    pass_over,
)
from hotrow.serve.updates.cut_over import Fresh, prepare
from hotrow.serve.updates.remote_fill import fill_local, is_local
from hotrow.table import Lookup
from hotrow.tiers.host.store import HostStore, count_cold, prefetch_all

if TYPE_CHECKING:
    from hotrow.serve.execution.device_lane import DeviceLanes

Columns = Mapping[str, Any]
TRIES = 20  # to read a batch whose rows leave a small cache while it waits for others


@dataclass(frozen=True)
class Late:
    """Ids whose rows are on SSD alone and were answered by policy: how many, and how many of each row (int32
    [rows], None where there are none)."""

    ids: int
    by_row: Tensor | None


class Answered(NamedTuple):
    """Logits of a batch, what was answered by policy, whether a compiled bucket or a captured graph gave them, and
    which publication the rows and the weights are of."""

    logits: Tensor
    late: Late
    compiled: bool
    fresh: Fresh


@dataclass(frozen=True)
class _Live:
    """What an open engine holds. A batch takes it once, so that `close` does not take it away from under it."""

    embeddings: EmbeddingCollection
    original: OriginalTower
    towers: Tower


class Engine:
    """A version of an exported model, opened for lookups and predictions.

    `path` is a model's folder, "repository/ctr"; without `version` its newest that is whole is taken. `memory` says
    where rows lie, as in training, or with `remote=` which store has them; `device` where the tower runs (without it,
    where the rows come out). `towers`, where given, makes what runs the tower out of the original graph. On a GPU with
    hbm=, `precision` is what towers compute
    in (fp32, tf32, bf16, fp16), `ladder` the batch sizes that are captured, and `lanes` how many batches run at once.

    >>> import tempfile, torch, hotrow as hr
    >>> embeddings = hr.EmbeddingCollection([hr.Table("user", dim=4), hr.Table("item", dim=4)])
    >>> model = hr.Recommender(embeddings, hr.models.DLRM(embeddings.features, top=(8,)))
    >>> with tempfile.TemporaryDirectory() as repository:
    ...     _ = hr.export(model, f"{repository}/ctr")
    ...     with hr.Engine(f"{repository}/ctr") as engine:
    ...         batch = hr.KeyedBatch({name: hr.Jagged(torch.tensor([1, 2])) for name in engine.signature.features})
    ...         engine.predict(batch).shape, engine.version
    (torch.Size([2]), 1)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        version: int | str | None = None,
        *,
        memory: Memory | None = None,
        device: str | torch.device | None = None,
        towers: Any = None,
        precision: str = "fp32",
        ladder: Sequence[int] | None = None,
        lanes: int = 1,
    ) -> None:
        self.source, embeddings = _open(Path(path), version, memory, device)
        beside = device is not None and embeddings.hot is None  # the tower on a GPU, rows in DRAM
        self.device = torch.device(device or "cpu") if beside else embeddings.device
        self.signature: Signature = self.source.signature
        self.features: FeatureSpec | None = self.source.features()
        original = _tower(self.source, embeddings, self.device)
        self._live: _Live | None = _Live(embeddings, original, original if towers is None else towers(original))
        self.fresh = Fresh.of(int(self.source.manifest["publication"]), self.source.manifest["trained"]["watermark"])
        self._begin_remote(embeddings)
        self._crossing = Crossing()
        # Whether a batch's tower may run after the rows are switched, with the weights that it took before.
        self._apart = self.device.type == "cpu" and isinstance(self._live.towers, (OriginalTower, Towers))
        self._lanes: DeviceLanes | None = None
        if embeddings.hot is not None and embeddings.device.type == "cuda":
            from hotrow.serve.execution.device_lane import DeviceLanes

            self._lanes = DeviceLanes(embeddings, original, self.signature.dense, ladder, precision, lanes)
        # What is not for those lanes looks through the HBM cache one batch at a time.
        self._finding: Callable[[], AbstractContextManager[Any]] = nullcontext
        if embeddings.hot is not None:
            alone = threading.Lock()
            self._finding = (lambda: alone) if self._lanes is None else self._lanes.reader.changing

    def _begin_remote(self, embeddings: EmbeddingCollection) -> None:
        self._watermarks: deque[tuple[int, int | None]] = deque([(self.fresh.publication, self.fresh.watermark)], 1024)
        if embeddings.remote is not None:
            embeddings.remote.begin(self.fresh.publication)

    @property
    def version(self) -> int:
        """The version's number."""
        return self.source.number

    @property
    def model(self) -> str:
        """The model's name."""
        return self.source.model

    @property
    def publication(self) -> int:
        """The publication that is in service; 0 without any."""
        return self.fresh.publication

    @property
    def embeddings(self) -> EmbeddingCollection:
        """The version's rows."""
        return self._open().embeddings

    @property
    def original(self) -> OriginalTower:
        """The saved graph with the weights of now."""
        return self._open().original

    @property
    def towers(self) -> Tower:
        """What runs the tower: the original graph, or buckets of it."""
        return self._open().towers

    def predict(self, batch: KeyedBatch | Columns) -> Tensor:
        """Probabilities of a batch, or of raw columns by name, which go through the saved feature spec."""
        return torch.sigmoid(self.logits(batch))

    def logits(self, batch: KeyedBatch | Columns) -> Tensor:
        """Logits, [rows] or [rows, tasks], on the CPU."""
        return self.run(self.keyed(batch))[0].cpu()

    def lookup(self, batch: KeyedBatch | Columns) -> dict[str, Tensor]:
        """The vectors that the tower would be fed: [rows, dim], or for a sequence [rows, length, dim] and its mask."""
        live, keyed = self._open(), self.keyed(batch)
        with torch.inference_mode(), self._finding(), ExitStack() as crossing:
            return self._pool(live, self._read(live, keyed, "wait", crossing))[0]

    def run(self, batch: KeyedBatch, policy: str = "wait") -> tuple[Tensor, Late]:
        """Logits of a joined batch, on the engine's device, and what was answered by policy.

        With "wait", rows on SSD or in a remote store are waited for. With "initial" or "default" nothing waits: whoever
        has a deadline calls `warm` first, and takes what is there when the time is up.
        """
        answered = self.answer(batch, policy)
        return answered.logits, answered.late

    def answer(self, batch: KeyedBatch, policy: str = "wait") -> Answered:
        """As `run`, and what gave the logits: see Answered."""
        live = self._open()
        with torch.inference_mode(), ExitStack() as crossing:
            self._check_dense(batch)
            lanes = self._lanes
            if lanes is not None and lanes.takes(batch):
                with self._crossing.together():
                    logits, by_row, ids = lanes.run(batch, policy)
                    return Answered(logits, Late(ids, by_row), True, self.fresh)
            dense = self._dense(batch)
            with self._finding():
                lookup = self._read(live, batch, policy, crossing)
                fresh = self.fresh if live.embeddings.remote is None else self._fresh_of(lookup)
                weights = live.towers.weights if self._apart else None  # type: ignore[attr-defined]
                vectors, late = self._pool(live, lookup)
            if self._apart:
                crossing.close()
            if isinstance(live.towers, OriginalTower):
                return Answered(live.towers.run(vectors, dense, weights), late, False, fresh)
            if isinstance(live.towers, Towers):
                logits, compiled = live.towers.answer(vectors, dense, weights)
                return Answered(logits, late, compiled, fresh)
            return Answered(live.towers.run(vectors, dense), late, False, fresh)

    def cold(self, batch: KeyedBatch) -> int:
        """How many of a batch's ids have rows on SSD alone, or perhaps in a remote store. Quick: nobody is asked."""
        remote = self.embeddings.remote
        return count_cold(self._keys(batch)) if remote is None else remote.cold(self._keys(batch))

    def warm(self, batch: KeyedBatch, patient: bool = False) -> int:
        """Bring the batch's rows up from SSD or a remote store; returns how many came. Blocks the calling thread and
        nobody else. A patient one waits long for a store that does not answer."""
        remote = self.embeddings.remote
        return prefetch_all(self._keys(batch)) if remote is None else remote.warm(self._keys(batch), patient)

    def keyed(self, batch: KeyedBatch | Columns) -> KeyedBatch:
        """A batch as it is, or raw columns through the feature spec."""
        if isinstance(batch, KeyedBatch):
            return batch
        if self.features is None:
            raise OptionError(
                f"{self.source.path} was exported without a feature spec and takes keys alone: pass an hr.KeyedBatch, "
                "or export it with features="
            )
        return self.features.apply(batch, labels=False)

    def replace_weights(self, state: Mapping[str, Tensor]) -> None:
        """Serve with other weights of the same tower from the next batch on. What does not fit changes nothing.

        `state` is a tower's state dict. Needs no export and no compilation.
        """
        change = self._fit(self._open(), state)
        with self._crossing.alone():
            change()

    def apply(self, publication: Publication) -> None:
        """Put a publication in service: batches that begin afterwards see all of it, those before nothing.

        It follows the one in service; one that is here already, or a heartbeat, changes the watermark at most. What
        does not fit is an error and changes nothing. One thread at a time.
        """
        live = self._open()
        if publication.number <= self.fresh.publication:
            if publication.number == self.fresh.publication and publication.watermark is not None:
                self.fresh = self.fresh._replace(watermark=publication.watermark)
            return
        if publication.previous != self.fresh.publication:
            raise PublishError(
                f"publication {publication.number} follows {publication.previous}, but {self.fresh.publication} is in "
                "service; apply those between first"
            )
        switch = prepare(publication, live.embeddings)
        if live.embeddings.remote is not None:
            live.embeddings.remote.take(publication.number, publication.previous, switch.changes())
        change = None if publication.dense is None else self._fit(live, publication.dense)
        with ExitStack() as alone:
            refresh = None
            if self._lanes is not None:
                refresh = alone.enter_context(self._lanes.reader.refreshing(switch.touched))
            alone.enter_context(self._crossing.alone())
            switch.rows()
            if refresh is not None:
                refresh()
            if change is not None:
                change()
            self.fresh = switch.fresh
            self._watermarks.append((publication.number, publication.watermark))

    def _fit(self, live: _Live, state: Mapping[str, Tensor]) -> Callable[[], None]:
        """What takes other weights into service; call it when no batch is at the crossing."""
        fitting, towers = live.original.fit(state), live.towers
        arranged = towers.arrange(fitting) if isinstance(towers, Towers) else None

        def change() -> None:
            if self._lanes is not None:
                self._lanes.set_weights(fitting)  # into the same storage, which the graphs know
            else:
                live.original.set_weights(fitting)
            if isinstance(towers, Towers) and arranged is not None:
                towers.set_weights(arranged)
            elif towers is not live.original and hasattr(towers, "replace_weights"):
                towers.replace_weights(fitting)

        return change

    def close(self) -> None:
        """Let go of rows and weights; calls after it are refused."""
        live, self._live = self._live, None
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None
        if live is not None and hasattr(live.towers, "close"):
            live.towers.close()
        if live is not None and live.embeddings.remote is not None:
            live.embeddings.remote.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine({str(self.source.path)!r})"

    def _read(self, live: _Live, batch: KeyedBatch, policy: str, crossing: ExitStack) -> Lookup:
        """Rows of a batch, with the crossing held from here on. A remote store is waited for before that: nobody else
        waits for it. Requires: `_finding` is held."""
        embeddings = live.embeddings
        if embeddings.remote is None:
            crossing.enter_context(self._crossing.together())
            return embeddings.route(batch, ahead=False).read(policy)
        lookup = embeddings.route(batch, ahead=False)
        for tries_left in reversed(range(TRIES)):
            if policy == "wait":
                lookup.prefetch()
            crossing.enter_context(self._crossing.together())
            try:
                return lookup.read(policy)
            except LeftError:  # a small cache, and others in it
                crossing.close()
                if not tries_left:
                    raise
        raise AssertionError

    def _fresh_of(self, lookup: Lookup) -> Fresh:
        """What an answer over a remote store is made from: rows may be older or newer than what was applied here."""
        lowest, highest = lookup.publications
        fresh = self.fresh
        highest = max(fresh.publication, highest)
        if lowest >= fresh.publication:
            return fresh._replace(highest=highest)
        known = [watermark for number, watermark in self._watermarks if number <= lowest]
        return Fresh(lowest, known[-1] if known else None, highest)

    def _pool(self, live: _Live, lookup: Lookup) -> tuple[dict[str, Tensor], Late]:
        """Rows that were read, pooled, sequences padded to one length; and which of them a policy answered."""
        embeddings = live.embeddings
        vectors: dict[str, Tensor] = embeddings(lookup)
        late = Late(lookup.late_ids, lookup.late_by_example)
        if self.device == embeddings.device:
            return vectors, late
        return {name: vector.to(self.device, non_blocking=True) for name, vector in vectors.items()}, late

    def _keys(self, batch: KeyedBatch) -> list[tuple[HostStore, Tensor]]:
        """Each feature's keys with the store that has their rows."""
        return [
            (rows.store, batch.ids[feature].values)
            for rows in self.embeddings.tables
            for feature in rows.table.poolings
            if feature in batch.ids
        ]

    def _check_dense(self, batch: KeyedBatch) -> None:
        wanted, came = self.signature.dense, 0 if batch.dense is None else batch.dense.shape[1]
        if came != wanted:
            raise BatchError(f"the model reads {wanted} dense features but the batch has {came}; give [rows, {wanted}]")

    def _dense(self, batch: KeyedBatch) -> Tensor | None:
        if batch.dense is None or batch.dense.shape[1] == 0:
            return None
        return batch.dense.to(self.device, non_blocking=True)

    def _open(self) -> _Live:
        live = self._live
        if live is None:
            raise ClosedError(f"the engine of {self.source.path} is closed; make a new hr.Engine")
        return live


def _open(
    path: Path, version: int | str | None, memory: Memory | None, device: str | torch.device | None
) -> tuple[Version, EmbeddingCollection]:
    """The version asked for, or the newest whose rows can be read, with its rows loaded."""
    if version is None and (path / MANIFEST).is_file():
        path, version = path.parent, path.name
    check_name(path.resolve().name)
    if version is not None:
        chosen = open_version(path / str(check_version(version)))
        return chosen, _load_rows(chosen, memory, device)
    for chosen in candidates(path):
        try:
            return chosen, _load_rows(chosen, memory, device)
        except CheckpointError as error:  # a damaged block of rows: the version before may be whole
            pass_over(chosen.path, error)
    raise AssertionError("candidates raises when there is none")


def _load_rows(version: Version, memory: Memory | None, device: str | torch.device | None) -> EmbeddingCollection:
    """The version's rows as a collection that is never trained."""
    memory = memory or Memory()
    tables = version.tables
    if memory.remote is not None and is_local(memory.remote):
        fill_local(version, memory.remote)
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


def _tower(version: Version, embeddings: EmbeddingCollection, device: torch.device) -> OriginalTower:
    """The saved graph with the saved weights."""
    inputs = TowerInputs.of(embeddings, version.signature.dense)
    program = graph_archive.unpack(version.read(TOWER), version.path / TOWER)
    return OriginalTower(program, inputs, version.weights(), version.manifest["tower"]["tied"], device)
