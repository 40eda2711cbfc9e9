"""Histories built from an event log: those of an obvious loop over all events, whatever the cut, and after a resume."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotrow import data
from hotrow.batch import KeyedBatch
from hotrow.data.event_log import builder as builder_file
from hotrow.data.event_log import event_store
from hotrow.data.rebatch import join_batches, slice_batch
from hotrow.data.source import Cursor, StatefulCursor
from hotrow.errors import DataError, OptionError
from hotrow.features import EventTimes, FeatureSpec, Key, Numbers, Sequence, TimeGap
from hotrow.job import load_job

LENGTH = 4

SPEC = FeatureSpec(
    [
        Key("user"),
        Key("item"),
        Sequence("seen", column="seen_item", max_length=LENGTH),
        Sequence("acts", column="seen_action", aligned="seen"),
        Numbers("dwells", column="seen_dwell", missing=-1, aligned="seen"),
        EventTimes("times", column="seen_time", aligned="seen"),
        TimeGap("gaps", column="seen_time", aligned="seen"),
        TimeGap("ages", column="seen_time", since="example", aligned="seen"),
    ],
    label="click",
    time="time",
)
COLUMNS = {"seen_item": "item", "seen_action": "action", "seen_dwell": "dwell", "seen_time": "time"}
HISTORIES = data.Histories(
    user="user", columns=COLUMNS, events={"action": ["click", "buy"]}, examples={"click": [0, 1]}, memory="64MiB"
)


def events(rows: int, seed: int, users: int = 5, text: bool = True) -> list[dict[str, Any]]:
    """A log with ties, nulls and rows that are an event, an example, both or neither."""
    draw = random.Random(seed)
    time, log = 1000, []
    for _ in range(rows):
        time += draw.choice([0, 0, 1, 700, 5000, 1_000_000])
        user = draw.randrange(users)
        log.append(
            {
                "user": f"user-{user}" if text else user,
                "item": draw.choice([None, *range(20)]),
                "action": draw.choice(["click", "buy", "view", None]),
                "dwell": draw.choice([None, draw.randrange(1000)]),
                "time": time,
                "click": draw.choice([None, 0, 1]),
            }
        )
    return log


SCHEMA = pa.schema(
    [
        ("user", pa.string()),
        ("item", pa.int64()),
        ("action", pa.string()),
        ("dwell", pa.int64()),
        ("time", pa.int64()),
        ("click", pa.int64()),
    ]
)


def table(log: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(log, schema=SCHEMA)


def expected(log: list[dict[str, Any]], length: int = LENGTH) -> KeyedBatch:
    """Every example with its history as lists, found by a loop over all earlier rows, through the same spec."""
    rows = []
    for at, row in enumerate(log):
        if row["click"] is None:
            continue
        past = [
            other
            for other in log[:at]
            if other["user"] == row["user"]
            and other["time"] < row["time"]
            and other["action"] in ("click", "buy")
            and other["item"] is not None
        ][-length:]
        rows.append(row | {name: [other[of] for other in past] for name, of in COLUMNS.items()})
    lists = {"seen_item": pa.int64(), "seen_action": pa.string(), "seen_dwell": pa.int64(), "seen_time": pa.int64()}
    schema = pa.schema([*SCHEMA, *((name, pa.list_(kind)) for name, kind in lists.items())])
    return SPEC.apply(pa.Table.from_pylist(rows, schema=schema))


def write(folder: Path, log: list[dict[str, Any]], files: int = 3, group: int = 7) -> str:
    folder.mkdir(exist_ok=True)
    size = -(-len(log) // files)
    for number in range(files):
        pq.write_table(
            table(log[number * size : (number + 1) * size]), folder / f"{number:03}.parquet", row_group_size=group
        )
    return str(folder / "*.parquet")


def joined(batches: Iterator[tuple[KeyedBatch, Cursor]]) -> KeyedBatch:
    return join_batches([batch for batch, _ in batches])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 rows and pieces of 20 events, so that a small log meets every edge."""
    for module in (event_store, builder_file):
        monkeypatch.setattr(module, "BLOCK", 8)
    monkeypatch.setattr(builder_file, "PIECE_EVENTS", 20)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(12))
