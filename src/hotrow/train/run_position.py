"""Where a fit stands: what a checkpoint keeps of the run beside the cursor, so that `fit(resume=True)` goes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Place:
    """Counted from the start of the run, interruptions or not: its first step, the epoch (from 0), examples seen."""

    first_step: int = 0
    epoch: int = 0
    examples: int = 0
