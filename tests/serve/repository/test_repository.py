"""A repository: names that cannot leave it, damage that is named, the older version when the newest is broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_models import make_batch, make_model

import hotrow as hr
from hotrow.serve.repository.manifest import (
    Repository,
    Version,
    check_name,
    check_version,
    open_version,
    write_manifest,
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two versions of one model, which differ."""
    folder = tmp_path_factory.mktemp("repository")
    spec = hr.FeatureSpec(
        [hr.features.Key(name) for name in ("user", "item", "tags")] + [hr.features.Dense(f"d{n}") for n in range(3)]
    )
    model = make_model()
    for _ in range(2):
        model.embeddings.table("user").assign(torch.arange(3000), torch.randn(3000, 4))
        hr.export(model, folder / "ctr", features=spec)
    return folder


@pytest.fixture
def repository(exported: Path, tmp_path: Path) -> Path:
    shutil.copytree(exported, tmp_path / "repository")
    return tmp_path / "repository"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at if at >= 0 else len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


FILES = [
    "manifest.json",
    "tower.pt2",
    "weights.safetensors",
    "features.json",
    "rows/user/MANIFEST",
    "rows/user/segment",
]
HARM: dict[str, Callable[[Path], None]] = {"a flipped bit": flip, "a short file": cut, "no file": Path.unlink}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("file", FILES)
def test_damage_is_named_and_the_older_version_served(file: str, harm: str, repository: Path) -> None:
    newest = repository / "ctr" / "2"
    path = next((newest / "rows" / "user").glob("segment-*")) if file == "rows/user/segment" else newest / file
    HARM[harm](path)
    named = str(path) if (file, harm) != ("manifest.json", "no file") else "manifest.json"
    with pytest.raises(hr.CheckpointError) as refused:
        hr.Engine(repository / "ctr", version=2)
    assert named in str(refused.value)
    with pytest.warns(UserWarning, match=r"ctr/2 is not served"), hr.Engine(repository / "ctr") as engine:
        assert engine.version == 1
        engine.predict(make_batch(3))


def test_a_flipped_bit_in_any_byte_of_a_small_file_is_found(repository: Path) -> None:
    """In rows, damage that a lookup can read; `verify(whole=True)` finds the rest too."""
    version = open_version(repository / "ctr" / "2")
    for name in version.manifest["files"]:
        flip(version.path / name, at=(version.path / name).stat().st_size - 1)
        with pytest.raises(hr.CheckpointError) as refused:
            version.verify(whole=True)
        assert name in str(refused.value)
        flip(version.path / name, at=(version.path / name).stat().st_size - 1)
    version.verify(whole=True)


def test_when_no_version_is_whole_each_is_named(repository: Path) -> None:
    for number in (1, 2):
        flip(repository / "ctr" / str(number) / "tower.pt2")
    with pytest.warns(UserWarning), pytest.raises(hr.RepositoryError, match=r"none of the 2 versions.*1/tower.*"):
        hr.Engine(repository / "ctr")


def test_what_a_repository_has(repository: Path) -> None:
    (repository / "notes").mkdir()
    (repository / "ctr" / ".3.tmp").mkdir()
    (repository / "ctr" / "old").mkdir()
    (repository / "ctr" / "007").mkdir()
    here = Repository(repository)
    assert here.models() == ["ctr"] and here.versions("ctr") == [2, 1]
    assert here.open("ctr").number == 2 and here.open("ctr", "1").number == 1
    flip(repository / "ctr" / "2" / "weights.safetensors")
    index = list(here.index())
    assert [entry[:2] for entry in index] == [("ctr", 2), ("ctr", 1)]
    assert "weights.safetensors" in index[0][2] and index[1][2] == ""


def test_missing_models_and_versions_are_named(repository: Path) -> None:
    with pytest.raises(hr.RepositoryError, match=r"crt has no version.*did you mean 'ctr'"):
        hr.Engine(repository / "crt")
    with pytest.raises(hr.RepositoryError, match=r"ctr/9 is not a version"):
        hr.Engine(repository / "ctr", version=9)
    with pytest.raises(hr.RepositoryError, match="there is no repository"):
        Repository(repository / "nowhere")


@pytest.mark.parametrize("name", ["", ".", "..", "../ctr", "a/b", "a\\b", "/etc", ".hidden", "a\0b", "a" * 129, "ü", 3])
def test_names_that_could_leave_the_repository_are_refused(name: object, repository: Path) -> None:
    with pytest.raises(hr.OptionError, match="model name"):
        check_name(name)
    with pytest.raises(hr.OptionError, match="model name"):
        Repository(repository).open(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["", "0", "01", "1.0", "-1", "../1", "1/../2", "१", "9" * 19, True, 1.5])
def test_versions_that_are_no_numbers_are_refused(version: object, repository: Path) -> None:
    with pytest.raises(hr.OptionError, match="version"):
        check_version(version)
    with pytest.raises(hr.OptionError, match="version"):
        Repository(repository).open("ctr", version)


def test_a_version_under_another_name_is_refused(repository: Path) -> None:
    (repository / "ctr" / "2").rename(repository / "ctr" / "5")
    with pytest.raises(hr.RepositoryError, match="holds version 2"):
        open_version(repository / "ctr" / "5")


def rewrite(version: Version, **fields: object) -> None:
    """A manifest with a right checksum and wrong contents."""
    manifest = {k: v for k, v in version.manifest.items() if k not in ("format", "version", "checksum")}
    (version.path / "manifest.json").unlink()
    write_manifest(version.path, {**manifest, **fields})


def test_a_foreign_manifest_is_refused(repository: Path) -> None:
    version = open_version(repository / "ctr" / "2")
    files, tables = version.manifest["files"], version.manifest["tables"]
    mark = next(iter(files.values()))
    for fields in (
        {"files": {**files, "../../../etc/passwd": mark}},
        {"files": {**files, "/etc/passwd": mark}},
        {"tables": [{**tables[0], "name": "../user"}, *tables[1:]]},
        {"tables": [{**tables[0], "dim": -1}, *tables[1:]]},
        {"tables": [{**tables[0], "default": [1.0]}, *tables[1:]]},
        {"tables": tables[1:]},
        {"tables": None},
        {"policy": "never"},
        {"signature": {}},
        {"model": "../ctr"},
        {"number": "x"},
    ):
        rewrite(version, **fields)
        with pytest.raises(hr.RepositoryError, match=r"manifest\.json"):
            open_version(version.path)
    rewrite(version, tables=[{**tables[0], "rows": 7}, *tables[1:]])
    with pytest.raises(hr.RepositoryError, match="not what was exported here"):
        open_version(version.path)


def test_another_format_is_refused_with_both(repository: Path) -> None:
    path = repository / "ctr" / "2" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(hr.RepositoryError, match=r"version 99; this release reads 'hotrow-export' version"):
        open_version(path.parent)
