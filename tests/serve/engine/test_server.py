"""`hotrow serve` as a command: start it, send requests over HTTP, kill its processes, end it."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
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


def test_release_is_followed_by_all_engines_and_survives_their_death(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write_version(tmp_path / "repository", "ctr", version)
    model = str(tmp_path / "repository" / "ctr")

    def release(*arguments: str) -> str:
        ran = forked.hotrow("release", model, *arguments, log=tmp_path / "release.log", env={"COLUMNS": "200"})
        assert ran.wait(120) == 0, ran.text()
        return ran.text()

    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while True:
            with contextlib.suppress(urllib.error.HTTPError):
                if condition():
                    return
            assert time.monotonic() < end, server.text()
            time.sleep(0.1)

    release("--alias", "stable=1")
    server = Served(tmp_path / "repository", "--poll", "200ms", "--processes", "2", "--frontends", "2")
    try:
        assert server.infer()["model_version"] == "1"  # not 3, the newest
        assert "5% of them" in release("--canary", "2:5%", "--shadow", "3")
        until(lambda: server.infer("@canary")["model_version"] == "2")
        until(lambda: server.infer("@shadow")["model_version"] == "3")
        for engine in server.children("engine_process"):
            engine.kill()
            until(lambda: len(server.children("engine_process")) == 2)
        for _ in range(10):
            until(lambda: server.infer("@canary")["model_version"] == "2")
        until(lambda: server.infer()["model_version"] == "1")
        for _ in range(50):
            server.infer("@stable")
        until(lambda: 'hotrow_shadow_difference_count{model="ctr",version="3"}' in server.get("/metrics", "metrics"))
        for version, role, share in (("1", "stable", 0.95), ("2", "canary", 0.05), ("3", "shadow", 1)):
            line = f'hotrow_release_share{{model="ctr",version="{version}",role="{role}"}} {share}'
            until(lambda line=line: line in server.get("/metrics", "metrics"))  # type: ignore[misc]
        release("--alias", "stable=2")  # the canary is promoted, and ends
        until(lambda: server.infer()["model_version"] == "2")

        def canary_is_unknown() -> bool:
            try:
                server.infer("@canary")
            except urllib.error.HTTPError as error:
                return error.code == 404
            return False

        until(lambda: all(canary_is_unknown() for _ in range(10)))  # at each front end, once both engines have polled
    finally:
        server.end()


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
