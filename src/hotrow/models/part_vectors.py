"""The vectors that each part of a two-part tower may read.

Both are dicts. Reading a feature of the other part raises a BatchError that names the mistake, instead of a KeyError
or, worse, a logit from the wrong rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hotrow.errors import BatchError


class PartVectors(dict[str, Tensor]):
    """Vectors of a part, and the names of the user's features."""

    def __init__(self, vectors: Mapping[str, Tensor], user_features: tuple[str, ...]) -> None:
        super().__init__(vectors)
        self.user_features = user_features

    def refuse(self, name: str) -> None:
        """Raises BatchError if the other part reads this feature."""
        raise NotImplementedError

    def is_of_user(self, name: str) -> bool:
        """Whether this is a feature of the user, or its lengths."""
        return name in self.user_features or name.removesuffix("_lengths") in self.user_features

    def __missing__(self, name: str) -> Tensor:
        self.refuse(name)
        raise KeyError(name)


class UserVectors(PartVectors):
    """What `encode_user` reads."""

    def refuse(self, name: str) -> None:
        """Raises BatchError for a feature that is not the user's."""
        if not self.is_of_user(name):
            raise BatchError(
                f"encode_user() reads {name!r}, which is no feature of the user ({', '.join(self.user_features)}); "
                "read it in score(), or add it to user_features"
            )


class CandidateVectors(PartVectors):
    """What `score` reads."""

    def refuse(self, name: str) -> None:
        """Raises BatchError for a feature of the user."""
        if self.is_of_user(name):
            raise BatchError(
                f"score() reads {name!r}, which is a feature of the user and has one entry per user, not per row; "
                "put what score() needs of it into the encoding that encode_user() returns"
            )
