"""Door: requests that cannot be answered in time are turned away before they are read.

The engine admits by what it knows: rows in line, how long a batch takes, each request's deadline (tensorbatch.py). But
a request that it refuses has been read, checked, made a frame, sent and refused by then, on the cores that the others
want; at ten times the capacity that work is all there is, and requests grow old in the sockets where nobody sees them.
So the front end keeps two figures:

- `limit`, how many requests may be under way here. It falls when the engine refuses one for want of time, to less than
  were under way when that one came, and rises by one with every answer that comes while it is nearly reached. So it
  follows the engine's own edge from just below: most of a flood ends here, for the price of one read and one small
  write (serve/frontend/http_connection.py), and a few requests still ask the engine, which alone knows.
- `turn`, how long a turn of the event loop takes: so long an answer will wait. A turn is microseconds until there is a
  flood.

How long a request lay in its socket before it was read, the kernel knows (connection.lain). That and the turn are taken
from the request's time; one that has lain for most of the time that requests usually have is turned away unread, like
those over the limit.

Whoever was turned away is not heard for some milliseconds, and only so many are heard again at a time. Without that a
thousand clients who ask again at once keep the loop reading: libuv looks up to 48 times for more before it lets others
run, and answers that were long there waited for seconds. When a flood begins, all others that are idle are held back in
the same way: a turn that turns a thousand away takes longer than the few that came in before have.

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

LEAST = 32  # requests under way, whatever the engine says: it refuses precisely, this does not
_FALL = 0.9  # of those under way when one came that the engine refused
_NEAR = 0.5  # of the limit: with fewer under way an answer says nothing about more
_COST = 0.0016  # seconds of this process and of the engine that a request takes, roughly: the limit before all figures
_MARGIN = 0.25  # of a request's time that is not planned with in a flood: nobody knows all its waits
_RETRY_SECONDS = 0.1
AWAY = RefusedError(429, "the server has as many requests as it can answer in time; ask again", _RETRY_SECONDS)
_SHORT = 0.001  # seconds: a turn that is no loss
_TICK = 0.005  # seconds: after so long
_TOGETHER = 48  # of those who were turned away are heard again


class Guest(Protocol):
    """A client's connection."""

    def let_in(self) -> None:
        """Hear it again."""
        ...


class Door:
    """Who may come in.

    >>> door = Door(1000)
    >>> door.refused(door.entered()); door.limit
    32.0
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = float(most)
        self.inside = 0
        self.turned_away = 0
        self.turn = 0.0  # seconds
        self._began = 0.0  # this turn; 0 between turns
        self._allowed = 1.0  # seconds that requests have, lately
        self._outside: deque[Guest] = deque()

    @property
    def shut(self) -> bool:
        """Whether nobody may come in now: enough are inside."""
        return self.inside >= min(self.limit, max(LEAST, self._allowed / _COST))

    def shut_for(self, waited: float) -> bool:
        """Whether one that lay in its socket for so long may not: nobody may, or in a flood, too much of its time has
        gone."""
        return self.shut or (self.limit < self.most and waited + self.turn > (1 - _MARGIN) * self._allowed)

    def refusal(self) -> RefusedError:
        """What to say to one who may not."""
        self.turned_away += 1
        return AWAY

    def entered(self) -> int:
        """A request is under way; how many are."""
        self.inside += 1
        return self.inside

    def shut_out(self, guest: Guest, loop: asyncio.AbstractEventLoop) -> None:
        """One was turned away. It is not heard for a moment, so that a flood cannot fill whole turns."""
        self.turned_away += 1
        self.hold_back([guest], loop)

    @property
    def crowded(self) -> bool:
        """Whether there are some who are not heard."""
        return bool(self._outside)

    def hold_back(self, guests: Iterable[Guest], loop: asyncio.AbstractEventLoop) -> None:
        """These are not heard; they are let in again some at a time."""
        if not self._outside:
            loop.call_later(_TICK, self._let_in, loop)
        self._outside.extend(guests)

    def _let_in(self, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(min(len(self._outside), _TOGETHER)):
            self._outside.popleft().let_in()
        if self._outside:
            loop.call_later(_TICK, self._let_in, loop)

    def hastened(self, request: Request, waited: float = 0.0) -> Request:
        """The request with the time taken off that it lay in its socket, and that it takes here: this turn and, for its
        answer, another. Raises RefusedError where nothing is left."""
        if request.deadline is None:
            return request
        now = time.monotonic()
        self._allowed += 0.1 * (request.deadline - now - self._allowed)
        age = now - self._began if self._began else 0.0
        lost = waited + max(age, self.turn)
        if self.limit < self.most:
            lost += _MARGIN * (request.deadline - now)
        if lost < _SHORT:
            return request
        if request.deadline - lost < now:
            raise RefusedError(
                429, "its deadline would pass before an answer comes; ask with more time", _RETRY_SECONDS
            )
        return replace(request, deadline=request.deadline - lost)

    def ordinary(self, request: Request) -> bool:
        """Whether it has about as much time as others: what happens to one in a hurry says nothing about the rest."""
        return request.deadline is None or request.deadline - time.monotonic() > 0.5 * self._allowed

    def answered(self) -> None:
        """It was answered."""
        if self.inside > _NEAR * self.limit:
            self.limit = min(float(self.most), self.limit + 1.0)
        self.inside -= 1

    def refused(self, entered: int) -> None:
        """The engine has no time for it; `entered` is how many were under way when it came."""
        self.limit = max(float(min(LEAST, self.most)), min(self.limit, _FALL * entered))
        self.inside -= 1

    def left(self) -> None:
        """It ended in another way."""
        self.inside -= 1

    def read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Something was read from a client: the first in a turn begins to time it."""
        if not self._began:
            self._began = time.monotonic()
            loop.call_soon(self._turned, loop)

    def _turned(self, loop: asyncio.AbstractEventLoop) -> None:
        """All that was ready has been read; what it started runs next, and ends with the callback after it."""
        loop.call_soon(self._ended)

    def _ended(self) -> None:
        self.turn, self._began = time.monotonic() - self._began, 0.0
