"""Data: events in, as batches with a resumable cursor.

`parquet`, `text` and `synthetic` each make a `Source`; docs/data.md is the guide.
"""

from hotrow.data.layouts import TextLayout
from hotrow.data.parquet import parquet
from hotrow.data.shape import Shape
from hotrow.data.source import Cursor, Source
from hotrow.data.synthetic import SyntheticClicks as synthetic
from hotrow.data.text import text

__all__ = ["Cursor", "Shape", "Source", "TextLayout", "parquet", "synthetic", "text"]
