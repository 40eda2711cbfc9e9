"""The demo in a short form: it trains, serves and publishes, and its page has what it promises."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from command_line import hotrow

import hotrow as hr
from hotrow.demo.page import Line, Plot, page, svg, ticks


@pytest.fixture
def threads() -> Iterator[None]:
    """The demo takes one thread of each kind; what comes after has as many as before."""
    torch_threads, our_threads = torch.get_num_threads(), hr.threads()
    yield
    torch.set_num_threads(torch_threads)
    hr.set_threads(our_threads)


@pytest.mark.usefixtures("threads")
def test_the_short_demo_makes_a_report_with_its_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds of clicks that happen are enough for all it shows; most of the rest is processes that start."""
    pytest.importorskip("httptools", reason="pip install hotrow[serve]")
    home = tmp_path / "demo"
    monkeypatch.setenv("HOTROW_DEMO_SECONDS", "6")
    done = hotrow("demo", "--output", str(home))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "".join(str(home / "report.html").split()) in "".join(done.stdout.split())
    figures = json.loads((home / "figures.json").read_text())
    assert figures["examples"] > 0 and figures["rows"] > 0
    assert figures["answers"] > 0 and figures["errors"] == 0
    assert figures["publications"] > 0
    assert 0.5 < figures["best_auc"] < 1
    assert math.isfinite(figures["latency_ms"]["p99"])
    shown = (home / "report.html").read_text()
    for title in ("AUC: predict, then learn", "Log loss", "Rows found in DRAM", "Throughput", "Latency", "Freshness"):
        assert title in shown
    assert shown.count("<svg") >= 4
    assert "<script" not in shown and "http://" not in shown and "https://" not in shown


def test_a_folder_that_is_no_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = hotrow("demo", "--output", str(tmp_path))
    assert done.returncode == 2
    assert "not an earlier demo" in " ".join(done.stderr.split())
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_plot_is_valid_and_its_points_stay_inside() -> None:
    plot = Plot("A < B", "words", [Line("up", "#000", [(0, 1), (5, math.nan), (10, 3)]), Line("none", "#111", [])])
    drawn = ElementTree.fromstring(svg(plot))
    [line] = drawn.findall("polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    assert len(points) == 2
    assert all(0 <= x <= 560 and 0 <= y <= 230 for x, y in points)
    assert points[0][0] < points[1][0] and points[0][1] > points[1][1]
    text = page("t", "l", [("a", "<b>")], [plot, Plot("empty", "", [])])
    assert "&lt;b&gt;" in text and "nothing was measured" in text


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-3, 7), (0.68, 0.77), (1e6, 1e6), (0, 1e-7)])
def test_ticks_enclose_what_is_drawn(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-9 and found[-1] >= high - 1e-9
    assert 2 <= len(found) <= 12
