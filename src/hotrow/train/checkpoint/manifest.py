"""A checkpoint on disk: the layout of its folder, reading it, finding the newest. docs/formats/checkpoint.md.

    checkpoints/
      step-000000001000/
        manifest.json             all files with sizes and checksums, and everything that is not a tensor
        dense.safetensors         the tower's weights
        optimizer.safetensors     the dense optimizer's state
        state.safetensors         metrics and torch's random state
        features.json             the feature spec, where there is one
        rows/<table>/             a snapshot of the table's rows: segments and their own manifest
        rows/<table>/part-0001/   with ranks: the snapshot of the rows that rank 1 owned
      .step-000000002000.tmp/     a draft: being written, or left by a crash; never read

A folder with its final name is complete (saving.py). Checkpoints are numbered in the order of publication; the newest
has the highest number, whatever its step. Every file is compared with its checksum when it is read, and is not read
again after that check. Reading needs no trainer. Any thread may read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hotrow.checksummed_json import FileFormat, OtherFormatError, fingerprint
from hotrow.errors import CheckpointError
from hotrow.features import FeatureSpec
from hotrow.tiers.host.store import SHARDS, HostStore
from hotrow.train.checkpoint import durable_files, state_encoding

FORMAT, VERSION, PARTED = "hotrow-checkpoint", 1, 2  # PARTED: written by ranks, rows in parts
MANIFEST_JSON = FileFormat(FORMAT, (VERSION, PARTED))
MANIFEST, DENSE, OPTIMIZER, STATE, FEATURES = (
    "manifest.json",
    "dense.safetensors",
    "optimizer.safetensors",
    "state.safetensors",
    "features.json",
)
CURSOR = "cursor.safetensors"
"""What the source remembers after the cursor, if that is more than a position."""
_NAME = re.compile(r"step-\d{12,}(-\d+)?")
_DRAFT = re.compile(r"\.step-.*\.tmp")


@dataclass(frozen=True)
class Part:
    """A folder with the rows of a range of a table's shards: from the first number up to, not including, the second."""

    folder: Path
    shards: tuple[int, int]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its folder and its checked manifest. Its other files are checked when they are read."""

    path: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Updates made when it was taken."""
        return int(self.manifest["step"])

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The saved tables by name: definition, optimizer, width and number of rows."""
        return {saved["name"]: saved for saved in self.manifest["tables"]}

    def parts(self, table: str) -> list[Part]:
        """Where a table's rows are: one folder, or one for each rank that wrote it."""
        folder, ranges = self.path / "rows" / table, self.tables[table].get("parts")
        if ranges is None:
            return [Part(folder, (0, SHARDS))]
        return [Part(folder / part_name(rank), (int(begin), int(end))) for rank, (begin, end) in enumerate(ranges)]

    @property
    def world(self) -> int:
        """How many ranks wrote it."""
        return 1 + len(self.manifest.get("ranks", []))

    def read(self, name: str) -> bytes:
        """A file's bytes, compared with its size and checksum."""
        expected, path = self.manifest["files"].get(name), self.path / name
        if expected is None:
            raise CheckpointError(f"{self.path} has no {name}: its manifest does not name one")
        try:
            with durable_files.disk("read", path):
                data = path.read_bytes()
        except OSError:
            if path.exists():
                raise
            raise CheckpointError(f"{path} is missing; the checkpoint cannot be loaded without it") from None
        if fingerprint(data) != expected:
            raise CheckpointError(f"{path} is corrupt: its size or checksum differs from the manifest's")
        return data

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file."""
        return state_encoding.from_bytes(self.read(name), self.path / name)

    def features(self) -> FeatureSpec | None:
        """The feature spec that was saved with it, if there was one."""
        if FEATURES not in self.manifest["files"]:
            return None
        return FeatureSpec.from_json(self.read(FEATURES).decode())

    def verify(self) -> None:
        """Check everything except the rows' blocks. The error names the wrong file."""
        for name in self.manifest["files"]:
            if not name.startswith("rows/"):
                self.read(name)
        self.verify_rows()

    def verify_rows(self) -> None:
        """Check the snapshots of rows: all but the segments' blocks, whose checksums are compared as they are read."""
        for name, saved in self.tables.items():
            parts = self.parts(name)
            for part in parts:
                if not part.folder.is_dir():
                    raise CheckpointError(f"{part.folder} is missing; the checkpoint cannot be loaded without it")
            for file in self.manifest["files"]:
                if file.startswith(f"rows/{name}/"):
                    self.read(file)
            rows = 0
            for part in parts:
                info = HostStore.snapshot_info(str(part.folder))
                if info["table"] != name:
                    raise CheckpointError(
                        f"{part.folder} is not what was saved here: it has rows of table {info['table']!r}, the "
                        f"manifest of {name!r}"
                    )
                rows += info["rows"]
            if rows != saved["rows"]:
                raise CheckpointError(
                    f"{self.path / 'rows' / name} is not what was saved here: it has {rows:,} rows of table {name!r}, "
                    f"the manifest {saved['rows']:,}"
                )


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint's manifest and check it; a folder of checkpoints gives its newest."""
    folder = newest_in(Path(path))
    return Checkpoint(folder, _read_manifest(folder))


