"""EmbeddingCollection: the sparse part of a model. Keys in, vectors out.

It is an `nn.Module` without parameters: the rows are in the tiers, not in torch, and `step()` changes them, not a torch
optimizer. In training mode with gradients enabled, a forward pass creates rows for unseen keys, backward stores
gradients in the lookup, and `step()` applies them, once for all forward passes since the last step (gradient
accumulation). Otherwise (`eval()` or `torch.no_grad()`) a forward pass only reads: it creates no row and changes no
count.

Pipelines prepare lookups ahead of their turn: `route(batch)`, then `fetch(lookup)`, then `collection(lookup)`.

With `ranks` each process owns the rows of its shards. All ranks call `route`, forward, `step` and reads together, in
the same order. `table(name)` then has this rank's rows.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.credentials import public
from hotrow.errors import BatchError, OptionError, choices
from hotrow.nn.tower_form import TowerForm
from hotrow.optim import Optimizer, RowWiseAdagrad
from hotrow.parallel.backend import own_device
from hotrow.parallel.rank_plans import RankPlanFactory
from hotrow.parallel.ranks import Ranks
from hotrow.table import Lookup, Table, TableRows
from hotrow.table.lookup import MergedLookup
from hotrow.table.ssd_folder import SsdFolder
from hotrow.tiers.feature_layout import Layout
from hotrow.tiers.host.client import HostClient
from hotrow.tiers.host.plan import HostPlan
from hotrow.tiers.host.store import Budget
from hotrow.tiers.plan import Plan
from hotrow.tiers.remote.below_hbm import RemoteBelow
from hotrow.tiers.remote.owner import RemoteOwner
from hotrow.tiers.remote.tables import RemoteTables
from hotrow.tiers.rows.client import RowServerClient
from hotrow.tiers.rows.row_servers import RowServers
from hotrow.tiers.rows.tables import RowServerOwner, RowServerTables, RowServerTransport
from hotrow.tiers.sharded.plan import ClientTables, ShardedPlan
from hotrow.tiers.sharded.transport import LocalTransport

if TYPE_CHECKING:
    from hotrow.tiers.hbm.cache import HbmCache


class EmbeddingCollection(nn.Module):
    """Embedding tables, looked up by the names of features.

    >>> embeddings = EmbeddingCollection([Table("user", dim=4)], seed=1)
    >>> batch = KeyedBatch({"user": Jagged(torch.tensor([7, 7, 8]))})
    >>> embeddings(batch)["user"].shape, len(embeddings.table("user"))
    (torch.Size([3, 4]), 2)
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: Optimizer | None = None,
        memory: Memory | None = None,
        seed: int = 0,
        device: str | torch.device | None = None,
        ranks: Ranks | None = None,
        row_servers: RowServers | None = None,
    ) -> None:
        super().__init__()
        _check_tables(tables)
        if memory is not None and memory.rows is not None:
            raise OptionError(
                f"rows={public(memory.rows)!r}: row servers are read by hr.Engine; train with dram= and ssd="
            )
        self.optimizer = optimizer or RowWiseAdagrad()
        self.ranks = ranks
        self.memory = _memory_of_rank(memory or Memory(), ranks)
        self.seed = seed
        self.budget = Budget(self.memory.dram_bytes)
        self.tables = [TableRows(table, self.optimizer, seed, self.budget) for table in tables]
        self._ssd = SsdFolder(self.memory, self.tables) if self.memory.ssd is not None else None
        self.remote: RemoteTables | RowServerTables | None = _remote(self.memory, self.tables, seed, ranks)
        if row_servers is not None:
            self.remote = _over_row_servers(row_servers, self.tables)
        self.steps = 0
        self.watermark: int | None = None  # the latest event time that was trained on, in milliseconds
        self.device = _device(self.memory, device, ranks)
        self.hbm_cache = _hbm_cache(self.tables, self.memory, self.device, self.budget)
        for rows in self.tables:
            rows.hbm_cache = self.hbm_cache
            if ranks is not None and not ranks.replicates(rows.table.replicate):
                rows.sum_over_ranks = lambda number: sum(n for (n,) in ranks.rows.gather_numbers(number))
        self._over_ranks = RankPlanFactory(self.tables, ranks, self.hbm_cache) if ranks is not None else None
        rows_device = self.device if self.hbm_cache is not None else torch.device("cpu")
        self.layout = Layout(self.tables, rows_device, self._over_ranks or _plans(self.hbm_cache, self.remote))
        self.form = TowerForm()  # a Recommender sets its tower's
        self._waiting: list[Lookup] = []
        self._plans: list[Plan] = []
        # Requires a gradient, so that backward reaches the rows. Not a parameter: no optimizer changes it.
        self._anchor = torch.zeros(0, requires_grad=True, device=self.device)

    @property
    def features(self) -> dict[str, int]:
        """Width of each pooled feature's vector, in order."""
        return {place.feature: place.end - place.begin for place in self.layout.outputs if place.pooled}

    @property
    def width(self) -> int:
        """The sum of the pooled features' widths."""
        return self.layout.width

    @property
    def sequences(self) -> dict[str, int]:
        """Width of each sequence feature's vectors, in order."""
        return {place.feature: place.table.table.dim for place in self.layout.outputs if not place.pooled}

    def table(self, name: str) -> TableRows:
        """A table's rows, by name."""
        for rows in self.tables:
            if rows.table.name == name:
                return rows
        names = [rows.table.name for rows in self.tables]
        raise OptionError(f"there is no table {name!r}; {choices(name, names)}")

    def route(self, batch: KeyedBatch, ahead: bool = True) -> Lookup:
        """Begin a batch's lookup: deduplicate its keys. Follow with `fetch()` or `read()`.

        Training batches are routed in their order, perhaps ahead of their turn and on a thread of their own. Pass
        `ahead=False` for a batch beside that stream, such as one of an evaluation.
        """
        try:
            plan = self._plans.pop()
        except IndexError:  # not checked beforehand: several threads route
            plan = None
        return Lookup(self.layout, self.form.arrange(batch), plan, self.steps + 1, ahead).route()

    def fetch(self, lookup: Lookup) -> Lookup:
        """On the lookup's turn: find its rows. It becomes part of the next update, whichever it was routed for."""
        lookup.step = self.steps + 1
        return lookup.fetch()

    def in_flight(self, batches: int) -> None:
        """Allow this many batches in flight at once: routed, and not updated yet."""
        if self.hbm_cache is not None:
            self.hbm_cache.set_max_in_flight(batches)

    @property
    def routes_ahead(self) -> bool:
        """Whether a batch may be routed on another thread: Triton's interpreter, which stands in for a GPU, has one."""
        return self.hbm_cache is None or self.device.type == "cuda"

    def forward(self, batch: KeyedBatch | Lookup) -> dict[str, Tensor]:
        """Vectors by feature: [batch, dim] where pooled; [batch, length, dim] and a `<name>_mask` for sequences.

        For a tower that is `jagged` (tower_form.py) a sequence is [events, dim] and `<name>_lengths`. One with a user
        part also gets `user_of`, and a causal one `<name>_visible` where examples see the beginning of a history.
        """
        outputs, examples = self._vectors(batch, whole=False)
        vectors: dict[str, Tensor] = {}
        for place, output in zip(self.layout.outputs, outputs, strict=True):
            if place.pooled:
                vectors[place.feature] = output
            else:
                vectors |= self._sequence(place.feature, examples.ids[place.feature], output)
        for name, numbers in examples.numbers.items():
            vectors |= self._sequence(name, numbers, numbers.values.to(self.device, non_blocking=True))
        if self.form.user_features:
            users = torch.arange(examples.size) if examples.user_of is None else examples.user_of
            vectors["user_of"] = users.to(self.device, non_blocking=True)
            for name, events in examples.visible.items():
                vectors[f"{name}_visible"] = events.to(self.device, non_blocking=True)
        return vectors

    def _sequence(self, name: str, ids: Jagged, values: Tensor) -> dict[str, Tensor]:
        """A sequence as the tower reads it."""
        if self.form.jagged:
            return {name: values, f"{name}_lengths": ids.lengths().to(values.device, non_blocking=True)}
        padded, mask = pad(ids, values)
        return {name: padded, f"{name}_mask": mask}

    def pooled(self, batch: KeyedBatch | Lookup) -> Tensor:
        """The pooled features side by side, [batch, sum of dims], as one matrix. Refuses a batch with users."""
        return self._vectors(batch, whole=True)[0][0]

    def _vectors(self, batch: KeyedBatch | Lookup, whole: bool) -> tuple[Sequence[Tensor], KeyedBatch]:
        """Each feature's output, or with `whole` the pooled matrix."""
        training = self.training and torch.is_grad_enabled()
        if whole and (batch.batch if isinstance(batch, Lookup) else batch).user_of is not None:
            raise BatchError(
                "pooled() of a batch with users: its features have different numbers of rows; call forward"
            )
        if isinstance(batch, Lookup):
            lookup = batch
        else:
            lookup = self.route(batch, ahead=training)
            lookup = lookup.fetch() if training else lookup.read()
        if training:
            outputs = _Gather.apply(self._anchor, lookup, self._waiting, whole)  # type: ignore[no-untyped-call]
            return outputs, lookup.batch
        pooled, parts = _on_device(lookup, *lookup.gather(whole), self.device)
        self._release(lookup)
        return [pooled] if whole else parts, lookup.batch

    def step_without_gradients(self, lookup: Lookup, gathered: bool = False) -> None:
        """Replace forward (unless the lookup was `gathered`) and backward of a batch without gradients: other ranks
        need the rows that this one owns."""
        if not gathered:
            lookup.gather()
        lookup.accept([None] * len(self.layout.outputs))
        self._waiting.append(lookup)

    def settle(self, end: Callable[[], object] = lambda: None) -> None:
        """With ranks: stop routing ahead, after the same number of routes on all ranks. Every rank calls this when its
        pipeline ends. `end` waits for the route thread (`thread.join`). A rank that has begun fewer routes than another
        routes empty batches, so that no route waits forever. A route that is begun meanwhile raises RankError."""
        plans = self._over_ranks
        if self.ranks is None or plans is None:
            end()
            return
        nothing = Jagged(torch.zeros(0, dtype=torch.int64))
        inputs = [(rows.store, [(nothing, "none")]) for rows in self.tables]
        plans.settle(inputs, end)

    def release(self, lookup: Lookup) -> None:
        """Release a lookup that will not be trained on."""
        self._release(lookup)

    def step(self, grad_scale: float = 1.0, also: Sequence[Tensor] = ()) -> None:
        """Update the rows with all gradients since the last step, times `grad_scale`.

        If a gradient is NaN or infinite this raises GradientError, and no row has changed. The float32 matrices `also`,
        on the rows' device, are checked the same way.
        """
        if not math.isfinite(grad_scale):
            raise OptionError(f"grad_scale={grad_scale!r}: give a finite number")
        if not self._waiting:
            return
        lookups, self._waiting[:] = list(self._waiting), []
        work = lookups[0] if len(lookups) == 1 else MergedLookup(lookups)
        work.update(self.steps + 1, grad_scale, also)
        self.steps += 1
        times = [time.max() for lookup in lookups if (time := lookup.batch.time) is not None and time.numel()]
        for lookup in lookups:
            self._release(lookup)
        watermark = int(max(times)) if times else None
        if watermark is not None:
            self.watermark = watermark if self.watermark is None else max(self.watermark, watermark)
        if self.ranks is not None and any(rows.clock.span for rows in self.tables):
            watermark = self.ranks.largest(watermark)
        sweeps = self.hbm_cache is not None and any(rows.sweeps_at(self.steps) for rows in self.tables)
        if sweeps:
            self.flush()
        gone = sum([rows.after_step(self.steps, watermark) for rows in self.tables])
        if self.hbm_cache is not None:
            if sweeps and gone:
                self.hbm_cache.prune()
            self.hbm_cache.rebalance()

    def flush(self) -> None:
        """Write back the rows that are newer in HBM. Call it before reading rows in DRAM or on SSD directly."""
        if self.hbm_cache is not None:
            self.hbm_cache.flush()

    def discard(self) -> None:
        """Drop the gradients that wait for `step()`."""
        self._waiting.clear()

    def memory_report(self) -> dict[str, dict[str, Any]]:
        """Rows and bytes of each table."""
        return {rows.table.name: rows.memory() for rows in self.tables}

    def extra_repr(self) -> str:
        return ", ".join(f"{rows.table.name}[{len(rows):,} x {rows.table.dim}]" for rows in self.tables)

    def _release(self, lookup: Lookup) -> None:
        lookup.plan.release()
        if len(self._plans) < 8:
            self._plans.append(lookup.plan)
        del lookup.plan
        lookup.done, lookup.gradients = True, None


