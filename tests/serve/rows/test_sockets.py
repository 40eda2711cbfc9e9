"""Where a row server listens: ports and socket files that it cannot have, IPv6, the status page."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from row_servers import Rows, over, where
from small_models import make_batch

from hotrow.errors import OptionError


def test_a_port_in_use_is_an_error_before_a_row_is_loaded(repository: Path, rows: Rows, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for options in ({"listen": (f"127.0.0.1:{port}",)}, {"listen": ("127.0.0.1:0",), "metrics": port}):
            with pytest.raises(OptionError, match=rf"{port}: cannot listen .* give another port"):
                rows.start(repository, **options)
            assert not rows.running.pop().versions


def test_a_socket_file_that_cannot_be_is_an_error_before_a_row_is_loaded(
    repository: Path, rows: Rows, tmp_path: Path
) -> None:
    precious = tmp_path / "model.bin"
    precious.write_text("years of work")
    running = rows.start(repository, listen=(f"unix:{tmp_path / 'rows.sock'}",))
    for path, said in [
        (precious, "is there and no socket"),
        (tmp_path / "nowhere" / "rows.sock", "No such file or directory"),
        (tmp_path / ("x" * 120), "path too long"),
        (tmp_path / "rows.sock", "another process listens there"),
    ]:
        with pytest.raises(OptionError, match=said):
            rows.start(repository, listen=(f"unix:{path}",))
        assert not rows.running.pop().versions
    assert precious.read_text() == "years of work"
    assert running.addresses == [f"unix:{tmp_path / 'rows.sock'}"]
    with over(repository / "ctr", running.addresses[0]) as engine:
        engine.logits(make_batch(5))
    assert (tmp_path / "rows.sock").stat().st_mode & 0o777 == 0o600


def test_a_socket_file_of_a_server_that_was_killed_is_replaced(repository: Path, rows: Rows, tmp_path: Path) -> None:
    path = tmp_path / "rows.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))
    left.close()
    server = rows.start(repository, listen=(f"unix:{path}",))
    with over(repository / "ctr", server.addresses[0]) as engine:
        engine.logits(make_batch(5))


def test_ipv6_has_metrics_too(repository: Path, rows: Rows) -> None:
    server = rows.start(repository, listen=("[::1]:0",), metrics=0)
    assert server._status is not None
    with urllib.request.urlopen(f"http://[::1]:{server._status.port}/ready", timeout=10) as answer:
        assert answer.read() == b"ready\n"
    with over(repository / "ctr", where(server, local="off")) as engine:
        engine.logits(make_batch(5))


def test_metrics_page_has_every_figure_with_its_help(repository: Path, rows: Rows) -> None:
    server = rows.start(repository, metrics=0)
    assert server._status is not None

    def ask(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{server._status.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    with over(repository / "ctr", where(server, local="off")) as engine:
        engine.logits(make_batch(30))
        page = ask("/metrics")
        lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        assert float(lines['hotrow_rows_lookups_total{model="ctr",version="1"}']) == 1
        assert float(lines['hotrow_rows_keys_total{model="ctr",version="1"}']) > 30
        assert float(lines["hotrow_rows_connections"]) == 9
        assert float(lines['hotrow_rows_publication{model="ctr",version="1"}']) == 0
        from prometheus_client.parser import text_string_to_metric_families

        families = list(text_string_to_metric_families(page))
        assert all(family.documentation for family in families) and len(families) > 10
    assert ask("/live") == "live\n" and ask("/ready") == "ready\n"
    with pytest.raises(urllib.error.HTTPError):
        ask("/nothing")
