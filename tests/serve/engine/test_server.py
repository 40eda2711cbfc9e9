"""`hotrow serve` as a command: start it, send requests over HTTP, kill its processes, end it."""

from __future__ import annotations

import signal
import socket
import sys
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import forked
import psutil
import pytest
from plain_servable import write_version
from served import Served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    write_version(tmp_path / "repository", "ctr", 1)
    server = Served(tmp_path / "repository")
    yield server
    server.end()


def test_server_answers_survives_its_engines_death_and_drains(served: Served) -> None:
    answer = served.infer()
    assert answer["model_name"] == "ctr" and answer["model_version"] == "1"
    assert len(answer["outputs"][0]["data"]) == 2
    assert "ctr (version 1)" in served.text()
    write_version(served.repository, "ctr", 2)
    served.get("/v2/repository/models/ctr/load", data=b"{}")
    assert served.infer()["model_version"] == "2"

    (engine,) = served.children("engine_process")
    engine.kill()
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            again = served.infer("/versions/1")  # the restarted engine has the same versions
            break
        except urllib.error.HTTPError as error:
            assert error.code == 503
            time.sleep(0.1)
    assert again["outputs"] == answer["outputs"] and served.infer()["model_version"] == "2"
    assert "engine 0 ended with -9; it starts again" in served.text()
    time.sleep(2.5)
    metrics = served.get("/metrics", "metrics")
    assert "hotrow_engine_restarts_total 1" in metrics
    assert 'nv_inference_count{model="ctr",version="1"} 2' in metrics
    assert 'nv_inference_request_failure{model="ctr",version="2",reason="REFUSED"}' in metrics

    family = psutil.Process(served.process.pid).children(recursive=True)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(30) == 0
    assert not [process for process in family if process.is_running()]
    assert "stopped" in served.text()


def test_killed_supervisor_leaves_no_orphans(served: Served) -> None:
    family = psutil.Process(served.process.pid).children(recursive=True)
    assert len(family) >= 2
    served.process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive


def test_port_in_use_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ("serve", str(tmp_path / "repository"), "--http", port)
        ended = forked.hotrow(*arguments, log=tmp_path / "log", env={"COLUMNS": "200"})
        assert ended.wait(120) == 2
    assert f"--http {port}: cannot listen on 127.0.0.1:{port}" in ended.text()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere"], "there is no repository 'nowhere'"),
        ([".", "--policy", "wiat"], "did you mean 'wait'?"),
        ([".", "--deadline", "50"], "--deadline 50: give a number and a unit"),
        ([".", "--ssd", "rows"], "--ssd without --dram"),
    ],
)
def test_wrong_option_is_named_with_its_cure(
    arguments: list[str], error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hotrow.cli import main

    monkeypatch.setattr(sys, "argv", ["hotrow", "serve", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and error in capsys.readouterr().err
