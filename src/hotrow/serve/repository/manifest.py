"""A repository of exported models: lists, opens and verifies the models and versions in a folder.

    repository/
      ctr/                        a model
        3/                        a version: a whole number, the highest is the newest
          manifest.json           all files with sizes and checksums; docs/formats/export.md
          tower.pt2               the tower's graph (serve/graph/graph_archive.py)
          user.pt2                the graph of its user part, where it has one
          weights.safetensors     the tower's weights
          features.json           the feature spec, where there is one
          rows/<table>/           rows: values only, in segments
        .4.tmp/                   a draft being written, or left by a crash; never read

A folder whose name is a version is complete (export.py ensures that). Files are checked when they are read, and are not
read again after the check. Segments of rows have a checksum in every block, which is checked when the rows are loaded.
`verify(whole=True)` reads everything. Any thread may read; only `write_manifest` writes.

Names of models and versions come from clients. Only `check_name` and `check_version` turn such a name into a part of a
path.
"""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hotrow.checksummed_json import FileFormat, OtherFormatError, digest
from hotrow.config import Initial
from hotrow.errors import CheckpointError, HotRowError, OptionError, RepositoryError, choices
from hotrow.features import FeatureSpec
from hotrow.serve.protocol.request import POLICIES, Signature
from hotrow.table import Table
from hotrow.tiers.host.store import HostStore
from hotrow.train.checkpoint import durable_files, state_encoding

FORMAT, VERSION = "hotrow-export", 1
MANIFEST_JSON = FileFormat(FORMAT, (VERSION,))
MANIFEST, TOWER, WEIGHTS, FEATURES = "manifest.json", "tower.pt2", "weights.safetensors", "features.json"
USER = "user.pt2"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_FILE = re.compile(r"[^/\\\0]+(/[^/\\\0]+)*")
_BLOCK = 1 << 20


