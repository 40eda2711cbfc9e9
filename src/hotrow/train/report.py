"""The values that `fit` and `save` return."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hotrow.data import Cursor
from hotrow.train.progressive_validation import Window
from hotrow.train.stage_times import StageReport


@dataclass
class SaveReport:
    """What a save did. With `wait=False`, the figures about writing are set once it is `done`.

    `pause_seconds` is how long training paused: the capture, and waiting for an earlier save. `bytes_copied` counts
    rows that were copied for the save because training was about to change them.
    """

    path: Path
    step: int
    pause_seconds: float
    seconds: float = 0.0
    rows: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    bytes_copied: int = 0
    done: bool = False


@dataclass
class Report:
    """What a call of `fit` did: steps, losses, speed, where it stopped, the checkpoints it made.

    `metrics` cover the last epoch, including the part before an interruption. `stages` has seconds busy and waiting,
    bytes and the share of time of each stage of the pipeline; `stages_by_role` has those of "towers" and "rows" where
    they are ranks of their own. `windows` are the points of progressive validation
    (`Trainer(window=)`). `hbm` has the counters of the HBM cache, if there is one: hits and misses in ids, evictions
    and overflows in rows (docs/hbm.md). With ranks, everything covers the whole job and is the same on every rank,
    except `seconds`, `saves` and `hbm`.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    examples: int = 0
    ids: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list, repr=False)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list, repr=False)
    cursor: Cursor | None = field(default=None, repr=False)
    saves: list[SaveReport] = field(default_factory=list, repr=False)
    resumed_from: int | None = None
    stages: list[StageReport] = field(default_factory=list, repr=False)
    stages_by_role: dict[str, list[StageReport]] = field(default_factory=dict, repr=False)
    windows: list[Window] = field(default_factory=list, repr=False)
    hbm: dict[str, int] = field(default_factory=dict)

    @property
    def examples_per_second(self) -> float:
        """Speed over the whole run, reading included."""
        return self.examples / max(self.seconds, 1e-9)

    @property
    def ids_per_second(self) -> float:
        """Ids looked up and updated per second."""
        return self.ids / max(self.seconds, 1e-9)

    @property
    def longest_pause(self) -> float:
        """The longest pause of training for a checkpoint, in seconds; 0 without one."""
        return max((save.pause_seconds for save in self.saves), default=0.0)
