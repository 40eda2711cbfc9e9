"""Features: raw columns → keys, the same in training and serving.

`FeatureSpec` is the door; the other names are the kinds of feature that it is made of. A spec that refuses a value
raises `RowError`, which knows the rows.
"""

from hotrow.features.buckets import Bucketize, LogBucket
from hotrow.features.dense import Dense
from hotrow.features.keys import Cross, Key
from hotrow.features.kinds import Feature
from hotrow.features.row_error import RowError
from hotrow.features.sequences import Sequence
from hotrow.features.spec import FeatureSpec
from hotrow.features.times import TimePart

__all__ = [
    "Bucketize",
    "Cross",
    "Dense",
    "Feature",
    "FeatureSpec",
    "Key",
    "LogBucket",
    "RowError",
    "Sequence",
    "TimePart",
]
