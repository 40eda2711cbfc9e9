"""The five stages of a training batch, top to bottom.

    read     decode events and make a KeyedBatch, with the cursor that resumes after it
    route    deduplicate its keys, table by table
    fetch    find its rows; unseen keys get theirs
    stage    copy rows up to HBM (nothing to do without a GPU)
    compute  gather and pool, tower forward and backward, update rows in place, step the dense part

This version runs them one after another, one batch at a time. That order is the definition of what training computes:
whatever overlaps them later must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from hotrow.batch import KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.nn import EmbeddingCollection
from hotrow.table import Lookup

Result = TypeVar("Result")


def run(
    source: Source,
    embeddings: EmbeddingCollection,
    compute: Callable[[Lookup], Result],
    cursor: Cursor | None = None,
) -> Iterator[tuple[Result, KeyedBatch, Cursor]]:
    """Take every batch of `source` through the five stages; yields what `compute` made of it."""
    for batch, after in source.batches(cursor):
        lookup = embeddings.route(batch)
        lookup.fetch()
        yield compute(lookup), batch, after
