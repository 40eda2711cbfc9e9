"""Parquet files: one stream over all files and row groups, resumable at every batch, refused by name when wrong."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotrow import data
from hotrow.errors import DataError, OptionError
from hotrow.features import FeatureSpec, Key


@pytest.mark.parametrize("batch_size", [1, 3, 4, 7, 23, 100])
def test_every_row_comes_once_in_order_across_files(log: Path, spec: FeatureSpec, batch_size: int) -> None:
    source = data.parquet(str(log / "*.parquet"), features=spec, batch_size=batch_size)
    batches = [batch for batch, _ in source.batches()]
    assert torch.cat([batch.ids["item"].values for batch in batches]).tolist() == list(range(23))
    assert all(batch.size == batch_size for batch in batches[:-1])
    assert source.examples == 23 and source.skipped == 0


def test_batches_equal_the_features_of_the_whole_table(
    log: Path, spec: FeatureSpec, same_batch: Callable[..., bool]
) -> None:
    source = data.parquet(log / "*.parquet", features=spec, batch_size=100)
    table = pa.concat_tables([pq.read_table(path) for path in sorted(log.iterdir())])
    (batch, _), *rest = source.batches()
    assert not rest and same_batch(batch, spec.apply(table))


@pytest.mark.parametrize("batch_size", [1, 3, 4, 11])
def test_resuming_at_every_cut_gives_exactly_the_rest(
    log: Path, spec: FeatureSpec, batch_size: int, check_every_cut: Callable[..., int]
) -> None:
    count = check_every_cut(lambda: data.parquet(str(log / "*.parquet"), features=spec, batch_size=batch_size))
    assert count == -(-23 // batch_size)


def test_small_chunks_change_nothing(
    log: Path, spec: FeatureSpec, monkeypatch: pytest.MonkeyPatch, check_every_cut: Callable[..., int]
) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.files.parquet"], "CHUNK_ROWS", 3)
    check_every_cut(lambda: data.parquet(str(log / "*.parquet"), features=spec, batch_size=5))


def test_a_cursor_survives_json_and_a_move_of_the_directory(log: Path, spec: FeatureSpec, tmp_path: Path) -> None:
    stream = data.parquet(str(log / "*.parquet"), features=spec, batch_size=4).batches()
    cursor = json.loads(json.dumps([next(stream), next(stream)][-1][1]))
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in log.glob("*.parquet"):
        shutil.copy(path, moved)
    resumed = data.parquet(str(moved / "*.parquet"), features=spec, batch_size=4)
    assert next(resumed.batches(cursor))[0].ids["item"].values.tolist() == [8, 9, 10, 11]


def test_a_list_is_read_in_its_own_order(log: Path, spec: FeatureSpec) -> None:
    source = data.parquet([log / "part-1.parquet", str(log / "part-[0]*")], features=spec)
    assert next(source.batches())[0].ids["item"].values.tolist() == [10, *range(10)]


def test_only_the_needed_columns_are_decoded(tmp_path: Path) -> None:
    table = pa.table({"user": [1], "junk": [{"a": 1}]})
    pq.write_table(table, tmp_path / "x.parquet")
    batch, _ = next(data.parquet(tmp_path / "x.parquet", features=FeatureSpec([Key("user")])).batches())
    assert batch.ids["user"].values.tolist() == [1]


def test_an_empty_file_among_others_is_passed_over(log: Path, spec: FeatureSpec) -> None:
    pq.write_table(pq.read_table(log / "part-0.parquet").slice(0, 0), log / "part-00.parquet")
    source = data.parquet(str(log / "*.parquet"), features=spec, batch_size=50)
    assert [batch.size for batch, _ in source.batches()] == [23]


def test_describe_says_what_is_read(log: Path, spec: FeatureSpec) -> None:
    line = data.parquet(str(log / "*.parquet"), features=spec, batch_size=64).describe()
    assert line.startswith("parquet: ") and "3 files" in line and "batches of 64" in line


# What is refused.


def first_cursor(log: Path, spec: FeatureSpec) -> data.Cursor:
    return next(data.parquet(str(log / "*.parquet"), features=spec, batch_size=4).batches())[1]


def test_a_cursor_of_another_batch_size_is_refused(log: Path, spec: FeatureSpec) -> None:
    source = data.parquet(str(log / "*.parquet"), features=spec, batch_size=5)
    with pytest.raises(DataError, match=r"its batch_size is 4 and the source has 5; pass batch_size=4"):
        source.batches(first_cursor(log, spec))


def test_a_cursor_of_a_file_that_changed_is_refused_by_name(log: Path, spec: FeatureSpec) -> None:
    cursor = first_cursor(log, spec)
    pq.write_table(pq.read_table(log / "part-0.parquet").slice(1), log / "part-0.parquet")
    with pytest.raises(
        DataError, match=r"its size is \d+ and the source has \d+; the file .*part-0\.parquet has changed"
    ):
        data.parquet(str(log / "*.parquet"), features=spec, batch_size=4).batches(cursor)


def test_a_cursor_is_refused_when_another_file_changed_or_came(log: Path, spec: FeatureSpec) -> None:
    cursor = first_cursor(log, spec)
    shutil.copy(log / "part-1.parquet", log / "part-9.parquet")
    with pytest.raises(DataError, match=r"some of the 4 files are other ones or have changed; name the same files"):
        data.parquet(str(log / "*.parquet"), features=spec, batch_size=4).batches(cursor)


def test_a_cursor_of_other_files_is_refused(log: Path, spec: FeatureSpec) -> None:
    cursor = first_cursor(log, spec)
    with pytest.raises(DataError, match=r"its file is 'part-0\.parquet' and the source has 'part-2\.parquet'"):
        data.parquet(str(log / "part-2.parquet"), features=spec, batch_size=4).batches(cursor)
    with pytest.raises(DataError, match=r"stands in file 4 \('part-0\.parquet'\) and the source has 3 files"):
        data.parquet(str(log / "*.parquet"), features=spec, batch_size=4).batches({**cursor, "index": 3})


@pytest.mark.parametrize(("field", "value"), [("offset", "7"), ("number", None), ("index", -1), ("offset", True)])
def test_a_damaged_cursor_is_refused(log: Path, spec: FeatureSpec, field: str, value: object) -> None:
    cursor = {**first_cursor(log, spec), field: value}
    with pytest.raises(DataError, match=f"the cursor is damaged: its {field} is"):
        data.parquet(str(log / "*.parquet"), features=spec, batch_size=4).batches(cursor)


def test_a_cursor_of_another_kind_of_source_is_refused(log: Path, spec: FeatureSpec) -> None:
    with pytest.raises(DataError, match="its source is 'synthetic' and the source has 'parquet'"):
        data.parquet(str(log / "*.parquet"), features=spec).batches({"source": "synthetic"})


def test_files_that_are_not_there_are_named(tmp_path: Path, spec: FeatureSpec) -> None:
    with pytest.raises(DataError, match=r"no file matches '.*nothing\*\.parquet'; check the pattern"):
        data.parquet(str(tmp_path / "nothing*.parquet"), features=spec)
    with pytest.raises(DataError, match=r"there is no file .*absent\.parquet; check the path"):
        data.parquet(tmp_path / "absent.parquet", features=spec)
    with pytest.raises(DataError, match=r"is a directory; name the files in it, for example '.*\*'"):
        data.parquet(tmp_path, features=spec)
    with pytest.raises(OptionError, match="the list of paths is empty"):
        data.parquet([], features=spec)


def test_a_file_named_twice_is_refused(log: Path, spec: FeatureSpec) -> None:
    with pytest.raises(OptionError, match=r"part-0\.parquet is named 2 times"):
        data.parquet([log / "part-0.parquet", str(log / "*.parquet")], features=spec)


def test_a_file_that_vanished_is_named(log: Path, spec: FeatureSpec) -> None:
    source = data.parquet(str(log / "*.parquet"), features=spec)
    (log / "part-1.parquet").unlink()
    with pytest.raises(DataError, match=r"part-1\.parquet is gone since the source was made"):
        source.batches()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0; give an integer of 1 or more"),
        ({"on_error": "ignore"}, "on_error='ignore'; Choose one of: raise, skip"),
    ],
)
def test_a_wrong_option_is_refused(log: Path, spec: FeatureSpec, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        data.parquet(str(log / "*.parquet"), features=spec, **options)


def test_features_of_another_type_are_refused(log: Path) -> None:
    with pytest.raises(OptionError, match=r"features=\['user'\]; pass a hotrow.features.FeatureSpec"):
        data.parquet(str(log / "*.parquet"), features=["user"])


def test_an_absent_column_names_the_file_and_the_nearest_column(log: Path) -> None:
    source = data.parquet(str(log / "*.parquet"), features=FeatureSpec([Key("usr")]))
    with pytest.raises(
        DataError, match=r"part-0\.parquet has no column 'usr', which the features need; did you mean 'us"
    ):
        next(source.batches())


def test_a_column_of_another_family_of_types_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"user": pa.array([None], pa.null())}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"user": pa.array([3], pa.int16())}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"user": ["1"]}), tmp_path / "d.parquet")
    stream = data.parquet(str(tmp_path / "*.parquet"), FeatureSpec([Key("user")]), batch_size=1).batches()
    assert [next(stream)[0].ids["user"].values.tolist() for _ in range(3)][::2] == [[1], [3]]
    with pytest.raises(
        DataError, match=r"d\.parquet: column 'user' holds string values but integer values in .*a\.parq"
    ):
        next(stream)


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path, spec: FeatureSpec) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no, it is not PAR1")
    with pytest.raises(DataError, match=r"x\.parquet cannot be read as Parquet"):
        next(data.parquet(tmp_path / "x.parquet", features=spec).batches())


def test_a_damaged_page_names_file_and_row_group(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"user": [f"user number {i}" for i in range(1000)]}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[60:400] = bytes(340)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet, row group 0: .*; the file is damaged"):
        list(data.parquet(path, features=FeatureSpec([Key("user")])).batches())


@pytest.fixture
def bad_log(tmp_path: Path) -> Path:
    """Two files with bad labels in rows 3 of the first and 1 and 2 of the second."""
    pq.write_table(pa.table({"user": [0, 1, 2, 3], "click": [0, 1, 2, 1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"user": [4, 5, 6], "click": [None, 7, 1]}), tmp_path / "b.parquet")
    return tmp_path


def test_a_bad_row_names_file_row_and_column(bad_log: Path) -> None:
    source = data.parquet(str(bad_log / "*.parquet"), FeatureSpec([Key("user")], label="click"))
    with pytest.raises(DataError, match=r"a\.parquet, row 3, column 'click': the label is 2; .*on_error=\"skip\""):
        list(source.batches())


@pytest.mark.parametrize("batch_size", [1, 2, 3, 9])
def test_bad_rows_can_be_skipped_and_counted(
    bad_log: Path, batch_size: int, check_every_cut: Callable[..., int]
) -> None:
    def make() -> object:
        spec = FeatureSpec([Key("user")], label="click")
        return data.parquet(str(bad_log / "*.parquet"), spec, batch_size, on_error="skip")

    source = make()
    users = [user for batch, _ in source.batches() for user in batch.ids["user"].values.tolist()]
    assert users == [0, 1, 3, 6] and source.skipped == 3
    assert check_every_cut(make) == -(-4 // batch_size)


def test_a_wrong_type_is_no_row_to_skip(bad_log: Path) -> None:
    spec = FeatureSpec([Key("user", hash="string")])
    with pytest.raises(
        DataError, match=r"a\.parquet: column 'user' holds int64 values but hash='string' needs strings"
    ):
        list(data.parquet(str(bad_log / "*.parquet"), spec, on_error="skip").batches())


def test_skipping_every_row_is_an_error(bad_log: Path) -> None:
    spec = FeatureSpec([Key("click")], label="user")
    pq.write_table(pa.table({"user": [5, 6], "click": [0, 1]}), bad_log / "c.parquet")
    with pytest.raises(DataError, match=r"all 2 rows were skipped, .* the first: .*c\.parquet, row 1, column 'user'"):
        list(data.parquet(bad_log / "c.parquet", spec, on_error="skip").batches())
