"""Apply a publication to a model in this process: for tests, tools, and readers that serve no requests meanwhile.

A server cuts over between batches (serve/updates/); here the rows are set at once. Rows get the published values and
fresh optimizer state, because a reader does not train.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hotrow.errors import PublishError
from hotrow.nn import EmbeddingCollection
from hotrow.publish.publication import Publication


def apply(publication: Publication, embeddings: EmbeddingCollection, tower: nn.Module | None = None) -> int:
    """Set and remove its rows and load its weights; returns the number of rows.

    Everything is checked first, so an error changes nothing.
    """
    tables = {rows.table.name: rows for rows in embeddings.tables}
    for name, change in publication.tables.items():
        if name not in tables:
            raise PublishError(f"publication {publication.number} has table {name!r}, which this model lacks")
        dim = tables[name].table.dim
        if change.keys.numel() and change.values.shape[1] != dim:
            raise PublishError(
                f"publication {publication.number} has rows of dim {change.values.shape[1]} for table {name!r}, which "
                f"has dim {dim}; open the version of the model that the trainer trains"
            )
    if publication.dense is not None and tower is not None:
        _check_weights(publication, tower.state_dict())
    for name, change in publication.tables.items():
        if change.deleted.numel():
            tables[name].erase(change.deleted)
        if change.keys.numel():
            tables[name].assign(change.keys, change.values.to(torch.float32))
    if publication.dense is not None and tower is not None:
        tower.load_state_dict(publication.dense)
    return publication.rows


def _check_weights(publication: Publication, state: dict[str, Any]) -> None:
    assert publication.dense is not None
    sent = {name: tuple(value.shape) for name, value in publication.dense.items()}
    mine = {name: tuple(value.shape) for name, value in state.items()}
    if sent != mine:
        differ = sorted(name for name in {*sent, *mine} if sent.get(name) != mine.get(name))
        raise PublishError(
            f"publication {publication.number} has weights for another tower: {', '.join(differ[:4])} differ; open the "
            "version of the model that the trainer trains"
        )
