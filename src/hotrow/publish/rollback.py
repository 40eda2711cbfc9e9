"""Rollback to an older publication: `hotrow rollback BUS --to N`, and `hotrow release BUS`.

The old state becomes a *new* publication, so readers only ever apply higher numbers. Every row that was changed after N
gets the value that it had at N, and every row that was created after N is removed. The value at N comes from the newest
publication up to N that has the row, or, where retention has removed that, from the newest snapshot up to N. If the bus
still has the first publication, a row in none of them did not exist.

First the publisher is held by a mark on the bus. The publisher reads the mark within a fraction of a second,
acknowledges it and stops publishing; training continues. So no publication is added while the rollback is computed.
`release` removes the mark; the trainer's next publication then sets every row to its current trained value.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.credentials import public
from hotrow.errors import PublishError
from hotrow.publish.bus import Bus, open_bus
from hotrow.publish.delivery import HELD, HOLD
from hotrow.publish.history import Commit, commits_after, newest_commit, snapshot_of
from hotrow.publish.message import checksum, note, parts
from hotrow.publish.publication import (
    ROLLBACK,
    SnapshotPlace,
    TableChange,
    content_checksum,
    decode_body,
    encode_body,
    join_tables,
)
from hotrow.publish.subscriber import bodies_of

ACKNOWLEDGES_WITHIN = 5.0  # seconds; a publisher checks five times a second
Rows = dict[str, tuple[Tensor, Tensor]]  # keys and values, by table
# A function from a snapshot's path and the wanted keys by table to those of their rows in it, and its dense weights.
ReadSnapshot = Callable[[str, Mapping[str, Tensor]], tuple[Rows, dict[str, Tensor] | None]]


@dataclass(frozen=True)
class RolledBack:
    """The restored publication, and the number of the new one."""

    number: int
    restores: int
    rows: int
    deleted: int


def rollback(address: str, to: int, read_snapshot: ReadSnapshot | None = None) -> RolledBack:
    """Publish the state of publication `to` again, and hold the publisher until `release`.

    If retention has removed data that is needed, PublishError says so, and nothing is published or held.
    """
    bus = open_bus(address)
    held_before = bus.mark(HOLD)
    newest = newest_commit(bus)
    if newest is None:
        raise PublishError(f"bus={public(address)!r} has no publication, so there is nothing to go back to")
    if not 0 <= to < newest.number:
        raise PublishError(f"--to {to}: the newest publication is {newest.number}; give a number below it")
    try:
        newest = hold(bus, f"rollback to {to}") or newest
        older = _RollbackPlan(bus, to, newest, read_snapshot)
        tables, dense = older.rows(), older.dense()
        _publish(bus, newest, to, tables, dense, older)
    except BaseException:
        if held_before is None:
            bus.set_mark(HOLD, None)
        raise
    finally:
        bus.close()
    return RolledBack(
        newest.number + 1,
        to,
        sum(change.keys.numel() for change in tables.values()),
        sum(change.deleted.numel() for change in tables.values()),
    )


def hold(bus: Bus, why: str) -> Commit | None:
    """Stop the publisher and wait for its acknowledgement; returns the newest publication after that."""
    request = json.dumps({"why": why, "id": secrets.token_hex(8), "since": time.time()}).encode()
    bus.set_mark(HOLD, request)
    end = time.monotonic() + ACKNOWLEDGES_WITHIN  # there may be no publisher to answer
    while bus.mark(HELD) != request and time.monotonic() < end:
        time.sleep(0.05)
    return newest_commit(bus)


def release(address: str) -> bool:
    """Let the publisher continue; False if it was not held."""
    bus = open_bus(address)
    held = bus.mark(HOLD) is not None
    bus.set_mark(HOLD, None)
    bus.close()
    return held


class _RollbackPlan:
    """The values at publication `to` of all rows that were changed after it."""

    def __init__(self, bus: Bus, to: int, newest: Commit, read_snapshot: ReadSnapshot | None) -> None:
        self.bus, self.to, self.newest, self.read_snapshot = bus, to, newest, read_snapshot
        self.commits = commits_after(bus, 0)
        missing = [n for n in range(to + 1, newest.number + 1) if n not in self.commits]
        if missing:
            raise PublishError(
                f"publication {to} cannot be put back: publication {missing[0]}, which came after it, is not on "
                "the bus any more, so its changes cannot be undone; keep publications longer (keep=, size= of the bus)"
            )
        self.snapshot = self._snapshot()
        self._weights: dict[str, Tensor] | None = None
        self._dims: dict[str, int] = {}

    def rows(self) -> dict[str, TableChange]:
        """Rows to set and keys to remove, by table."""
        touched: dict[str, list[Tensor]] = {}
        for number in range(self.to + 1, self.newest.number + 1):
            for name, change in self._publication(number)[0].items():
                touched.setdefault(name, []).append(torch.cat([change.keys, change.deleted]))
                if change.keys.numel():
                    self._dims[name] = int(
                        change.values.shape[1]
                    )  # a snapshot's rows may have optimizer state after the values
        wanted = {name: torch.unique(torch.cat(keys)) for name, keys in touched.items()}
        found = {name: _FoundRows(keys) for name, keys in wanted.items()}
        number = self.to
        while number > 0 and number in self.commits and (self.snapshot is None or number > self.snapshot.number):
            tables, dense = self._publication(number)
            self._weights = self._weights if self._weights is not None else dense
            for name, change in tables.items():
                if name in found:
                    found[name].take(change)
            number -= 1
        if number > 0 and not (self._weights is not None and all(one.done for one in found.values())):
            self._from_snapshot(number, found)
        return {name: one.change() for name, one in found.items()}

    def dense(self) -> dict[str, Tensor] | None:
        """The weights at `to`; None if there were none yet."""
        return self._weights

    def _publication(self, number: int) -> tuple[dict[str, TableChange], dict[str, Tensor] | None]:
        decoded = [decode_body(body) for body in bodies_of(self.bus, self.commits[number])]
        return join_tables(part for part, _ in decoded), next((d for _, d in decoded if d is not None), None)

    def _snapshot(self) -> SnapshotPlace | None:
        """The newest snapshot up to `to` that the bus names."""
        places = [place for c in self.commits.values() if (place := snapshot_of(c.fields)) and place.number <= self.to]
        return max(places, key=lambda place: place.number, default=None)

    def _from_snapshot(self, number: int, found: dict[str, _FoundRows]) -> None:
        if self.snapshot is None or self.snapshot.number < number or self.read_snapshot is None:
            why = (
                f"the bus goes back to publication {number + 1} only, and names no snapshot between {number} and "
                f"{self.to}"
                if self.snapshot is None or self.snapshot.number < number
                else f"the snapshot at {self.snapshot.path} cannot be read by this command"
            )
            raise PublishError(
                f"publication {self.to} cannot be put back: {why}; go back to a newer one, keep publications longer "
                "(keep=, size= of the bus), or take snapshots more often (snapshot_every=)"
            )
        rows, dense = self.read_snapshot(self.snapshot.path, {name: one.unresolved() for name, one in found.items()})
        self._weights = self._weights if self._weights is not None else dense
        for name, (keys, values) in rows.items():
            order = torch.argsort(keys)
            found[name].take(TableChange(keys[order], values[order][:, : self._dims[name]], keys[:0]))


class _FoundRows:
    """The values of wanted keys, filled in from newer to older publications."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.known = torch.zeros(keys.numel(), dtype=torch.bool)
        self.present = torch.zeros(keys.numel(), dtype=torch.bool)
        self.values: Tensor | None = None

    def unresolved(self) -> Tensor:
        """Keys that no publication so far has set or removed."""
        return self.keys[~self.known]

    def take(self, change: TableChange) -> None:
        """Fill in from an older publication the keys that no newer one had."""
        positions, at = self._positions(change.keys)
        if positions.numel():
            if self.values is None:
                self.values = torch.zeros(self.keys.numel(), change.values.shape[1], dtype=torch.float32)
            self.values[positions] = change.values[at].to(torch.float32)
            self.present[positions] = True
            self.known[positions] = True
        removed, _ = self._positions(change.deleted)
        self.known[removed] = True

    def change(self) -> TableChange:
        """The change that restores the old state. A key that was never found had no row, and is removed."""
        values = self.values if self.values is not None else torch.zeros(self.keys.numel(), 1)
        return TableChange(self.keys[self.present], values[self.present], self.keys[~self.present])

    @property
    def done(self) -> bool:
        """Whether all values have been found."""
        return bool(self.known.all())

    def _positions(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the unresolved ones of `keys` (sorted) in this object, and in `keys`."""
        if not keys.numel() or not self.keys.numel():
            none = torch.zeros(0, dtype=torch.int64)
            return none, none
        place = torch.searchsorted(self.keys, keys).clamp(max=self.keys.numel() - 1)
        matches = (self.keys[place] == keys) & ~self.known[place]
        return place[matches], matches.nonzero().flatten()


def _publish(
    bus: Bus,
    newest: Commit,
    to: int,
    tables: dict[str, TableChange],
    dense: dict[str, Tensor] | None,
    older: _RollbackPlan,
) -> None:
    number, session = newest.number + 1, secrets.randbits(63)
    values = str(newest.fields.get("values", "fp32"))
    body = encode_body(tables, dense, values)
    old = older.commits.get(to)
    for message in parts(number, session, 0, 1, body, bus.limit):
        bus.append(message.encode())
    fields = {
        **{"kind": ROLLBACK, "previous": newest.number, "restores": to, "run": newest.fields["run"], "values": values},
        **{"step": 0 if old is None else old.step, "watermark": None if old is None else old.fields["watermark"]},
        **{"cut": time.time(), "rows": sum(c.rows for c in tables.values()), "parts": [checksum(body)]},
    }
    place = snapshot_of(newest.fields)
    if place is not None:
        fields["snapshot"] = place.to_dict()
    fields["checksum"] = content_checksum(number, fields)
    bus.append(note(number, session, fields).encode())


def default_snapshot_reader(path: str, wanted: Mapping[str, Tensor]) -> tuple[Rows, dict[str, Tensor] | None]:
    """Read a checkpoint or an exported version: rows in segments (rows/<table>) and weights beside them."""
    from safetensors.torch import load_file

    from hotrow.tiers.host.store import scan_snapshot

    folder, rows = Path(path), Rows()
    dims = {table["name"]: int(table["dim"]) for table in _manifest(folder)["tables"]}
    for name, keys in wanted.items():
        if name not in dims:
            raise PublishError(f"the snapshot {folder} has no table {name!r}; it is a snapshot of another model")
        kept: list[tuple[Tensor, Tensor]] = []
        for part in sorted((folder / "rows" / name).glob("part-*")) or [folder / "rows" / name]:
            for found, values in scan_snapshot(str(part), dims[name]):
                wanted_rows = torch.isin(found, keys)
                kept.append((found[wanted_rows], values[wanted_rows]))
        if kept:
            rows[name] = torch.cat([k for k, _ in kept]), torch.cat([v for _, v in kept])
    weights = [folder / name for name in ("dense.safetensors", "weights.safetensors") if (folder / name).exists()]
    return rows, load_file(weights[0]) if weights else None


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise PublishError(
            f"the snapshot {folder} cannot be read ({error}); restore it, or roll back to another publication"
        ) from error
    return found
