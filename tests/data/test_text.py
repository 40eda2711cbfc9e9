"""Delimited text: Criteo's and Avazu's layouts, exact places of errors, gzip, resuming."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotrow import data
from hotrow.data.files import lines
from hotrow.data.files.text_layouts import AVAZU, CRITEO
from hotrow.errors import DataError, OptionError
from hotrow.features import Dense, FeatureSpec, Key, LogBucket, TimePart
from hotrow.features.hashing import hash_bytes, missing_key

COUNTS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
SIMPLE = data.TextLayout(
    {"click": "number", "user": "string", "count": "integer"},
    header=False,
    features=FeatureSpec([Key("user"), Key("count")], label="click"),
)


def criteo_rows(count: int, seed: int = 0) -> list[list[str]]:
    """Rows as they are in the real files: gaps, negative counts, whole floats, 8 hex digits."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        counts = [draw.choice(["", "0", "-1", "17668.0", "260", str(draw.randrange(10**6))]) for _ in COUNTS]
        categories = ["" if draw.random() < 0.2 else f"{draw.randrange(2**32):08x}" for _ in CATEGORIES]
        rows.append([str(i % 2), *counts, *categories])
    return rows


def write_criteo(path: Path, rows: list[list[str]], delimiter: str = "\t", header: bool = False) -> Path:
    table = [["label", *COUNTS, *CATEGORIES]] * header + rows
    text = "".join(delimiter.join(line) + "\n" for line in table).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def users(source: data.Source) -> list[int]:
    return [key for batch, _ in source.batches() for key in batch.ids["count"].values.tolist()]


def simple(path: Path, content: str | bytes, **options: object) -> data.Source:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return data.text(path, SIMPLE, **options)


# The layouts.


@pytest.mark.parametrize(
    ("layout", "delimiter", "header", "name"),
    [("criteo", ",", True, "day.csv"), ("criteo-tsv", "\t", False, "day.txt"), ("criteo-tsv", "\t", False, "day.gz")],
)
def test_criteo_files_become_13_dense_and_26_key_features(
    tmp_path: Path, layout: str, delimiter: str, header: bool, name: str
) -> None:
    rows = criteo_rows(20)
    path = write_criteo(tmp_path / name, rows, delimiter, header)
    (batch, cursor), *rest = data.text(path, layout).batches()
    assert not rest and batch.size == 20 and list(batch.ids) == CATEGORIES
    assert batch.labels.tolist() == [float(row[0]) for row in rows]
    counts = torch.tensor([[float(cell or 0) for cell in row[1:14]] for row in rows], dtype=torch.float64)
    assert torch.allclose(batch.dense, (counts.sign() * counts.abs().log1p()).float())
    for column, category in enumerate(CATEGORIES, 14):
        expected = [hash_bytes(row[column].encode()) if row[column] else missing_key() for row in rows]
        assert batch.ids[category].values.tolist() == expected
    assert cursor["number"] == 20 + header


def test_avazu_files_become_keys_and_event_times(tmp_path: Path) -> None:
    texts = "1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,ddd2926e,44956a24"
    rows = [
        f"10000169349117863715,1,14102123,1005,0,{texts},1,2,15706,320,50,1722,0,35,-1,79",
        f"1000009418151094273,0,14102600,1005,1,{texts},1,2,15706,320,50,1722,0,35,100084,79",
    ]
    (tmp_path / "train.csv").write_text(",".join(AVAZU.columns) + "\n" + "\n".join(rows))
    (batch, _), *rest = data.text(tmp_path / "train.csv", "avazu").batches()
    assert not rest and batch.labels.tolist() == [1.0, 0.0] and len(batch.ids) == 23 and batch.dense is None
    assert batch.time.tolist() == [1413932400000, 1414281600000]  # 2014-10-21 23:00 and 2014-10-26 00:00 UTC
    assert batch.ids["hour_of_day"].values.tolist() == [23, 0]
    assert batch.ids["day_of_week"].values.tolist() == [1, 6]
    assert batch.ids["C20"].values.tolist() == [-1, 100084] and batch.ids["banner_pos"].values.tolist() == [0, 1]
    assert batch.ids["site_id"].values[0] == hash_bytes(b"1fbe01fe")


@pytest.mark.parametrize("hour", ["14130100", "14002100", "14103200", "14022900", "14102124", "-4102100", "2014102100"])
def test_an_hour_that_does_not_exist_is_malformed(tmp_path: Path, hour: str) -> None:
    layout = data.TextLayout({"hour": "hour"}, header=False, features=FeatureSpec([TimePart("hour")]))
    (tmp_path / "x").write_text(f"16022923\n{hour}\n")
    with pytest.raises(DataError, match=f"x, line 2, column 'hour': '{hour}' is not an hour as YYMMDDHH"):
        list(data.text(tmp_path / "x", layout).batches())


