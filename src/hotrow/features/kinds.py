"""The kinds of feature: one frozen dataclass each, and the word for it in JSON.

A kind is a value that says what to read and how (`name`, `inputs()`, its options) with one method that does it: `ids`
for all but Dense, whose `values` become a column of `batch.dense`. To add a kind, write its file and list it here; the
spec and the JSON format need no change.
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
