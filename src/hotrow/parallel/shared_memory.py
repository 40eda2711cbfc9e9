"""Ranks of one machine exchange CPU memory through shared memory (core/exchange/shared_memory_exchange.h).

If all ranks are on one machine and can open each other's segments, training's channels exchange there and need no
connection of their own. Otherwise, or with HOTROW_SHARED_MEMORY=0 in the environment of any rank, sockets or Gloo carry
everything (ranks.py). All ranks decide from the same gathered
answers, so that all decide the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotrow import _core
from hotrow.parallel.meeting import machine

if TYPE_CHECKING:
    from hotrow.parallel.exchange import Channel

SWITCH = "HOTROW_SHARED_MEMORY"


def connect_shared_memory(channels: Sequence[Channel], patient: Channel, timeout: float) -> bool:
    """Make the channels use shared memory if all ranks can; returns whether they do. All ranks call it."""
    exchanges: list[Any] = []  # one for each channel; None where this rank is no member
    try:
        if os.environ.get(SWITCH) != "0":
            exchanges = [
                _core.SharedMemoryExchange(channel.rank, channel.world, timeout) if channel.is_member else None
                for channel in channels
            ]
    except RuntimeError:
        exchanges = []  # the system has no such memory
    answers = patient.gather_json(
        [machine(), [None if exchange is None else list(exchange.address) for exchange in exchanges]]
    )
    if any(where != answers[0][0] or not addresses for where, addresses in answers):
        return False
    try:
        for number, (channel, exchange) in enumerate(zip(channels, exchanges, strict=True)):
            if exchange is not None:
                exchange.connect([tuple(answers[rank][1][number]) for rank in channel.members])
        connected = True
    except RuntimeError:
        connected = False  # a process may not open another's memory: other users, other containers
    if not all(patient.gather_json(connected)):
        return False
    for channel, exchange in zip(channels, exchanges, strict=True):
        if exchange is not None:
            channel.use_core_exchange(exchange)
    return True
