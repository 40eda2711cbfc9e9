"""Answer: what an engine returns for a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hotrow.serve.updates.freshness import Freshness


@dataclass(frozen=True)
class LateIds:
    """Ids that the policy answered because their rows were on SSD only: how many, and how many of each row (int32
    [rows]; None if there are none)."""

    ids: int
    by_row: Tensor | None


class Answer(NamedTuple):
    """Logits of a batch, the ids that the policy answered, whether compiled buckets or captured graphs computed all
    logits, and the publication of the rows and weights."""

    logits: Tensor
    late: LateIds
    compiled: bool
    fresh: Freshness