class _Gather(torch.autograd.Function):
    """Gathers rows into outputs. Backward stores the gradients in the lookup and adds the lookup to `waiting`.

    Outputs are one per feature (views of one matrix), or with `whole` that matrix.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup, waiting: list[Lookup], whole: bool) -> tuple[Tensor, ...]:
        ctx.lookup, ctx.waiting, ctx.whole = lookup, waiting, whole
        ctx.set_materialize_grads(False)
        pooled, parts = _on_device(lookup, *lookup.gather(), anchor.device)
        return (pooled,) if whole else tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        lookup: Lookup = ctx.lookup
        if ctx.whole:
            matrix = gradients[0]
            gradients = (None,) * len(lookup.layout.outputs) if matrix is None else tuple(lookup.layout.split(matrix))
        lookup.accept(list(gradients))
        if not any(lookup is other for other in ctx.waiting):
            ctx.waiting.append(lookup)
        return None, None, None, None


def _on_device(
    lookup: Lookup, pooled: Tensor, parts: list[Tensor], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """What `Lookup.gather` returned, on the tower's device. The matrix is copied once, not feature by feature."""
    if pooled.device.type == device.type:
        return pooled, parts
    if lookup.batch.user_of is not None:
        return pooled.to(device), [part.to(device) for part in parts]
    pooled = pooled.to(device)
    if not parts:
        return pooled, parts
    slices = lookup.layout.split(pooled)
    return pooled, [part.to(device) if piece is None else piece for part, piece in zip(parts, slices, strict=True)]


