"""The GPUs of a machine are found without torch, or the reason is told why there are none. A stand-in for the driver's
library (fake_driver.c) has the GPUs and the faults; the process that asks it is the real one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hotrow.serve.processes import gpus
from hotrow.serve.processes.gpus import Gpu, find_gpus

COMPILER = shutil.which("cc") or shutil.which("gcc")
CUDA = "12.8"  # that torch is built for


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver's library."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_driver.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return folder


@pytest.fixture
def driver_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").touch()
    monkeypatch.setattr(gpus, "DRIVER_FILES", (str(tmp_path / "missing"), str(tmp_path / "version")))


def environment(folder: Path, **variables: str) -> dict[str, str]:
    rest = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**rest, "LD_LIBRARY_PATH": str(folder), **variables}


def test_gpus_are_listed_with_the_ids_that_cuda_visible_devices_takes(driver: Path, driver_is_loaded: None) -> None:
    names = "NVIDIA H200;NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    found = find_gpus(environment(driver, FAKE_GPUS=names), CUDA)
    assert found.why == "" and found.usable == (
        Gpu(0, "NVIDIA H200", "GPU-01010101-0101-0101-0101-010101010101", 1 << 30),
        Gpu(1, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-02020202-0202-0202-0202-020202020202", 2 << 30),
    )


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"FAKE_CUINIT": "100"}, "the NVIDIA driver sees no GPU; if `nvidia-smi -L` lists one"),
        ({"FAKE_GPUS": ""}, "the NVIDIA driver sees no GPU"),
        (
            {"FAKE_CUINIT": "100", "CUDA_VISIBLE_DEVICES": "7"},
            "CUDA_VISIBLE_DEVICES='7' names no GPU of this machine; `nvidia-smi -L` lists them",
        ),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides every GPU; unset it"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES='-1' hides every GPU; unset it"),
        ({"FAKE_CUINIT": "803"}, "does not work: CUDA error 803: system has unsupported display driver"),
        ({"FAKE_CUINIT": "999"}, "does not work: CUDA error 999: unknown error; repair it until `nvidia-smi` works"),
        ({"FAKE_CRASH": "1"}, "does not work: asking it ended with exit code -6"),
        ({"FAKE_DRIVER": "11080"}, f"supports CUDA 11 and torch {torch.__version__} is built for CUDA 12.8; install a"),
    ],
)
def test_reason_is_told_when_no_gpu_can_be_used(
    variables: dict[str, str], why: str, driver: Path, driver_is_loaded: None
) -> None:
    found = find_gpus(environment(driver, **{"FAKE_GPUS": "NVIDIA H200", **variables}), CUDA)
    assert found.usable == () and why in found.why


def test_missing_library_of_the_driver_points_to_the_container(tmp_path: Path, driver_is_loaded: None) -> None:
    (tmp_path / "libcuda.so.1").touch()  # found first, and no library, on a machine with a driver too
    found = find_gpus(environment(tmp_path), CUDA)
    assert found.usable == () and "library cannot be loaded" in found.why and "docker run --gpus all" in found.why


def test_torch_without_cuda_is_named(driver: Path, driver_is_loaded: None) -> None:
    found = find_gpus(environment(driver, FAKE_GPUS="NVIDIA H200"), None)
    assert found.usable == () and f"torch {torch.__version__} is built without CUDA; install a build" in found.why


def test_without_a_driver_no_process_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "DRIVER_FILES", (str(tmp_path / "missing"),))
    monkeypatch.setattr("subprocess.Popen", None)
    found = find_gpus({}, CUDA)
    assert found.usable == () and "there is no NVIDIA driver on this machine; if it has" in found.why


def test_driver_that_hangs_is_given_up(driver_is_loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(gpus.gpu_probe, "__file__", str(hangs))
    monkeypatch.setattr(gpus, "TIMEOUT_SECONDS", 0.2)
    assert "it has not answered for 0.2 s" in find_gpus(environment(tmp_path), CUDA).why


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpus_are_those_of_torch_in_its_order() -> None:
    found = find_gpus(os.environ, torch.version.cuda).usable
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    assert [gpu.name for gpu in found] == [one.name for one in properties]
    assert [gpu.uuid.partition("-")[2] for gpu in found] == [str(one.uuid) for one in properties]
