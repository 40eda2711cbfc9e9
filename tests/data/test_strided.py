"""Every N-th batch: the same batches and cursors as reading all and dropping the others, with a part of the work."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotrow import data
from hotrow.batch import KeyedBatch
from hotrow.data.cluster.wire_format import pack, unpack
from hotrow.data.files import lines, text_layouts
from hotrow.data.files.chunks import Chunk
from hotrow.data.files.parquet import ParquetReader
from hotrow.data.split import DecodedUnit, SerialDecoder, Unit
from hotrow.data.strided import StridedStream, SupportsStride, finished_steps
from hotrow.errors import DataError
from hotrow.features import Dense, FeatureSpec, Key, Sequence

Step = tuple[KeyedBatch | None, data.Cursor]
LAYOUT = data.TextLayout({"click": "number", "user": "string", "age": "number"}, delimiter=";", header=False)
TEXT = FeatureSpec([Key("user", hash="hex"), Dense("age")], label="click")
ROWS = FeatureSpec([Key("user"), Key("item"), Sequence("seen"), Dense("price")], label="click", time="when")


def read_and_drop(source: data.Source, number: int, of: int, cursor: data.Cursor | None = None) -> list[Step]:
    whole = list(source.batches(cursor))
    steps = [whole[at : at + of] for at in range(0, len(whole), of)]
    return [(step[number][0] if number < len(step) else None, step[-1][1]) for step in steps]


def decoded_elsewhere(
    source: SupportsStride, number: int, of: int, cursor: data.Cursor | None = None, workers: int = 2
) -> Iterator[Step]:
    """Through units, packed parts and assembling; units go to the workers in turn."""
    share = source.strided(number, of)
    decoders = [share.decoder() for _ in range(workers)]

    def decode(turn: int, unit: Unit) -> DecodedUnit:
        part = decoders[turn % workers].decode(unit)
        travelled = unpack(*pack(part))
        travelled.error = part.error
        return travelled

    units = share.units(cursor)
    assert units is not None
    parts = ((unit, decode(turn, unit)) for turn, unit in enumerate(units))
    return share.assemble(cursor, parts, lambda unit: decode(0, unit))


@pytest.fixture
def check(same_batch: Callable[..., bool]) -> Callable[..., None]:
    """The steps of all ranks, here and elsewhere, from the start and from some cuts, are those of reading all."""

    def same(found: list[Step], expected: list[Step]) -> None:
        assert [cursor for _, cursor in found] == [cursor for _, cursor in expected]
        for (batch, _), (wanted, _) in zip(found, expected, strict=True):
            assert (batch is None) == (wanted is None)
            assert batch is None or wanted is None or same_batch(batch, wanted)

    def check(source: data.FileSource, of: int, cuts: int = 3, elsewhere: bool = True) -> None:
        cursors = [cursor for _, cursor in source.batches()]
        some = cursors[:: max(1, len(cursors) // cuts)]
        for number in range(of):
            for cursor in (None, *some, *cursors[-1:]):
                expected = read_and_drop(source, number, of, cursor)
                same(list(source.every(number, of, cursor)), expected)
                if elsewhere and of > 1:
                    same(list(decoded_elsewhere(source, number, of, cursor)), expected)

    return check


def write_rows(folder: Path, sizes: list[int], group: int, dictionary: bool) -> None:
    start = 0
    for number, count in enumerate(sizes):
        rows = range(start, start + count)
        start += count
        users = pa.array([f"user-{i % 7}" if i % 5 else None for i in rows], pa.string())
        table = {
            "user": users.dictionary_encode() if dictionary else users,
            "item": pa.array(rows, pa.int64()),
            "seen": pa.array([list(range(i % 4)) if i % 6 else None for i in rows], pa.list_(pa.int64())),
            "price": pa.array([i / 4 if i % 3 else None for i in rows], pa.float64()),
            "click": pa.array([i % 2 for i in rows], pa.int64()),
            "when": pa.array([1000 * i for i in rows], pa.int64()),
        }
        pq.write_table(pa.table(table), folder / f"{number:02}.parquet", row_group_size=group)


ANY = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@settings(max_examples=25, **ANY)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 8, 20]), min_size=1, max_size=5),
    group=st.sampled_from([1, 3, 8, 100]),
    chunk=st.sampled_from([1, 4, 7, 65_536]),
    batch_size=st.sampled_from([1, 2, 3, 8, 30]),
    of=st.integers(1, 4),
    dictionary=st.booleans(),
)
def test_parquet(
    tmp_path_factory: pytest.TempPathFactory,
    check: Callable[..., None],
    sizes: list[int],
    group: int,
    chunk: int,
    batch_size: int,
    of: int,
    dictionary: bool,
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder, sizes, group, dictionary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["hotrow.data.files.parquet"], "CHUNK_ROWS", chunk)
        check(data.parquet(str(folder / "*.parquet"), features=ROWS, batch_size=batch_size), of)


def write_lines(folder: Path, sizes: list[int], header: bool, draw: random.Random) -> None:
    """Lines of many lengths, some blank, some ending in CRLF, every other file without its last newline."""
    for number, count in enumerate(sizes):
        text = ["click;user;age\n"] * header
        for _ in range(count):
            text += [draw.choice(["\n", "\r\n"])] * (draw.random() < 0.2)
            user = f"{draw.randrange(16):x}" * draw.choice([1, 2, 9, 15])
            text.append(f"{draw.randrange(2)};{user};{draw.randrange(99)}" + draw.choice(["\n", "\r\n"]))
        text += ["\n\n"] * (draw.random() < 0.2)
        whole = "".join(text).encode()
        (folder / f"{number:02}.csv").write_bytes(whole.rstrip(b"\r\n") if number % 2 else whole)


@settings(max_examples=25, **ANY)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 8, 20]), min_size=1, max_size=5),
    header=st.booleans(),
    block=st.sampled_from([1, 30, 200, 4 << 20]),
    span=st.sampled_from([1, 50, 8 << 20]),
    batch_size=st.sampled_from([1, 2, 3, 8, 30]),
    of=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_text(
    tmp_path_factory: pytest.TempPathFactory,
    check: Callable[..., None],
    sizes: list[int],
    header: bool,
    block: int,
    span: int,
    batch_size: int,
    of: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    write_lines(folder, sizes, header, random.Random(seed))
    layout = dataclasses.replace(LAYOUT, header=header)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", block)
        patch.setattr(lines, "SPAN_BYTES", span)
        check(data.text(str(folder / "*.csv"), layout, features=TEXT, batch_size=batch_size), of)


@pytest.mark.parametrize("of", [1, 2, 3])
@pytest.mark.parametrize("layout", ["criteo-tsv", "avazu"])
def test_known_layouts(tmp_path: Path, check: Callable[..., None], layout: str, of: int) -> None:
    columns = text_layouts.find_layout(layout).columns
    with open(tmp_path / "x", "w") as file:
        file.writelines([",".join(columns) + "\n"] * (layout == "avazu"))
        for i in range(50):
            if layout == "avazu":
                cells = ["1", str(i % 2), f"141021{i % 24:02}", *(str(i * k % 17) for k in range(len(columns) - 3))]
                file.write(",".join(cells) + "\n")
            else:
                cells = [str(i % 2), *(str(i * k % 9) for k in range(13)), *(f"{i * k:08x}" for k in range(26))]
                file.write("\t".join(cells) + "\n")
    check(data.text(tmp_path / "x", layout, batch_size=4), of)


@pytest.mark.parametrize("examples", [0, 1, 30, 97])
@pytest.mark.parametrize("of", [2, 3])
def test_synthetic(monkeypatch: pytest.MonkeyPatch, check: Callable[..., None], examples: int, of: int) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.synthetic_log.generated"], "UNIT_EXAMPLES", 30)
    check(data.synthetic(examples=examples, offset=7, batch_size=10, keys=10_000), of)


# Where rows are skipped, or cannot be found without reading, all are read.


def test_skipped_lines_move_the_batches_of_all_ranks(tmp_path: Path, check: Callable[..., None]) -> None:
    (tmp_path / "x").write_text("".join(f"1;{i:x};{i}\n" if i % 3 else "what\n" for i in range(40)))
    source = data.text(tmp_path / "x", LAYOUT, features=TEXT, batch_size=4, on_error="skip")
    assert source.strided(0, 2).units() is None
    check(source, 3, elsewhere=False)
    list(source.every(1, 2))
    assert source.skipped == 14


def test_gzip_files_are_read_whole(tmp_path: Path, check: Callable[..., None]) -> None:
    (tmp_path / "a").write_text("1;a;1\n" * 9)
    (tmp_path / "b").write_bytes(gzip.compress(b"1;b;1\n" * 9))
    source = data.text([tmp_path / "a", tmp_path / "b"], LAYOUT, features=TEXT, batch_size=2)
    assert source.strided(0, 2).units() is None
    check(source, 2, elsewhere=False)


def test_one_worker_that_reads_all_sends_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.split"], "SERIAL_BATCHES", 2)
    (tmp_path / "a").write_bytes(gzip.compress("".join(f"1;{i:x};1\n" for i in range(19)).encode()))
    source = data.text(tmp_path / "a", LAYOUT, features=TEXT, batch_size=2)
    decoders = [
        SerialDecoder(StridedStream(source, 2, 3)),
        SerialDecoder(StridedStream(source, 2, 3)),
    ]  # the second takes over at every other unit
    expected = read_and_drop(source, 2, 3)

    def parts() -> Iterator[tuple[Unit, DecodedUnit]]:
        cursor, ended, turn = None, False, 0
        while not ended:
            part = decoders[turn % 2].decode({"cursor": cursor})
            yield {}, part
            ended, turn = part.notes["ended"], turn + 1
            cursor = part.notes["cursors"][-1] if part.notes["cursors"] else cursor

    found = list(finished_steps(parts()))
    assert [cursor for _, cursor in found] == [cursor for _, cursor in expected] and len(found) == 4
    assert [batch and batch.ids["user"].values.tolist() for batch, _ in found] == [[4, 5], [10, 11], [16, 17], None]


# Errors.


def until_error(stream: Iterator[Step]) -> tuple[list[data.Cursor], str | None]:
    """Cursors until the stream ends, and the error that ended it, without the number of bad rows after it."""
    found: list[data.Cursor] = []
    try:
        for _, cursor in stream:
            found.append(cursor)
    except DataError as error:
        return found, re.sub(r" \(and \d+ more \w+\)", "", str(error))
    return found, None


def here_and_there(source: data.FileSource, number: int, of: int) -> list[tuple[list[data.Cursor], str | None]]:
    return [until_error(source.every(number, of)), until_error(decoded_elsewhere(source, number, of))]


@pytest.mark.parametrize("line", ["yes;a;1", "1;a", "1;a;2;3", "1;a;x", "1;not hex;5", "3;a;1", "1;a\r;1"])
@pytest.mark.parametrize("block", [20, 4 << 20])
def test_a_bad_line_is_reported_by_the_rank_that_has_it_where_reading_all_would_meet_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, block: int
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", block)
    monkeypatch.setattr(lines, "SPAN_BYTES", 100)
    content = [f"1;{i:x};{i}" for i in range(100)]
    content[57] = line  # batch 5: rank 2 of 3, in step 1
    content[99] = "also bad"  # batch 9: rank 0, in step 3
    (tmp_path / "a").write_text("\n".join(content[:30]) + "\n")
    (tmp_path / "b").write_text("\n" + "\n".join(content[30:]))
    source = data.text([tmp_path / "a", tmp_path / "b"], LAYOUT, features=TEXT, batch_size=10)
    cursors, message = until_error(source.batches())
    assert "b, line 29" in str(message) and len(cursors) == 5
    assert here_and_there(source, 2, 3) == [(cursors[2:3], message)] * 2
    for found, said in here_and_there(source, 0, 3):
        assert [cursor["number"] for cursor in found] == [30, 31, 61] and "b, line 71" in str(said)
    for found, said in here_and_there(source, 1, 3):
        assert [cursor["number"] for cursor in found] == [30, 31, 61, 71] and said is None


def test_a_bad_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    clicks = [0] * 100
    clicks[57] = clicks[58] = 7
    pq.write_table(pa.table({"user": list(range(100)), "click": clicks}), tmp_path / "a.parquet", row_group_size=25)
    source = data.parquet(tmp_path / "a.parquet", FeatureSpec([Key("user")], label="click"), batch_size=10)
    cursors, message = until_error(source.batches())
    assert "a.parquet, row 58" in str(message) and len(cursors) == 5
    assert here_and_there(source, 1, 2) == [(cursors[1:4:2], message)] * 2
    assert [len(found) for found, said in here_and_there(source, 0, 2) if said is None] == [5, 5]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_file_that_does_not_fit_is_reported_by_all_where_reading_all_would_meet_it(
    tmp_path: Path, number: int
) -> None:
    """The files before it have 25 rows, with or without this rank's batch of the third step."""
    spec = FeatureSpec([Key("user")])
    for name, users in (("a", list(range(25))), ("b", ["text"] * 30), ("c", list(range(30)))):
        pq.write_table(pa.table({"user": users}), tmp_path / f"{name}.parquet")
        (tmp_path / f"{name}.csv").write_text("other;names\n" * (name == "b") + "user\n" + "7\n" * len(users))
    layout = data.TextLayout({"user": "string"})
    for source in (
        data.parquet(str(tmp_path / "*.parquet"), features=spec, batch_size=3),
        data.text(str(tmp_path / "*.csv"), layout, features=spec, batch_size=3),
    ):
        cursors, message = until_error(source.batches())
        assert "b." in str(message) and len(cursors) == 8
        assert here_and_there(source, number, 3) == [(cursors[2::3], message)] * 2