def test_own_features_replace_the_default_ones(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "x", criteo_rows(5))
    spec = FeatureSpec([LogBucket("I1"), Key("C1", hash="hex"), Dense("I2")])
    batch, _ = next(data.text(path, "criteo-tsv", features=spec).batches())
    assert list(batch.ids) == ["I1", "C1"] and batch.dense.shape == (5, 1) and batch.labels is None


def test_texts_for_missing_values_can_be_named(tmp_path: Path) -> None:
    layout = data.TextLayout(
        {"user": "string", "count": "integer"}, delimiter=";", header=False, missing=("", "NULL"), features=None
    )
    (tmp_path / "x").write_text("NULL;1\na;NULL\n;2\n")
    spec = FeatureSpec([Key("user"), Key("count")])
    batch, _ = next(data.text(tmp_path / "x", layout, features=spec).batches())
    assert batch.ids["user"].values.tolist() == [missing_key(), hash_bytes(b"a"), missing_key()]
    assert batch.ids["count"].values.tolist() == [1, missing_key(), 2]


def test_quotes_are_ordinary_characters(tmp_path: Path) -> None:
    batch, _ = next(simple(tmp_path / "x", '1,"a,5\n0,"b",6\n').batches())
    assert batch.ids["user"].values.tolist() == [hash_bytes(b'"a'), hash_bytes(b'"b"')]


@pytest.mark.parametrize(
    "content", ["1,a,5\r\n0,b,6\r\n", "1,a,5\n0,b,6", "\n1,a,5\n\r\n\n0,b,6\n\n", "1,a,5\n0,b,6\r"]
)
def test_line_endings_and_blank_lines_do_not_matter(tmp_path: Path, content: str) -> None:
    assert users(simple(tmp_path / "x", content)) == [5, 6]


# Resuming.


@pytest.mark.parametrize("suffix", [".txt", ".gz"])
@pytest.mark.parametrize("batch_size", [1, 3, 10])
def test_resuming_at_every_cut_gives_exactly_the_rest(
    tmp_path: Path,
    suffix: str,
    batch_size: int,
    monkeypatch: pytest.MonkeyPatch,
    check_every_cut: Callable[..., int],
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 700)
    for number, count in enumerate((9, 4)):
        write_criteo(tmp_path / f"{number}{suffix}", criteo_rows(count, number), ",", header=True)
    count = check_every_cut(lambda: data.text(str(tmp_path / "*"), "criteo", batch_size=batch_size))
    assert count == -(-13 // batch_size)


def test_resuming_with_skipped_lines_gives_exactly_the_rest(
    tmp_path: Path, check_every_cut: Callable[..., int]
) -> None:
    content = "bad\n1,a,1\n\n0,b,2,\n1,c,3\n2,d,4\n0,e,5\nbad"
    assert users(source := simple(tmp_path / "x", content, on_error="skip")) == [1, 3, 5]
    assert source.skipped == 4 and source.examples is None
    for batch_size in (1, 2, 3, 4):
        check_every_cut(lambda size=batch_size: simple(tmp_path / "x", content, batch_size=size, on_error="skip"))


def test_a_cursor_of_a_changed_file_is_refused(tmp_path: Path) -> None:
    source = simple(tmp_path / "x", "1,a,5\n0,b,6\n", batch_size=1)
    _, cursor = next(source.batches())
    with pytest.raises(DataError, match=r"its size is 12 and the source has 18; the file .*x has changed"):
        simple(tmp_path / "x", "1,a,5\n0,b,6\n0,c,7\n", batch_size=1).batches(cursor)


# Malformed lines.


@pytest.mark.parametrize(
    ("line", "place", "fact"),
    [
        ("1,a", "x, line 3", "it has 2 columns and the layout has 3"),
        ("1,a,5,6", "x, line 3", "it has 4 columns and the layout has 3"),
        ("yes,a,5", "x, line 3, column 'click'", "'yes' is not a number"),
        ("2,a,5", "x, line 3, column 'click'", "the label is 2.0; a label is 0 or 1"),
        (",a,5", "x, line 3, column 'click'", "the label is missing"),
        ("1,a,5.5", "x, line 3, column 'count'", "'5.5' is not an integer"),
        ("1,a,99999999999999999999", "x, line 3, column 'count'", "'99999999999999999999' is not an integer"),
        ("1,a\r,5", "x, line 3", "there is a carriage return inside the line"),
        (b"1,\xff,5", "x, line 3, column 'user'", "b'\\xff' is not UTF-8 text"),
    ],
)
def test_a_malformed_line_names_file_line_column_and_value(
    tmp_path: Path, line: str | bytes, place: str, fact: str
) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    content = b"1,a,1\n\n" + raw + b"\n0,b,2\nalso,bad\n"
    with pytest.raises(DataError) as caught:
        list(simple(tmp_path / "x", content).batches())
    assert f"{place}: {fact}" in str(caught.value) and 'on_error="skip"' in str(caught.value)


@pytest.mark.parametrize(("bad", "number"), [(["1,a", "yes,a,1", "3,a,1"], 2), (["yes,a,1", "1,a", "3,a,1"], 2)])
def test_the_first_bad_line_is_the_one_that_is_named(tmp_path: Path, bad: list[str], number: int) -> None:
    with pytest.raises(DataError, match=f"x, line {number}"):
        list(simple(tmp_path / "x", "\n".join(["1,a,1", *bad])).batches())


def test_batches_before_a_malformed_line_are_delivered(tmp_path: Path) -> None:
    stream = simple(tmp_path / "x", "1,a,1\n1,a,2\n1,a,3\nbad\n", batch_size=2).batches()
    assert next(stream)[0].ids["count"].values.tolist() == [1, 2]
    with pytest.raises(DataError, match="x, line 4: it has 1 columns"):
        next(stream)


def test_line_numbers_are_right_far_into_a_file_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 100)
    content = "".join(f"{i % 2},user,{i}\n" for i in range(1, 1000)) + "1,user,x\n"
    with pytest.raises(DataError, match="x, line 1000, column 'count': 'x' is not an integer"):
        list(simple(tmp_path / "x", content).batches())


