"""`hotrow publish-remote`: keeps a remote store up to date with a bus.

    fill      write all rows of the newest export, or of the snapshot that the bus names, into a store without rows
    follow    write each new publication. A Follower does this as in a server: it retries if the bus is unreachable, and
              if retention has removed publications that it needs, it fills the store from a newer export
    repair    if a store lost a part of its rows (a master restarted empty), fill it again and write publications up to
              the newest that it had again; newer rows are not replaced

There is no leader election. Rows carry the number of their publication and a write never replaces a higher one, so
several writers may do the same work at the same time. A writer may be killed at any time: the next one starts at the
store's mark `complete`.

The follower's thread writes; any thread may read its figures.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hotrow.credentials import public
from hotrow.errors import OptionError, StorageError
from hotrow.progress import ProgressBar
from hotrow.publish.bus import open_bus
from hotrow.publish.history import newest_commit, snapshot_of
from hotrow.publish.publication import DELTA, ROLLBACK, Publication
from hotrow.serve.repository.manifest import candidates, open_version
from hotrow.serve.updates.cut_over import MixedPublicationsError
from hotrow.serve.updates.follower import FOLLOWING, STUCK, Follower
from hotrow.serve.updates.freshness import Freshness
from hotrow.serve.updates.remote_fill import fill_from_export
from hotrow.signals import StopSignals
from hotrow.tiers.remote.store import LostError, RemoteStore, check_kind, open_remote, write_publication
from hotrow.tiers.remote.tables import is_local

Wrote = Callable[[str, int, int], object]


class RemoteWriter:
    """Adapts a remote store to the UpdateTarget protocol of a Follower."""

    def __init__(
        self, store: RemoteStore, values: str | None = None, wrote: Wrote = lambda table, rows, of: None
    ) -> None:
        self.store, self.values, self.wrote = store, values, wrote
        self.fresh = Freshness.of(store.marks().complete, None)
        self._rewrite_until = 0  # publications up to this number are written again although the store had them

    def fill(self, path: Path) -> int:
        """Write all rows of an export; returns how many."""
        version = open_version(path)
        rows = fill_from_export(self.store, version, self.values, self.wrote)
        self.fresh = Freshness.of(int(version.manifest["publication"]), version.manifest["trained"]["watermark"])
        return rows

    def reopen(self, path: Path) -> None:
        """Start again from another export."""
        self.fill(path)

    def prepare_update(self, publication: Publication) -> Callable[[], None]:
        """A function that writes the publication; the store checks it."""
        return lambda: self.apply(publication)

    def apply(self, publication: Publication) -> None:
        """Write a publication, unless the store has it."""
        if publication.kind in (DELTA, ROLLBACK) and publication.number > self.fresh.publication:
            self._write(publication)
        self.fresh = Freshness.of(max(publication.number, self.fresh.publication), publication.watermark)

    def _write(self, publication: Publication) -> None:
        number, changes = publication.number, publication.tables.items()
        rows = {name: (change.keys.numpy(), change.values.float().numpy()) for name, change in changes}
        deleted = {name: change.deleted.numpy() for name, change in changes}
        try:
            if number <= self._rewrite_until:
                for name, (keys, values) in rows.items():
                    self.store.write(name, keys, values, number)
                    self.store.erase(name, deleted[name], number)
            else:
                write_publication(self.store, number, rows, deleted, publication.previous)
        except LostError as error:
            self._rewrite_until = self.store.marks().complete
            raise MixedPublicationsError(str(error)) from None
        except StorageError as error:
            if self.store.marks().complete >= publication.previous:
                raise
            self._rewrite_until = 0
            raise MixedPublicationsError(f"the store lost rows that it had: {error}") from None


def first_export(bus: str, export: str | None) -> Path:
    """The export to fill a store from: the newest complete version, or the newest snapshot named on the bus."""
    if export is not None:
        return next(iter(candidates(Path(export)))).path
    opened = open_bus(bus)
    newest = newest_commit(opened)
    opened.close()
    place = None if newest is None else snapshot_of(newest.fields)
    if place is None:
        raise OptionError(
            f"the store has no rows, and the bus {public(bus)} names no snapshot: pass --export repository/ctr, the "
            "folder of the model that the trainer was exported to"
        )
    return Path(place.path)


def run(bus: str, url: str, export: str | None, values: str | None, once: bool, quiet: bool) -> int:
    """Run `hotrow publish-remote`; returns the exit code."""
    if is_local(url):
        raise OptionError(
            f"{public(url)}: a RocksDB folder belongs to the server that reads it, and that server writes it: "
            f"hotrow serve repository/ --remote {public(url)} --bus {public(bus)}"
        )
    if values is not None:
        check_kind(values)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    console, stop = Console(stderr=True, quiet=quiet), threading.Event()
    store = open_remote(url)
    try:
        writer = RemoteWriter(store, values)
        if not store.marks().filled:
            _fill(writer, first_export(bus, export), console)
        follower = Follower(writer, bus, None if export is None else Path(export))
        with StopSignals(lambda _: stop.set()):
            follower.start()
            done = _watch(follower, writer, once, stop, console)
            follower.close()
        return done
    finally:
        store.close()


def _fill(writer: RemoteWriter, path: Path, console: Console) -> None:
    with ProgressBar("fill", console=console) as bar:
        reported: dict[str, int] = {}

        def wrote(table: str, rows: int, of: int) -> None:
            if table not in reported:
                bar.begin(table, of)
            bar.advance(rows - reported.get(table, 0))
            reported[table] = rows

        writer.wrote = wrote
        rows = writer.fill(path)
        writer.wrote = lambda table, rows, of: None
    console.print(
        f"filled with {rows:,} rows of publication {writer.fresh.publication}, from {path}",
        highlight=False,
        soft_wrap=True,
    )


def _watch(follower: Follower, writer: RemoteWriter, once: bool, stop: threading.Event, console: Console) -> int:
    """Print progress until `stop` is set, or with `once` until the store has caught up; returns the exit code."""
    printed, printed_at = -1, 0.0
    while not stop.wait(0.05):
        if follower.state == FOLLOWING and writer.fresh.publication != printed and time.monotonic() > printed_at + 10.0:
            printed, printed_at = writer.fresh.publication, time.monotonic()
            console.print(f"the store has publication {printed}", highlight=False)
        if once and follower.state in (FOLLOWING, STUCK):
            break
    return 1 if follower.state == STUCK else 0
