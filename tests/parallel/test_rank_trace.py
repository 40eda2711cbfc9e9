"""Reports of a run of several ranks: one trace with all ranks, one table, one progress bar for the job."""

from __future__ import annotations

import io
import itertools
import json
import time
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from crew import Crew
from rich.console import Console
from test_rank_training import WithSequences, make

import hotrow as hr
from hotrow.train import progress_view, stage_times
from hotrow.train.interrupt import Interrupted
from hotrow.train.lookahead import Lookahead, LookaheadOptions

EXAMPLES, BATCH = 960, 32
CHANNELS = ("route", "rows", "dense", "saves")  # the others are used before and after the run as well


def traced(ranks: hr.Ranks, folder: Path, what: str = "") -> dict[str, Any]:
    """A traced run: bytes that this rank sent meanwhile, by channel, and its report."""
    trainer = make(ranks, folder / "checkpoints", checkpoint_every=4, trace=folder / "run.json")
    trainer.team.dense.__init__(trainer.parameters, ranks, bucket_bytes=400)  # type: ignore[union-attr, misc]
    real = trainer._forward_backward

    def compute(lookup: Any) -> Any:
        if what == "stop" and trainer.steps == 5:
            trainer.stop()
        return real(lookup)

    trainer._forward_backward = compute  # type: ignore[method-assign]
    before, report = dict(ranks.bytes_sent), None
    try:
        report = trainer.fit(WithSequences(EXAMPLES, BATCH, poison=7 if what == "poison" else None), progress=False)
    except Interrupted as stopped:
        report = stopped.report
    except hr.GradientError:
        assert what == "poison"
    return {"sent": {name: total - before[name] for name, total in ranks.bytes_sent.items()}, "report": report}


