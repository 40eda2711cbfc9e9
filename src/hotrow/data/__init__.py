"""Data: sources that read events and yield batches, each with a resumable cursor.

`parquet`, `text`, `synthetic` and `follow` each make a `Source` (docs/data.md, docs/online.md). `on_ray` wraps a source
and decodes it on a Ray cluster (docs/ray.md). Files in reading order:

    source.py        the Source protocol and the cursor
    rejects.py       what happens to a row that cannot be used: raise or skip
    rebatch.py       batches of any size in, batches of one size out
    split.py         units of work: how a source can be decoded in parts, in any order, by any process
    strided.py       every N-th batch of a source, for one rank, without decoding the others
    event_log/       histories built out of the events of a log
    files/           Parquet and delimited text
    synthetic_log/   a generated click log with a known ground truth
    streams/         sources without an end: a folder, a Redis stream, a Kafka topic
    cluster/         decoding on a Ray cluster

Imported by `train`, `parallel`, `demo`, `bench` and the command line. Imports `features` and `batch`. The training
pipeline's read stage iterates a source on one thread; `cluster/` starts one thread of its own for each pass.
"""

from hotrow.data.cluster import OnRay, on_ray
from hotrow.data.event_log.options import Histories
from hotrow.data.files.parquet import parquet
from hotrow.data.files.text import text
from hotrow.data.files.text_layouts import TextLayout
from hotrow.data.source import Cursor, Source
from hotrow.data.streams.follow import FollowSource, follow
from hotrow.data.synthetic_log.clicks import SyntheticClicks as synthetic
from hotrow.data.synthetic_log.interests import LongInterests as long_interests
from hotrow.data.synthetic_log.shape import Shape
from hotrow.data.synthetic_log.world import Drift

__all__ = [
    "Cursor",
    "Drift",
    "FollowSource",
    "Histories",
    "OnRay",
    "Shape",
    "Source",
    "TextLayout",
    "follow",
    "long_interests",
    "on_ray",
    "parquet",
    "synthetic",
    "text",
]