def newest_in(folder: Path) -> Path:
    """The newest checkpoint of a folder of them; any other folder is returned as it is."""
    if (folder / MANIFEST).exists():
        return folder
    return next(iter(list_checkpoints(folder)), folder)


def list_checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a folder, newest first. One whose manifest cannot be read comes before all others."""
    here = Path(folder)
    with durable_files.disk("list", here):
        paths = [path for path in here.iterdir() if _NAME.fullmatch(path.name)] if here.is_dir() else []
    return sorted(paths, key=lambda path: (_number(path), path.name), reverse=True)


def is_readable(path: Path) -> bool:
    """Whether a checkpoint's manifest can be read; its other files are not checked."""
    return _number(path) != float("inf")


def list_drafts(folder: Path) -> list[Path]:
    """Drafts: checkpoints that a crash left half-written or half-removed."""
    with durable_files.disk("list", folder):
        return [path for path in folder.iterdir() if _DRAFT.fullmatch(path.name)]


def next_number(folder: Path) -> int:
    """The number of the next checkpoint of a folder."""
    return 1 + max((int(n) for n in map(_number, list_checkpoints(folder)) if n != float("inf")), default=0)


def step_name(step: int) -> str:
    """The name of a step's checkpoint.

    >>> step_name(1000)
    'step-000000001000'
    """
    return f"step-{step:012d}"


def part_name(rank: int) -> str:
    """The folder of a rank's part of a table.

    >>> part_name(1)
    'part-0001'
    """
    return f"part-{rank:04d}"


def draft_name(name: str) -> str:
    """The folder name that a checkpoint has while it is written, and while it is removed."""
    return f".{name}.tmp"


def write_manifest(folder: Path, fields: dict[str, Any]) -> bytes:
    """Write manifest.json with its own checksum; returns its bytes."""
    data = MANIFEST_JSON.dump(fields, PARTED if "ranks" in fields else VERSION)
    durable_files.write(folder / MANIFEST, data)
    return data


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no {MANIFEST}; give a step-... folder, or the folder that holds them"
        )
    with durable_files.disk("read", path):
        data = path.read_bytes()
    try:
        return MANIFEST_JSON.load(data)
    except OtherFormatError as error:
        raise CheckpointError(
            f"{folder} has format {error.format!r} version {error.version!r}; this release reads {FORMAT!r} version "
            f"{VERSION} and {PARTED}"
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is corrupt: {error}") from None


def _number(path: Path) -> float:
    try:
        return int(_read_manifest(path)["number"])
    except (CheckpointError, OSError):
        return float("inf")
