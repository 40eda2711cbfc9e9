"""Errors of the disk are one line with the path and the cure."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import hotrow as hr
from hotrow.train.checkpoint import durable_files


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free some space there"),
        (errno.EROFS, "mount it writable"),
        (errno.EACCES, "give this user the right to write there"),
        (errno.EIO, "look at the disk"),
    ],
)
def test_a_refused_write_names_the_file_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    def refuse(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(hr.StorageError, match=f"cannot write {tmp_path}/x: {os.strerror(number)}; {cure}"):
        durable_files.write(tmp_path / "x", b"data")
    with pytest.raises(OSError, match="cannot sync"):
        durable_files.sync(tmp_path)


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    durable_files.write(tmp_path / "x", b"old")
    with pytest.raises(hr.StorageError, match="File exists"):
        durable_files.write(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"


def test_folders_are_made_with_those_above_and_removed_with_what_is_inside(tmp_path: Path) -> None:
    durable_files.make(tmp_path / "a" / "b")
    durable_files.make(tmp_path / "a" / "b")
    durable_files.write(tmp_path / "a" / "b" / "x", b"")
    durable_files.rename(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c" / "b" / "x").exists()
    durable_files.remove(tmp_path / "c")
    durable_files.remove(tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(hr.StorageError, match="a file is where a folder should be"):
        durable_files.make(tmp_path / "x")
