"""Terminal: the output of all ranks on the driver's terminal, with one progress bar.

Rank 0 speaks for the job: its lines are shown unchanged. A line of another rank begins with its role:
`row rank 1 | ...`. On a terminal rank 0 believes to be on one, so it draws the bar, and its bytes pass through as they
come. If it has an unfinished line on the screen, such as the bar, that line is erased, the other's is written, and rank
0's is written again below. In a file or a pipe only whole lines are written, of every rank.

Only the driver's main thread calls this.
"""

from __future__ import annotations

import codecs
import shutil
import sys
from collections.abc import Sequence

ERASE = "\r\x1b[2K"
SHOW_CURSOR = "\x1b[?25h"
LONGEST_LINE = 500  # in columns, of ranks that see no terminal


class Terminal:
    """`names` are those of the ranks, in their order."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.live = sys.stdout.isatty()
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in names]
        self._lines = [""] * len(names)  # what ranks have written since their last line break

    @property
    def size(self) -> tuple[int, int] | None:
        """Columns and lines for rank 0; None if there is no terminal."""
        found = shutil.get_terminal_size()
        return (found.columns, found.lines) if self.live else None

    def columns(self, rank: int) -> int:
        """How long lines of another rank may be."""
        if not self.live:
            return LONGEST_LINE
        return max(40, shutil.get_terminal_size().columns - len(self._prefix(rank)))

    def write(self, rank: int, data: bytes) -> None:
        """Show what a rank has written."""
        text = self._decoders[rank].decode(data)
        if rank == 0 and self.live:
            self._put(text)
            self._lines[0] = (self._lines[0] + text).rpartition("\n")[2].rpartition("\r")[2]
            return
        *lines, self._lines[rank] = (self._lines[rank] + text).split("\n")
        self._insert([self._prefix(rank) + line for line in lines])

    def note(self, text: str) -> None:
        """Show a line of the driver's own."""
        self._insert([text])

    def end_ranks(self) -> None:
        """All ranks have ended: complete their last lines."""
        for rank, line in enumerate(self._lines):
            if line and not (rank == 0 and self.live):
                self._insert([self._prefix(rank) + line])
        if self.live:
            self._put("\n" * bool(self._lines[0]) + SHOW_CURSOR)
        self._lines = [""] * len(self.names)
        for decoder in self._decoders:
            decoder.reset()

    def _insert(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        text = "".join(f"{line}\n" for line in lines)
        if self.live and self._lines[0]:
            text = f"{ERASE}{text}{self._lines[0]}"
        self._put(text)

    def _prefix(self, rank: int) -> str:
        return f"{self.names[rank]} | " if rank > 0 else ""

    @staticmethod
    def _put(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
