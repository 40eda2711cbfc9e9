"""The kinds of feature: one frozen dataclass each, by its name in JSON.

A kind has a `name`, its input columns (`inputs()`), its options, and one method that computes it: `ids`, or for Dense
`values`, which become a column of `batch.dense`. Kinds of a history are computed together (histories.py). To add a
kind, write its file and list it here; the spec needs no change, and the JSON format a new version (spec_json.py).
"""

from __future__ import annotations

from typing import Any, TypeAlias

from hotrow.features.buckets import Bucketize, LogBucket
from hotrow.features.dense import Dense
from hotrow.features.event_numbers import EventTimes, Numbers, TimeGap
from hotrow.features.keys import Cross, Key
from hotrow.features.sequences import Sequence
from hotrow.features.times import TimePart

Feature: TypeAlias = Key | Bucketize | LogBucket | TimePart | Cross | Sequence | Dense | Numbers | EventTimes | TimeGap

KINDS: dict[str, type[Any]] = {
    "key": Key,
    "bucketize": Bucketize,
    "log_bucket": LogBucket,
    "time_part": TimePart,
    "cross": Cross,
    "sequence": Sequence,
    "dense": Dense,
    "numbers": Numbers,
    "event_times": EventTimes,
    "time_gap": TimeGap,
}