def _device(memory: Memory, device: str | torch.device | None, ranks: Ranks | None) -> torch.device:
    """The device of the tower, and with hbm= of the rows. Ranks take a GPU each if there are any, and agree on a
    backend."""
    chosen = _chosen_device(memory, device, ranks)
    if ranks is not None:
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        ranks.carry(chosen)
    return chosen


def _chosen_device(memory: Memory, device: str | torch.device | None, ranks: Ranks | None) -> torch.device:
    if memory.hbm is None and (device is None or (ranks is not None and not ranks.has_tower)):
        return torch.device("cpu")
    chosen = torch.device(device or "cuda")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        if memory.hbm is None:
            raise OptionError(
                f"device={str(device)!r}: torch sees no GPU; leave device= out to run the tower on the CPU"
            )
        raise OptionError(f"hbm={memory.hbm!r} needs a GPU, and torch sees none; leave hbm= out to keep rows in DRAM")
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device()) if ranks is None else own_device()
    return chosen


def _hbm_cache(tables: Sequence[TableRows], memory: Memory, device: torch.device, budget: Budget) -> HbmCache | None:
    if memory.hbm is None:
        return None
    try:
        from hotrow.tiers.hbm.cache import HbmCache
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise OptionError(f"hbm={memory.hbm!r} needs Triton, which is not installed: pip install triton") from None
    return HbmCache(tables, memory, device, budget)


