"""The checkpoint folder of a job on several machines must be one folder that all of them see.

A machine that has a folder of its own at that path would write its rows where no other machine finds them. So all ranks
look for a file that rank 0 has just made, before training begins.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from hotrow.errors import CheckpointError
from hotrow.parallel.ranks import Ranks
from hotrow.train.checkpoint import durable_files


def check_shared_folder(folder: Path, ranks: Ranks) -> None:
    """Raise on every rank if one of them does not see rank 0's folder. All ranks call it."""
    name = ranks.broadcast_json(f".seen-{secrets.token_hex(8)}")

    def make_mark() -> None:
        if ranks.first:
            durable_files.make(folder)
            with durable_files.disk("write", folder / name):
                (folder / name).touch()

    def find_mark() -> None:
        if not (folder / name).exists():
            raise not_shared(folder, ranks)

    ranks.collective("making the checkpoint folder", make_mark)
    try:
        ranks.collective("looking for rank 0's checkpoint folder", find_mark)
    finally:
        if ranks.first:
            (folder / name).unlink(missing_ok=True)


def not_shared(folder: Path, ranks: Ranks) -> CheckpointError:
    """The error of a rank that does not see rank 0's folder."""
    return CheckpointError(
        f"{ranks.roles.name(ranks.rank)} on {socket.gethostname()} does not see rank 0's folder {folder}: ranks of all "
        "machines write their rows into one shared folder (NFS, Lustre, CephFS ...); mount it at this path everywhere"
    )
