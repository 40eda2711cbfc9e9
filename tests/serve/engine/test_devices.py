"""--devices: which device each engine gets, what the options of its process are, and errors before a process starts."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plain_servable import write_version
from rich.console import Console

from hotrow.errors import OptionError
from hotrow.serve.processes import child as processes_child
from hotrow.serve.processes import child_runtime, gpus, mps, serve_options, supervisor
from hotrow.serve.processes.child import Child
from hotrow.serve.processes.devices import Device, describe, parse_devices, place, shared_gpus
from hotrow.serve.processes.gpus import Gpu, Gpus
from hotrow.serve.processes.serve_options import ServeOptions
from hotrow.serve.processes.status_line import StatusLine

FOUR = Gpus(tuple(Gpu(index, "NVIDIA H200", f"GPU-{index}{index}", 150 << 30) for index in range(4)))
NONE = Gpus(why="there is no NVIDIA driver; install one")
CPU = Device()
GPU = [Device(gpu) for gpu in FOUR.usable]


@pytest.fixture
def repository(tmp_path: Path) -> str:
    write_version(tmp_path / "repository", "ctr", 1)
    return str(tmp_path / "repository")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "usable_gpus", lambda: FOUR)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


def names(given: str, found: Gpus, hbm: str | None = None) -> list[str]:
    return [device.name for device in place(given, hbm, lambda: found).devices]


def test_auto_takes_every_gpu_and_otherwise_the_cpu() -> None:
    assert names("auto", FOUR) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert names("auto", NONE) == ["cpu"]


def test_devices_are_taken_in_the_given_order_and_may_repeat() -> None:
    assert names("3, cuda:1,cpu", FOUR) == ["cuda:3", "cuda:1", "cpu"]
    assert names("0,0", FOUR) == ["cuda:0", "cuda:0"]


def test_cpu_needs_no_look_at_the_gpus() -> None:
    def never() -> Gpus:
        raise AssertionError("the driver was asked")

    assert place("cpu,cpu", None, never).devices == (CPU, CPU)


@pytest.mark.parametrize("given", ["", "0,", "gpu", "cuda", "cuda:", "-1", "0;1", "auto,0", "1.5", "²"])
def test_word_that_is_no_device_is_named(given: str) -> None:
    with pytest.raises(OptionError, match="is no device; give GPUs by number"):
        parse_devices(given)


def test_missing_gpu_is_an_error_with_the_devices_that_exist() -> None:
    with pytest.raises(OptionError, match=r"--devices 0,4: there is no cuda:4; .*0 \(NVIDIA H200\), 1 .* and cpu"):
        names("0,4", FOUR)
    with pytest.raises(OptionError, match=r"--devices 0: no GPU can be used: there is no NVIDIA .*--devices cpu"):
        names("0", NONE)


def test_hbm_needs_gpus_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert names("auto", FOUR, "1GiB") == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    with pytest.raises(OptionError, match="--hbm 1GiB needs a GPU, and there is no NVIDIA driver; install one"):
        names("auto", NONE, "1GiB")
    with pytest.raises(OptionError, match="--devices 0,cpu: an engine on the CPU has no HBM"):
        names("0,cpu", FOUR, "1GiB")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match="needs Triton, which is not installed: pip install triton"):
        names("0", FOUR, "1GiB")


def test_start_says_where_engines_run_and_why_not_on_a_gpu() -> None:
    assert describe(place("auto", None, lambda: NONE), [CPU]) == [f"engine 0 on the CPU: {NONE.why}"]
    assert describe(place("cpu", None, lambda: NONE), [CPU]) == ["engine 0 on the CPU"]
    engines = [GPU[1], GPU[1], GPU[0]]
    assert describe(place("1,0", None, lambda: FOUR), engines) == [
        "engines 0, 1 on cuda:1 (NVIDIA H200)",
        "engine 2 on cuda:0 (NVIDIA H200)",
    ]


@pytest.mark.parametrize(
    ("devices", "processes", "shared"),
    [
        ("auto", 1, []),
        ("0", 1, []),
        ("0", 2, ["cuda:0"]),
        ("0,1", 1, []),
        ("0,1", 2, ["cuda:0", "cuda:1"]),
        ("0,1,1", 1, ["cuda:1"]),
        ("cpu,cpu", 3, []),
        ("cpu,cpu,2", 1, []),
        ("cpu,2", 2, ["cuda:2"]),
    ],
)
def test_mps_is_for_gpus_with_several_engines(
    devices: str, processes: int, shared: list[str], repository: str, four_gpus: None
) -> None:
    options = ServeOptions(repository, devices=devices, processes=processes)
    assert [device.name for device in shared_gpus(options.engine_devices)] == shared


@pytest.mark.parametrize(
    ("cores", "options", "threads"),
    [
        (2, {}, 2),  # as without --devices
        (2, {"devices": "cpu,cpu"}, 1),
        (1, {"devices": "cpu,cpu"}, 1),
        (17, {"devices": "0,1,2,3"}, 4),
        (17, {"devices": "0,1", "processes": 2, "lanes": 2}, 2),
        (17, {"devices": "0,1", "processes": 2, "frontends": 5}, 3),
        (17, {"devices": "0,1", "threads": 7}, 7),
    ],
)
def test_cores_are_divided_among_the_lanes_of_all_engines(
    cores: int, options: dict[str, Any], threads: int, repository: str, four_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    given = ServeOptions(repository, **{"devices": "cpu", **options})
    of_engines = [given.engine(number, "") for number in range(len(given.engine_devices))]
    assert (
        {engine.threads for engine in of_engines} == {engine.options["threads"] for engine in of_engines} == {threads}
    )


def test_engine_has_the_device_the_tiers_and_a_folder_of_its_own(repository: str, four_gpus: None) -> None:
    options = ServeOptions(repository, devices="2,cpu", processes=2, dram="1GiB", ssd="/data/rows")
    engines = [options.engine(number, "") for number in range(4)]
    assert [engine.device for engine in engines] == ["cuda:2", "cuda:2", "cpu", "cpu"]
    assert [engine.options.get("device") for engine in engines] == ["cuda:0", "cuda:0", None, None]
    assert [engine.options["ssd"] for engine in engines] == [f"/data/rows/engine-{number}" for number in range(4)]
    one = ServeOptions(repository, devices="cpu", dram="1GiB", ssd="/data/rows").engine(0, "")
    assert one.options["ssd"] == "/data/rows" and one.device == "cpu" and "device" not in one.options


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({"devices": "0,1"}, True),
        ({"devices": "0", "processes": 2, "dram": "1GiB", "ssd": "/data/rows"}, True),
        ({"devices": "0,cpu"}, True),
        ({"devices": "cpu", "processes": 2}, True),
        ({"devices": "auto"}, True),  # four GPUs
        ({"devices": "0"}, False),
        ({"devices": "0,1", "hbm": "1GiB"}, False),
        ({"devices": "0,1", "rows": ("10.0.0.1:8010",)}, False),
        ({"devices": "0,1", "remote": ("redis://10.0.0.1:6379",), "dram": "1GiB"}, False),
        ({"devices": "0,1", "loader": "plain_servable:load"}, False),
    ],
)
def test_engines_without_a_cache_on_a_gpu_share_one_row_server(
    options: dict[str, Any], shared: bool, repository: str, four_gpus: None
) -> None:
    assert ServeOptions(repository, **options).shares_rows == shared


def test_engine_over_a_row_server_has_its_device_and_no_tiers(repository: str, four_gpus: None) -> None:
    options = ServeOptions(repository, devices="2,cpu", dram="1GiB", ssd="/data/rows")
    engines = [options.engine(number, "", "/tmp/rows.sock") for number in range(2)]
    assert [engine.options.get("device") for engine in engines] == ["cuda:0", None]
    assert all(engine.options["rows"] == {"": "unix:/tmp/rows.sock"} for engine in engines)
    assert not any(tier in engine.options for engine in engines for tier in ("dram", "ssd", "hbm"))
    row_server = options.row_server("/tmp/rows.sock")
    assert (row_server["dram"], row_server["ssd"]) == ("1GiB", "/data/rows")


def test_options_that_do_not_go_with_the_devices_are_errors(repository: str, four_gpus: None) -> None:
    with pytest.raises(OptionError, match="--precision bf16 on cuda:1 without --hbm"):
        ServeOptions(repository, devices="1", precision="bf16")
    assert ServeOptions(repository, devices="1", precision="bf16", hbm="1GiB").engine(0, "").options["hbm"] == "1GiB"
    with pytest.raises(OptionError, match=r"with 4 engines .*cuda:3\): RocksDB lets one process open a folder"):
        ServeOptions(repository, remote=("rocksdb:/data/rows",), dram="1GiB")
    with pytest.raises(OptionError, match="--devices cpu,gpu: 'gpu' is no device"):
        ServeOptions(repository, devices="cpu,gpu")


def test_wrong_option_is_found_before_the_driver_is_asked(repository: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "usable_gpus", None)
    with pytest.raises(OptionError, match="policy=wiat"):
        ServeOptions(repository, policy="wiat")
    assert serve_options.gpus is gpus


@pytest.fixture
def signals() -> Iterator[None]:
    """Restores the handlers that a Supervisor replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_engine_sees_only_its_gpu_and_keeps_it_when_it_is_restarted(
    repository: str, four_gpus: None, signals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("CHILD_RUNTIME_FILE", child_runtime.__file__)
    monkeypatch.setattr(processes_child, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(mps, "DEFAULT_PIPE_FOLDER", str(tmp_path / "usual"))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    control = tmp_path / mps.CONTROL
    control.write_text(f'#!/bin/sh\necho "$1 $CUDA_VISIBLE_DEVICES $([ -z "$1" ] && cat)" >> {tmp_path}/calls\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    starts: list[tuple[str, str, str | None]] = []

    def stub(name: str, module: str, options: dict[str, Any], on_event: Any) -> Child:
        def note(child: Child, event: dict[str, Any]) -> None:
            if event["event"] == "ready" and name.startswith("engine"):
                environment = event["environment"]
                starts.append((name, environment["CUDA_VISIBLE_DEVICES"], environment.get("CUDA_MPS_PIPE_DIRECTORY")))
                if len(starts) == 5:
                    served.stop()
            on_event(child, event)

        return Child(name, "stub_child", {"ready": True, **options}, note)

    monkeypatch.setattr(supervisor, "Child", stub)
    options = ServeOptions(repository, devices="3,1,1,cpu", dram="1GiB", http=0, grpc=None, metrics=None, drain=1.0)
    served = supervisor.Supervisor(options)
    served.run(lambda ports: served.engines[1].process.kill())  # type: ignore[union-attr]
    pipe = f"{served.folder}/gpu-1/mps"
    expected = [
        ("engine 0 on cuda:3", "GPU-33", None),
        ("engine 1 on cuda:1", "GPU-11", pipe),
        ("engine 2 on cuda:1", "GPU-11", pipe),
        ("engine 3", "", None),
    ]
    assert sorted(starts[:4]) == expected and starts[4] == expected[1]
    assert (tmp_path / "calls").read_text().split() == ["-d", "GPU-11", "GPU-11", "quit"]
    said = capfd.readouterr().err
    assert "engines 1, 2 on cuda:1 (NVIDIA H200)" in said and "cuda:1: MPS was started" in said
    assert "the engines share the rows of one row server: --dram 1GiB" in said
    assert "engine 1 on cuda:1 ended with -9; it starts again" in said


def test_reason_why_a_restarted_engine_fails_is_shown(repository: str, four_gpus: None) -> None:
    console = Console(file=io.StringIO(), width=200)
    served = supervisor.Supervisor(ServeOptions(repository, devices="1"), console)
    child = Child("engine 0 on cuda:1", "stub_child", {}, served._on_event)
    for child.restarts in (0, 1):  # at the first start the server ends with the same text as its error
        served._on_event(child, {"event": "failed", "why": "torch cannot compute on it"})
    shutil.rmtree(served.folder)
    assert console.file.getvalue() == "engine 0 on cuda:1: torch cannot compute on it\n"  # type: ignore[attr-defined]


def test_status_line_shows_the_rows_of_each_device() -> None:
    def figures(rows: int) -> dict[str, Any]:
        queue = {"admitted": rows, "batches": 1, "batch_rows": rows}
        return {"queue": queue, "latency": [rows], "versions": []}

    line, devices = StatusLine(), ["cuda:0", "cuda:0", "cuda:1"]
    line.line([figures(0), figures(0), {}], {"ctr": "1"}, devices)
    shown = line.line([figures(10_000), figures(10_000), figures(0)], {"ctr": "1"}, devices)
    assert "rows/s: cuda:0 " in shown and shown.rstrip().endswith("cuda:1 0")
    assert "rows/s" not in StatusLine().line([figures(5)], {"ctr": "1"}, ["cpu"])