def check_name(name: object) -> str:
    """A model's name that is safe in a path; anything else is an error.

    >>> check_name("ctr-v2.home")
    'ctr-v2.home'
    >>> check_name("../../etc")
    Traceback (most recent call last):
    hotrow.errors.OptionError: model name '../../etc': ...
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise OptionError(
            f"model name {str(name)[:128]!r}: use letters, digits, '.', '_' and '-', beginning with a letter or a "
            "digit, at most 128"
        )
    return name


def check_version(version: object) -> int:
    """A version's number from a number or its text; anything else is an error.

    >>> check_version("12")
    12
    """
    if isinstance(version, bool) or not _NUMBER.fullmatch(str(version)):
        raise OptionError(f"version {str(version)[:64]!r}: give a whole number from 1 up")
    return int(str(version))


@dataclass(frozen=True)
class TableOnDisk:
    """One table of a version: its definition, its number of rows, and their folder."""

    table: Table
    rows: int
    folder: Path


@dataclass(frozen=True)
class Version:
    """One version of a model: its folder and its checked manifest. Files are checked when they are read.

    >>> Version(Path("repository/ctr/3"), {"model": "ctr", "number": 3}).number
    3
    """

    path: Path
    manifest: dict[str, Any] = field(repr=False)

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.manifest["model"])

    @property
    def number(self) -> int:
        """The version's number."""
        return int(self.manifest["number"])

    @property
    def signature(self) -> Signature:
        """The model's inputs and outputs."""
        return Signature.from_json(self.manifest["signature"])

    @property
    def tables(self) -> list[TableOnDisk]:
        """Its tables, in order."""
        return [_table(self.path, saved) for saved in self.manifest["tables"]]

    @property
    def policy(self) -> str:
        """The policy for rows that cannot be read before the deadline."""
        return str(self.manifest["policy"])

    @property
    def deadline(self) -> float | None:
        """The default deadline of a request in seconds; None for the server's default."""
        deadline = self.manifest["deadline"]
        return None if deadline is None else float(deadline)

    def read(self, name: str) -> bytes:
        """A file's bytes, after checking their size and checksum."""
        expected, path = self._expected(name), self.path / name
        try:
            with durable_files.disk("read", path):
                data = path.read_bytes()
        except OSError:
            if path.exists():
                raise
            raise RepositoryError(f"{path} is missing; {self._cure()}") from None
        if len(data) != expected["bytes"] or digest(data) != expected["blake2b"]:
            raise RepositoryError(f"{path} is corrupt: its size or checksum is not the manifest's; {self._cure()}")
        return data

    def weights(self) -> dict[str, Tensor]:
        """The tower's weights by name, in the order in which its graph takes them."""
        tensors = state_encoding.from_bytes(self.read(WEIGHTS), self.path / WEIGHTS)
        names = self.manifest["tower"]["weights"]
        if set(names) != set(tensors):
            raise RepositoryError(f"{self.path / WEIGHTS} has other weights than the manifest names; {self._cure()}")
        return {name: tensors[name] for name in names}

    def features(self) -> FeatureSpec | None:
        """The feature spec, if the version has one."""
        if FEATURES not in self.manifest["files"]:
            return None
        return FeatureSpec.from_json(self.read(FEATURES).decode())

    def verify(self, whole: bool = False) -> None:
        """Check every file and raise an error that names the first bad one. Without `whole`, segments of rows are
        checked by size and header only; the checksums of their blocks are compared when the rows are loaded."""
        for name in self.manifest["files"]:
            if not _is_segment(name):
                self.read(name)
            else:
                self._verify_segment(name, whole)
        for on_disk in self.tables:
            info = HostStore.snapshot_info(str(on_disk.folder))
            table = on_disk.table
            if (info["table"], info["rows"], info["values"]) != (table.name, on_disk.rows, table.values):
                raise RepositoryError(
                    f"{on_disk.folder} is not what was exported here: it has {info['rows']:,} {info['values']} rows of "
                    f"table {info['table']!r}, the manifest {on_disk.rows:,} {table.values} of {table.name!r}; "
                    f"{self._cure()}"
                )

    def _verify_segment(self, name: str, whole: bool) -> None:
        expected, path = self._expected(name), self.path / name
        try:
            size = path.stat().st_size
        except OSError:
            raise RepositoryError(f"{path} is missing; {self._cure()}") from None
        if size != expected["bytes"]:
            raise RepositoryError(
                f"{path} is corrupt: it has {size:,} bytes, the manifest {expected['bytes']:,}; {self._cure()}"
            )
        if whole and file_digest(path) != expected["blake2b"]:
            raise RepositoryError(f"{path} is corrupt: its checksum differs from the manifest's; {self._cure()}")

    def _expected(self, name: str) -> dict[str, Any]:
        expected: dict[str, Any] | None = self.manifest["files"].get(name)
        if expected is None:
            raise RepositoryError(f"{self.path} has no {name}: its manifest does not list it; {self._cure()}")
        return expected

    def _cure(self) -> str:
        return f"copy version {self.number} here again, or export the model again"


class Repository:
    """A folder of models. Every call reads the folder again, because versions may change while a server runs.

    >>> Repository("no/such/folder")
    Traceback (most recent call last):
    hotrow.errors.RepositoryError: there is no repository no/such/folder; ...
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise RepositoryError(f"there is no repository {self.path}; hr.export(model, 'repository/ctr') makes one")

    def models(self) -> list[str]:
        """The models that have a version."""
        with durable_files.disk("list", self.path):
            names = sorted(path.name for path in self.path.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
        return [name for name in names if self.versions(name)]

    def versions(self, model: str) -> list[int]:
        """A model's versions, newest first."""
        return list_versions(self.path / check_name(model))

    def open(self, model: str, version: object = None) -> Version:
        """One version, checked except for the blocks of rows; without a number, the newest complete one."""
        check_name(model)
        if version is not None:
            return open_version(self.path / model / str(check_version(version)))
        return next(candidates(self.path / model))

    def index(self) -> Iterator[tuple[str, int, str]]:
        """Every model and version with its error, which is empty for an intact one."""
        for model in self.models():
            for number in self.versions(model):
                try:
                    open_version(self.path / model / str(number))
                except HotRowError as error:
                    yield model, number, str(error)
                else:
                    yield model, number, ""


def list_versions(model: Path) -> list[int]:
    """The versions in a model's folder, newest first."""
    if not model.is_dir():
        return []
    with durable_files.disk("list", model):
        return sorted((int(p.name) for p in model.iterdir() if _NUMBER.fullmatch(p.name) and p.is_dir()), reverse=True)


