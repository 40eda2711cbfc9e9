"""The serving bench from front to back: a real server and a real load, for moments, without peers."""

from __future__ import annotations

import pytest

pytest.importorskip("httptools")

from hotrow.bench.harness import Result
from hotrow.bench.serving import serve, serve_model
from hotrow.bench.serving.load_client import percentile
from hotrow.bench.serving.serve import Point, best_pair
from hotrow.errors import OptionError


@pytest.mark.soak
def test_answers_are_compared_and_a_burst_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_model, "KEYS", 200)
    monkeypatch.setattr(serve, "BURST_CONNECTIONS", 256)
    monkeypatch.setenv("HOTROW_BENCH_SCALE", "0.1")
    monkeypatch.setenv("HOTROW_BENCH_ONLY", "same,burst")
    rows = {row.name: row for row in serve.results() if isinstance(row, Result)}
    assert {"serve/same", "serve/burst", "serve/burst/after"} <= set(rows)
    assert rows["serve/same"].value <= rows["serve/same"].peer_value
    assert all(row.value > 0 for row in rows.values() if row.peer == "capacity")


def test_ours_is_the_fastest_point_whose_p99_is_no_worse_than_that_of_their_fastest() -> None:
    theirs = {4: Point(700, 0.010), 32: Point(650, 0.080)}
    ours = {4: Point(1500, 0.004), 16: Point(2200, 0.009), 32: Point(2600, 0.020)}
    assert best_pair(ours, theirs) == (ours[16], theirs[4])
    assert best_pair({4: Point(1500, 0.050)}, theirs)[0].p99 == 0.050


def test_percentiles_are_those_of_the_sorted_times() -> None:
    times = [i / 1000 for i in range(1000, 0, -1)]
    assert percentile(times, 0.99) == pytest.approx(0.991)
    assert percentile(times, 0.5) == pytest.approx(0.501)
    assert percentile([], 0.99) == 0


def test_an_unknown_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTROW_BENCH_ONLY", "same,none")
    with pytest.raises(OptionError, match="tensorbatch"):
        serve.wanted_parts()
