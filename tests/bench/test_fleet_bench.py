"""The fleet benches: what the check of answers finds, nginx's configuration, and both from front to back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotrow.bench.harness import Result
from hotrow.bench.serving import checked_load, failover, fleet, fleet_history, serve_model
from hotrow.bench.serving.fleet_history import REQUEST_ROWS, TABLES, WIDTH, Answer, History
from hotrow.bench.serving.fleet_servers import check_nginx, nginx_config
from hotrow.errors import OptionError

KEYS = fleet_history.request_keys()


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    """Three publications of a small trainer; the bus gets none of them."""
    monkeypatch.setattr(fleet_history, "CHANGED", 50_000)
    monkeypatch.setattr(fleet_history, "DENSE_EVERY", 2)
    made = History(f"dir:{tmp_path / 'bus'}", tmp_path / "spool")
    for number in (1, 2, 3):
        made._publish(number)
    return made


def answer(history: History, request: int, publication: int, weights: int) -> Answer:
    """What a server at this publication answers, made key by key."""
    vectors = []
    initial = {rows.table.name: rows.store for rows in fleet_history.collection().tables}
    for row in KEYS[request]:
        for key, (name, dim) in zip(row.tolist(), TABLES.items(), strict=True):
            last = 0 if key < fleet_history.ROWS else -1
            for number, published in enumerate(history._published[:publication], 1):
                keys, removed = published.changes[name]
                last = number if key in keys else -1 if key in removed else last
            if last < 0:
                vectors.append(initial[name].read(torch.tensor([key]))[0][0])
            else:
                vectors.append(torch.tensor([key, last] * (dim // 2), dtype=torch.float32))
    values = torch.cat(vectors).view(REQUEST_ROWS, WIDTH).numpy()
    logits = np.full(REQUEST_ROWS, weights, np.float32)
    at = 0.5 + (history._published[publication - 1].at if publication else 0.0)
    return Answer(request, at, publication, publication, 0.25, 0, values, logits)


def test_answers_of_one_publication_are_accepted(history: History) -> None:
    good = [answer(history, request, 3, 2) for request in range(20)] + [answer(history, 0, 1, 0)]
    found = history.check(good, KEYS)
    assert (found.answers, found.mixed, found.publications) == (21, [], 2)
    assert found.oldest == pytest.approx(0.5)


def test_rows_or_weights_of_another_publication_are_found(history: History) -> None:
    good = answer(history, 0, 3, 2)
    older = answer(history, 0, 2, 2)
    assert (older.vectors != good.vectors).any()
    one_row = good.vectors.copy()
    changed = int(np.flatnonzero((older.vectors != good.vectors).any(axis=1))[0])
    one_row[changed] = older.vectors[changed]
    torn = good.vectors.copy()
    torn[0, 1] += 1
    wrong: list[dict[str, Any]] = [
        {"vectors": one_row},
        {"vectors": torn},
        {"logits": np.zeros(REQUEST_ROWS, np.float32)},
        {"publication": 2, "highest": 2},
        {"publication": 9, "highest": 9},
        {"highest": 4},
        {"late_rows": 1},
    ]
    found = history.check([replace(good, **change) for change in wrong], KEYS)
    assert len(found.mixed) == found.answers == len(wrong), found.mixed


def test_records_come_back_from_a_file(tmp_path: Path) -> None:
    records = [checked_load.Record(n, 200, 1.5, 0.25, 3, bytes(range(n))) for n in range(5)]
    checked_load.write_records(str(tmp_path / "records"), records)
    assert list(checked_load.read_records(str(tmp_path / "records"))) == records


def test_a_request_names_its_keys_and_wants_vectors_and_logits() -> None:
    length, body = fleet_history.request_bodies(KEYS)[7]
    head = json.loads(body[:length])
    assert [output["name"] for output in head["outputs"]] == ["embeddings", "logits"]
    keys = np.frombuffer(body, np.int64, offset=length).reshape(head["inputs"][0]["shape"])
    assert (keys == KEYS[7]).all()


def test_nginx_gets_our_servers_with_the_parameters_of_deploy(tmp_path: Path) -> None:
    text = """upstream hotrow_http {
    least_conn;
    server 127.0.0.1:8000 max_fails=3;
    server 127.0.0.1:8100 max_fails=3;
    server 127.0.0.1:8000 backup;
}
server {
    listen 127.0.0.1:8443 ssl http2;
    ssl_certificate /etc/hotrow/public.crt;
    access_log /var/log/nginx/hotrow.log;
}
"""
    made = nginx_config(text, tmp_path, 7000, [7001, 7002])
    assert "listen 127.0.0.1:7000;" in made and "ssl" not in made and str(tmp_path) in made
    for port in (7001, 7002):
        assert f"server 127.0.0.1:{port} max_fails=3;" in made and f"server 127.0.0.1:{port} backup;" in made
    assert "8000" not in made and "8100" not in made
    with pytest.raises(OptionError, match="one listener"):
        nginx_config("server {}", tmp_path, 7000, [7001])


@pytest.mark.soak
def test_no_answer_fails_when_row_servers_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serve_model, "KEYS", 200)
    monkeypatch.setattr(failover, "KILL_SECONDS", 2.0)
    monkeypatch.setattr(failover, "LOAD", 0.1)
    monkeypatch.setattr(fleet, "DEADLINE", 10_000.0)
    monkeypatch.setenv("HOTROW_BENCH_SCALE", "0.5")
    rows = {row.name: row for row in fleet.failover(tmp_path) if isinstance(row, Result)}
    assert rows["split/failover/failed"].value == 0 and rows["split/failover/p99"].value > 0


@pytest.mark.soak
def test_a_rolling_restart_fails_no_answer_and_mixes_no_publications(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        check_nginx()
    except OptionError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("HOTROW_BENCH_SCALE", "0.5")
    rows = {row.name: row for row in fleet.rolling(tmp_path) if isinstance(row, Result)}
    assert rows["split/rolling/failed"].value == 0 and rows["split/rolling/mixed"].value == 0
    assert rows["split/rolling/oldest"].value < 30  # the bar is 2 s on a machine that does nothing else
