"""LoadShedder: refuse requests before they are parsed, when the engine is saturated.

The engine's admission control is precise: it knows the rows in its queue, how long a batch takes, and each request's
deadline (serve/batching/tensorbatch.py). But a request that the engine refuses has already been read, parsed and sent
as a frame. At ten times the capacity this work uses up the cores, and requests wait for a long time in the sockets'
buffers, where nothing measures them. So the front end keeps two figures of its own:

- `limit`, the maximum of requests in flight here. If the engine refuses a request for lack of time, the limit drops
  below the number in flight when that request arrived. An answer while the limit is nearly reached raises it by one. So
  `limit` stays just below the engine's capacity: most of an overload is shed here, for one read and one small write
  (serve/frontend/http_connection.py), and a few requests still reach the engine.
- `turn_seconds`, the duration of one turn (iteration) of the event loop. An answer will wait about that long. A turn
  takes microseconds until there is an overload.

The kernel reports how long a request waited in its socket before it was read
(http_connection.seconds_since_last_received). This wait and the turn are deducted from the request's deadline. During
an overload, a request that has waited for most of its usual time is shed: its body is dropped as it arrives.

A connection whose request was shed is not read for some milliseconds, and only a few are resumed at a time. Without
this pause a thousand clients that retry at once keep the loop reading: libuv reads up to 48 times before it runs other
callbacks, and answers that were ready waited for seconds. When an overload begins, idle connections are paused in the
same way.

Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from hotrow.serve.protocol.request import RefusedError, Request

MIN_LIMIT = 32  # requests in flight that always reach the engine, whose admission control is precise
_DECREASE = 0.9  # the new limit after a refusal, as a fraction of the requests in flight when that request arrived
_NEAR = 0.5  # of the limit: an answer with fewer requests in flight does not raise it
_COST = 0.0016  # rough seconds of this process and the engine per request; sets the limit before any measurement
_MARGIN = 0.25  # of a request's time, kept in reserve during an overload, because some of its waits are not measured
_RETRY_SECONDS = 0.1
SHED = RefusedError(429, "the server has as many requests as it can answer in time; retry later", _RETRY_SECONDS)
_NEGLIGIBLE = 0.001  # seconds: a shorter wait is not deducted
_RESUME_SECONDS = 0.005  # between two groups of paused connections
_RESUME_COUNT = 48  # connections in a group


class PausableConnection(Protocol):
    """A client's connection whose reading can be paused."""

    def resume(self) -> None:
        """Read it again."""
        ...


class LoadShedder:
    """Decides which requests are shed, and pauses their connections.

    >>> shedder = LoadShedder(1000)
    >>> shedder.end_refused(shedder.begin()); shedder.limit
    32.0
    """

    def __init__(self, max_limit: int) -> None:
        self.max_limit = max_limit
        self.limit = float(max_limit)
        self.in_flight = 0
        self.shed_total = 0
        self.turn_seconds = 0.0
        self._turn_began = 0.0  # 0 between turns
        self._usual_seconds = 1.0  # from a request to its deadline, a moving average
        self._paused: deque[PausableConnection] = deque()

    @property
    def at_limit(self) -> bool:
        """Whether every new request is shed now."""
        return self.in_flight >= min(self.limit, max(MIN_LIMIT, self._usual_seconds / _COST))

    def should_shed(self, waited: float) -> bool:
        """Whether to shed a request that waited in its socket for `waited` seconds: always at the limit, and during an
        overload also if too much of its time has passed."""
        return self.at_limit or (
            self.limit < self.max_limit and waited + self.turn_seconds > (1 - _MARGIN) * self._usual_seconds
        )

    def shed(self) -> RefusedError:
        """Count a shed request; returns its error."""
        self.shed_total += 1
        return SHED

    def shed_and_pause(self, connection: PausableConnection, loop: asyncio.AbstractEventLoop) -> None:
        """Count a shed request; its connection, which is paused, is resumed later."""
        self.shed_total += 1
        self.resume_later([connection], loop)

    @property
    def has_paused(self) -> bool:
        """Whether some connections are paused."""
        return bool(self._paused)

    def resume_later(self, connections: Iterable[PausableConnection], loop: asyncio.AbstractEventLoop) -> None:
        """These connections are paused; resume them, a few at a time."""
        if not self._paused:
            loop.call_later(_RESUME_SECONDS, self._resume_some, loop)
        self._paused.extend(connections)

    def _resume_some(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(len(self._paused), _RESUME_COUNT)):
            self._paused.popleft().resume()
        if self._paused:
            loop.call_later(_RESUME_SECONDS, self._resume_some, loop)

    def begin(self) -> int:
        """A request is in flight from now on; returns how many are."""
        self.in_flight += 1
        return self.in_flight

    def end_answered(self) -> None:
        """A request was answered."""
        if self.in_flight > _NEAR * self.limit:
            self.limit = min(float(self.max_limit), self.limit + 1.0)
        self.in_flight -= 1

    def end_refused(self, in_flight_before: int) -> None:
        """The engine refused a request for lack of time; `in_flight_before` is what `begin` returned for it."""
        self.limit = max(float(min(MIN_LIMIT, self.max_limit)), min(self.limit, _DECREASE * in_flight_before))
        self.in_flight -= 1

    def end(self) -> None:
        """A request ended in another way; this is no evidence about the engine's capacity."""
        self.in_flight -= 1

    def deduct_waiting(self, request: Request, waited: float = 0.0) -> Request:
        """The request with an earlier deadline: minus the seconds that it waited in its socket, this turn of the loop,
        and another turn for its answer. Raises RefusedError if that deadline has passed."""
        if request.deadline is None:
            return request
        now = time.monotonic()
        self._usual_seconds += 0.1 * (request.deadline - now - self._usual_seconds)
        turn_so_far = now - self._turn_began if self._turn_began else 0.0
        deducted = waited + max(turn_so_far, self.turn_seconds)
        if self.limit < self.max_limit:
            deducted += _MARGIN * (request.deadline - now)
        if deducted < _NEGLIGIBLE:
            return request
        if request.deadline - deducted < now:
            raise RefusedError(
                429, "its deadline would pass before the answer; send it with a longer deadline", _RETRY_SECONDS
            )
        return replace(request, deadline=request.deadline - deducted)

    def has_usual_deadline(self, request: Request) -> bool:
        """Whether the request has at least half the usual time. If it has less, its refusal is no evidence about the
        engine's capacity."""
        return request.deadline is None or request.deadline - time.monotonic() > 0.5 * self._usual_seconds

    def time_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Something was read from a client; the first read of a turn starts its clock."""
        if not self._turn_began:
            self._turn_began = time.monotonic()
            loop.call_soon(self._all_read, loop)

    def _all_read(self, loop: asyncio.AbstractEventLoop) -> None:
        """All ready sockets have been read. The callbacks that this scheduled run next; the turn ends after them."""
        loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self.turn_seconds, self._turn_began = time.monotonic() - self._turn_began, 0.0
