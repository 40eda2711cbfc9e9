"""Encodings of users: what the user part of a two-part tower returns, cut into users and joined again.

An encoding is a dict of tensors. `x` is jagged, [events, ...], exactly if `x_lengths` (int64 [users]) is in it too;
every other tensor is [users, ...]. So it can be cut and joined without knowing the tower. What lies behind the last
user's events, and behind the last user, is the padding of a bucket: it is dropped.

Every function here is pure; any thread may call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

Encoding = Mapping[str, Tensor]
LENGTHS = "_lengths"


def cut(encoding: Encoding, users: int) -> list[dict[str, Tensor]]:
    """The encoding of each user, as copies that share no memory with the whole.

    >>> whole = {"x": torch.tensor([1, 2, 3]), "x_lengths": torch.tensor([1, 2]), "mean": torch.tensor([[1.0], [2.5]])}
    >>> cut(whole, 2)[1]
    {'x': tensor([2, 3]), 'x_lengths': tensor([2]), 'mean': tensor([[2.5000]])}
    """
    found: list[dict[str, Tensor]] = [{} for _ in range(users)]
    for name, value in encoding.items():
        lengths = encoding.get(name + LENGTHS)
        sizes = [1] * users if lengths is None else lengths[:users].tolist()
        for one, part in zip(found, value[: sum(sizes)].split(sizes), strict=True):
            one[name] = part.clone()
    return found


def join(parts: Sequence[Encoding]) -> dict[str, Tensor]:
    """One encoding of several, in order. It shares no memory with them.

    >>> join([{"x": torch.tensor([1]), "x_lengths": torch.tensor([1])}, {"x": torch.tensor([2, 3]),
    ...       "x_lengths": torch.tensor([2])}])
    {'x': tensor([1, 2, 3]), 'x_lengths': tensor([1, 2])}
    """
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def size_of(encoding: Encoding) -> int:
    """Its bytes."""
    return sum([value.numel() * value.element_size() for value in encoding.values()])


def user_vectors(
    vectors: Mapping[str, Tensor], features: Iterable[str], users: Sequence[int] | None
) -> dict[str, Tensor]:
    """The vectors of user features, of some users. Requires: the other users have no events (`users` None: all)."""
    found = {}
    for name in features:
        for tensor in (name, name + LENGTHS):
            if tensor in vectors:
                found[tensor] = vectors[tensor]
        if users is not None:
            per_user = name + LENGTHS if name + LENGTHS in vectors else name
            found[per_user] = vectors[per_user][torch.tensor(users, device=vectors[per_user].device)]
    return found


def candidate_vectors(vectors: Mapping[str, Tensor], user_features: Iterable[str]) -> dict[str, Tensor]:
    """The other vectors, and `user_of`."""
    dropped = {tensor for name in user_features for tensor in (name, name + LENGTHS)}
    return {name: value for name, value in vectors.items() if name not in dropped}


def rows_between(vectors: Mapping[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """The vectors of these rows, of those that `candidate_vectors` returned."""
    found = {}
    for name, value in vectors.items():
        lengths = vectors.get(name + LENGTHS)
        if lengths is None:
            found[name] = value[begin:end]
        else:
            first = int(lengths[:begin].sum())
            found[name] = value[first : first + int(lengths[begin:end].sum())]
    return found
