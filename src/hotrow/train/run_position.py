"""RunPosition: the progress of a run, saved in checkpoints beside the cursor, so that `fit(resume=True)` continues."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunPosition:
    """The run's first step, the current epoch (from 0) and the examples seen, counted over all its interruptions."""

    first_step: int = 0
    epoch: int = 0
    examples: int = 0
