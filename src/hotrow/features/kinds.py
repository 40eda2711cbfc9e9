"""The kinds of feature: one frozen dataclass each, by its name in JSON.

A kind has a `name`, its input columns (`inputs()`), its options, and one method that computes it: `ids`, or for Dense
`values`, which become a column of `batch.dense`. To add a kind, write its file and list it here; the spec and the JSON
format need no change.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from hotrow.features.buckets import Bucketize, LogBucket
from hotrow.features.dense import Dense
from hotrow.features.keys import Cross, Key
from hotrow.features.sequences import Sequence
from hotrow.features.times import TimePart

Feature: TypeAlias = Key | Bucketize | LogBucket | TimePart | Cross | Sequence | Dense

KINDS: dict[str, type[Any]] = {
    "key": Key,
    "bucketize": Bucketize,
    "log_bucket": LogBucket,
    "time_part": TimePart,
    "cross": Cross,
    "sequence": Sequence,
    "dense": Dense,
}
