"""Logs for tables without an SSD tier: what lets their checkpoints write only the rows that have changed.

A snapshot of rows is made of segments of the table's log (core/log/log.h). A table with `ssd=` has a log; any other
gets one here, in a hidden folder beside the checkpoints, so that a checkpoint on that disk is links and not copies. It
takes 10 bytes a row and a write buffer out of the dram budget; no row leaves DRAM for it.

The folder belongs to one collection's rows and goes with the last who uses them: a save behind training may outlive the
collection. What a process left that died is removed by the next one that saves there: its lock is free. Checkpoints do
not need it.

With ranks each has a folder of its own. Rank 0 alone removes what is left: one that a rank is just making would look as
if nobody held it.
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
_homes: weakref.WeakKeyDictionary[EmbeddingCollection, Path] = weakref.WeakKeyDictionary()


def open_logs(embeddings: EmbeddingCollection, folder: Path) -> None:
    """Give every table that has no log one beside the checkpoints of `folder`."""
    known = _homes.get(embeddings)
    if known is not None and not known.is_dir():
        raise StorageError(
            f"{known} is gone: it had the rows' log of this model, which lasts as long as the model. Load the last "
            "checkpoint into a new model, and leave a folder of checkpoints where it is while its trainer lives"
        )
    ranks = embeddings.ranks
    for left in folder.glob(f"{PREFIX}*") if ranks is None or ranks.first else ():
        remove_if_free(left)
    without = [rows for rows in embeddings.tables if not rows.store.has_log]
    if not without:
        return
    if ranks is not None:
        ranks.barrier()
    durable_files.make(folder)
    who = f"{os.getpid()}" if ranks is None else f"{ranks.rank}-{os.getpid()}"  # a folder may serve several machines
    home = folder / f"{PREFIX}{who}-{next(_numbers)}"
    held = _Held(home)
    _homes[embeddings] = home
    share = embeddings.memory.dram_bytes // 100 // len(without) // 4096 * 4096
    buffer = min(LARGEST_BUFFER, max(SMALLEST_BUFFER, share)) if share else LARGEST_BUFFER
    for rows in without:
        rows.store.attach(str(home / rows.table.name), evicts=False, buffer=buffer, lock=held)


class _Held:
    """A folder that is locked, and removed when nobody holds this any more."""

    def __init__(self, folder: Path) -> None:
        with core_errors():
            lock = _core.lock_folder(str(folder))
        weakref.finalize(self, _close, lock, folder)


def remove_if_free(folder: Path) -> None:
    """Remove a folder that a process held which has ended."""
    with suppress(StorageError):  # somebody uses it
        _Held(folder)


def _close(lock: Any, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    del lock
