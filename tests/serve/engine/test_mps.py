"""MPS is started if it is not running, in a private folder, and ended only by the object that started it. A stand-in
for NVIDIA's program records its calls, so the test needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotrow.serve.processes import mps


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    calls = tmp_path / "calls"
    program = programs / mps.CONTROL
    program.write_text(
        f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES $([ -z "$1" ] && cat)" >> {calls}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(mps, "DEFAULT_PIPE_FOLDER", str(tmp_path / "usual"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return calls


def test_mps_is_started_in_a_private_folder_and_ended(control: Path, tmp_path: Path) -> None:
    service = mps.Mps(tmp_path / "own", "GPU-7")
    assert "was started" in service.start() and service.started
    pipe = service.environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert Path(pipe).is_relative_to(tmp_path / "own")
    service.stop()
    service.stop()
    assert [line.split() for line in control.read_text().splitlines()] == [
        ["-d", pipe, "GPU-7"],
        [pipe, "GPU-7", "quit"],
    ]


def test_running_mps_is_used_and_not_ended(control: Path, tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "control").touch()
    service = mps.Mps(tmp_path / "own", "GPU-7")
    assert "already" in service.start()
    service.stop()
    assert not control.exists() and service.environment == {}


def test_without_the_program_the_message_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mps, "DEFAULT_PIPE_FOLDER", str(tmp_path / "usual"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert "take turns" in mps.Mps(tmp_path, "GPU-7").start()
