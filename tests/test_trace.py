"""A trace is a file that Perfetto opens, whatever becomes of the run."""

from __future__ import annotations

import json
import sys
import threading
import time
import timeit
from pathlib import Path
from typing import Any

import forked
import pytest

import hotrow as hr
from hotrow import trace

sys.path.append(str(Path(__file__).parent / "train"))
from runs import SHAPE, make_trainer

from hotrow.data.synthetic_log.clicks import SyntheticClicks


def events(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text()))


def tracks(of: list[dict[str, Any]]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in of if event["name"] == "thread_name"}


def test_spans_and_counters_of_several_threads_are_valid_json(tmp_path: Path) -> None:
    with trace.recording(tmp_path / "t.json", process=3, title="rank 3"):

        def work(track: str) -> None:
            for i in range(300):
                with trace.span(track, f"item {i}", bytes=i) as span:
                    span.note(more="ä")
                trace.counter("rows", up=i)

        threads = [threading.Thread(target=work, args=(f"track {n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(ValueError, match="x"), trace.span("errors", "one"):
            raise ValueError("x")
    found = events(tmp_path / "t.json")
    assert {event["pid"] for event in found} == {3}
    spans = [event for event in found if event["ph"] == "X"]
    assert len(spans) == 901 and all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    assert sorted(tracks(found).values()) == ["errors", "track 0", "track 1", "track 2"]
    assert spans[-1]["args"] == {"error": "ValueError"}
    assert len([event for event in found if event["ph"] == "C"]) == 900


def test_without_a_recording_a_span_costs_next_to_nothing() -> None:
    assert not trace.on()
    assert timeit.timeit(lambda: trace.span("a", "b", c=1), number=100_000) / 100_000 < 5e-6


def test_a_trace_keeps_little_in_memory_and_a_killed_process_leaves_a_readable_one(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    code = (
        "import sys, time\nfrom hotrow import trace\n"
        "with trace.recording(sys.argv[1]):\n"
        "    for i in range(10_000):\n"
        "        with trace.span('t', 'x'): pass\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    process = forked.python(code, str(path), log=tmp_path / "log")
    while "ready" not in process.text():
        assert process.poll() is None, process.text()
        time.sleep(0.01)
    process.kill()
    text = path.read_text()
    text = text[: text.rindex("\n")].rstrip(",")  # the format lets "]" be left out; Python's json does not
    assert len(json.loads(text + "]")) > 9_000


def write_part(path: Path, process: int, origin: float) -> Path:
    with trace.recording(trace.part(path, process), process, f"rank {process}", origin):
        trace.add("compute", "one", time.perf_counter(), time.perf_counter() + 1)
        trace.counter("rows", up=process)
    return trace.part(path, process)


def test_parts_of_one_run_are_joined_and_a_torn_one_counts_to_its_last_whole_line(tmp_path: Path) -> None:
    path, origin = tmp_path / "run.json", time.time() - 5
    parts = [write_part(path, process, origin) for process in range(3)]
    stale = write_part(path, 3, origin - 100)  # of an earlier run, with more ranks
    other = tmp_path / "run.rank-0009.json"
    other.write_text("not a trace")
    text = parts[1].read_text()
    parts[1].write_text(text[: text.index('"ph": "C"')])  # killed while it wrote
    trace.join(path)
    found = events(path)
    assert {event["pid"] for event in found} == {0, 1, 2}
    spans = {event["pid"]: event for event in found if event["ph"] == "X"}
    assert len(spans) == 3 and all(5e6 <= span["ts"] < 65e6 for span in spans.values())  # after the common origin
    assert [event["pid"] for event in found if event["ph"] == "C"] == [0, 2]
    assert sorted(tmp_path.iterdir()) == sorted([path, stale, other])


def test_parts_that_cannot_be_joined_stay_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"could not be joined: .*hotrow\.trace\.join\("):
        trace.join(tmp_path / "none.json")
    part = write_part(tmp_path / "run.json", 0, time.time())
    (tmp_path / "run.json").mkdir()
    with pytest.warns(UserWarning, match="could not be joined"):
        trace.join(tmp_path / "run.json")
    assert events(part)


def test_two_recordings_at_once_and_a_file_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with trace.recording(tmp_path / "a.json"), pytest.raises(hr.OptionError, match="one trace at a time"):
        with trace.recording(tmp_path / "b.json"):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(hr.StorageError, match="trace="), trace.recording(tmp_path / "file" / "t.json"):
        pass
    assert not trace.on()


def test_a_run_is_traced_stage_by_stage_with_its_tiers_and_checkpoints(tmp_path: Path) -> None:
    clicks = SyntheticClicks(examples=30 * 1024, batch_size=1024, keys=200_000, shape=SHAPE)
    trainer = make_trainer(
        tmp_path / "c",
        dim=64,
        memory=hr.Memory(dram="12MiB", ssd=tmp_path / "ssd"),
        checkpoint_every=10,
        lookahead=2,
        trace=tmp_path / "run.json",
    )
    trainer.fit(clicks, progress=False)
    found = events(tmp_path / "run.json")
    names = tracks(found)
    assert {"read", "route", "fetch", "stage", "compute", "compute (fetch)", "checkpoint"} <= set(names.values())
    spans = [event for event in found if event["ph"] == "X"]
    for stage in ("read", "route", "fetch", "stage", "compute"):
        of_stage = [event for event in spans if names[event["tid"]] == stage]
        assert len(of_stage) == 30
        ends = [event["ts"] + event["dur"] for event in of_stage]
        assert all(end <= after["ts"] + 1 for end, after in zip(ends, of_stage[1:], strict=False))  # one at a time
    ahead = [event["ts"] for event in spans if names[event["tid"]] == "read"]
    computed = [event["ts"] for event in spans if names[event["tid"]] == "compute"]
    assert any(read < begun for read, begun in zip(ahead[2:], computed[1:], strict=False))  # it did run ahead
    written = [event for event in spans if names[event["tid"]] == "checkpoint" and event["name"].startswith("write")]
    assert [event["name"] for event in written] == ["write step 10", "write step 20", "write step 30"]
    assert all(event["args"]["bytes_written"] > 0 for event in written)
    curves = {event["name"] for event in found if event["ph"] == "C"}
    assert {"ssd: rows up", "ssd: rows down", "ssd: bytes read", "ssd: bytes written", "dram: bytes used"} <= curves
    assert not trace.on()


def test_a_run_that_fails_leaves_a_valid_trace(tmp_path: Path) -> None:
    class Fails(SyntheticClicks):
        def batches(self, cursor: Any = None) -> Any:
            yield from list(super().batches(cursor))[:3]
            raise RuntimeError("no more")

    trainer = make_trainer(trace=tmp_path / "run.json")
    with pytest.raises(RuntimeError, match="no more"):
        trainer.fit(Fails(examples=640, batch_size=32, keys=2000, shape=SHAPE), progress=False)
    time.sleep(0.01)
    assert len([event for event in events(tmp_path / "run.json") if event.get("cat") == "compute"]) == 3
