"""Data: events in, as batches with a resumable cursor.

`parquet`, `text` and `synthetic` each make a `Source`; docs/data.md is the guide. `on_ray` moves a source's work to a
cluster; docs/ray.md. `follow` waits for more; docs/online.md.
"""

from hotrow.data.cluster import OnRay, on_ray
from hotrow.data.files.parquet import parquet
from hotrow.data.files.text import text
from hotrow.data.files.text_layouts import TextLayout
from hotrow.data.source import Cursor, Source
from hotrow.data.streams.follow import FollowSource, follow
from hotrow.data.synthetic_log.clicks import SyntheticClicks as synthetic
from hotrow.data.synthetic_log.shape import Shape
from hotrow.data.synthetic_log.world import Drift

__all__ = [
    "Cursor",
    "Drift",
    "FollowSource",
    "OnRay",
    "Shape",
    "Source",
    "TextLayout",
    "follow",
    "on_ray",
    "parquet",
    "synthetic",
    "text",
]