def test_a_file_without_rows_is_looked_at_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [1, 2, 3]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"item": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    source = data.parquet(str(tmp_path / "*.parquet"), features=FeatureSpec([Key("user")]), batch_size=1)
    for number in range(2):
        with pytest.raises(DataError, match=r"b\.parquet has no column 'user'"):
            list(source.every(number, 2))


def test_a_bad_row_comes_before_a_file_that_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click;user;age\n1;a;1\n1;b;2\n1;c;x\n")
    (tmp_path / "b.csv").write_text("no;header\n")
    layout = dataclasses.replace(LAYOUT, header=True)
    source = data.text(str(tmp_path / "*.csv"), layout, features=TEXT, batch_size=2)
    assert "a.csv, line 4, column 'age'" in str(until_error(source.every(1, 2))[1])
    assert "b.csv, line 1: the header" in str(until_error(source.every(0, 2))[1])


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE", 1000)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 100)
    (tmp_path / "x").write_text("1;a;1\n" + "z" * 2000)
    with pytest.raises(DataError, match="x, line 2 is longer than 1,000 bytes; is this a text file"):
        list(data.text(tmp_path / "x", LAYOUT, features=TEXT, batch_size=1).every(0, 2))


def test_a_cursor_of_another_source_is_refused_at_once(tmp_path: Path) -> None:
    write_rows(tmp_path, [20], 8, dictionary=False)
    path = str(tmp_path / "*.parquet")
    cursor = next(data.parquet(path, features=ROWS, batch_size=4).batches())[1]
    with pytest.raises(DataError, match="pass batch_size=4"):
        data.parquet(path, features=ROWS, batch_size=5).every(0, 2, cursor)


