"""Features: raw columns to keys and dense features, the same in training and serving.

    spec.py        FeatureSpec: a list of features, applied to columns; the entry point
    kinds.py       the kinds of feature, by their name in JSON
    keys.py        Key and Cross: one id per example
    sequences.py   Sequence: any number of ids per example
    event_numbers.py  Numbers, EventTimes and TimeGap: integers of events that are not hashed
    histories.py   aligned features: columns of one list of events, cut together
    buckets.py     Bucketize and LogBucket: a number's bucket as a key
    times.py       TimePart, and event times
    dense.py       Dense: a number for the tower
    columns.py     Arrow tables, lists, arrays and tensors as plain Arrow arrays
    nested.py      a field of a struct, or of a list of structs, as a column
    numbers.py     a column as float64, and plain labels
    labels.py      Label: the column of one task's labels
    hashing.py     the core's hash functions over whole columns
    options.py     checks that several kinds share
    row_error.py   RowError: the rows of a column that cannot be used
    spec_json.py   the JSON format of a spec (docs/formats/features.md)

Imported by `data`, `serve`, `train` and the command line. Imports `batch` and the core's hashes. Specs are immutable
values without state: any thread may call `apply`.
"""

from hotrow.features.buckets import Bucketize, LogBucket
from hotrow.features.dense import Dense
from hotrow.features.event_numbers import EventTimes, Numbers, TimeGap
from hotrow.features.keys import Cross, Key
from hotrow.features.kinds import Feature
from hotrow.features.labels import Label
from hotrow.features.row_error import RowError
from hotrow.features.sequences import Sequence
from hotrow.features.spec import FeatureSpec
from hotrow.features.times import TimePart

__all__ = [
    "Bucketize",
    "Cross",
    "Dense",
    "EventTimes",
    "Feature",
    "FeatureSpec",
    "Key",
    "Label",
    "LogBucket",
    "Numbers",
    "RowError",
    "Sequence",
    "TimeGap",
    "TimePart",
]
