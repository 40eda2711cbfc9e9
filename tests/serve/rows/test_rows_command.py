"""`hotrow rows` as a user meets it: options with their cures, signals, the status page."""

from __future__ import annotations

import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import forked
import pytest
from row_servers import TOKEN, until
from small_models import trained

import hotrow as hr
from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.tiers.rows.cluster_file import RowsAddress


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no repository 'nowhere'; export a model into it"),
        (["empty"], "empty has no model; export one: hr.export(model, 'empty/ctr')"),
        (["repository", "--model", "crt"], "--model crt: did you mean 'ctr'"),
        (["repository", "--shards", "0:2000"], "--shards '0:2000': give BEGIN:END with 0 <= BEGIN < END <= 1024"),
        (["repository", "--shards", "512"], "--shards '512': give BEGIN:END"),
        (["repository", "--listen", "8010"], "'8010' is no address of a row server; give HOST:PORT"),
        (["repository", "--listen", "0.0.0.0:8010"], "--listen 0.0.0.0:8010 without a token: every machine"),
        (["repository", "--listen", "0.0.0.0:0"], "--listen 0.0.0.0:0 without a token"),
        (["repository", "--listen", "[::]:8010"], "--listen [::]:8010 without a token"),
        (["repository", "--listen", "rows.prod:8010"], "openssl rand -hex 32 > rows.token; chmod 600 rows.token"),
        (["repository", "--listen", ":0"], "--listen :0 without a token"),
        (["repository", "--token-file", "missing"], "--token-file 'missing' cannot be read"),
        (["repository", "--token-file", "open"], "'open' is readable by every user of this machine (mode 0644)"),
        (["repository", "--token-file", "short"], "a token of row servers has at least 16 characters, this one 5"),
        (["repository", "--ssd", "rows"], "ssd='rows' without dram="),
        (["repository", "--dram", "much"], "dram"),
        (["repository", "--history", "1KiB"], "--history 1KiB: give at least 1MiB"),
        (["repository", "--drain", "0s"], "--drain 0: give seconds above 0"),
        (["repository", "--drain", "5"], "--drain 5: give a number and a unit"),
        (["repository", "--bus", "dri:/data"], "--bus dri:/data: did you mean 'dir'"),
        (["repository", "--bus", "crt=dir:/data"], "there is no model 'crt'; did you mean 'ctr'"),
        (["repository", "--register", "redis://host/0"], "--register without --advertise"),
        (
            ["repository", "--register", "http://me:hunter2@host/0"],
            "--register http://host/0: give redis://HOST:PORT/0",
        ),
        (["repository", "--bus", "crt=redis://me:hunter2@host/0"], "--bus crt=redis://host/0: there is no model 'crt'"),
        (["repository", "--register", "redis://host/0", "--advertise", "host"], "'host' is no address of a row server"),
    ],
)
def test_a_wrong_option_is_named_with_its_cure(
    tmp_path: Path,
    repository: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from hotrow.cli import main

    monkeypatch.chdir(tmp_path)
    Path("repository").symlink_to(repository)
    Path("empty").mkdir()
    for name, secret, mode in [("open", TOKEN, 0o644), ("short", "short", 0o600)]:
        Path(name).write_text(secret)
        Path(name).chmod(mode)
    monkeypatch.setattr(sys, "argv", ["hotrow", "rows", *arguments])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error, error
    assert TOKEN not in error and "Traceback" not in error
    assert "hunter2" not in error.replace("password", "")


def start(log: Path, *arguments: str) -> forked.Forked:
    process = forked.hotrow("rows", *arguments, log=log, env={"COLUMNS": "300"})
    until(lambda: "serving rows" in process.text() or process.poll() is not None, "the row server")
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_order(
    tmp_path: Path, repository: Path, redis: RedisServers, number: signal.Signals
) -> None:
    """It leaves the set in Redis and its socket file; it does so while clients are connected, too."""
    pytest.importorskip("redis", reason="pip install hotrow[redis]")
    path = tmp_path / "rows.sock"
    place = f"{redis.url}/0?set=rows-{os.getpid()}-{int(number)}"
    process = start(
        tmp_path / "log", str(repository), "--listen", "127.0.0.1:0", "--listen", f"unix:{path}", "--metrics", "-1",
        "--register", place, "--advertise", "10.0.0.1:8010",
    )  # fmt: skip
    try:
        assert list(RowsAddress.parse(place).servers()) == ["10.0.0.1:8010"]
        assert "loaded ctr version 1:" in process.text() and "rows of shards 0:1024 at publication 0" in process.text()
        with hr.Engine(repository / "ctr", memory=hr.Memory(rows=f"unix:{path}")):
            process.send_signal(number)
            assert process.wait(30) == 0, process.text()
        assert not path.exists() and RowsAddress.parse(place).servers() == {}
        assert "Traceback" not in process.text()
    finally:
        process.kill()


def test_the_status_page_says_when_it_is_ready(tmp_path: Path) -> None:
    hr.export(trained().model, tmp_path / "repository" / "ctr")
    port = free_port()
    process = start(tmp_path / "log", str(tmp_path / "repository"), "--listen", "127.0.0.1:0", "--metrics", str(port))
    try:
        for path, text in [("/live", "live"), ("/ready", "ready"), ("/metrics", 'hotrow_rows_rows{model="ctr"')]:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                assert text in answer.read().decode()
        second = forked.hotrow(
            "rows", str(tmp_path / "repository"), "--listen", "127.0.0.1:0", "--metrics", str(port),
            log=tmp_path / "second", env={"COLUMNS": "300"},
        )  # fmt: skip
        assert second.wait(60) == 2
        assert f"--metrics {port}: cannot listen on 127.0.0.1" in second.text() and "Traceback" not in second.text()
    finally:
        process.kill()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