# What it costs.


class Counts:
    """Rows that features were made of and rows that Parquet decoded, per pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Counter[str] = Counter()
        apply, group, parse = FeatureSpec.apply, ParquetReader._group, data.text.__globals__["split_lines"]

        def counting_apply(spec: FeatureSpec, columns: pa.Table, labels: bool = True) -> KeyedBatch:
            self.found["features"] += columns.num_rows
            return apply(spec, columns, labels)

        def counting_group(reader: ParquetReader, path: str, file: pq.ParquetFile, at: int, *rest: int) -> object:
            self.found["decoded"] += file.metadata.row_group(at).num_rows
            return group(reader, path, file, at, *rest)

        def counting_parse(layout: data.TextLayout, raw: bytes, columns: object) -> pa.Table | None:
            self.found["parsed"] += raw.count(b"\n")
            return parse(layout, raw, columns)

        monkeypatch.setattr(FeatureSpec, "apply", counting_apply)
        monkeypatch.setattr(ParquetReader, "_group", counting_group)
        monkeypatch.setitem(data.text.__globals__, "split_lines", counting_parse)

    def of(self, stream: Iterator[Step]) -> dict[str, int]:
        self.found.clear()
        for _ in stream:
            pass
        return dict(self.found)


@pytest.mark.parametrize("of", [2, 4])
def test_features_are_made_of_own_rows_and_row_groups_of_others_are_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: int
) -> None:
    counts = Counts(monkeypatch)
    for name in "ab":
        pq.write_table(pa.table({"user": np.arange(4800)}), tmp_path / f"{name}.parquet", row_group_size=100)
    source = data.parquet(str(tmp_path / "*.parquet"), features=FeatureSpec([Key("user")]), batch_size=200)
    assert counts.of(source.batches()) == {"features": 9600, "decoded": 9600}
    for number in range(of):  # two whole row groups are a batch
        assert counts.of(source.every(number, of)) == {"features": 9600 // of, "decoded": 9600 // of}
    cursor = list(source.batches())[of - 1][1]
    assert counts.of(source.every(1, of, cursor)) == {"features": 9600 // of - 200, "decoded": 9600 // of - 200}
    source = data.parquet(str(tmp_path / "*.parquet"), features=FeatureSpec([Key("user")]), batch_size=150)
    for number in range(of):  # a batch and a half row group
        assert counts.of(source.every(number, of)) == {"features": 9600 // of, "decoded": 9600 // of * 4 // 3}


@pytest.mark.parametrize("of", [2, 4])
def test_only_own_lines_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: int) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 5000)
    counts = Counts(monkeypatch)
    (tmp_path / "x").write_text("".join(f"1;{i:x};{i}\n" for i in range(4800)))
    source = data.text(tmp_path / "x", LAYOUT, features=TEXT, batch_size=100)
    assert counts.of(source.batches()) == {"features": 4800, "parsed": 4800}
    for number in range(of):
        assert counts.of(source.every(number, of)) == {"features": 4800 // of, "parsed": 4800 // of}


def test_the_first_batch_waits_for_one_chunk_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.files.parquet"], "CHUNK_ROWS", 400)
    pq.write_table(pa.table({"user": np.arange(4800)}), tmp_path / "a.parquet", row_group_size=400)
    source = data.parquet(tmp_path / "a.parquet", features=FeatureSpec([Key("user")]), batch_size=100)
    counts = Counts(monkeypatch)
    assert counts.of(itertools.islice(source.every(1, 4), 1)) == {"features": 100, "decoded": 400}
    units = source.strided(1, 4).units()
    assert units is not None and len(next(units)["spans"]) == 4  # a worker gets as much as it would of the whole


def test_a_footer_is_read_once_for_the_plan_and_once_for_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"user": np.arange(4800)}), tmp_path / "a.parquet", row_group_size=100)
    source = data.parquet(tmp_path / "a.parquet", features=FeatureSpec([Key("user")]), batch_size=200)
    list(source.batches())  # the types of the first file are known from then on
    opened = []
    monkeypatch.setattr(pq, "ParquetFile", lambda path, open=pq.ParquetFile: opened.append(path) or open(path))
    list(source.every(1, 3))
    assert len(opened) == 2


def test_a_few_rows_do_not_keep_all_that_were_decoded_with_them() -> None:
    rows = np.arange(10_000)
    table = pa.table({"user": rows, "name": [f"user-{i}" for i in rows], "seen": [[i, i] for i in rows]})
    few = Chunk("x", table, rows + 1, rows + 1).slice(700, 720)
    kept = few.compact()
    assert kept.table.equals(few.table) and kept.numbers.tolist() == list(range(701, 721))
    assert kept.table.get_total_buffer_size() < table.nbytes / 50 < few.table.get_total_buffer_size()
