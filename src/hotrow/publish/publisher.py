"""Publisher: a trainer's changed rows and dense weights, cut at step boundaries.

    trainer's thread    if a cut is due after a step: take the changed keys from the store (core/table/changed_keys.h),
                        read their rows from any tier, copy the dense weights. Training pauses for this.
    delivery's thread   encode, send or spool, commit (delivery.py)

Cuts. A publication is cut every `every_steps` steps, or at the first step boundary after `every_seconds`. Its commit on
the bus records the step. A checkpoint is always taken at a cut and records its number. A run that resumes from it reads
the steps of later cuts from the bus, cuts at the same steps and compares, without sending anything twice. After the
newest publication on the bus it publishes again. If retention has removed these commits, or a replay differs (another
number of ranks), the first new publication has the affected rows again. Readers end up with the same rows either way.

Readers always have the trainer's rows of some step. So if rows were trained or loaded before publishing began, the
first publication has all of them.

With ranks, every rank makes all calls at the same step, and the ranks agree on the number at each cut. Ranks' clocks
differ, so only `every_steps` is allowed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotrow import trace
from hotrow.credentials import public
from hotrow.errors import MemoryBudgetError, OptionError, PublishError
from hotrow.nn import EmbeddingCollection
from hotrow.parallel.ranks import Ranks
from hotrow.publish.bus import open_bus
from hotrow.publish.cut import Cut, Keys, keys_on_bus
from hotrow.publish.delivery import Delivery, SenderIdentity
from hotrow.publish.history import Commit, commits_after, newest_commit, snapshot_of
from hotrow.publish.publication import DELTA, ROLLBACK, VALUES, SnapshotPlace, TableChange
from hotrow.publish.spool import Spool
from hotrow.table.rows import TableRows
from hotrow.tiers.host.stored_table import SLOTS_AT_A_TIME, smallest_dram_bytes
from hotrow.units import format_size, parse_size, round_up_size

Snapshot = Callable[[int], str]
KEY_BYTES = 16  # for the key of a changed row until the next publication


@dataclass(frozen=True)
class Publish:
    """How a trainer publishes: where, how often, in which precision.

    `bus` is an address (`dir:/path`, `redis://host:6379/0?stream=name`, `kafka://host:9092/topic`). `every_steps` or
    `every_seconds` is the interval; `values` is "fp16" or "fp32". While the bus is unreachable, publications are stored
    in `spool`, a folder (beside the checkpoints by default), up to `spool_size`.

    `snapshot` is called with the publication's number after every `snapshot_every` publications, at that step boundary.
    It writes all rows (an export, for example) and returns the path. Readers that are new or fell behind start there.

    >>> Publish("dir:/tmp/publications", every_steps=50).values
    'fp16'
    """

    bus: str
    every_steps: int | None = None
    every_seconds: float | None = None
    values: str = "fp16"
    spool: str | None = None
    spool_size: str | int = "4GiB"
    memory: str | int = "256MiB"
    heartbeat: float = 1.0
    snapshot: Snapshot | None = None
    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        if (self.every_steps is None) == (self.every_seconds is None):
            raise OptionError(
                f"Publish(every_steps={self.every_steps}, every_seconds={self.every_seconds}): give one of the two"
            )
        if self.every_steps is not None and (not isinstance(self.every_steps, int) or self.every_steps < 1):
            raise OptionError(f"every_steps={self.every_steps!r}: give a whole number of steps, 1 or more")
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise OptionError(f"every_seconds={self.every_seconds!r}: give a number of seconds above 0")
        if self.values not in VALUES:
            raise OptionError(f"values={self.values!r}: choose one of {', '.join(VALUES)}")
        if not self.heartbeat > 0:
            raise OptionError(f"heartbeat={self.heartbeat!r}: give a number of seconds above 0")
        if self.snapshot_every is not None and (self.snapshot is None or self.snapshot_every < 1):
            raise OptionError(
                f"snapshot_every={self.snapshot_every} with snapshot={self.snapshot!r}: give a number of publications, "
                "1 or more, and what writes a snapshot"
            )
        parse_size(self.spool_size, "spool_size")
        parse_size(self.memory, "memory")


class Publisher:
    """Publishes a model's changes. The trainer calls it between steps, on its own thread."""

    def __init__(
        self,
        options: Publish,
        embeddings: EmbeddingCollection,
        tower: nn.Module,
        home: Path | None = None,
    ) -> None:
        self.options, self.embeddings, self.tower = options, embeddings, tower
        self.ranks: Ranks | None = embeddings.ranks
        if self.ranks is not None and options.every_seconds is not None:
            raise OptionError(
                f"every_seconds={options.every_seconds} with {self.ranks.world} ranks: their clocks differ; give "
                "every_steps="
            )
        self.watermark: int | None = None
        self.pauses: list[float] = []  # seconds of the last 1,000 cuts
        self._home = home
        self._delivery: Delivery | None = None
        self._replay: dict[int, int] = {}  # number by step, of cuts that a replay must repeat
        self._replays_until = -1  # the step of the last cut to repeat
        self._cut_step = 0
        self._cut_at = 0.0
        self._last = 0  # the number of the last cut
        self._newest = 0  # the newest number on the bus at the start

    @property
    def delivery(self) -> Delivery:
        """The thread that sends cuts to the bus."""
        assert self._delivery is not None, "start() first"
        return self._delivery

    @property
    def counters(self) -> Any:
        """Totals of what was published (delivery.Counters)."""
        return self.delivery.counters

    @property
    def replaying(self) -> bool:
        """Whether the trainer repeats steps whose publications are on the bus."""
        return self.embeddings.steps < self._replays_until

    # --- start ---

    def start(self, saved: dict[str, Any] | None, resume: bool) -> None:
        """Start or resume a run. `saved` is the `state` in the loaded checkpoint, if there is one."""
        if self._delivery is not None and not resume:
            return
        self.close()
        found = self._agree(lambda: self._inspect_bus(saved, resume))
        sender = SenderIdentity(found["run"], found["session"], *self._rank_and_world())
        spool = Spool(self._spool_folder(), parse_size(self.options.spool_size, "spool_size"))
        after, newest = found["after"], found["newest"]
        everything = bool(found["everything"])
        missing = set(range(newest + 1, after + 1)) - set(spool.numbers)
        if any(self._gather(bool(missing))):
            everything, after = True, newest  # publications are missing on the bus: publish all rows again
        known = {int(n): Commit(int(n), fields, 0) for n, fields in found["known"].items()}
        self._delivery = Delivery(
            lambda: open_bus(self.options.bus),
            spool,
            sender,
            memory=parse_size(self.options.memory, "memory"),
            heartbeat=self.options.heartbeat,
        )
        self._replay = {commit.step: n for n, commit in known.items() if commit.fields["kind"] == DELTA}
        self._replays_until = found["until"] if not everything else -1
        self._cut_step, self._last, self._cut_at = self.embeddings.steps, after, time.monotonic()
        self._newest = newest
        if saved is not None and saved.get("watermark") is not None:
            self.watermark = max(int(saved["watermark"]), self.watermark or 0)
        self._check_memory(everything)
        for rows in self._tables():
            rows.store.begin_changes(everything)
        if everything:
            after, self._cut_step = newest, -1
        place = SnapshotPlace.of(found["snapshot"])
        self.delivery.start(after, known, newest if not everything else after, place, int(found["head"]))
        foreign = list(known) if everything else found["foreign"]
        if foreign:  # readers have rows that this run lacks or has with other values
            bus = open_bus(self.options.bus)
            self.delivery.carry_over(keys_on_bus(bus, [known[n] for n in foreign]))
            bus.close()

    def _inspect_bus(self, saved: dict[str, Any] | None, resume: bool) -> dict[str, Any]:
        """The state of the bus, and which of its publications this trainer will repeat; JSON values."""
        bus = open_bus(self.options.bus)
        newest = newest_commit(bus)
        rows = any(len(table) for table in self.embeddings.tables)
        found: dict[str, Any] = {
            "run": secrets.token_hex(8),
            "session": secrets.randbits(63),
            "after": 0,
            "newest": 0,
            "known": {},
            "everything": rows,
            "until": -1,
            "snapshot": None,
            "foreign": [],
            "head": bus.head(),
        }
        ours = saved is not None and (newest is None or saved["run"] == newest.fields["run"])
        if newest is not None:
            place = snapshot_of(newest.fields)
            found |= {
                "newest": newest.number,
                "after": newest.number,
                "run": newest.fields["run"],
                "snapshot": None if place is None else place.to_dict(),
            }
            if not ours and not (resume and saved is None):
                raise OptionError(
                    f"bus={public(self.options.bus)!r} has publications of another run ({newest.fields['run']}, number "
                    f"{newest.number}); continue that run with fit(resume=True) and its checkpoints=, or give this one "
                    "a bus of its own"
                )
        start = saved if ours else {"number": 0, "whole": not rows} if resume and newest is not None else None
        if start is not None:
            after = int(start["number"])
            known = commits_after(bus, after) if newest is not None and newest.number > after else {}
            known = {n: commit for n, commit in known.items() if n > after}
            found |= {
                "run": start.get("run", found["run"]),
                "after": after,
                "everything": not start["whole"],
                "known": {n: commit.fields for n, commit in known.items()},
                "until": max([commit.step for commit in known.values()], default=-1),
                "foreign": [n for n, commit in known.items() if commit.fields["kind"] == ROLLBACK],
            }
        bus.close()
        return found

    def _check_memory(self, everything: bool) -> None:
        """Check the budget, which includes the keys of changed rows: 8 bytes each, twice while their list grows."""
        limit, tables = self.embeddings.budget.limit, self.embeddings.tables
        if not limit or not all(rows.store.evicts for rows in tables):
            return
        noted = sum(KEY_BYTES * max(SLOTS_AT_A_TIME, len(rows) if everything else 0) for rows in tables)
        if limit < (least := smallest_dram_bytes(tables) + noted):
            why = "; all rows are published first" if everything and any(len(rows) for rows in tables) else ""
            raise MemoryBudgetError(
                f"dram={format_size(limit)} is too small to note what changes in {len(tables)} tables that are "
                f"published{why}; give at least {round_up_size(least)}, or leave publish= out"
            )

    def _spool_folder(self) -> Path:
        if self.options.spool is not None:
            folder = Path(self.options.spool)
        elif self._home is not None:
            folder = self._home / ".publications"
        else:
            name = hashlib.sha256(public(self.options.bus).encode()).hexdigest()[:16]
            folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hotrow" / "spool" / name
        return folder if self.ranks is None else folder / f"rank-{self.ranks.rank:04d}"

    # --- between steps ---

    def note_event_times(self, times: Tensor | None) -> None:
        """Advance the watermark by the event times of a batch of the last step."""
        if times is not None and times.numel():
            self.watermark = max(int(times.max()), self.watermark or 0)

    def after_step(self) -> None:
        """Publish if a cut is due. Call it after every step."""
        step = self.embeddings.steps
        if step <= self._replays_until:
            if step in self._replay:
                self.cut()
        elif self._due(step):
            self.cut()

    def _due(self, step: int) -> bool:
        if self.options.every_steps is not None:
            return step % self.options.every_steps == 0
        return time.monotonic() - self._cut_at >= (self.options.every_seconds or 0)

    def cut(self) -> int | None:
        """Publish all changes since the last cut; returns its number, or None if nothing changed or a hold is set."""
        started, step = time.perf_counter(), self.embeddings.steps
        agreed = self._agree_on_number()
        if agreed is None or (step == self._cut_step and not self._any(self._has_news())):
            return None
        number, watermark = agreed
        number = max(number, self._replay.get(step, 0) if step <= self._replays_until else self._newest + 1)
        delivery = self.delivery
        with trace.span("publish", "cut", number=number):
            if self._any(delivery.lost):
                delivery.lost = False
                for rows in self._tables():
                    rows.store.begin_changes(True)
            self.embeddings.flush()
            tables = self._changed(delivery.claim_number(number))
            dense = self._dense() if delivery.sender.first else None
        fields = {
            "kind": DELTA,
            "previous": number - 1,
            "step": step,
            "watermark": watermark,
            "cut": time.time(),
            "rows": sum(change.rows for change in tables.values()),
            "values": self.options.values,
        }
        delivery.put(Cut(number, fields, tables, dense, self.options.values))
        self._last, self._cut_step, self._cut_at = number, step, time.monotonic()
        self.pauses = [*self.pauses[-999:], time.perf_counter() - started]
        every = self.options.snapshot_every
        if every is not None and number % every == 0 and not self.replaying:
            self.snapshot()
        return number

    def _has_news(self) -> bool:
        """Whether there is something to publish even if no step was made."""
        return self._cut_step < 0 or self.delivery.lost

    def snapshot(self) -> SnapshotPlace:
        """Write a snapshot of the last cut and announce its path to readers. If a step was made since, cut first."""
        if self.options.snapshot is None:
            raise OptionError("snapshot() has no function to write one: give Publish(snapshot=)")
        if self.embeddings.steps != self._cut_step and self.cut() is None:
            raise PublishError("a snapshot is taken at a publication, and the bus is held; run `hotrow release` first")
        place = SnapshotPlace(self._last, str(self.options.snapshot(self._last)))
        if self.delivery.sender.first:
            self.delivery.announce_snapshot(place)
        return place

    def idle(self, watermark: int) -> None:
        """Called while the source has no examples: later heartbeats carry `watermark`, its current event time. If
        `every_seconds` has passed, the steps made since the last cut are published.

        Publications never carry this watermark: a resumed run is idle at other times, but must repeat publications.
        """
        step = self.embeddings.steps
        if step == self._cut_step:
            self.delivery.set_heartbeat({"step": step, "watermark": max(watermark, self.watermark or 0)})
        elif self.options.every_seconds is not None and step > self._replays_until and self._due(step):
            self.cut()

    # --- saving ---

    def before_save(self) -> None:
        """Cut before a checkpoint is taken, so that it is at a cut."""
        if self._delivery is None:
            return
        if not self.replaying and self.embeddings.steps != self._cut_step:
            self.cut()

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint: the number of the publication with these rows, and whether it has all of them."""
        if self._delivery is None:
            return None
        whole = self.embeddings.steps == self._cut_step and not self.delivery.held
        return {"run": self.delivery.sender.run, "number": self._last, "whole": whole, "watermark": self.watermark}

    def finish(self, seconds: float = 10.0) -> None:
        """Publish the remaining changes at the end of a run, and wait until they are on the bus or in the spool."""
        if self._delivery is not None:
            if not self.replaying and self.embeddings.steps != self._cut_step:
                self.cut()
            self._delivery.flush(seconds, kept=True)

    def close(self) -> None:
        """End the thread. Publications that are not on the bus are in the spool."""
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None

    # --- parts of a cut ---

    def _tables(self) -> list[TableRows]:
        """The tables that this rank publishes. Only the first rank publishes a replicated table."""
        ranks = self.ranks
        return [
            rows
            for rows in self.embeddings.tables
            if ranks is None or ranks.first or not ranks.replicates(rows.table.replicate)
        ]

    def _changed(self, carried: Keys) -> dict[str, TableChange]:
        changes = {}
        for rows in self._tables():
            keys = rows.store.take_changes()
            carried_keys = carried.get(rows.table.name)
            if carried_keys:
                keys = torch.unique(torch.cat([keys, *carried_keys]))
            if self.ranks is not None and carried_keys and not self.ranks.replicates(rows.table.replicate):
                keys = self._owned(keys)
            values, found = rows.store.read(keys)
            if bool(found.all()):
                changes[rows.table.name] = TableChange(keys, values, keys[:0])
            else:
                changes[rows.table.name] = TableChange(keys[found], values[found], keys[~found])
        return changes

    def _owned(self, keys: Tensor) -> Tensor:
        """The keys whose rows this rank owns."""
        from hotrow import _core

        assert self.ranks is not None
        shards = torch.empty(keys.numel(), dtype=torch.int32)
        _core.shards(keys, shards)
        begin, end = self.ranks.shards
        return keys[(shards >= begin) & (shards < end)]

    def _dense(self) -> dict[str, Tensor]:
        return {name: value.detach().to("cpu", copy=True) for name, value in self.tower.state_dict().items()}

    # --- ranks ---

    def _rank_and_world(self) -> tuple[int, int]:
        return (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.world)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self.ranks is None else self.ranks.patient.gather_json(value)

    def _any(self, value: bool) -> bool:
        return any(self._gather(value))

    def _agree(self, inspect: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Rank 0's result, on every rank."""
        if self.ranks is None:
            return inspect()
        found = self.ranks.collective(
            "looking at the bus", lambda: inspect() if self.ranks and self.ranks.first else {}
        )
        first: dict[str, Any] = self.ranks.patient.gather_json(found)[0]
        return first

    def _agree_on_number(self) -> tuple[int, int | None] | None:
        """The number of this cut and the newest event time of all ranks; None while any rank is held."""
        delivery = self.delivery
        mine = [delivery.next_number(), delivery.held, self.watermark, delivery.counters.committed]
        gathered = self._gather(mine)
        if any(held for _, held, _, _ in gathered):
            return None
        delivery.acknowledge(gathered[0][3])
        times = [time for _, _, time, _ in gathered if time is not None]
        return min(number for number, *_ in gathered), max(times, default=None)
