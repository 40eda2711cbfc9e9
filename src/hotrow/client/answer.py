"""Answer: what a server sent, as arrays. ClientError: why it did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from hotrow.errors import HotRowError

Array = NDArray[Any]


@dataclass(frozen=True)
class Answer:
    """An answer's arrays by name, and the version and publication that they are of.

    Predictions have `probabilities` (or `predictions`) and `logits`. Lookups have the names of `Engine.lookup`: a
    pooled feature [rows, dim]; a sequence [rows, length, dim] and its `<name>_mask` [rows, length].
    """

    arrays: Mapping[str, Array]
    model: str
    version: str
    parameters: Mapping[str, Any]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    @property
    def publication(self) -> int:
        """The publication that the rows and weights are of; 0 without any."""
        return int(self.parameters.get("publication", 0))

    @property
    def late_rows(self) -> int:
        """How many ids the policy answered, because their rows missed the deadline."""
        return int(self.parameters.get("late_rows", 0))


class ClientError(HotRowError, RuntimeError):
    """A request failed. `status` is HTTP's, over gRPC too; 0 if no server answered."""

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after

    @property
    def temporary(self) -> bool:
        """Whether the same request may succeed later: the server is away, starting or overloaded."""
        return self.status in (0, 429, 503)