def candidates(model: Path) -> Iterator[Version]:
    """A model's intact versions, newest first. A damaged one is skipped with a warning that names it.

    Raises if there is no version, or if none is left.
    """
    numbers, faults = list_versions(model), []
    if not numbers:
        others = [path.name for path in model.parent.iterdir() if list_versions(path)] if model.parent.is_dir() else []
        hint = f"; {choices(model.name, sorted(others))}" if others else ""
        raise RepositoryError(f"{model} has no version: make one with hr.export(model, {str(model)!r}){hint}")
    for number in numbers:
        try:
            version = open_version(model / str(number))
        except CheckpointError as error:
            faults.append(warn_damaged(model / str(number), error))
            continue
        yield version
    raise RepositoryError(
        f"none of the {len(numbers)} versions in {model} can be served{': ' if faults else ''}{'; '.join(faults)}"
    )


def warn_damaged(path: Path, error: Exception) -> str:
    """Warn that a version is not served; returns the reason."""
    warnings.warn(f"version {path} is not served: {error}", stacklevel=4)
    return str(error)


def open_version(path: Path) -> Version:
    """Read a version's manifest and check it and its files."""
    version = Version(path, _read_manifest(path))
    if str(version.number) != path.name or version.model != path.parent.name:
        raise RepositoryError(
            f"{path} holds version {version.number} of model {version.model!r}: its folder must be "
            f"{version.model}/{version.number}; put it there, or export the model under this name"
        )
    version.verify()
    return version


def write_manifest(folder: Path, fields: dict[str, Any]) -> None:
    """Write manifest.json with its own checksum."""
    durable_files.write(folder / MANIFEST, MANIFEST_JSON.dump(fields))


def file_digest(path: Path) -> str:
    """The checksum of a file of any size."""
    hasher = hashlib.blake2b(digest_size=16)
    with durable_files.disk("read", path), open(path, "rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


def _is_segment(name: str) -> bool:
    return name.startswith("rows/") and name.rpartition("/")[2].startswith("segment-")


def _table(path: Path, saved: dict[str, Any]) -> TableOnDisk:
    table = Table(
        saved["name"],
        saved["dim"],
        saved["features"],
        Initial.from_dict(saved["initial"]),
        dtype=str(saved.get("dtype", "fp32")),
        values=str(saved["values"]),
        default=saved["default"],
    )
    return TableOnDisk(table, int(saved["rows"]), path / "rows" / table.name)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise RepositoryError(f"{folder} is not a version of a model: it has no {MANIFEST}; export the model again")
    with durable_files.disk("read", path):
        data = path.read_bytes()
    try:
        manifest = MANIFEST_JSON.load(data)
    except OtherFormatError as error:
        raise RepositoryError(
            f"{path} has format {error.format!r} version {error.version!r}; this release reads {FORMAT!r} version "
            f"{VERSION}: export the model again with it"
        ) from None
    except ValueError as error:
        raise RepositoryError(f"{path} is corrupt: {error}; export the model again") from None
    _check_fields(path, manifest)
    return manifest


def _check_fields(path: Path, manifest: dict[str, Any]) -> None:
    """Check the fields: a manifest with a correct checksum may still be written by another program."""
    version = Version(path.parent, manifest)
    try:
        check_name(version.model)
        check_version(version.number)
        signature, tables = version.signature, version.tables
        if version.policy not in POLICIES:
            raise OptionError(f"policy {version.policy!r}: {choices(version.policy, POLICIES)}")
        if [f for t in tables for f in t.table.poolings] != list(signature.features):
            raise OptionError("the signature's features are not those of the tables")
        if signature.named_tasks and len(signature.named_tasks) != signature.tasks:
            raise OptionError(f"{len(signature.named_tasks)} tasks are named but a row has {signature.tasks} logits")
        for name in manifest["files"]:
            if not _FILE.fullmatch(name) or ".." in name.split("/"):
                raise OptionError(f"a file is named {name!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RepositoryError(f"{path} is not what HotRow writes: {error!s}; export the model again") from None
