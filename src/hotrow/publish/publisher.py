"""Publisher: a trainer's changed rows and dense weights, cut at step boundaries.

    trainer's thread   every step: is it time? Then: the keys that the store noted (core/table/changed_keys.h), their
                       rows read from whatever tier they are in, a copy of the dense weights. That is the pause.
    delivery's thread  bytes, bus, spool, commit (delivery.py)

Cuts. A publication is cut every `every_steps` steps, or at the first step boundary after `every_seconds`. Its commit on
the bus says at which step it was cut. A checkpoint is always at a cut, and holds the number of it; a run that resumes
from there looks up which steps were cut since, cuts at the same ones, compares (nothing is sent twice), and publishes
when it is past the newest. Where the bus no longer knows (retention), or a replay differs (another number of ranks),
the rows in question go out again with the first new publication; readers end up with the same rows either way.

What readers have is always the trainer's rows of some step. So a trainer whose rows the bus has never seen (trained or
loaded before publishing began) publishes all of them first.

With ranks all calls are made by every rank at the same step; they agree on numbers at each cut. The clock is not part
of that, so ranks cut by steps.
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
from hotrow.publish.delivery import Cut, Delivery, Keys, Sender, keys_on_bus
from hotrow.publish.history import Commit, commits_after, newest_commit, snapshot_of
from hotrow.publish.publication import DELTA, ROLLBACK, VALUES, SnapshotPlace, TableChange
from hotrow.publish.spool import Spool
from hotrow.table.rows import TableRows
from hotrow.tiers.host.stored_table import SLOTS_AT_A_TIME, smallest_dram_bytes
from hotrow.units import format_size, parse_size, round_up_size

Snapshot = Callable[[int], str]
KEY_BYTES = 16  # of a changed row's key, noted until the next publication


@dataclass(frozen=True)
class Publish:
    """How a trainer publishes: where to, how often, how precisely.

    `bus` is an address (`dir:/path`, `redis://host:6379/0?stream=name`, `kafka://host:9092/topic`). `every_steps` or
    `every_seconds` says when; `values` is "fp16" or "fp32". While the bus is away publications wait in `spool`, a
    folder (beside the checkpoints by default), up to `spool_size`.

    `snapshot` is called with a number after every `snapshot_every` publications, at that step boundary; it writes all
    rows somewhere (an export, say) and returns where. Readers that are new or fell behind begin there.

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
    """Publishes a model's changes. The trainer makes one and calls it between steps, on its own thread."""

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
        self.pauses: list[float] = []  # seconds of the last cuts
        self._home = home
        self._delivery: Delivery | None = None
        self._replay: dict[int, int] = {}  # steps at which a cut was made before: its number
        self._replays_until = -1  # a step
        self._cut_step = 0
        self._cut_at = 0.0
        self._last = 0  # the number of the last cut
        self._newest = 0  # of the bus, when this began

    @property
    def delivery(self) -> Delivery:
        """What takes cuts to the bus."""
        assert self._delivery is not None, "start() first"
        return self._delivery

    @property
    def counters(self) -> Any:
        """What has been published so far (delivery.Counters)."""
        return self.delivery.counters

    @property
    def replaying(self) -> bool:
        """Whether the trainer is still behind what the bus has."""
        return self.embeddings.steps < self._replays_until

    # --- beginning ---

    def start(self, saved: dict[str, Any] | None, resume: bool) -> None:
        """Begin a run, or go on with one. `saved` is what the loaded checkpoint says (`state`), if one was."""
        if self._delivery is not None and not resume:
            return
        self.close()
        found = self._agree(lambda: self._look(saved, resume))
        sender = Sender(found["run"], found["session"], *self._place())
        spool = Spool(self._spool_folder(), parse_size(self.options.spool_size, "spool_size"))
        after, newest = found["after"], found["newest"]
        everything = bool(found["everything"])
        missing = set(range(newest + 1, after + 1)) - set(spool.numbers)
        if any(self._gather(bool(missing))):
            everything, after = True, newest  # the bus lost what it had: all rows go out again
        known = {int(n): Commit(int(n), words, 0) for n, words in found["known"].items()}
        self._delivery = Delivery(
            lambda: open_bus(self.options.bus),
            spool,
            sender,
            memory=parse_size(self.options.memory, "memory"),
            heartbeat=self.options.heartbeat,
        )
        self._replay = {commit.step: n for n, commit in known.items() if commit.words["kind"] == DELTA}
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
        if foreign:  # readers have rows that this trainer's run has not, or has otherwise
            bus = open_bus(self.options.bus)
            self.delivery.carry(keys_on_bus(bus, [known[n] for n in foreign]))
            bus.close()

    def _look(self, saved: dict[str, Any] | None, resume: bool) -> dict[str, Any]:
        """Where the bus stands and what of it this trainer will repeat; plain values."""
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
        ours = saved is not None and (newest is None or saved["run"] == newest.words["run"])
        if newest is not None:
            place = snapshot_of(newest.words)
            found |= {
                "newest": newest.number,
                "after": newest.number,
                "run": newest.words["run"],
                "snapshot": None if place is None else place.to_dict(),
            }
            if not ours and not (resume and saved is None):
                raise OptionError(
                    f"bus={public(self.options.bus)!r} has publications of another run ({newest.words['run']}, number "
                    f"{newest.number}); go on with that run by fit(resume=True) and its checkpoints=, or give this one "
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
                "known": {n: commit.words for n, commit in known.items()},
                "until": max([commit.step for commit in known.values()], default=-1),
                "foreign": [n for n, commit in known.items() if commit.words["kind"] == ROLLBACK],
            }
        bus.close()
        return found

    def _check_memory(self, everything: bool) -> None:
        """The keys of changed rows are part of the budget: 8 bytes each, twice while their list grows."""
        limit, tables = self.embeddings.budget.limit, self.embeddings.tables
        if not limit or not all(rows.store.evicts for rows in tables):
            return
        noted = sum(KEY_BYTES * max(SLOTS_AT_A_TIME, len(rows) if everything else 0) for rows in tables)
        if limit < (least := smallest_dram_bytes(tables) + noted):
            why = "; all rows go out first" if everything and any(len(rows) for rows in tables) else ""
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

    def seen(self, times: Tensor | None) -> None:
        """Event times of a batch that is part of the last step."""
        if times is not None and times.numel():
            self.watermark = max(int(times.max()), self.watermark or 0)

    def after_step(self) -> None:
        """A step is whole: publish if it is time."""
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
        """Publish what changed since the last cut, now; its number. None where there is nothing to say, or a hold."""
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
            tables = self._changed(delivery.claim(number))
            dense = self._dense() if delivery.sender.first else None
        words = {
            "kind": DELTA,
            "previous": number - 1,
            "step": step,
            "watermark": watermark,
            "cut": time.time(),
            "rows": sum(change.rows for change in tables.values()),
            "values": self.options.values,
        }
        delivery.put(Cut(number, words, tables, dense, self.options.values))
        self._last, self._cut_step, self._cut_at = number, step, time.monotonic()
        self.pauses = [*self.pauses[-999:], time.perf_counter() - started]
        every = self.options.snapshot_every
        if every is not None and number % every == 0 and not self.replaying:
            self.snapshot()
        return number

    def _has_news(self) -> bool:
        """Whether there may be something to publish though no step was made."""
        return self._cut_step < 0 or self.delivery.lost

    def snapshot(self) -> SnapshotPlace:
        """Write a snapshot now, at the last cut, and tell readers where it is. Requires: nothing changed since."""
        if self.options.snapshot is None:
            raise OptionError("snapshot() does not know how: give Publish(snapshot=) what writes one")
        if self.embeddings.steps != self._cut_step and self.cut() is None:
            raise PublishError("a snapshot is taken at a publication, and the bus is held; hotrow release it first")
        place = SnapshotPlace(self._last, str(self.options.snapshot(self._last)))
        if self.delivery.sender.first:
            self.delivery.announce(place)
        return place

    def idle(self, watermark: int) -> None:
        """The source is at this event time and had nothing to train on: heartbeats carry it. What was trained before
        and waits for a cut by the clock is published.

        Publications never carry it: a run that resumes would be quiet at other moments, and must repeat them.
        """
        step = self.embeddings.steps
        if step == self._cut_step:
            self.delivery.say({"step": step, "watermark": max(watermark, self.watermark or 0)})
        elif self.options.every_seconds is not None and step > self._replays_until and self._due(step):
            self.cut()

    # --- saving ---

    def before_save(self) -> None:
        """A checkpoint is about to be taken: make it one of a cut."""
        if self._delivery is None:
            return
        if not self.replaying and self.embeddings.steps != self._cut_step:
            self.cut()

    def state(self) -> dict[str, Any] | None:
        """For the checkpoint: the number whose rows these are, or that there is none."""
        if self._delivery is None:
            return None
        whole = self.embeddings.steps == self._cut_step and not self.delivery.held
        return {"run": self.delivery.sender.run, "number": self._last, "whole": whole, "watermark": self.watermark}

    def finish(self, seconds: float = 10.0) -> None:
        """The run is over: publish what is left, and wait until it is on the bus or in the spool."""
        if self._delivery is not None:
            if not self.replaying and self.embeddings.steps != self._cut_step:
                self.cut()
            self._delivery.flush(seconds, kept=True)

    def close(self) -> None:
        """End the thread; what is not on the bus is in the spool."""
        if self._delivery is not None:
            self._delivery.close()
            self._delivery = None

    # --- inside a cut ---

    def _tables(self) -> list[TableRows]:
        """Those that this rank publishes: of a replicated one every rank has all rows."""
        return [t for t in self.embeddings.tables if self.ranks is None or self.ranks.first or not t.table.replicate]

    def _changed(self, carried: Keys) -> dict[str, TableChange]:
        changes = {}
        for rows in self._tables():
            keys = rows.store.take_changes()
            more = carried.get(rows.table.name)
            if more:
                keys = torch.unique(torch.cat([keys, *more]))
            if self.ranks is not None and more and not rows.table.replicate:
                keys = self._mine(keys)
            values, found = rows.store.read(keys)
            if bool(found.all()):
                changes[rows.table.name] = TableChange(keys, values, keys[:0])
            else:
                changes[rows.table.name] = TableChange(keys[found], values[found], keys[~found])
        return changes

    def _mine(self, keys: Tensor) -> Tensor:
        """Those whose rows this rank owns."""
        from hotrow import _core

        assert self.ranks is not None
        shards = torch.empty(keys.numel(), dtype=torch.int32)
        _core.shards(keys, shards)
        begin, end = self.ranks.shards
        return keys[(shards >= begin) & (shards < end)]

    def _dense(self) -> dict[str, Tensor]:
        return {name: value.detach().to("cpu", copy=True) for name, value in self.tower.state_dict().items()}

    # --- ranks ---

    def _place(self) -> tuple[int, int]:
        return (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.world)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self.ranks is None else self.ranks.patient.gather_json(value)

    def _any(self, value: bool) -> bool:
        return any(self._gather(value))

    def _agree(self, look: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What rank 0 found."""
        if self.ranks is None:
            return look()
        found = self.ranks.collective("looking at the bus", lambda: look() if self.ranks and self.ranks.first else {})
        first: dict[str, Any] = self.ranks.patient.gather_json(found)[0]
        return first

    def _agree_on_number(self) -> tuple[int, int | None] | None:
        """The number of this cut and the newest event time of all ranks; None while anybody is held."""
        delivery = self.delivery
        mine = [delivery.next_number(), delivery.held, self.watermark, delivery.counters.committed]
        everyones = self._gather(mine)
        if any(held for _, held, _, _ in everyones):
            return None
        delivery.settle(everyones[0][3])
        times = [time for _, _, time, _ in everyones if time is not None]
        return min(number for number, *_ in everyones), max(times, default=None)
