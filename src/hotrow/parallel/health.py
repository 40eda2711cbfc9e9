"""Which rank is it? Heartbeats, last words, and the name of the rank for which the others wait.

Every rank writes a heartbeat into the store at which the ranks met, from a thread of its own: a count that rises, and
how many exchanges it has begun. A rank that ends with an error leaves its last words there. When an exchange fails or
does not come to its end in time, the others look: whoever left last words has failed; whoever's heartbeat stands still
is dead, or stopped; if all hearts beat, whoever has begun the fewest exchanges is the one that hangs.

Heartbeats decide nothing while all is well: they are read after an exchange has failed, and by whoever waits in one
that may take long (`Hearts`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hotrow.errors import RankError

BEAT_SECONDS = 0.5
LOOK_SECONDS = 4 * BEAT_SECONDS  # between two looks at the others' hearts: several beats, for busy machines
LAST_WORDS_SECONDS = 1.0  # a rank that fails breaks its connections only after it has said why


class Health:
    """This rank's heartbeat, and a look at the others'."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float, exchanges: Callable[[], int]) -> None:
        self.rank, self.world, self.timeout, self.exchanges = rank, world, timeout, exchanges
        self.broken = threading.Event()  # an exchange has failed: this rank cannot go on
        self.found: RankError | None = None  # and why
        self._store = store.clone() if hasattr(store, "clone") else store
        with suppress(RuntimeError):
            self._store.set_timeout(timedelta(seconds=5))
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._explaining = threading.Lock()
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="hotrow-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more heartbeats: this rank is done."""
        self._stop.set()
        self._thread.join(timeout=5)

    def last_words(self, error: BaseException) -> None:
        """Tell the others why this rank ends. A rank that ends because of another has nothing to add."""
        if isinstance(error, RankError):
            return
        words = f"{type(error).__name__}: {error}"
        with self._lock, suppress(RuntimeError):
            self._store.set(f"hotrow/words/{self.rank}", words[:2000])

    def explain(self, what: str, error: BaseException) -> RankError:
        """What to raise when an exchange has failed.

        Several may fail at once, on several threads, and any of them may be the one that ends the run: who comes second
        waits for what the first has found out, and says the same.
        """
        self.broken.set()
        with self._explaining:
            if self.found is None:
                self.found = RankError(self._find(what, error))
            return RankError(str(self.found))

    def _find(self, what: str, error: BaseException) -> str:
        cure = "start the job again with --resume: it goes on from the newest checkpoint"
        try:
            found = self._look()
        except RuntimeError as unreachable:
            return (
                f"{self._me()} lost the others in the exchange {what!r}, and the store at which ranks meet (rank 0, or "
                f"its launcher) does not answer: {_first_line(unreachable)}; {cure}"
            )
        return f"{self._me()} stops, because {found} (exchange {what!r}: {_first_line(error)}); {cure}"

    def spoken(self) -> dict[int, str]:
        """The last words of other ranks."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        return {rank: words for rank in others if (words := self._words(rank)) is not None}

    def _look(self) -> str:
        others = [rank for rank in range(self.world) if rank != self.rank]
        time.sleep(LAST_WORDS_SECONDS)
        spoken = self.spoken()
        if spoken:
            return "; ".join(f"rank {rank} failed: {words}" for rank, words in spoken.items())
        before = {rank: self._read(rank) for rank in others}
        time.sleep(LOOK_SECONDS)
        after = {rank: self._read(rank) for rank in others}
        still = [rank for rank in others if before[rank]["beats"] == after[rank]["beats"]]
        if still:
            which = " and ".join(f"rank {rank} ({after[rank]['where']})" for rank in still)
            return f"{which} died or was stopped: no sign of life"
        fewest = min(after[rank]["exchanges"] for rank in others)
        if fewest < self.exchanges():
            behind = [f"rank {rank} ({after[rank]['where']})" for rank in others if after[rank]["exchanges"] == fewest]
            return (
                f"{' and '.join(behind)} hangs: it lives but has not come to the exchange for {self.timeout:g} s "
                "(raise the ranks' timeout= where it is only slow)"
            )
        return "the connection to another rank broke, though all ranks are alive"

    def _words(self, rank: int) -> str | None:
        with self._lock:
            if not self._store.check([f"hotrow/words/{rank}"]):
                return None
            return str(self._store.get(f"hotrow/words/{rank}").decode())

    def _read(self, rank: int) -> dict[str, Any]:
        key = f"hotrow/beat/{rank}"
        with self._lock:
            if not self._store.check([key]):
                return {"beats": -1, "exchanges": 0, "where": "it never began"}
            return dict(json.loads(self._store.get(key)))

    def _beat(self) -> None:
        self._beats += 1
        where = f"process {os.getpid()} on {socket.gethostname()}"
        value = json.dumps({"beats": self._beats, "exchanges": self.exchanges(), "where": where})
        with self._lock:
            self._store.set(f"hotrow/beat/{self.rank}", value)

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with suppress(RuntimeError):  # the store is gone: whoever needs it will say so
                self._beat()

    def _me(self) -> str:
        return f"rank {self.rank}"


class Hearts:
    """The others' hearts while this rank waits: one that stands still for the timeout is an error."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self._seen: dict[int, tuple[int, float]] = {}  # beats, and since when
        self._next = time.monotonic() + 2 * BEAT_SECONDS

    def check(self) -> None:
        """Look, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 2 * BEAT_SECONDS
        for rank in range(self.health.world):
            beats = self.health._read(rank)["beats"]
            before, since = self._seen.get(rank, (-1, now))
            if beats != before:
                self._seen[rank] = (beats, now)
            elif now - since > self.health.timeout:
                raise RuntimeError(f"no heartbeat of rank {rank} for {self.health.timeout:g} s")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