def test_histories_are_those_of_an_obvious_loop(
    seed: int,
    tmp_path: Path,
    same_batch: Callable[[KeyedBatch, KeyedBatch], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder_file, "LONG", 0 if seed % 2 else 64)  # both ways of copying events
    log = events(rows=30 + 10 * seed, seed=seed, users=1 + seed % 6)
    source = data.parquet(write(tmp_path, log, 1 + seed % 3), SPEC, batch_size=5, histories=HISTORIES)
    assert same_batch(joined(source.batches()), expected(log))


def test_histories_across_real_blocks_are_those_of_an_obvious_loop(
    tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    rows = 40_000
    draw = np.random.default_rng(3)
    log = [
        {
            "user": f"u{u}",
            "item": i,
            "action": "click",
            "dwell": None,
            "time": 10 * t,
            "click": 1 if t % 997 == 0 else None,
        }
        for t, (u, i) in enumerate(zip(draw.integers(0, 300, rows), draw.integers(0, 99, rows), strict=True))
    ]
    source = data.parquet(write(tmp_path, log, 2, 9999), SPEC, batch_size=16, histories=HISTORIES)
    assert same_batch(joined(source.batches()), expected(log))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("carried", [True, False], ids=["state", "replay"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_pass_resumed_at_any_batch_gives_the_same_bits(
    carried: bool, on_error: str, tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    log = events(rows=120, seed=5)
    if on_error == "skip":
        for row in (40, 50, 51):
            log[row] = log[row] | {"time": 1, "click": 0}
    make = lambda: data.parquet(write(tmp_path, log), SPEC, batch_size=7, on_error=on_error, histories=HISTORIES)  # noqa: E731
    source = make()
    whole = list(source.batches())
    assert source.skipped == (3 if on_error == "skip" else 0) and len(whole) > 5
    for number, (_, cursor) in enumerate(whole):
        assert isinstance(cursor, StatefulCursor)
        plain = json.loads(json.dumps(cursor))
        state = {name: tensor.clone() for name, tensor in cursor.state().items()}
        tail = list(make().batches(StatefulCursor(plain, lambda state=state: state) if carried else plain))
        assert len(tail) == len(whole) - number - 1
        for (batch, after), (want, want_after) in zip(tail, whole[number + 1 :], strict=True):
            assert same_batch(batch, want) and after == want_after
            assert _same_state(after, want_after)


def _same_state(a: Cursor, b: Cursor) -> bool:
    assert isinstance(a, StatefulCursor) and isinstance(b, StatefulCursor)
    one, other = a.state(), b.state()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("small_blocks")
def test_a_small_memory_drops_the_users_who_came_first_and_resumes_exactly(
    tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    log = [
        {"user": f"u{n % 90 if n < 200 else n % 3}", "item": n, "action": "buy", "dwell": 1, "time": n, "click": 1}
        for n in range(320)
    ]
    small = data.Histories(user="user", columns=COLUMNS, memory=8 * 1024)
    path = write(tmp_path, log, 2, 50)
    source = data.parquet(path, SPEC, batch_size=20, histories=small)
    whole = list(source.batches())
    assert source.dropped_users > 10
    kept = join_batches([batch for batch, _ in whole]).ids["seen"].lengths()
    assert kept[-80:].tolist() == [LENGTH] * 80  # the users of the end are never dropped
    state = whole[-1][1].state()
    assert sum(tensor.nbytes for name, tensor in state.items() if name.startswith("run.")) <= 4 * 1024
    for number in (0, 6, 11, 13):
        for after in (whole[number][1], dict(whole[number][1])):
            tail = data.parquet(path, SPEC, batch_size=20, histories=small).batches(after)
            for (batch, cursor), (want, want_after) in zip(tail, whole[number + 1 :], strict=True):
                assert same_batch(batch, want) and _same_state(cursor, want_after)


@pytest.mark.usefixtures("small_blocks")
def test_events_before_the_first_file_are_in_the_histories(
    tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    log = events(rows=80, seed=2)
    train, test = write(tmp_path / "train", log[:60]), write(tmp_path / "test", log[60:])
    histories = data.Histories("user", COLUMNS, HISTORIES.events, HISTORIES.examples, before=train)
    whole = list(data.parquet(test, SPEC, batch_size=3, histories=histories).batches())
    before = sum(row["click"] is not None for row in log[:60])
    want = expected(log)
    assert same_batch(joined(iter(whole)), slice_batch(want, before, want.size))
    tail = list(data.parquet(test, SPEC, batch_size=3, histories=histories).batches(dict(whole[0][1])))
    assert all(same_batch(a, b) for (a, _), (b, _) in zip(tail, whole[1:], strict=True))


def test_every_nth_batch_has_the_histories_of_the_whole_log(
    tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    source = data.parquet(write(tmp_path, events(90, 4)), SPEC, batch_size=5, histories=HISTORIES)
    whole = [batch for batch, _ in source.batches()]
    for number in range(3):
        mine = [batch for batch, _ in source.every(number, 3) if batch is not None]
        assert all(same_batch(a, b) for a, b in zip(mine, whole[number::3], strict=True))


def test_two_histories_of_one_log_are_cut_each_to_its_own_length(tmp_path: Path) -> None:
    spec = FeatureSpec(
        [
            Sequence("seen", column="seen_item", max_length=5),
            EventTimes("times", column="seen_time", aligned="seen"),
            Sequence("latest", column="latest_item", max_length=1),
            Sequence("given", column="item_list"),
        ],
        time="time",
    )
    log = table(events(80, 11)).append_column("item_list", pa.array([[n] for n in range(80)]))
    pq.write_table(log, tmp_path / "log.parquet")
    columns = {"seen_item": "item", "seen_time": "time", "latest_item": "item"}
    source = data.parquet(tmp_path / "log.parquet", spec, histories=data.Histories("user", columns))
    (batch, _), *rest = source.batches()
    assert not rest and batch.ids["given"].values.tolist() == list(range(80))
    seen, latest = batch.ids["seen"], batch.ids["latest"]
    assert seen.offsets is not None and int(seen.lengths().max()) == 5
    assert torch.equal(latest.lengths(), seen.lengths().clamp(max=1))
    assert torch.equal(latest.values, seen.values[seen.offsets[1:][seen.lengths() > 0] - 1])


def test_text_files_build_the_same_histories(
    tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    log = events(60, 9)
    lines = ["\t".join("" if row[name] is None else str(row[name]) for name in SCHEMA.names) for row in log]
    (tmp_path / "log.tsv").write_text("\n".join(lines) + "\n")
    kinds = {name: "string" if name in ("user", "action") else "integer" for name in SCHEMA.names}
    layout = data.TextLayout(kinds, delimiter="\t", header=False)
    source = data.text(str(tmp_path / "log.tsv"), layout, SPEC, batch_size=8, histories=HISTORIES)
    assert same_batch(joined(source.batches()), expected(log))


@pytest.mark.usefixtures("small_blocks")
def test_a_followed_folder_builds_histories_and_resumes_exactly(
    tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    log = events(rows=100, seed=8)
    write(tmp_path, log, files=9)
    want = expected(log)
    count = want.size // 6

    def follow(cursor: Cursor | None, count: int) -> list[tuple[KeyedBatch, Cursor]]:
        source = data.follow(tmp_path, SPEC, batch_size=6, flush=60, histories=HISTORIES)
        return list(itertools.islice(source.batches(cursor), count))

    whole = follow(None, count)
    assert same_batch(joined(iter(whole)), slice_batch(want, 0, count * 6))
    for number in range(0, count - 1, 3):
        tail = follow(whole[number][1], count - number - 1)
        assert all(same_batch(a, b) for (a, _), (b, _) in zip(tail, whole[number + 1 :], strict=True))
    with pytest.raises(DataError, match="comes without the histories of its users; resume from a checkpoint"):
        follow(dict(whole[0][1]), 1)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            {"time": 5},
            "row 31, column 'time': the event of user 'user-.' is at 5 ms, and an earlier row of that user at",
        ),
        ({"time": None}, "row 31, column 'time': the event time is missing"),
        ({"user": None}, "row 31, column 'user': the user is missing"),
        ({"click": 7}, "row 31, column 'click': the label is 7"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_and_can_be_skipped(
    change: dict[str, Any], fact: str, tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    log = events(rows=60, seed=1, users=1)
    for row in log:
        row["action"] = row["action"] or "view"
    good = [*log]
    log[30] = log[30] | {"click": 1, "item": 3, "action": "buy"} | change
    path = write(tmp_path, log, files=1)
    histories = data.Histories("user", COLUMNS, HISTORIES.events, {"click": [0, 1, 7]})
    stream = data.parquet(path, SPEC, batch_size=4, histories=histories).batches()
    with pytest.raises(DataError, match=fact):
        list(stream)
    source = data.parquet(path, SPEC, batch_size=4, on_error="skip", histories=histories)
    assert same_batch(joined(source.batches()), expected(good[:30] + good[31:])) and source.skipped == 1


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"columns": {"seen_itm": "item"}}, "no sequence of the spec reads; did you mean 'seen_item'"),
        ({"columns": {"seen_item": "item"}}, "lacks 'seen_action', which 'acts' reads"),
        ({"columns": COLUMNS | {"seen_time": "dwell"}}, "map 'seen_time' to 'time'"),
        ({"columns": {}}, "give {list column: column of one event}"),
        ({"events": {"action": []}}, "give {column: \\[values\\]}"),
        ({"memory": "10KiB"}, "memory='10KiB'; give at least"),
        ({"user": ""}, "give the name of the column that names the user"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], fact: str, tmp_path: Path) -> None:
    path = write(tmp_path, events(5, 0))
    with pytest.raises(OptionError, match=fact):
        data.parquet(path, SPEC, histories=data.Histories(**({"user": "user", "columns": COLUMNS} | options)))


def test_other_options_refuse_the_cursor_and_ray_refuses_histories(tmp_path: Path) -> None:
    path = write(tmp_path, events(60, 0))
    source = data.parquet(path, SPEC, batch_size=4, histories=HISTORIES)
    _, cursor = next(iter(source.batches()))
    other = data.Histories("user", COLUMNS, {"action": ["buy"]}, HISTORIES.examples)
    with pytest.raises(DataError, match="pass the same histories="):
        data.parquet(path, SPEC, batch_size=4, histories=other).batches(cursor)
    with pytest.raises(OptionError, match="needs every row of the log in order, in one process"):
        data.on_ray(source)


JOB = """
[data]
source = "parquet"
path = "{path}"
test = "{test}"
features = "{spec}"
batch_size = 8
[data.histories]
user = "user"
columns = {{ seen_item = "item", seen_action = "action", seen_dwell = "dwell", seen_time = "time" }}
events = {{ action = ["click", "buy"] }}
examples = {{ click = [0, 1] }}
[tower]
kind = "wide_and_deep"
"""


def test_a_job_builds_histories_and_tests_on_the_days_after(
    tmp_path: Path, same_batch: Callable[[KeyedBatch, KeyedBatch], bool]
) -> None:
    log = events(rows=80, seed=6)
    train, test = write(tmp_path / "train", log[:60]), write(tmp_path / "test", log[60:])
    SPEC.save(tmp_path / "spec.json")
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(path=train, test=test, spec=tmp_path / "spec.json"))
    job, want = load_job(file), expected(log)
    cut = sum(row["click"] is not None for row in log[:60])
    assert same_batch(joined(job.source.batches()), slice_batch(want, 0, cut))
    assert job.test is not None
    assert same_batch(joined(job.test.batches()), slice_batch(want, cut, want.size))
    file.write_text(file.read_text().replace("events =", "event ="))
    with pytest.raises(OptionError, match="histories: unknown option 'event'; did you mean 'events'"):
        load_job(file)
