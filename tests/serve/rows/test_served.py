"""`hotrow rows` and `hotrow serve` as people run them: real processes, over HTTP."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from row_servers import TOKEN, RowsCommand
from server_process import KEYS, Server, ShowsRows, until

import hotrow as hr
from hotrow.serve.rows.shards import in_shards


def export(folder: Path, keys: int = KEYS, name: str = "ctr", seed: int = 3, **options: Any) -> hr.Recommender:
    """A model whose answers are its rows: each has the key's number."""
    embeddings = hr.EmbeddingCollection([hr.Table("user", dim=1)], seed=seed)
    numbers = torch.arange(keys)
    embeddings.table("user").assign(numbers, numbers[:, None].float() + seed)
    model = hr.Recommender(embeddings, ShowsRows())
    hr.export(model, folder / "repository" / name, dense_features=0, **{"policy": "wait", **options})
    return model


def status_of(server: Server, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.ports['http']}{path}", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def load(server: Server, model: str) -> None:
    url = f"http://127.0.0.1:{server.ports['http']}/v2/repository/models/{model}/load"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=90) as answer:
        assert answer.status == 200


class Askers:
    """Threads that ask for all rows without a pause, and note every status and every wrong row."""

    def __init__(self, server: Server, allowed: list[np.ndarray[Any, Any]], threads: int = 2) -> None:
        self.server, self.allowed = server, allowed
        self.statuses: dict[int, int] = {}
        self.wrong = 0
        self.texts: set[str] = set()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.is_set():
            status = 200
            try:
                rows, _ = self.server.ask(seconds=1.0)
                self.wrong += not any(np.array_equal(rows, one) for one in self.allowed)
            except urllib.error.HTTPError as error:
                status = error.code
                self.texts.add(error.read().decode()[:500])
                time.sleep(0.02)
            self.statuses[status] = self.statuses.get(status, 0) + 1

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.wrong
        assert set(self.statuses) <= {200, 503}, (self.statuses, self.texts)


def test_a_fleet_of_two_ranges_answers_loses_one_and_has_it_back(tmp_path: Path) -> None:
    export(tmp_path)
    token = tmp_path / "rows.token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    repository = tmp_path / "repository"
    shards = ("--shards", "0:512"), ("--shards", "512:1024")
    rows = [
        RowsCommand(tmp_path / f"rows-{number}.log", repository, 0, *part, "--token-file", str(token))
        for number, part in enumerate(shards)
    ]
    where = ",".join(one.address for one in rows)
    expected = np.arange(KEYS, dtype=np.float32) + 3
    unseen = hr.EmbeddingCollection([hr.Table("user", dim=1)], seed=3).table("user").read(torch.arange(KEYS))[:, 0]
    first = in_shards(torch.arange(KEYS), (0, 512))
    try:
        with Server(tmp_path, "--rows", where, "--rows-token-file", str(token)) as server:
            assert np.array_equal(server.ask()[0], expected)
            assert status_of(server, "/v2/health/ready") == 200
            until(lambda: server.metric("hotrow_row_servers_complete") == 1.0, "the metric")
            check_secret(
                [server.process.pid, *(one.process.pid for one in rows)],
                server.text(),
                *(r.process.text() for r in rows),
            )

            rows[1].process.kill()
            until(lambda: status_of(server, "/v2/health/ready") == 503, "the server to say that it is not ready")
            until(lambda: server.metric("hotrow_row_servers_complete") == 0.0, "the metric")
            with pytest.raises(urllib.error.HTTPError) as late:
                server.ask("wait", 0.3)
            assert late.value.code == 503
            found, said = server.ask("initial", 0.3)
            assert np.array_equal(found, np.where(first, expected, unseen.numpy()))
            assert said["late_rows"] == int((~first).sum())

            rows.append(
                RowsCommand(tmp_path / "again.log", repository, rows[1].port, *shards[1], "--token-file", str(token))
            )
            until(lambda: status_of(server, "/v2/health/ready") == 200, "the server to be ready again")
            assert np.array_equal(server.ask()[0], expected)
            until(lambda: server.metric("hotrow_row_servers_complete") == 1.0, "the metric")
            check_secret(
                [server.process.pid, rows[0].process.pid, rows[2].process.pid], server.text(), rows[2].process.text()
            )
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(60) == 0, server.text()
        for one, number in ((rows[0], signal.SIGTERM), (rows[2], signal.SIGINT)):
            one.process.send_signal(number)
            assert one.process.wait(30) == 0, one.process.text()
    finally:
        for one in rows:
            one.end()