def _memory_of_rank(memory: Memory, ranks: Ranks | None) -> Memory:
    """This rank's budgets and SSD folder. Each owner has its own, and a rank without rows needs none."""
    if ranks is None:
        return memory
    if ranks.roles.are_apart and memory.hbm is not None:
        raise OptionError(
            f"hbm={memory.hbm!r} with row ranks: rows are in their DRAM and on their SSDs; leave hbm= out, or start "
            "without row ranks"
        )
    if not ranks.owns_rows:
        return Memory()
    if memory.ssd is None:
        return memory
    return dataclasses.replace(memory, ssd=os.path.join(memory.ssd, f"rank-{ranks.roles.owner_number(ranks.rank):04d}"))


def _remote(memory: Memory, tables: Sequence[TableRows], seed: int, ranks: Ranks | None) -> RemoteTables | None:
    if memory.remote is None:
        return None
    if ranks is not None:
        raise OptionError("remote= with ranks: a remote store is read-only, and each process reads it by itself")
    remote = RemoteTables(memory, tables, seed)
    for table, rows in zip(tables, remote.rows, strict=True):
        table.remote = rows
    return remote


def _over_row_servers(row_servers: RowServers, tables: Sequence[TableRows]) -> RowServerTables:
    remote = RowServerTables(row_servers, tables)
    for table, rows in zip(tables, remote.rows, strict=True):
        table.remote = rows
    return remote


