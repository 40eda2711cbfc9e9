"""Ranks of one machine exchange what is in CPU memory through shared memory (core/exchange/shared_memory_exchange.h).

Where all ranks are on one machine and can open each other's segments, the channels of training post their messages
there and need no connection of their own; Gloo, over which they meet, has the rest. Elsewhere, and with
HOTROW_SHARED_MEMORY=0 in the environment of any of them, Gloo carries everything. All decide from what all have said,
so nobody waits in one place for who is in another.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotrow import _core

if TYPE_CHECKING:
    from hotrow.parallel.exchange import Channel

SWITCH = "HOTROW_SHARED_MEMORY"


def share(channels: Sequence[Channel], patient: Channel, timeout: float) -> bool:
    """Have the channels use shared memory, if all ranks can; says whether they do. All ranks call it."""
    rank, world = patient.rank, patient.world
    boxes = []
    try:
        if os.environ.get(SWITCH) != "0":
            boxes = [_core.Mailbox(rank, world, timeout) for _ in channels]
    except RuntimeError:
        boxes = []  # a system without such memory
    offers = patient.gather_json([_machine(), [list(box.address) for box in boxes]])
    if any(machine != offers[0][0] or not addresses for machine, addresses in offers):
        return False
    try:
        for number, box in enumerate(boxes):
            box.connect([tuple(addresses[number]) for _, addresses in offers])
        connected = True
    except RuntimeError:
        connected = False  # processes that may not look at each other: other users, other containers
    if not all(patient.gather_json(connected)):
        return False
    for channel, box in zip(channels, boxes, strict=True):
        channel.share(box)
    return True


def _machine() -> str:
    """The same for all processes of a machine, until it is started anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"unknown, process {os.getpid()}"
