"""Each kind of feature: what it makes of ordinary, missing and wrong values."""

from __future__ import annotations

import datetime as dt
import math
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch

from hotrow.errors import DataError, OptionError
from hotrow.features import Bucketize, Cross, Dense, FeatureSpec, Key, LogBucket, RowError, Sequence, TimePart
from hotrow.features.buckets import LOG_BUCKETS, log_boundaries
from hotrow.features.hashing import cross, hash_bytes, hash_ints, missing_key


def ids(feature: object, values: object) -> list[int]:
    jagged = FeatureSpec([feature]).apply({feature.name: values}).ids[feature.name]
    assert jagged.offsets is None
    return jagged.values.tolist()


def rows(feature: object, values: object) -> list[list[int]]:
    jagged = FeatureSpec([feature]).apply({feature.name: values}).ids[feature.name]
    bounds = jagged.offsets.tolist()
    return [jagged.values[a:b].tolist() for a, b in pairwise(bounds)]


def dense(feature: Dense, values: object) -> list[float]:
    return FeatureSpec([feature]).apply({feature.name: values}).dense[:, 0].tolist()


# Key.


def test_integers_are_their_own_keys_whatever_their_width() -> None:
    for kind in ("int8", "int16", "int32", "int64", "uint8", "uint32"):
        assert ids(Key("x"), np.array([0, 1, 100], kind)) == [0, 1, 100]
    assert ids(Key("x"), [-(1 << 63), (1 << 63) - 1]) == [-(1 << 63), (1 << 63) - 1]
    assert ids(Key("x"), [True, False]) == [1, 0]


def test_an_uint64_keeps_its_64_bits() -> None:
    assert ids(Key("x"), np.array([10000169349117863715], np.uint64)) == [10000169349117863715 - (1 << 64)]


def test_strings_are_hashed_with_the_seed() -> None:
    assert ids(Key("x"), ["ann", "", "zoë"]) == [hash_bytes(b"ann"), hash_bytes(b""), hash_bytes("zoë".encode())]
    assert ids(Key("x", seed=9), ["ann"]) == [hash_bytes(b"ann", 9)]
    assert ids(Key("x"), [b"ann"]) == [hash_bytes(b"ann")]


def test_hash_int_spreads_integers_with_the_seed() -> None:
    assert ids(Key("x", hash="int", seed=4), [1, 2]) == hash_ints(np.array([1, 2]), 4).tolist()


def test_hash_hex_reads_the_integer_that_is_spelled() -> None:
    assert ids(Key("x", hash="hex"), ["05db9164", "1fbe01fe", "FF"]) == [0x05DB9164, 0x1FBE01FE, 255]


def test_a_missing_key_is_the_reserved_key_by_default() -> None:
    assert ids(Key("x"), [5, None]) == [5, missing_key()]
    assert ids(Key("x", seed=2), ["a", None]) == [hash_bytes(b"a", 2), hash_bytes(b"\x00missing", 2)]
    assert ids(Key("x", hash="hex"), ["a", None]) == [10, missing_key()]
    assert ids(Key("x"), [None, None]) == [missing_key()] * 2


def test_a_missing_key_can_be_dropped() -> None:
    assert rows(Key("x", missing="drop"), [5, None, 6]) == [[5], [], [6]]
    assert rows(Key("x", missing="drop"), [5, 6]) == [[5], [6]]


def test_a_missing_key_can_be_an_error_that_names_the_row() -> None:
    with pytest.raises(RowError, match=r"row 1, column 'x': a missing value, and feature 'x' allows none \(and 1 more"):
        ids(Key("x", missing="error"), [5, None, None])


def test_a_float_key_is_refused_with_the_cure() -> None:
    with pytest.raises(DataError, match=r"column 'x' holds double values .* use Bucketize or LogBucket, or cast"):
        ids(Key("x"), [0.5])


def test_a_list_or_time_key_is_refused_with_the_cure() -> None:
    with pytest.raises(DataError, match="use Sequence for lists"):
        ids(Key("x"), [[1]])
    with pytest.raises(DataError, match="use TimePart for its hour or weekday"):
        ids(Key("x"), [dt.datetime(2024, 1, 1)])


