"""Logs for tables without an SSD tier: they let a checkpoint write only the rows that changed since the last one.

A snapshot of rows consists of segments of the table's log (core/log/log.h). A table with `ssd=` has a log. Any other
table gets one here, in a hidden folder beside the checkpoints, so that a checkpoint on that disk links segments instead
of copying them. A log takes 10 bytes per row and a write buffer from the DRAM budget; rows stay in DRAM.

The folder belongs to one collection's rows. It is removed with the last object that uses it, because a background save
may outlive the collection. If a process dies, the next process that saves there finds the folder's lock free and
removes the folder. Checkpoints do not need it.

With ranks, each has a folder of its own. Only rank 0 removes the folders of dead processes: a folder that another rank
is just creating is not locked yet.
"""

from __future__ import annotations

import itertools
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotrow import _core
from hotrow.errors import StorageError
from hotrow.nn import EmbeddingCollection
from hotrow.table.ssd_folder import LARGEST_BUFFER
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.stored_table import SMALLEST_BUFFER
from hotrow.train.checkpoint import durable_files

PREFIX = ".rows-"
_numbers = itertools.count()
_met: weakref.WeakSet[EmbeddingCollection] = weakref.WeakSet()  # whose ranks have waited for each other here
_folders: weakref.WeakKeyDictionary[EmbeddingCollection, Path] = weakref.WeakKeyDictionary()


def open_logs(embeddings: EmbeddingCollection, folder: Path) -> None:
    """Give every table that has no log one beside the checkpoints of `folder`."""
    known = _folders.get(embeddings)
    if known is not None and not known.is_dir():
        raise StorageError(
            f"{known} is gone: it had the rows' log of this model, which the model needs. Load the last checkpoint "
            "into a new model, and do not move a folder of checkpoints while its trainer exists"
        )
    ranks = embeddings.ranks
    for left in folder.glob(f"{PREFIX}*") if ranks is None or ranks.first else ():
        remove_if_free(left)
    if ranks is not None and embeddings not in _met:
        _met.add(embeddings)
        ranks.barrier()  # rank 0 has removed what others left, before anyone makes a folder
    without = [rows for rows in embeddings.tables if not rows.store.has_log]
    if not without or (ranks is not None and not ranks.owns_rows):
        return
    durable_files.make(folder)
    who = f"{os.getpid()}" if ranks is None else f"{ranks.rank}-{os.getpid()}"  # several machines may share the folder
    path = folder / f"{PREFIX}{who}-{next(_numbers)}"
    locked = _LockedFolder(path)
    _folders[embeddings] = path
    share = embeddings.memory.dram_bytes // 100 // len(without) // 4096 * 4096
    buffer = min(LARGEST_BUFFER, max(SMALLEST_BUFFER, share)) if share else LARGEST_BUFFER
    for rows in without:
        rows.store.attach(str(path / rows.table.name), evicts=False, buffer=buffer, lock=locked)


class _LockedFolder:
    """A locked folder, removed when the last reference to this object is dropped."""

    def __init__(self, folder: Path) -> None:
        with core_errors():
            lock = _core.lock_folder(str(folder))
        weakref.finalize(self, _close, lock, folder)


def remove_if_free(folder: Path) -> None:
    """Remove the folder of a process that has ended."""
    with suppress(StorageError):  # a live process holds the lock
        _LockedFolder(folder)


def _close(lock: Any, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    del lock