def check_secret(processes: list[int], *texts: str) -> None:
    """No output and no process shows the token."""
    for text in texts:
        assert TOKEN not in text
    for number in processes:
        for one in (psutil.Process(number), *psutil.Process(number).children(recursive=True)):
            assert TOKEN not in repr(one.cmdline())
            assert not any(TOKEN in value for value in one.environ().values())  # not in the log of this test


def test_engine_processes_share_one_row_server(tmp_path: Path) -> None:
    """The rows exist once; the row server that is killed comes back; versions and models come later."""
    export(tmp_path)
    with Server(tmp_path, "--processes", "2") as server:
        family = {name: children(server, name) for name in ("engine_process", "row_server_process")}
        assert [len(found) for found in family.values()] == [2, 1]
        (holder,) = family["row_server_process"]
        before = [one.memory_full_info().uss for one in (*family["engine_process"], holder)]
        expected = [np.arange(KEYS, dtype=np.float32) + 3, np.arange(KEYS, dtype=np.float32) + 5]
        assert np.array_equal(server.ask()[0], expected[0])
        askers = Askers(server, [*expected])

        export(tmp_path, 2_000_000, seed=5)  # 32 MB and an index
        load(server, "ctr")
        assert np.array_equal(server.ask()[0], expected[1])
        after = [one.memory_full_info().uss for one in (*family["engine_process"], holder)]
        grown = [(b - a) >> 20 for a, b in zip(before, after, strict=True)]
        assert grown[2] > 30 and max(grown[:2]) < grown[2] / 2, grown

        export(tmp_path, name="feed", seed=7)
        load(server, "feed")
        assert status_of(server, "/v2/models/feed/ready") == 200

        export(tmp_path, 2000, seed=9)  # version 1 retires
        askers.allowed.append(np.arange(KEYS, dtype=np.float32) + 9)
        load(server, "ctr")
        time.sleep(0.5)
        assert set(askers.statuses) == {200}, (askers.statuses, askers.texts)

        holder.kill()
        until(lambda: askers.statuses.get(503, 0) > 0, "answers that say that the rows are away")
        until(lambda: len(children(server, "row_server_process")) == 1, "the next row server")
        until(lambda: status_of(server, "/v2/health/ready") == 200, "the server to be ready again")
        until(lambda: np.array_equal(server.ask()[0], askers.allowed[-1]), "answers")
        askers.end()
        assert "row server ended with -9; it starts again" in server.text()
        processes = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.text()
        assert not [one for one in processes if one.is_running()]


def children(server: Server, word: str) -> list[psutil.Process]:
    return [p for p in psutil.Process(server.process.pid).children() if any(word in part for part in p.cmdline())]


@pytest.mark.soak
def test_a_supervisor_that_is_killed_leaves_no_row_server(tmp_path: Path) -> None:
    export(tmp_path)
    with Server(tmp_path, "--processes", "2") as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert len(family) >= 4
        server.process.kill()
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive


@pytest.mark.soak
def test_a_damaged_model_beside_others_is_named_and_the_others_serve(
    tmp_path: Path,
) -> None:
    export(tmp_path)
    export(tmp_path, name="feed")
    for path in (tmp_path / "repository" / "feed" / "1").glob("rows/*/segment-*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    with Server(tmp_path, "--processes", "2") as server:
        assert np.array_equal(server.ask()[0], np.arange(KEYS, dtype=np.float32) + 3)
        assert "feed does not load" in server.text() and "is damaged in block" in server.text()
        request = urllib.request.Request(f"http://127.0.0.1:{server.ports['http']}/v2/repository/index", b"{}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            index = {one["name"]: one for one in json.loads(answer.read())}
        assert index["feed"]["state"] == "UNAVAILABLE" and "is damaged in block" in index["feed"]["reason"]
