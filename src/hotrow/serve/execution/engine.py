"""Engine: one version of a model in this process. It computes the probabilities of training from keys or raw columns.

    look up → pad → run the tower → split

The lookup reads a batch's rows through the tiers; it creates no row and changes no count. Sequences are padded to one
length. The tower runs as the original graph, or on compiled buckets (`towers`, towers.py). In a server, lanes join
requests before and split answers after (serve/batching/).

The version's rows become a read-only collection. By default they are in DRAM. `memory=` sets a DRAM budget over an SSD
folder (its segments are hard links to the repository's if both are on one disk), a cache in HBM, or a remote store.
Nothing is ever written into the repository.

Any thread may call any method; lanes call `answer` at the same time. Rows in DRAM and on SSD are read in parallel. On a
GPU, `lanes` of captured graphs (device_lane.py, jagged_lanes.py) run batches. A batch whose size has no graph yet looks
up its rows while no other does, and runs its tower in parallel.
A tower with a user part (two_part_tower.py) runs as two graphs: each user of a batch is encoded once, and all rows are
scored against the encodings. `user_cache=` keeps encodings of users whose features have not changed (user_cache.py).
One thread at a time may call `apply`, which puts a publication in service between two batches
(serve/updates/cut_over.py). A batch uses the old or the new weights of `replace_weights`, never a mixture. `close` does
not wait; batches that already run end normally.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hotrow.batch import KeyedBatch
from hotrow.config import Memory
from hotrow.errors import BatchError, ClosedError, LeftError, OptionError, PublishError
from hotrow.features import FeatureSpec
from hotrow.nn import EmbeddingCollection
from hotrow.publish.publication import Publication
from hotrow.serve.execution.answer import Answer, LateIds
from hotrow.serve.execution.opening import open_rows, run_with, set_form
from hotrow.serve.execution.reader_writer_gate import ReaderWriterGate
from hotrow.serve.execution.scoring import scorer
from hotrow.serve.execution.tower_weights import prepare_weights
from hotrow.serve.execution.towers import Towers
from hotrow.serve.execution.two_part_tower import TwoPartTower, open_tower
from hotrow.serve.execution.user_cache import State, UserCache
from hotrow.serve.execution.user_part import Probe, UserPart, outputs_by_row
from hotrow.serve.execution.version_rows import row_servers_below
from hotrow.serve.graph.tower import OriginalTower, Tower
from hotrow.serve.protocol.histories import check_batch
from hotrow.serve.protocol.request import Signature
from hotrow.serve.updates.cut_over import PreparedUpdate, prepare
from hotrow.serve.updates.freshness import Freshness
from hotrow.table import Lookup
from hotrow.task import apply_links
from hotrow.tiers.host.store import HostStore, count_cold, prefetch_all
from hotrow.tiers.remote.tables import RemoteTables
from hotrow.tiers.rows.tables import READ, ReadTerms, RowServerTables

if TYPE_CHECKING:
    from hotrow.serve.execution.device_lane import DeviceLanes, Run

Columns = Mapping[str, Any]
SERVERS_CATCH_UP = 2.0  # seconds that an update waits until row servers have it too
READ_ATTEMPTS = 20  # to read a batch whose rows a small cache evicts while others are being read


@dataclass(frozen=True)
class _Live:
    """The objects of an open engine. A batch takes them once at its start, so it may end after `close`."""

    embeddings: EmbeddingCollection
    original: OriginalTower | TwoPartTower
    towers: Tower | TwoPartTower


class _Read(NamedTuple):
    """What a batch read: its rows, their publication, and the weights that go with them (None: those of now, where a
    batch stays inside the gate) with the number that they have."""

    lookup: Lookup
    fresh: Freshness
    weights: Any
    weights_number: int

    @property
    def state(self) -> State | None:
        """What encodings of these rows depend on; None if the rows are of several publications."""
        if self.fresh.highest != self.fresh.publication:
            return None
        return State(self.fresh.publication, self.weights_number)


class Engine:
    """A version of an exported model, opened for lookups and predictions.

    `path` is a model's folder, "repository/ctr". Without `version`, the newest complete one is opened. `memory` sets
    the tiers that hold the rows, as in training, or the store with `remote=`. `device` is where the tower runs; by
    default, the device that rows are read to. `towers` is a function from the original graph to the Tower to run; for
    a tower with a user part it is called with each part. `user_cache` is the size of a cache of encoded users, such as
    "256MiB", for such a tower.
    On a GPU with hbm=, `precision` is the towers' (fp32, tf32, bf16, fp16), `ladder` lists the batch sizes that are
    captured, and `lanes` is how many batches run at once.

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
        user_cache: str | int | None = None,
    ) -> None:
        cache = None if user_cache is None else UserCache(user_cache)  # a wrong size is an error before rows are loaded
        self.source, embeddings = open_rows(Path(path), version, memory, device)
        tower_elsewhere = device is not None and embeddings.hbm_cache is None  # the tower on a GPU, rows in DRAM
        self.device = torch.device(device or "cpu") if tower_elsewhere else embeddings.device
        self.signature: Signature = self.source.signature
        self.features: FeatureSpec | None = self.source.features()
        set_form(embeddings, self.signature)
        original = open_tower(self.source, embeddings, self.device)
        self._live: _Live | None = _Live(embeddings, original, run_with(original, towers))
        # For a tower of one part a cache is of no use, and no error: a server has one option for all its models.
        self._users = UserPart(self.signature, cache) if self.signature.user else None
        self._weights_number = 0  # of replacements of the weights; changed inside the gate
        self.fresh = Freshness.of(
            int(self.source.manifest["publication"]), self.source.manifest["trained"]["watermark"]
        )
        self._begin_remote(embeddings)
        self._gate = ReaderWriterGate()
        # Whether a batch leaves the gate after its lookup and runs its tower with the weights that it read inside.
        self._tower_outside_gate = self.device.type == "cpu" and isinstance(
            self._live.towers, (OriginalTower, Towers, TwoPartTower)
        )
        self._lanes: DeviceLanes | None = None
        if embeddings.hbm_cache is not None and embeddings.device.type == "cuda":
            from hotrow.serve.execution.device_lane import DeviceLanes

            self._lanes = DeviceLanes(embeddings, original, self.signature.dense, ladder, precision, lanes)
        # Batches that the device lanes do not take read through the HBM cache one at a time.
        self._lookup_lock: Callable[[], AbstractContextManager[Any]] = nullcontext
        if embeddings.hbm_cache is not None:
            lock = threading.Lock()
            self._lookup_lock = (lambda: lock) if self._lanes is None else self._lanes.reader.changing

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
    def original(self) -> OriginalTower | TwoPartTower:
        """The saved graph with the current weights."""
        return self._open().original

    @property
    def towers(self) -> Tower | TwoPartTower:
        """The object that runs the tower: the original graph, or compiled buckets."""
        return self._open().towers

    @property
    def users(self) -> UserPart | None:
        """The user part of the tower, if it has one: its counters and its cache."""
        return self._users

    def predict(self, batch: KeyedBatch | Columns) -> Tensor:
        """Probabilities of a batch, or of raw columns by name, which go through the saved feature spec.

        Of a model with named tasks: probabilities, values or rates by their kinds.
        """
        logits, kinds = self.logits(batch), self.signature.kinds
        if not kinds:
            return torch.sigmoid(logits)
        return apply_links(kinds, logits.view(-1, len(kinds))).view(logits.shape)

    def logits(self, batch: KeyedBatch | Columns) -> Tensor:
        """Logits, [rows] or [rows, tasks], on the CPU."""
        return self.run(self.keyed(batch))[0].cpu()

    def lookup(self, batch: KeyedBatch | Columns) -> dict[str, Tensor]:
        """The tower's input vectors: [rows, dim], or for a sequence [rows, length, dim] and its mask."""
        live, keyed = self._open(), self.keyed(batch)
        with torch.inference_mode(), ExitStack() as held, ExitStack() as locked:
            read = self._read(live, keyed, "wait", None, held, locked)
            return self._by_row(self._pool(live, read.lookup)[0], read.lookup.batch)

    def answer_lookup(
        self,
        batch: KeyedBatch,
        policy: str = "wait",
        tower: bool = False,
        most_rows: int = 1024,
        until: float | None = None,
    ) -> tuple[dict[str, Tensor], Answer]:
        """The vectors of `lookup` on the CPU, and an Answer with the publication and the late ids of one read of the
        rows. With `tower`, it also has the logits, computed for at most `most_rows` rows at once; without, [0]. `until`
        as in `answer`."""
        live = self._open()
        with torch.inference_mode(), ExitStack() as held:
            places = None
            if tower:
                self._check_dense(batch)
                check_batch(self.signature, batch)
                if self._users is not None:
                    batch, places = self._users.arrange(batch)
            dense = self._dense(batch)
            with ExitStack() as locked:
                read = self._read(live, batch, policy, until, held, locked)
                vectors, late = self._pool(live, read.lookup)
                # With a tower they are copied on a CPU too, because a tower may write into its inputs.
                by_row = self._by_row(vectors, read.lookup.batch)
                on_host = {name: vector.to("cpu", copy=tower) for name, vector in by_row.items()}
            if not tower:
                return on_host, Answer(torch.empty(0), late, False, read.fresh)
            if self._tower_outside_gate:
                held.close()
            state = None if late.ids else read.state
            score = scorer(live.towers, self._users, vectors, Probe(batch), read.weights, state)
            parts = []
            for begin in range(0, batch.size, most_rows):
                end = min(begin + most_rows, batch.size)
                parts.append(score(begin, end, None if dense is None else dense[begin:end]))
            logits = torch.cat([part[0] for part in parts])
            if places is not None:
                logits, on_host = logits[places], {name: vector[places] for name, vector in on_host.items()}
            return on_host, Answer(logits, late, all(part[1] for part in parts), read.fresh)

    def run(self, batch: KeyedBatch, policy: str = "wait") -> tuple[Tensor, LateIds]:
        """Logits of a joined batch, on the engine's device, and the ids that the policy answered.

        With "wait", rows on SSD or in a remote store are waited for. "initial" and "default" never wait: to use the
        time until a deadline, call `warm` first and `run` when the time is up.
        """
        answered = self.answer(batch, policy)
        return answered.logits, answered.late

    def answer(self, batch: KeyedBatch, policy: str = "wait", until: float | None = None) -> Answer:
        """As `run`, with the other fields of Answer. `until` (time.monotonic()): when rows of row servers are late."""
        live = self._open()
        with torch.inference_mode(), ExitStack() as held:
            self._check_dense(batch)
            check_batch(self.signature, batch)
            places = None
            if self._users is not None:
                batch, places = self._users.arrange(batch)
            lanes = self._lanes
            if lanes is not None and (run := self._plan_lane(lanes, batch)) is not None:
                return self._run_lane(live, run, places, policy)
            dense = self._dense(batch)
            with ExitStack() as locked:
                probe, read = self._probe_and_read(live, batch, policy, until, held, locked)
                vectors, late = self._pool(live, read.lookup)
            if self._tower_outside_gate:
                held.close()
            state = None if late.ids else read.state
            score = scorer(live.towers, self._users, vectors, probe, read.weights, state)
            logits, compiled = score(0, batch.size, dense)
            return Answer(logits if places is None else logits[places], late, compiled, read.fresh)

    def cold(self, batch: KeyedBatch) -> int:
        """How many of a batch's ids have rows only on SSD, or may have rows in a remote store. Reads memory only."""
        remote = self.embeddings.remote
        return count_cold(self._keys(batch)) if remote is None else remote.cold(self._keys(batch))

    def without_cached_users(self, batch: KeyedBatch) -> KeyedBatch:
        """The batch, where users whose encodings the cache has now have no ids: their rows will not be read."""
        if self._users is None or self._users.cache is None:
            return batch
        with self._gate.shared():
            state = State(self.fresh.publication, self._weights_number)
        return self._users.probe(batch.share_users(self._users.features), state, count=False).batch

    def warm(self, batch: KeyedBatch, patient: bool = False) -> int:
        """Read the batch's rows from SSD or a remote store into memory; returns how many. It blocks only the calling
        thread. With `patient`, it waits much longer for a store that does not answer."""
        remote = self.embeddings.remote
        return prefetch_all(self._keys(batch)) if remote is None else remote.prefetch(self._keys(batch), patient)

    def keyed(self, batch: KeyedBatch | Columns) -> KeyedBatch:
        """A KeyedBatch unchanged, or raw columns converted by the feature spec."""
        if isinstance(batch, KeyedBatch):
            return batch
        if self.features is None:
            raise OptionError(
                f"{self.source.path} was exported without a feature spec and takes keys alone: pass an hr.KeyedBatch, "
                "or export it with features="
            )
        return self.features.apply(batch, labels=False)

    def replace_weights(self, state: Mapping[str, Tensor]) -> None:
        """Serve with other weights of the same tower from the next batch on. An error changes nothing.

        `state` is a tower's state dict. This needs no export and no compilation.
        """
        set_weights = self._prepare_weights(self._open(), state)
        with self._gate.exclusive():
            set_weights()

    def apply(self, publication: Publication) -> None:
        """Put a publication in service: batches that begin afterwards see all of it, earlier ones see none of it.

        It must follow the publication in service. An already applied publication or a heartbeat changes at most the
        watermark. An error changes nothing. One thread at a time.
        """
        self.prepare_update(publication)()

    def wait_for_row_servers(self, number: int) -> bool:
        """Wait up to SERVERS_CATCH_UP seconds until each shard range has a row server with this publication; returns
        whether that is so. True without row servers."""
        return all(servers.wait_for(number, SERVERS_CATCH_UP) for servers in row_servers_below(self._open().embeddings))

    def prepare_update(self, publication: Publication) -> Callable[[], None]:
        """Check and convert a publication while batches run; returns the function that puts it in service.

        Call that function before the next update is prepared. See `apply`.
        """
        live = self._open()
        if publication.number <= self.fresh.publication:
            return lambda: self._set_watermark(publication)
        if publication.previous != self.fresh.publication:
            raise PublishError(
                f"publication {publication.number} follows {publication.previous}, but {self.fresh.publication} is in "
                "service; apply those between first"
            )
        update = prepare(publication, live.embeddings)
        self.wait_for_row_servers(publication.number)
        if live.embeddings.remote is not None:
            live.embeddings.remote.write_if_local(publication.number, publication.previous, update.changes())
        set_weights = None if publication.dense is None else self._prepare_weights(live, publication.dense)
        return lambda: self._cut_over(update, set_weights)

    def _cut_over(self, update: PreparedUpdate, set_weights: Callable[[], None] | None) -> None:
        """Replace rows, weights and the publication's number between two batches."""
        with ExitStack() as exclusive:
            refresh_hbm = None
            if self._lanes is not None:
                refresh_hbm = exclusive.enter_context(self._lanes.reader.refreshing(update.changed_keys))
            elif (hbm_cache := self._open().embeddings.hbm_cache) is not None:
                from hotrow.tiers.hbm.serving_reader import ReaderWriterGate, prepare_refresh

                gate = ReaderWriterGate(hbm_cache.device)
                refresh_hbm = partial(prepare_refresh(hbm_cache, update.changed_keys), gate)
            exclusive.enter_context(self._gate.exclusive())
            update.apply_rows()
            if refresh_hbm is not None:
                refresh_hbm()
            if set_weights is not None:
                set_weights()
            self.fresh = update.fresh
            if isinstance(remote := self._open().embeddings.remote, RemoteTables):
                remote.follow(update.fresh.publication)
            self._watermarks.append((update.fresh.publication, update.fresh.watermark))

    def _set_watermark(self, publication: Publication) -> None:
        if publication.number == self.fresh.publication and publication.watermark is not None:
            self.fresh = self.fresh._replace(watermark=publication.watermark)

    def _prepare_weights(self, live: _Live, state: Mapping[str, Tensor]) -> Callable[[], None]:
        """Check a tower's state dict; returns the function that replaces the weights. Call it inside the gate."""
        set_weights = prepare_weights(live.original, live.towers, self._lanes, state)

        def set_and_count() -> None:
            self._weights_number += 1
            set_weights()

        return set_and_count

    def close(self) -> None:
        """Free rows and weights. Later calls raise ClosedError; batches that already run end normally."""
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

    def _plan_lane(self, lanes: DeviceLanes, batch: KeyedBatch) -> Run | None:
        """How a lane of captured graphs runs the batch; None: it goes without one, as do users whose encodings may be
        cached."""
        if self._users is None:
            return lanes.plan(batch)
        run = lanes.plan(batch) if self._users.cache is None else None
        if run is not None:
            self._users.count(batch, batch.users)
        return run

    def _run_lane(self, live: _Live, run: Run, places: Tensor | None, policy: str) -> Answer:
        """A batch on a lane. Rows that a remote store must be asked for are loaded outside the gate."""
        cache = live.embeddings.hbm_cache
        below = None if cache is None or cache.below is None else cache.below.batch()
        for tries_left in reversed(range(READ_ATTEMPTS)):
            try:
                with self._gate.shared():
                    if below is not None:
                        below.begin()
                    logits, by_row, ids = run(policy, below)
                    fresh = self.fresh if below is None else self.fresh.of_rows(below.publications, self._watermarks)
                    ordered = logits if places is None else logits[places]
                    return Answer(ordered, LateIds(ids, by_row), True, fresh)
            except LeftError:
                if below is None or not tries_left:
                    raise
                below.load()
        raise AssertionError

    def _probe_and_read(
        self, live: _Live, batch: KeyedBatch, policy: str, until: float | None, held: ExitStack, locked: ExitStack
    ) -> tuple[Probe, _Read]:
        """As `_read`, without the rows of users whose encodings are cached. If there was an update between asking the
        cache and reading the rows, the whole batch is read."""
        users = self._users
        if users is None or users.cache is None:
            return Probe(batch), self._read(live, batch, policy, until, held, locked)
        with self._gate.shared():
            state = State(self.fresh.publication, self._weights_number)
        probe = users.probe(batch, state)
        read = self._read(live, probe.batch, policy, until, held, locked)
        if not probe.hits or read.state == state:
            return probe, read
        held.close()
        locked.close()
        live.embeddings.release(read.lookup)
        return Probe(batch), self._read(live, batch, policy, until, held, locked)

    def _read(
        self, live: _Live, batch: KeyedBatch, policy: str, until: float | None, held: ExitStack, locked: ExitStack
    ) -> _Read:
        """Rows of a batch, their publication, and the weights that go with them. Enters the gate shared, which `held`
        leaves, and takes `_lookup_lock`, which `locked` releases. Rows elsewhere are read before both, so an update
        never waits for them."""
        if isinstance(live.embeddings.remote, RowServerTables):
            return self._read_from_servers(live, batch, policy, until, held)
        lookup = self._read_here(live, batch, policy, held, locked)
        fresh = (
            self.fresh if live.embeddings.remote is None else self.fresh.of_rows(lookup.publications, self._watermarks)
        )
        return _Read(lookup, fresh, self._weights(live), self._weights_number)

    def _read_here(self, live: _Live, batch: KeyedBatch, policy: str, held: ExitStack, locked: ExitStack) -> Lookup:
        """Rows of a batch through the tiers of this process. HBM is looked up first: rows that it has are not asked for
        below."""
        embeddings = live.embeddings
        if embeddings.remote is None:
            locked.enter_context(self._lookup_lock())
            held.enter_context(self._gate.shared())
            return embeddings.route(batch, ahead=False).read(policy)
        remote, lookup = embeddings.remote, embeddings.route(batch, ahead=False)
        assert isinstance(remote, RemoteTables)
        for tries_left in reversed(range(READ_ATTEMPTS)):
            if policy == "wait" and (embeddings.hbm_cache is None or tries_left < READ_ATTEMPTS - 1):
                lookup.prefetch()
            locked.enter_context(self._lookup_lock())
            held.enter_context(self._gate.shared())
            try:
                lookup.read(policy)
                wanted = self.fresh.publication
                if lookup.publications[0] >= wanted or not tries_left or not remote.can_read(wanted):
                    return lookup
                held.close()  # there was an update between loading rows and reading them
                locked.close()
            except LeftError:  # a small cache evicted some of the rows, or HBM lacks rows that must be loaded
                held.close()
                locked.close()
                if not tries_left:
                    raise
        raise AssertionError

    def _weights(self, live: _Live) -> Any:
        """The weights of now, where a batch keeps them for a tower that runs outside the gate. Inside the gate."""
        return live.towers.weights if self._tower_outside_gate else None  # type: ignore[union-attr]

    def _read_from_servers(
        self, live: _Live, batch: KeyedBatch, policy: str, until: float | None, held: ExitStack
    ) -> _Read:
        """Rows of a batch from row servers, at the publication in service when it begins, with the weights of that
        publication. An update does not wait for the network: where weights are replaced in place, the batch reads
        again if there was an update meanwhile."""
        remote = live.embeddings.remote
        assert isinstance(remote, RowServerTables)
        deadline = time.monotonic() + READ if until is None else until
        for tries_left in reversed(range(READ_ATTEMPTS)):
            if not tries_left:
                held.enter_context(self._gate.shared())  # the next update waits for this batch
            with self._gate.shared() if tries_left else nullcontext():
                fresh, weights, number = self.fresh, self._weights(live), self._weights_number
            lookup = live.embeddings.route(batch, ahead=False)
            remote.set_terms(lookup.plan, ReadTerms(fresh.publication, deadline))
            lookup.prefetch()
            if tries_left:
                held.enter_context(self._gate.shared())
            if self._tower_outside_gate or self.fresh.publication == fresh.publication:
                number = number if self._tower_outside_gate else self._weights_number
                return _Read(lookup.read(policy), fresh, weights, number)
            held.close()
            live.embeddings.release(lookup)
        raise AssertionError

    def _pool(self, live: _Live, lookup: Lookup) -> tuple[dict[str, Tensor], LateIds]:
        """Pool the rows that were read and pad sequences to one length; also the ids that the policy answered."""
        embeddings = live.embeddings
        vectors: dict[str, Tensor] = embeddings(lookup)
        late = LateIds(lookup.late_ids, lookup.late_by_example)
        if self.device == embeddings.device:
            return vectors, late
        return {name: vector.to(self.device, non_blocking=True) for name, vector in vectors.items()}, late

    def _by_row(self, vectors: dict[str, Tensor], batch: KeyedBatch) -> dict[str, Tensor]:
        """The vectors in the form of `lookup`."""
        return outputs_by_row(vectors, batch, self.signature) if self.signature.jagged else vectors

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
