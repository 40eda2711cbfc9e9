"""Scoring: the tower's part of a batch, once its rows were read.

    one part      run the tower
    two parts     encode the users, once each; score the rows against the encodings

A batch may be scored in ranges of rows. All ranges use the same encodings and the same weights.

Any thread may call it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hotrow.serve.execution.encodings import candidate_vectors, rows_between
from hotrow.serve.execution.towers import Towers
from hotrow.serve.execution.two_part_tower import TwoPartTower
from hotrow.serve.execution.user_cache import State
from hotrow.serve.execution.user_part import Probe, UserPart
from hotrow.serve.graph.tower import OriginalTower, Tower

Score = Callable[[int, int, Tensor | None], tuple[Tensor, bool]]


def scorer(
    towers: Tower | TwoPartTower,
    users: UserPart | None,
    vectors: Mapping[str, Tensor],
    probe: Probe,
    weights: Any,
    state: State | None,
) -> Score:
    """A function that runs the tower for the rows of a batch from `begin` to `end`, with their dense features. It
    returns their logits, and whether compiled buckets computed them all.

    Users are encoded here. `weights` were read with the rows (None: those of now), and `state` is that of the rows,
    None if encodings of them must not be kept.
    """
    rows = probe.batch.size
    if users is None or not isinstance(towers, TwoPartTower):

        def run(begin: int, end: int, dense: Tensor | None) -> tuple[Tensor, bool]:
            assert not isinstance(towers, TwoPartTower)
            some = vectors if end - begin == rows else rows_between(vectors, begin, end)
            return _run_tower(towers, some, dense, weights)

        return run
    tasks = users.signature.tasks
    if not rows:
        return lambda begin, end, dense: (torch.empty((0, tasks) if tasks > 1 else 0), False)
    encoding = users.encode(towers, vectors, probe, weights, state)
    candidates = candidate_vectors(vectors, users.features)

    def score(begin: int, end: int, dense: Tensor | None) -> tuple[Tensor, bool]:
        some = candidates if end - begin == rows else rows_between(candidates, begin, end)
        return towers.answer(some, encoding, dense, weights)

    return score


def _run_tower(tower: Tower, vectors: Mapping[str, Tensor], dense: Tensor | None, weights: Any) -> tuple[Tensor, bool]:
    """Logits, and whether compiled buckets computed all of them. `weights` were read at an earlier time; None: now."""
    if isinstance(tower, Towers):
        return tower.answer(vectors, dense, weights)
    if isinstance(tower, OriginalTower):
        return tower.run(vectors, dense, weights), False
    return tower.run(vectors, dense), False
