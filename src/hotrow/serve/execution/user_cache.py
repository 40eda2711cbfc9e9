"""UserCache: encodings of users whose features have not changed, so that their history is neither read nor encoded.

    key     a digest of all features of the user: ids, weights, numbers and lengths
    state   the publication of the rows and the number of the weights: all entries are of one state

An entry of another state is never returned. The first access with a newer state drops all entries, and an older state,
of a batch that began before an update, finds and stores nothing. So a lookup sees what it would compute itself.

The bytes of all entries stay at or under `limit`, the tensors' and what Python needs for them (ENTRY, TENSOR). The
entry that was not used for the longest time is evicted first. One that is larger than the limit is not stored.

Any thread may call any method. Tensors of an entry are never changed.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from hotrow.batch import KeyedBatch
from hotrow.errors import OptionError
from hotrow.serve.execution.encodings import Encoding, size_of
from hotrow.units import parse_size

ENTRY, TENSOR = 512, 256  # bytes of an entry's key, dict and links, and of a tensor's objects


class State(NamedTuple):
    """What an encoding depends on beside the user. Both numbers only grow."""

    publication: int
    weights: int


class UserCache:
    """Encodings by digest, least recently used first.

    >>> import torch
    >>> cache = UserCache("1MiB")
    >>> cache.store(State(0, 0), [b"user 7"], [{"x": torch.ones(1, 4)}])
    >>> cache.find(State(0, 0), [b"user 7"])[0]["x"].shape, cache.find(State(1, 0), [b"user 7"])
    (torch.Size([1, 4]), [None])
    """

    def __init__(self, limit: str | int) -> None:
        self.limit = parse_size(limit, "user_cache")
        if self.limit <= 0:
            raise OptionError(f"user_cache={limit!r}: give a size above 0, such as '256MiB', or leave it out")
        self._state = State(-1, -1)
        self._entries: OrderedDict[bytes, tuple[Encoding, int]] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = 0
        self._counts = {"hits": 0, "misses": 0, "evicted": 0, "outdated": 0}

    def find(self, state: State, digests: Sequence[bytes], count: bool = True) -> list[Encoding | None]:
        """The encoding of each user, or None. Without `count` hits and misses are not counted."""
        found: list[Encoding | None] = [None] * len(digests)
        with self._lock:
            if self._enter(state):
                for number, digest in enumerate(digests):
                    entry = self._entries.get(digest)
                    if entry is not None:
                        self._entries.move_to_end(digest)
                        found[number] = entry[0]
            if count:
                hits = sum([one is not None for one in found])
                self._counts["hits"] += hits
                self._counts["misses"] += len(found) - hits
        return found

    def store(self, state: State, digests: Sequence[bytes], encodings: Sequence[Encoding]) -> None:
        """Keep these users' encodings, which were computed at this state. They must not be changed afterwards."""
        with self._lock:
            if not self._enter(state):
                return
            for digest, encoding in zip(digests, encodings, strict=True):
                size = ENTRY + TENSOR * len(encoding) + size_of(encoding)
                if size > self.limit:
                    continue
                self._bytes += size - self._entries.pop(digest, (encoding, 0))[1]
                self._entries[digest] = encoding, size
                while self._bytes > self.limit:
                    _, (_, freed) = self._entries.popitem(last=False)
                    self._bytes -= freed
                    self._counts["evicted"] += 1

    def figures(self) -> dict[str, int]:
        """Counters, and the entries and bytes of now."""
        with self._lock:
            return {**self._counts, "users": len(self._entries), "bytes": self._bytes, "limit": self.limit}

    def _enter(self, state: State) -> bool:
        """Whether the entries are of this state, after dropping those of an older one. Requires: the lock."""
        if state > self._state:
            self._counts["outdated"] += len(self._entries)
            self._entries, self._bytes, self._state = OrderedDict(), 0, state
        return state == self._state


def digests(batch: KeyedBatch) -> list[bytes]:
    """A digest of each user's features. Users with equal digests have equal features."""
    hashes = [hashlib.blake2b(digest_size=16) for _ in range(batch.users)]
    for name in sorted(batch.user_features):
        if name not in batch.ids and name not in batch.numbers:
            continue
        column = batch.column(name)
        values = column.values.numpy()
        weights = None if column.weights is None else column.weights.numpy()
        places = range(len(values) + 1) if column.offsets is None else column.offsets.tolist()
        for user, one in enumerate(hashes):
            begin, end = places[user], places[user + 1]
            one.update((end - begin).to_bytes(7, "little") + (b"\1" if weights is not None else b"\0"))
            one.update(values[begin:end].data)
            if weights is not None:
                one.update(weights[begin:end].data)
    return [one.digest() for one in hashes]
