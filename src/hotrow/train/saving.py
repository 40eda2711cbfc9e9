"""A model on disk: a folder with a manifest, rows, dense weights and the feature spec. No pickle anywhere.

    manifest.json              what is here: tables with their optimizers, files with sizes and checksums, the step
    rows/<table>-00000.safetensors   keys, values with optimizer state, counts and last steps, a million rows a file
    dense.safetensors          the tower's weights
    features.json              the feature spec, where there is one

The folder is written beside its final name and renamed when it is complete, so a reader sees all of it or nothing.
docs/formats/model.md has the fields.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hotrow.errors import CheckpointError, choices
from hotrow.features import FeatureSpec
from hotrow.nn import Recommender
from hotrow.table import TableRows
from hotrow.tiers.host import Rows

FORMAT, VERSION = "hotrow-model", 1
ROWS_PER_FILE = 1 << 20


def save_model(model: Recommender, path: str | os.PathLike[str], extra: dict[str, Any] | None = None) -> None:
    """Write `model` to the folder `path`, replacing one that is there only when the new one is complete.

    `extra` may hold `features=` (a FeatureSpec, saved with the model) and plain values for the manifest.
    """
    target = Path(path)
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "rows").mkdir(parents=True)
    notes = dict(extra or {})
    spec = notes.pop("features", None)
    files: dict[str, dict[str, Any]] = {}
    try:
        tables = [_save_table(rows, fresh, files) for rows in model.embeddings.tables]
        dense = {name: tensor.detach().contiguous().clone() for name, tensor in model.tower.state_dict().items()}
        _save_tensors(dense, fresh, "dense.safetensors", files)
        if isinstance(spec, FeatureSpec):
            spec.save(fresh / "features.json")
            files["features.json"] = _fingerprint(fresh / "features.json")
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": model.embeddings.steps,
            "seed": model.embeddings.seed,
            "tower": type(model.tower).__name__,
            "tables": tables,
            "files": files,
            "notes": notes,
        }
        (fresh / "manifest.json").write_text(json.dumps(manifest, indent=1))
        _replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load_model(model: Recommender, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read rows and dense weights of `path` into `model`; returns the manifest. Everything is checked first."""
    folder = Path(path)
    manifest = read_manifest(folder)
    verify(folder, manifest)
    by_name = {rows.table.name: rows for rows in model.embeddings.tables}
    for saved in manifest["tables"]:
        _check_fits(saved, by_name, folder)
    weights = load_file(folder / "dense.safetensors")
    try:
        model.tower.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: the tower's weights do not fit this tower: {error}") from None
    for saved in manifest["tables"]:
        table = by_name[saved["name"]]
        for rows in read_rows(folder, saved):
            table.assign(rows.keys, rows.values, rows.counts, rows.last_steps)
    model.embeddings.steps = int(manifest["step"])
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a saved model."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a saved model: it has no manifest.json") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / 'manifest.json'} is corrupt: {error}") from None
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} has format {manifest.get('format')!r} version {manifest.get('version')!r}; "
            f"this release reads {FORMAT!r} version {VERSION}"
        )
    return manifest


def verify(folder: Path, manifest: dict[str, Any]) -> None:
    """Compare every file with its checksum; a corrupt one is named."""
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the model cannot be loaded without it")
        if _fingerprint(path) != expected:
            raise CheckpointError(f"{path} is corrupt: its size or checksum differs from the manifest's")


def read_rows(folder: Path, table: dict[str, Any]) -> Iterator[Rows]:
    """A saved table's rows, file by file."""
    for name in table["files"]:
        try:
            tensors = load_file(folder / name)
            yield Rows(tensors["keys"], tensors["values"], tensors["counts"], tensors["last_steps"])
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(f"{folder / name} is corrupt: {error}") from None


def _save_table(rows: TableRows, folder: Path, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    names, count = [], 0
    for part, chunk in enumerate(rows.scan(ROWS_PER_FILE)):
        name = f"rows/{rows.table.name}-{part:05d}.safetensors"
        tensors = {
            "keys": chunk.keys,
            "values": chunk.values,
            "counts": chunk.counts,
            "last_steps": chunk.last_steps,
        }
        _save_tensors({k: v.clone() for k, v in tensors.items()}, folder, name, files)
        names.append(name)
        count += chunk.keys.numel()
    definition = rows.table.to_dict()
    definition["optimizer"] = rows.optimizer.to_dict()
    return {**definition, "width": rows.store.width, "rows": count, "files": names}


def _save_tensors(tensors: dict[str, Tensor], folder: Path, name: str, files: dict[str, dict[str, Any]]) -> None:
    save_file(tensors, folder / name)
    files[name] = _fingerprint(folder / name)


def _fingerprint(path: Path) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "blake2b": digest.hexdigest()}


def _replace(fresh: Path, target: Path) -> None:
    for path in fresh.rglob("*"):
        _sync(path)
    _sync(fresh)
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        os.rename(target, old)
    os.rename(fresh, target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_fits(saved: dict[str, Any], tables: dict[str, TableRows], folder: Path) -> None:
    name = saved["name"]
    if name not in tables:
        raise CheckpointError(f"{folder} has a table {name!r} that this model lacks; {choices(name, tables)}")
    mine = tables[name]
    if saved["dim"] != mine.table.dim:
        raise CheckpointError(
            f"table {name!r} has dim {mine.table.dim} but {folder} has {saved['dim']}; pass dim={saved['dim']}"
        )
    if saved["optimizer"]["kind"] != type(mine.optimizer).__name__:
        raise CheckpointError(
            f"table {name!r} is trained by {type(mine.optimizer).__name__} but {folder} has state of "
            f"{saved['optimizer']['kind']}; use that optimizer"
        )
