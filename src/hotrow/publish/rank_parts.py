"""The parts that other ranks have put on the bus: rank 0 commits a publication when all of them are complete.

Only the delivery thread of rank 0 uses it.
"""

from __future__ import annotations

from hotrow.publish.bus import Bus
from hotrow.publish.message import NOTE, BadMessage, Message


class RankParts:
    """Reads a bus from an offset on and collects the checksums of complete parts of ranks 1 and up."""

    def __init__(self, session: int, world: int) -> None:
        self.session, self.world = session, world
        self.offset = 0  # of the next message to read
        self._missing: dict[tuple[int, int], dict[int, set[int]]] = {}  # number, rank: chunks missing by body checksum

    def read(self, bus: Bus, wait: float) -> None:
        """Read new messages from the bus, waiting up to `wait` seconds."""
        for entry in bus.read(self.offset, wait=wait):
            self.offset = entry.offset + 1
            self._note(entry.data)

    def checksums(self, number: int) -> list[int] | None:
        """The checksums of the parts of a publication by rank, or None while a part is incomplete."""
        found = [self._whole_part(number, rank) for rank in range(1, self.world)]
        whole = [checksum for checksum in found if checksum is not None]
        if len(whole) < self.world - 1:
            return None
        for rank in range(1, self.world):
            self._missing.pop((number, rank), None)
        return whole

    def _note(self, data: bytes) -> None:
        try:
            message = Message.decode(data)
        except BadMessage:
            return  # subscribers report it
        if message.kind == NOTE or message.session != self.session or message.rank == 0:
            return
        bodies = self._missing.setdefault((message.number, message.rank), {})
        bodies.setdefault(message.body_checksum, set(range(message.chunks))).discard(message.chunk)

    def _whole_part(self, number: int, rank: int) -> int | None:
        """The checksum of a rank's newest part that has all its chunks."""
        bodies = self._missing.get((number, rank), {})
        return next((body for body, missing in reversed(bodies.items()) if not missing), None)