def _plan_over_row_servers(remote: RowServerTables) -> Plan:
    client, transport = RowServerClient(), RowServerTransport(remote.servers)
    owner = RowServerOwner(remote, transport, client)
    return ShardedPlan([ClientTables(client)], [0] * len(remote.rows), owner, transport)


def _plans(hot: HbmCache | None, remote: RemoteTables | RowServerTables | None) -> Callable[[], Plan]:
    if isinstance(remote, RowServerTables):
        return partial(_plan_over_row_servers, remote)
    if remote is not None and hot is None:
        part_of, transport = [0] * len(remote.rows), LocalTransport()
        return lambda: ShardedPlan([ClientTables(HostClient())], part_of, RemoteOwner(remote), transport)
    if hot is None:
        return HostPlan
    from hotrow.tiers.hbm.plan import HbmPlan

    if remote is not None:
        hot.below = RemoteBelow(remote)
    return lambda: HbmPlan(hot)


def pad(ids: Jagged, values: Tensor) -> tuple[Tensor, Tensor]:
    """[ids, ...] to [batch, longest, ...], zeros behind each sequence, and the mask of what is real."""
    lengths = ids.lengths().to(values.device)
    longest = max(1, int(lengths.max())) if lengths.numel() else 1
    mask = torch.arange(longest, device=values.device) < lengths.unsqueeze(1)
    flat = values.new_zeros(ids.size * longest, *values.shape[1:])
    padded = flat.index_copy(0, mask.flatten().nonzero().squeeze(1), values)
    return padded.view(ids.size, longest, *values.shape[1:]), mask


def _check_tables(tables: Sequence[Table]) -> None:
    if not tables:
        raise OptionError("an EmbeddingCollection needs at least one table: hr.Table('user', dim=32)")
    names: set[str] = set()
    features: dict[str, str] = {}
    for table in tables:
        if not isinstance(table, Table):
            raise OptionError(f"tables must be hr.Table, got {type(table).__name__}")
        if table.name in names:
            raise OptionError(f"two tables are named {table.name!r}; give each its own name, or one table two features")
        names.add(table.name)
        for feature in table.poolings:
            if feature in features:
                raise OptionError(
                    f"feature {feature!r} is in tables {features[feature]!r} and {table.name!r}; "
                    "a feature belongs to one table (give the spec a second feature of the same column)"
                )
            features[feature] = table.name
    for table in tables:
        for feature, pooling in table.poolings.items():
            if pooling == "none" and f"{feature}_mask" in features:
                raise OptionError(
                    f"feature '{feature}_mask' has the name of the mask of sequence {feature!r}; rename it"
                )