@pytest.mark.parametrize(
    ("how", "values", "message"),
    [
        ("none", ["a"], "hash='none' needs integers"),
        ("int", ["a"], "hash='int' needs integers"),
        ("string", [1], "hash='string' needs strings"),
        ("hex", [1], "hash='hex' needs strings"),
    ],
)
def test_a_named_hash_refuses_the_other_type(how: str, values: list[object], message: str) -> None:
    with pytest.raises(DataError, match=f"column 'x' holds .* {message}"):
        ids(Key("x", hash=how), values)


def test_text_that_is_not_hex_names_row_and_value() -> None:
    with pytest.raises(RowError, match="row 1, column 'x': 'xyz' is not 1 to 16 hex digits") as caught:
        ids(Key("x", hash="hex"), ["ab", "xyz", None, ""])
    assert caught.value.rows.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Key(""), "Key: name=''; give the feature a name"),
        (lambda: Key("x", column=""), "feature 'x': column=''"),
        (lambda: Key("x", hash="hexx"), "feature 'x': hash='hexx'; did you mean 'hex'"),
        (lambda: Key("x", missing="kee"), "feature 'x': missing='kee'; did you mean 'key'"),
        (lambda: Key("x", seed=-1), r"feature 'x': seed=-1; give an integer from 0 to 2\*\*64 - 1"),
        (lambda: Bucketize("x", boundaries=[2, 1]), r"feature 'x': boundaries=\[2, 1\]; give one or more finite"),
        (lambda: Bucketize("x"), r"boundaries=\(\); give one or more"),
        (lambda: Bucketize("x", boundaries=[math.nan]), "give one or more finite"),
        (lambda: Cross("x", of=["a"]), r"feature 'x': of=\['a'\]; give a list of two or more"),
        (lambda: Cross("x", of="ab"), "of='ab'; give a list"),
        (lambda: Sequence("x", max_length=0), "feature 'x': max_length=0; give an integer of 1 or more"),
        (lambda: Sequence("x", keep="newest"), "feature 'x': keep='newest'; Choose one of: last, first"),
        (lambda: Sequence("x", separator=""), "feature 'x': separator=''"),
        (lambda: TimePart("x", part="hours"), "feature 'x': part='hours'; did you mean 'hour'"),
        (lambda: Dense("x", transform="log"), "feature 'x': transform='log'; did you mean 'log1p'"),
        (lambda: Dense("x", missing=math.nan), "feature 'x': missing=nan; give a finite number"),
        (lambda: Dense("x", mean=1.0), "mean and std belong to transform='standardize'"),
        (lambda: Dense("x", transform="standardize", mean=1.0), "feature 'x': std=None; give a finite number"),
        (lambda: Dense("x", transform="standardize", mean=1.0, std=0.0), "feature 'x': std=0.0; give the column's"),
        (lambda: Dense("x", clip=(1, 0)), r"feature 'x': clip=\(1, 0\); give \(low, high\) with low below high"),
        (lambda: Dense("x", clip=3), r"feature 'x': clip=3; give \(low, high\)"),
    ],
)
def test_a_wrong_option_is_an_error_with_its_value_and_the_cure(make: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


# Bucketize and LogBucket.


def test_a_bucket_is_how_many_boundaries_are_at_or_below_the_value() -> None:
    feature = Bucketize("x", boundaries=[0, 10.5, 20])
    values = [-math.inf, -1, 0, 10.4, 10.5, 20, math.inf, None, math.nan]
    assert ids(feature, values) == [0, 0, 1, 1, 2, 3, 3, 4, 4]
    assert ids(feature, [1, None]) == [1, 4]


def test_log_buckets_are_the_square_of_the_logarithm_rounded_down() -> None:
    counts = np.concatenate([np.arange(5000), 2 ** np.arange(13, 53)])
    expected = [math.floor(math.log(1 + int(x)) ** 2) for x in counts]
    assert ids(LogBucket("x"), counts) == expected
    assert ids(LogBucket("x"), -counts[1:]) == [-1 - bucket for bucket in expected[1:]]


def test_log_buckets_of_odd_values() -> None:
    values = [0, -0.0, None, math.nan, math.inf, -math.inf, 2.0**63, 1e300]
    last = LOG_BUCKETS
    assert ids(LogBucket("x"), values) == [0, 0, last + 1, last + 1, last, -1 - last, last, last]


def test_every_int64_has_a_log_bucket_of_its_own_size() -> None:
    bounds = log_boundaries()
    assert len(bounds) == LOG_BUCKETS and (np.diff(bounds) > 0).all()
    assert bounds[-1] <= 2.0**63 < math.exp(math.sqrt(LOG_BUCKETS + 1)) - 1


def test_log_boundaries_are_pinned_bits() -> None:
    bounds = log_boundaries()
    assert [bounds[k - 1].hex() for k in (1, 2, 100, 1000, 1906)] == [
        "0x1.b7e151628aed3p+0",
        "0x1.8e7efd0890eecp+1",
        "0x1.5825dcf950560p+14",
        "0x1.89fdfbe1fc506p+45",
        "0x1.faa553aa25714p+62",
    ]


def test_text_in_a_number_feature_is_refused_with_the_cure() -> None:
    for feature in (Bucketize("x", boundaries=[1]), LogBucket("x")):
        with pytest.raises(DataError, match="column 'x' holds string values but feature 'x' needs numbers; cast it"):
            ids(feature, ["1"])


# TimePart.


def test_hour_and_weekday_are_those_of_utc() -> None:
    times = [dt.datetime(2014, 10, 21, 13, 59, 59), dt.datetime(1969, 12, 31, 23), None]
    assert ids(TimePart("x", part="hour"), times) == [13, 23, 24]
    assert ids(TimePart("x", part="weekday"), times) == [1, 2, 7]


def test_a_time_may_be_milliseconds_or_any_timestamp() -> None:
    moment = dt.datetime(2024, 2, 29, 17, 5)
    ms = int(moment.replace(tzinfo=dt.timezone.utc).timestamp() * 1000)
    spec = FeatureSpec([TimePart("part", "t")], time="t")
    for unit in ("s", "ms", "us", "ns"):
        for zone in (None, "Asia/Tokyo"):
            array = pa.array([ms // 1000 * 1000], pa.int64())
            stamps = array.cast(pa.timestamp("ms")).cast(pa.timestamp(unit)).cast(pa.timestamp(unit, zone))
            batch = spec.apply({"t": stamps})
            assert batch.time.tolist() == [ms] and batch.ids["part"].values.tolist() == [17]
    assert spec.apply({"t": [ms]}).time.tolist() == [ms]
    assert spec.apply({"t": [moment.date()]}).time.tolist() == [ms // 86_400_000 * 86_400_000]


def test_times_before_1970_round_down() -> None:
    spec = FeatureSpec([TimePart("part", "t")], time="t")
    assert spec.apply({"t": pa.array([-1], pa.timestamp("ns"))}).time.tolist() == [-1]


# Cross.


def test_a_cross_folds_the_keys_from_the_left() -> None:
    spec = FeatureSpec([Cross("pair", of=["a", "b", "c"]), Key("a", seed=3), Bucketize("b", boundaries=[5])])
    batch = spec.apply({"a": ["u", None], "b": [1, 9], "c": [7, None]})
    a = np.array([hash_bytes(b"u", 3), missing_key(3)])
    c = np.array([7, missing_key()])
    assert batch.ids["pair"].values.tolist() == cross(cross(a, np.array([0, 1])), c).tolist()
    assert list(batch.ids) == ["pair", "a", "b"]


def test_a_cross_may_rest_on_a_cross() -> None:
    spec = FeatureSpec([Cross("abc", of=["ab", "c"]), Cross("ab", of=["a", "b"]), Cross("flat", of=["a", "b", "c"])])
    batch = spec.apply({"a": [1], "b": [2], "c": [3]})
    assert batch.ids["abc"].values.tolist() == batch.ids["flat"].values.tolist()


# Sequence.


def test_a_sequence_keeps_the_last_or_the_first_items_in_order() -> None:
    values = [[1, 2, 3, 4], [], None, [5]]
    assert rows(Sequence("x", max_length=2), values) == [[3, 4], [], [], [5]]
    assert rows(Sequence("x", max_length=2, keep="first"), values) == [[1, 2], [], [], [5]]
    assert rows(Sequence("x", max_length=9), values) == [[1, 2, 3, 4], [], [], [5]]


def test_items_that_are_missing_are_dropped_before_cutting() -> None:
    assert rows(Sequence("x", max_length=2), [[1, 2, None, 3, None], [None]]) == [[2, 3], []]


def test_text_is_split_at_the_separator() -> None:
    a, b = hash_bytes(b"a", 1), hash_bytes(b"b", 1)
    feature = Sequence("x", separator="||", seed=1)
    assert rows(feature, ["a||b", "", None, "||b||", "a"]) == [[a, b], [], [], [b], [a]]
    assert rows(Sequence("x", separator=",", hash="none", max_length=2), ["7,-8,9", "1"]) == [[-8, 9], [1]]
    assert rows(Sequence("x", separator=",", hash="int"), ["7"]) == [hash_ints(np.array([7])).tolist()]
    assert rows(Sequence("x", separator=",", hash="hex"), ["ff,10"]) == [[255, 16]]


def test_lists_of_every_arrow_type_and_of_arrays_work() -> None:
    expected = [[1, 2], [3, 4]]
    for kind in (pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.int64(), 2)):
        assert rows(Sequence("x"), pa.array(expected, kind)) == expected
    assert rows(Sequence("x"), np.array(expected)) == rows(Sequence("x"), torch.tensor(expected)) == expected
    assert rows(Sequence("x"), np.zeros((2, 0), np.int64)) == [[], []]
    texts = pa.array([["a"], ["b", "a"]], pa.list_(pa.dictionary(pa.int32(), pa.string())))
    assert rows(Sequence("x"), texts) == rows(Sequence("x"), [["a"], ["b", "a"]])


@pytest.mark.parametrize(
    ("feature", "values", "message"),
    [
        (Sequence("x"), ["a|b"], "holds string values but feature 'x' needs lists; pass separator="),
        (Sequence("x"), [1], "needs lists; use Key for one value per example"),
        (Sequence("x", separator="|"), [["a"]], "splits text at '|'; leave separator= out for lists"),
        (Sequence("x"), [[0.5]], "column 'x' holds double values but a key is an integer or a string"),
    ],
)
def test_a_sequence_refuses_what_is_not_its_column(feature: Sequence, values: list[object], message: str) -> None:
    with pytest.raises(DataError, match=message.replace("|", r"\|")):
        rows(feature, values)


@pytest.mark.parametrize(
    ("how", "texts", "bad_rows", "value"),
    [
        ("none", ["1,2", "3,+4,x", "5", "y"], [1, 3], r"'\+4'"),
        ("none", ["1", "9223372036854775808"], [1], "'9223372036854775808'"),
        ("hex", ["1", "", "f,g"], [2], "'g'"),
    ],
)
def test_a_bad_item_names_the_row_that_owns_it(how: str, texts: list[str], bad_rows: list[int], value: str) -> None:
    with pytest.raises(RowError, match=f"row {bad_rows[0]}, column 'x': {value} is not") as caught:
        rows(Sequence("x", separator=",", hash=how), texts)
    assert caught.value.rows.tolist() == bad_rows


# Dense.


def test_dense_values_are_float32_as_they_are() -> None:
    assert dense(Dense("x"), [1, -2, None]) == [1.0, -2.0, 0.0]
    assert dense(Dense("x", missing=-1), [math.nan, True]) == [-1.0, 1.0]


def test_log1p_keeps_the_sign() -> None:
    assert dense(Dense("x", transform="log1p"), [0, 1, -1, None]) == pytest.approx([0, math.log(2), -math.log(2), 0])


def test_standardize_takes_mean_and_std_and_leaves_missing_as_it_is_told() -> None:
    assert dense(Dense("x", transform="standardize", mean=10, std=2, missing=5), [14, None]) == [2.0, 5.0]


def test_clip_comes_before_the_transform_and_bounds_infinity() -> None:
    feature = Dense("x", transform="standardize", mean=0, std=10, clip=(-5, 20))
    assert dense(feature, [100, -math.inf, None]) == [2.0, -0.5, 0.0]


@pytest.mark.parametrize("value", [math.inf, 1e39])
def test_a_value_beyond_float32_names_row_value_and_cure(value: float) -> None:
    with pytest.raises(RowError, match=r"row 1, column 'x': .* does not fit a float32; pass clip="):
        dense(Dense("x"), [0.0, value])


def test_dense_features_stand_in_their_order() -> None:
    spec = FeatureSpec([Dense("b"), Key("k"), Dense("a", column="c")])
    batch = spec.apply({"k": [1], "b": [2.0], "c": [3.0]})
    assert batch.dense.tolist() == [[2.0, 3.0]] and spec.dense_names == ("b", "a")
    assert batch.dense.dtype == torch.float32 and batch.dense.is_contiguous()
