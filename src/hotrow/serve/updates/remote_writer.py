"""What keeps a remote store up to date with a bus: `hotrow publish-remote`.

    fill        a store that has nothing gets all rows of the newest export, or of the snapshot that the bus tells of
    follow      each publication is written as it comes (follower.py, as a server does it: a bus that is away is tried
                again, and a writer that fell behind retention fills from a newer export)
    mend        a store that lost a part of itself (a master that came back empty) is filled again, and publications
                up to what it had are written again; nothing that is newer is replaced

Nobody is elected. Rows carry the number of their publication and a write never replaces a higher one, so several
writers may do the same work at the same moment, and one that was killed does no harm: the next begins at `complete`.

The follower's thread writes; figures may be read from any.
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
from hotrow.publish.bus import open_bus
from hotrow.publish.history import newest_commit, snapshot_of
from hotrow.publish.publication import DELTA, ROLLBACK, Publication
from hotrow.row_progress import RowsView
from hotrow.serve.repository.manifest import candidates, open_version
from hotrow.serve.updates.cut_over import Fresh, TornError
from hotrow.serve.updates.follower import FOLLOWING, STUCK, Follower
from hotrow.serve.updates.remote_fill import fill_from_export
from hotrow.signals import StopSignals
from hotrow.tiers.remote.store import LostError, RemoteStore, check_kind, open_remote, write_publication
from hotrow.tiers.remote.tables import is_local

Wrote = Callable[[str, int, int], object]


class RemoteWriter:
    """A remote store that takes publications: what a Follower feeds."""

    def __init__(
        self, store: RemoteStore, values: str | None = None, wrote: Wrote = lambda table, rows, of: None
    ) -> None:
        self.store, self.values, self.wrote = store, values, wrote
        self.fresh = Fresh.of(store.marks().complete, None)
        self._again_until = 0  # publications up to this one are written though the store had them

    def fill(self, path: Path) -> int:
        """All rows of an export; how many there were."""
        version = open_version(path)
        rows = fill_from_export(self.store, version, self.values, self.wrote)
        self.fresh = Fresh.of(int(version.manifest["publication"]), version.manifest["trained"]["watermark"])
        return rows

    def reopen(self, path: Path) -> None:
        """Begin again from another export."""
        self.fill(path)

    def apply(self, publication: Publication) -> None:
        """Write a publication; one that the store has is passed over."""
        if publication.kind in (DELTA, ROLLBACK) and publication.number > self.fresh.publication:
            self._write(publication)
        self.fresh = Fresh.of(max(publication.number, self.fresh.publication), publication.watermark)

    def _write(self, publication: Publication) -> None:
        number, changes = publication.number, publication.tables.items()
        rows = {name: (change.keys.numpy(), change.values.float().numpy()) for name, change in changes}
        deleted = {name: change.deleted.numpy() for name, change in changes}
        try:
            if number <= self._again_until:
                for name, (keys, values) in rows.items():
                    self.store.write(name, keys, values, number)
                    self.store.erase(name, deleted[name], number)
            else:
                write_publication(self.store, number, rows, deleted, publication.previous)
        except LostError as error:
            self._again_until = self.store.marks().complete
            raise TornError(str(error)) from None
        except StorageError as error:
            if self.store.marks().complete >= publication.previous:
                raise
            self._again_until = 0
            raise TornError(f"the store lost what it had: {error}") from None


def first_export(bus: str, export: str | None) -> Path:
    """Where a store is to be filled from: the newest version that is whole, or the newest snapshot on the bus."""
    if export is not None:
        return next(iter(candidates(Path(export)))).path
    opened = open_bus(bus)
    newest = newest_commit(opened)
    opened.close()
    place = None if newest is None else snapshot_of(newest.words)
    if place is None:
        raise OptionError(
            f"the store has no rows, and the bus {public(bus)} tells of no snapshot: pass --export repository/ctr, the "
            "folder of the model that the trainer was exported to"
        )
    return Path(place.path)


def run(bus: str, url: str, export: str | None, values: str | None, once: bool, quiet: bool) -> int:
    """What `hotrow publish-remote` does."""
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
    with RowsView("fill", console) as view:
        told: dict[str, int] = {}

        def wrote(table: str, rows: int, of: int) -> None:
            if table not in told:
                view.begin(table, of)
            view.advance(rows - told.get(table, 0))
            told[table] = rows

        writer.wrote = wrote
        rows = writer.fill(path)
        writer.wrote = lambda table, rows, of: None
    console.print(
        f"filled with {rows:,} rows of publication {writer.fresh.publication}, from {path}",
        highlight=False,
        soft_wrap=True,
    )


def _watch(follower: Follower, writer: RemoteWriter, once: bool, stop: threading.Event, console: Console) -> int:
    """Say how far it is, until it is told to end, or with `once` until it is there; the exit code."""
    said, shown = -1, 0.0
    while not stop.wait(0.05):
        if follower.state == FOLLOWING and (writer.fresh.publication != said) and time.monotonic() > shown + 10.0:
            said, shown = writer.fresh.publication, time.monotonic()
            console.print(f"the store has publication {said}", highlight=False)
        if once and follower.state in (FOLLOWING, STUCK):
            break
    return 1 if follower.state == STUCK else 0
