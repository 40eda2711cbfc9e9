"""UserPart: a batch's way through the user part of a two-part tower, with a cache of encodings or without.

    arrange → probe the cache → (the engine looks up rows) → encode the users that it lacks → store → join

`arrange` gives equal users one entry and sorts the rows by user, as a candidate part may expect. `probe` takes the ids
of users that the cache has out of the batch, so that the engine does not look up their rows. `encode` returns one
encoding for all users of the batch, in their order.

The engine compares the state of the rows that it read with the state that was probed. If they differ, it reads again
with a batch that was not probed: cached encodings and rows of one batch are always of one publication.

Any thread may call any method. Counts are added without a lock: a sum may lose an increment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import BatchError
from hotrow.jagged_groups import Column, take
from hotrow.nn.collection import pad
from hotrow.serve.execution import encodings
from hotrow.serve.execution.encodings import Encoding
from hotrow.serve.execution.user_cache import State, UserCache, digests
from hotrow.serve.protocol.request import Signature


class Encoder(Protocol):
    """A tower's user part."""

    def encode(self, vectors: Mapping[str, Tensor], weights: Any = None) -> Encoding: ...


class Probe(NamedTuple):
    """A batch whose cached users have no ids, and what the cache has."""

    batch: KeyedBatch
    state: State | None = None  # None: the cache was not asked
    digests: Sequence[bytes] = ()
    found: Sequence[Encoding | None] = ()

    @property
    def hits(self) -> int:
        """How many users the cache has."""
        return sum([one is not None for one in self.found])


class UserPart:
    """The user part of one version's tower."""

    def __init__(self, signature: Signature, cache: UserCache | None = None) -> None:
        self.signature, self.cache = signature, cache
        self.features = tuple(name for name in signature.columns if name in signature.user)
        grouped = {name for group in signature.aligned for name in group[1:]}  # a history's events are counted once
        self._histories = [n for n in self.features if n in signature.sequences and n not in grouped]
        self.batches = self.users = self.events = 0  # encoded

    def arrange(self, batch: KeyedBatch) -> tuple[KeyedBatch, Tensor | None]:
        """The batch with users, its rows sorted by user; and the places of the original rows, if it was sorted."""
        if batch.visible:
            raise BatchError(
                f"examples of the batch see the beginnings of {', '.join(batch.visible)}: share_users(prefixes=) is "
                "for training; give the engine the batch without users, or with share_users(features)"
            )
        batch = batch.share_users(self.features)
        if batch.user_of is None or bool((batch.user_of[1:] >= batch.user_of[:-1]).all()):
            return batch, None
        order = torch.argsort(batch.user_of, stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(order.numel())

        def sort(columns: Mapping[str, Jagged]) -> dict[str, Jagged]:
            own = {name: Column(one.values, one.offsets, one.weights) for name, one in columns.items()}
            kept = batch.user_features
            return {name: one if name in kept else Jagged(*take(own[name], order)) for name, one in columns.items()}

        dense = None if batch.dense is None else batch.dense[order]
        ids, numbers = sort(batch.ids), sort(batch.numbers)
        found = KeyedBatch(ids, dense, None, None, numbers, batch.user_of[order], batch.user_features)
        return found, places

    def probe(self, batch: KeyedBatch, state: State | None, count: bool = True) -> Probe:
        """Ask the cache for the users of an arranged batch. Without a state it is not asked."""
        if self.cache is None or state is None:
            return Probe(batch)
        keys = digests(batch)
        found = self.cache.find(state, keys, count)
        if not any(one is not None for one in found):
            return Probe(batch, state, keys, found)
        return Probe(_without(batch, [one is not None for one in found]), state, keys, found)

    def encode(
        self, tower: Encoder, vectors: Mapping[str, Tensor], probe: Probe, weights: Any, state: State | None
    ) -> Encoding:
        """The encoding of all users. `state` is that of the rows and weights, None if they must not be stored.

        Requires: `state` equals the probe's if the probe has hits.
        """
        users = probe.batch.users
        found = probe.found or [None] * users
        missing = [user for user, one in enumerate(found) if one is None]
        if not missing:
            return encodings.join([one for one in found if one is not None])
        of_users = encodings.user_vectors(vectors, self.features, None if len(missing) == users else missing)
        encoded = tower.encode(of_users, weights)
        self.count(probe.batch, len(missing))
        if self.cache is None or (state is None and len(missing) == users):
            return encoded
        parts = encodings.cut(encoded, len(missing))
        if state is not None:
            keys = probe.digests or digests(probe.batch)
            self.cache.store(state, [keys[user] for user in missing], parts)
        if len(missing) == users:
            return encoded
        new = iter(parts)
        return encodings.join([next(new) if one is None else one for one in found])

    def count(self, batch: KeyedBatch, users: int) -> None:
        """Count the encoding of so many users of a batch, which has the events of these alone."""
        self.batches += 1
        self.users += users
        self.events += sum([len(batch.ids[name].values) for name in self._histories])

    def figures(self) -> dict[str, Any]:
        """Counters, for metrics."""
        cache = None if self.cache is None else self.cache.figures()
        return {"batches": self.batches, "users": self.users, "events": self.events, "cache": cache}


def outputs_by_row(vectors: Mapping[str, Tensor], batch: KeyedBatch, signature: Signature) -> dict[str, Tensor]:
    """The vectors of a jagged tower as lookups return them: one entry per row, and sequences padded, with a mask."""
    found: dict[str, Tensor] = {}
    for name in signature.features:
        parts = {name: vectors[name]}
        if name in signature.sequences:
            padded, mask = pad(batch.ids[name], vectors[name])
            parts = {name: padded, f"{name}_mask": mask}
        if batch.user_of is not None and name in batch.user_features:
            owners = batch.user_of.to(vectors[name].device)
            parts = {tensor: value[owners] for tensor, value in parts.items()}
        found |= parts
    return found


def _without(batch: KeyedBatch, dropped: Sequence[bool]) -> KeyedBatch:
    """The batch where these users have no ids."""
    kept = torch.tensor([not one for one in dropped])

    def drop(columns: Mapping[str, Jagged]) -> dict[str, Jagged]:
        return {name: _drop(one, kept) if name in batch.user_features else one for name, one in columns.items()}

    return replace(batch, ids=drop(batch.ids), numbers=drop(batch.numbers))


def _drop(column: Jagged, kept: Tensor) -> Jagged:
    lengths = column.lengths()
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths * kept, 0, out=offsets[1:])
    ids = torch.repeat_interleave(kept, lengths)
    return Jagged(column.values[ids], offsets, None if column.weights is None else column.weights[ids])