LINES = st.one_of(
    st.builds(lambda user, count: (f"1,{user},{count}", count), st.text("abc", max_size=3), st.integers(0, 99)),
    st.sampled_from(
        [("", None), ("1,a", "bad"), ("x,a,1", "bad"), ("1,a,b", "bad"), ("1,a,2,3", "bad"), ("3,a,1", "bad")]
    ),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(LINES, max_size=25), st.integers(1, 7), st.integers(1, 60), st.booleans())
def test_skipping_equals_a_line_by_line_oracle(
    tmp_path: Path, drawn: list[tuple[str, object]], batch_size: int, block_bytes: int, ended: bool
) -> None:
    content = "\n".join(line for line, _ in drawn) + ("\n" if ended else "")
    expected = [value for _, value in drawn if isinstance(value, int)]
    bad = sum(value == "bad" for _, value in drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "BLOCK_BYTES", block_bytes)
        source = simple(tmp_path / "x", content, batch_size=batch_size, on_error="skip")
        if bad and not expected:
            with pytest.raises(DataError, match=f"all {bad} lines were skipped"):
                users(source)
            return
        assert users(source) == expected and source.skipped == bad


# Files and options that are refused.


def test_a_header_that_does_not_fit_names_the_column(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "x", criteo_rows(2), ",", header=False)
    with pytest.raises(DataError, match=r"x, line 1: the header does not fit the layout: column 1 is '0', not 'label'"):
        next(data.text(path, "criteo").batches())
    path.write_text(",".join([*list(CRITEO.columns)[:-1], "C99"]) + "\n")
    with pytest.raises(DataError, match="column 40 is 'C99', not 'C26'"):
        next(data.text(path, "criteo").batches())
    path.write_text(",".join(list(CRITEO.columns)[:-1]) + "\n")
    with pytest.raises(DataError, match="column 40 is 'nothing', not 'C26'"):
        next(data.text(path, "criteo").batches())


def test_a_header_alone_is_an_empty_stream_and_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(",".join(CRITEO.columns))
    assert list(data.text(tmp_path / "x", "criteo").batches()) == []
    (tmp_path / "x").write_text("")
    with pytest.raises(DataError, match="x is empty and should begin with a header"):
        list(data.text(tmp_path / "x", "criteo").batches())
    assert list(data.text(tmp_path / "x", "criteo-tsv").batches()) == []


def test_a_gzip_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "x.gz", criteo_rows(50))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"x\.gz: the compressed data is damaged or cut off"):
        list(data.text(path, "criteo-tsv").batches())


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE", 1000)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 100)
    with pytest.raises(DataError, match="x, line 2 is longer than 1,000 bytes; is this a text file"):
        list(simple(tmp_path / "x", "1,a,1\n" + "z" * 2000).batches())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: data.text(path, "critoe"), "layout='critoe'; did you mean 'criteo'"),
        (lambda path: data.text(path, "criteo", on_error="drop"), "on_error='drop'"),
        (lambda path: data.text(path, data.TextLayout({"a": "string"})), "no default features; pass features="),
        (
            lambda path: data.text(path, SIMPLE, FeatureSpec([Key("usr")])),
            "'usr' that the layout lacks; did you mean 'user",
        ),
        (lambda path: data.TextLayout({}), "give a dict of column name to kind"),
        (lambda path: data.TextLayout({"a": "int"}), "column 'a' has the kind 'int'; did you mean 'integer'"),
        (lambda path: data.TextLayout({"a": "string"}, delimiter="||"), r"delimiter='\|\|'; give one ASCII"),
        (lambda path: data.TextLayout({"a": "string"}, missing="NA"), "missing='NA'; give a list of texts"),
    ],
)
def test_a_wrong_option_is_refused_with_the_cure(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(OptionError, match=message):
        make(tmp_path / "x")
