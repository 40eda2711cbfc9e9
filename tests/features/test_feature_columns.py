"""Every way to hold the same column gives the same keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import DataError
from hotrow.features import Dense, FeatureSpec, Key

TEXTS = ["ann", None, "bob", "", "ann", "zoë" * 20, None]
SPEC = FeatureSpec([Key("x")])


def keys(values: object) -> list[int]:
    return SPEC.apply({"x": values}).ids["x"].values.tolist()


@pytest.mark.parametrize(
    "values",
    [
        pa.array(TEXTS, pa.large_string()),
        pa.array(TEXTS).dictionary_encode(),
        pa.array(TEXTS, pa.large_string()).dictionary_encode(),
        pa.array(TEXTS).cast(pa.binary()),
        pa.array(TEXTS).cast(pa.string_view()),
        pa.chunked_array([TEXTS[:3], [], TEXTS[3:]], pa.string()),
        pa.chunked_array([pa.array(TEXTS[:3]).dictionary_encode(), pa.array(TEXTS[3:]).dictionary_encode()]),
        pa.array(["left", *TEXTS, "right"]).slice(1, len(TEXTS)),
        pa.array(["left", *TEXTS, "right"]).dictionary_encode().slice(1, len(TEXTS)),
        np.array([text if text is not None else np.nan for text in TEXTS], object),
        tuple(TEXTS),
    ],
    ids=lambda values: str(getattr(values, "type", type(values).__name__)),
)
def test_strings_give_the_same_keys_however_they_are_held(values: object) -> None:
    assert keys(values) == keys(TEXTS)


def test_a_dictionary_may_hold_null_itself() -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), pa.array(["a", None]))
    assert keys(values) == keys(["a", None, None])


def test_fixed_width_bytes_are_bytes() -> None:
    assert keys(pa.array([b"ab", None], pa.binary(2))) == keys(pa.array([b"ab", None]))
    assert keys(np.array(["ab", "c"])) == keys(["ab", "c"])


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([3, -4]),
        np.array([3, -4]),
        np.array([9, 3, 9, -4])[1::2],
        pa.array([3, -4], pa.int8()),
        pa.array([0, 3, -4]).slice(1),
    ],
)
def test_integers_give_the_same_keys_however_they_are_held(values: object) -> None:
    assert keys(values) == [3, -4]


def test_keys_do_not_share_memory_with_the_caller() -> None:
    values = np.array([1, 2])
    batch = SPEC.apply({"x": values})
    values[:] = 0
    assert batch.ids["x"].values.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dense_tensors_of_every_float_type_work(dtype: torch.dtype) -> None:
    values = torch.tensor([0.5, float("nan")], dtype=dtype, requires_grad=True)
    assert FeatureSpec([Dense("x")]).apply({"x": values}).dense.tolist() == [[0.5], [0.0]]


@pytest.mark.parametrize("kind", [pa.null(), pa.int64(), pa.string(), pa.dictionary(pa.int32(), pa.string())])
def test_no_rows_make_an_empty_batch(kind: pa.DataType) -> None:
    assert SPEC.apply(pa.table({"x": pa.array([], kind)})).size == 0
    assert SPEC.apply(pa.table({"x": pa.chunked_array([], kind)})).size == 0
    assert SPEC.apply({"x": []}).size == 0


@given(st.lists(st.one_of(st.none(), st.text(max_size=6)), min_size=1, max_size=20), st.data())
def test_a_slice_of_a_table_gives_the_slice_of_its_keys(texts: list[str | None], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(texts)))
    length = data.draw(st.integers(0, len(texts) - start))
    table = pa.table({"x": pa.array(texts, pa.string())})
    whole = SPEC.apply(table).ids["x"].values.tolist()
    part = SPEC.apply(table.slice(start, length)).ids["x"].values.tolist()
    batch = SPEC.apply(table.to_batches()[0].slice(start, length)).ids["x"].values.tolist()
    assert part == batch == whole[start : start + length]


def test_an_absent_column_names_who_needs_it_and_the_nearest_name() -> None:
    with pytest.raises(DataError, match="no column 'x', which feature 'x' needs; Choose one of: y, z"):
        SPEC.apply({"y": [1], "z": [2]})
    spec = FeatureSpec([Key("user_id")])
    with pytest.raises(DataError, match="did you mean 'userid'"):
        spec.apply(pa.table({"userid": [1], "item": [2]}))


def test_two_columns_of_one_name_are_refused() -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(DataError, match="2 columns are named 'x', which feature 'x' needs; rename"):
        SPEC.apply(table)


def test_columns_of_different_lengths_are_refused_with_their_lengths() -> None:
    with pytest.raises(DataError, match="different lengths: x 2, y 3; give every column one value"):
        FeatureSpec([Key("x"), Key("y")]).apply({"x": [1, 2], "y": [1, 2, 3]})


def test_whole_floats_among_integers_stay_floats() -> None:
    with pytest.raises(DataError, match="column 'x' holds double values"):
        keys([1, 2.0])


@pytest.mark.parametrize("values", [[1, "a"], [2**64], [object()]])
def test_a_list_of_no_one_type_is_refused_by_name(values: list[object]) -> None:
    with pytest.raises(DataError, match="column 'x' cannot be read as one type of value"):
        keys(values)


def test_other_containers_are_refused_with_the_cure() -> None:
    with pytest.raises(DataError, match=r"columns are list; pass a pyarrow Table .*from_pandas"):
        SPEC.apply([1, 2])