def spans_of(events: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Spans by process and track. Every one has a track with a name."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return found


def check_apart(spans: dict[tuple[int, str], list[dict[str, Any]]]) -> None:
    for track, of_track in spans.items():
        in_order = sorted(of_track, key=lambda e: e["ts"])
        for one, after in itertools.pairwise(in_order):
            assert one["ts"] + one["dur"] <= after["ts"] + 0.11, f"{track}: {one} runs into {after}"


@pytest.fixture(scope="module")
def run(crews: dict[int, Crew], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("traced")
    return folder, crews[2].run(traced, folder)


def test_the_trace_of_two_ranks_is_one_file_with_a_process_for_each(run: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = run
    assert [path.name for path in folder.glob("run*")] == ["run.json"]
    events = json.loads((folder / "run.json").read_text())
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "rank 0", 1: "rank 1"}
    spans = spans_of(events)
    check_apart(spans)
    for rank in (0, 1):
        tracks = {track for of, track in spans if of == rank}
        assert {"read", "route", "compute", "checkpoint"} <= tracks
        assert {"exchange route", "exchange rows", "exchange dense", "exchange dense 2", "exchange saves"} <= tracks
        assert len(spans[rank, "compute"]) == EXAMPLES // BATCH // 2 + 1  # the last one says that none is left


def test_exchanges_are_traced_with_the_bytes_that_were_sent(run: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, results = run
    spans = spans_of(json.loads((folder / "run.json").read_text()))
    received = [0, 0]
    for rank, result in enumerate(results):
        sent: dict[str, int] = dict.fromkeys(CHANNELS, 0)
        for (of, track), found in spans.items():
            if of == rank and track.startswith("exchange ") and (channel := track.split()[1]) in sent:
                sent[channel] += sum(event["args"]["sent"] for event in found)
                received[rank] += sum(event["args"]["received"] for event in found)
        assert sent == {name: result["sent"][name] for name in CHANNELS}
        assert min(sent.values()) > 0
    assert received == [sum(results[1 - rank]["sent"][name] for name in CHANNELS) for rank in (0, 1)]
    for rank in (0, 1):
        assert {event["name"] for event in spans[rank, "exchange route"]} == {"counts", "keys"}
        assert {"rows", "gradients", "numbers"} <= {event["name"] for event in spans[rank, "exchange rows"]}


def test_the_ranks_clocks_are_one(run: tuple[Path, list[dict[str, Any]]]) -> None:
    """No rank's exchange of rows ends before all have begun it."""
    spans = spans_of(json.loads((run[0] / "run.json").read_text()))
    ours, theirs = ([e for e in spans[rank, "exchange rows"] if e["name"] == "rows"] for rank in (0, 1))
    assert len(ours) == len(theirs) > 10
    for one, other in zip(ours, theirs, strict=True):
        assert max(one["ts"], other["ts"]) < min(one["ts"] + one["dur"], other["ts"] + other["dur"]) + 200  # us


def test_a_run_that_is_stopped_in_order_is_joined_and_reported_too(crews: dict[int, Crew], tmp_path: Path) -> None:
    reports = [result["report"] for result in crews[2].run(traced, tmp_path, "stop")]
    assert [path.name for path in tmp_path.glob("run*")] == ["run.json"]
    assert len(spans_of(json.loads((tmp_path / "run.json").read_text()))[1, "compute"]) == 6
    assert reports[0].stages == reports[1].stages and reports[0].stages[-1].name == "exchange"


def test_a_run_that_fails_leaves_the_ranks_parts_and_each_opens(crews: dict[int, Crew], tmp_path: Path) -> None:
    crews[2].run(traced, tmp_path, "poison")
    parts = sorted(tmp_path.glob("run*"))
    assert [path.name for path in parts] == ["run.rank-0000.json", "run.rank-0001.json"]
    for rank, part in enumerate(parts):
        spans = spans_of(json.loads(part.read_text()))
        check_apart(spans)
        assert {of for of, _ in spans} == {rank} and (rank, "exchange rows") in spans


def slow_second(ranks: hr.Ranks, seconds: float) -> dict[str, Any]:
    """Rank 1 is slow. Returns the progress bar's updates and the report."""
    trainer, told = make(ranks), []
    real = trainer._forward_backward

    def compute(lookup: Any) -> Any:
        if ranks.rank == 1:
            time.sleep(seconds)
        return real(lookup)

    def update(view: Any, *figures: Any) -> None:
        told.append(figures)

    trainer._forward_backward = compute  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress_view.ProgressView, "due", property(lambda view: view.enabled))
        patch.setattr(progress_view.ProgressView, "update", update)
        before = sum(ranks.bytes_sent.values())
        report = trainer.fit(WithSequences(640, BATCH))
    return {"report": report, "told": told, "sent": sum(ranks.bytes_sent.values()) - before}


def test_the_stages_of_all_ranks_are_reported_and_waiting_for_one_is_not_work(crews: dict[int, Crew]) -> None:
    steps, pause = 10, 0.04
    first, second = crews[2].run(slow_second, pause)
    report = first["report"]
    assert report.stages == second["report"].stages
    found = {stage.name: stage for stage in report.stages}
    assert list(found) == [*stage_times.NAMES, "exchange"]
    compute, exchange = found["compute"], found["exchange"]
    rank, most = compute.busiest
    assert rank == 1 and most >= steps * pause
    assert compute.busy < 0.75 * most  # the mean of one that works and one that waits for it
    assert compute.waited_ranks > 0.3 * steps * pause
    assert exchange.waited_ranks == pytest.approx(sum(stage.waited_ranks for stage in report.stages[:-1]))
    assert found["route"].bytes == 8 * report.ids
    assert 0 < exchange.bytes <= first["sent"] + second["sent"]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(stage_times.table(report.stages, report.seconds))
    text = console.export_text()
    assert "waits for ranks" in text and "busiest rank" in text and f"{most:.2f} s, 1" in text


def test_the_bar_counts_the_examples_of_all_ranks_and_says_whose_the_metrics_are(crews: dict[int, Crew]) -> None:
    first, second = crews[2].run(slow_second, 0.0)
    assert second["told"] == []  # only rank 0 prints
    *during, end = first["told"]
    assert [figures[0] for figures in during] == [2 * BATCH * step for step in range(1, 11)]
    assert {(figures[1], figures[5]) for figures in during} == {(None, "rank 0: ")}
    assert (end[0], end[1], end[5]) == (640, first["report"].ids, "")
    assert end[2] == first["report"].metrics == second["report"].metrics


def test_rows_that_are_lost_before_their_turn_are_said_once_under_ranks(tmp_path: Path) -> None:
    memory = hr.Memory(dram="10MiB", ssd=tmp_path)
    embeddings: Any = SimpleNamespace(ranks=SimpleNamespace(rank=1), memory=memory)
    lookahead = Lookahead(embeddings, LookaheadOptions(3))
    threads: Any = SimpleNamespace(ahead=3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lookahead._shrink(threads)
        lookahead._shrink(threads)
    assert len(said) == 1 and threads.ahead == 3  # ranks run ahead equally far
    text = str(said[0].message)
    assert "dram=10.0 MiB cannot hold" in text and "on rank 1" in text and "lookahead=2 on all ranks" in text
