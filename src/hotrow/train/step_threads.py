"""Flow: items through stages, each stage on a thread of its own, in order, so many ahead of the one in use and no more.

    with Flow(numbers(), [Stage("double", double)], ahead=2) as flow:
        for item in flow:
            ...

How far it runs ahead is counted where items are made: the source's thread waits until another one may begin, so that
while one item is in use at most `ahead` others exist, in any stage or between two. That is the back-pressure, and it is
exact: which items have been begun follows from which have been taken, never from the speed of a thread (with ranks, all
of them must begin the same ones). `needed` says how many will be wanted at all; nothing is read beyond.

An error of a stage takes its item's place in the queue: what came before it is still delivered, then the very exception
is raised where items are taken. `close` (leaving the block does it) ends all threads, and gives what was under way to
`drop`. Threads are daemons only because a source that blocks for ever could not be waited for: it is said, not hidden.

Threads: one takes items and closes. Queues are queue.SimpleQueue, which costs a microsecond where a Condition for all
of them would wake every stage for every item.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from hotrow.train.stage_times import Clock, now

Item = TypeVar("Item")
POLL, PATIENCE = 0.1, 10.0  # seconds: between two looks whether to give up; for a thread that should end


@dataclass(frozen=True)
class Stage(Generic[Item]):
    """What is done with every item; `work` returns the bytes it moved. `stuck` says why it may not come to its end."""

    clock: Clock
    work: Callable[[Item], int]
    stuck: str = "its work on a batch does not come to its end"


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _End:
    """Behind the last item."""


class Flow(Generic[Item]):
    """See above. `given_up` is asked while an item is waited for; when it is true, the flow ends there."""

    def __init__(
        self,
        source: Iterator[tuple[Item, int]],
        clock: Clock,
        stages: Sequence[Stage[Item]],
        ahead: int,
        drop: Callable[[Item], None],
        needed: Callable[[], int | None] = lambda: None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ahead = ahead
        self._drop, self._needed, self._given_up = drop, needed, given_up
        self._taken = self._allowed = 0
        self._permits = threading.Semaphore(0)
        self._queues: list[queue.SimpleQueue[Item | _Failed | _End]] = [
            queue.SimpleQueue() for _ in range(len(stages) + 1)
        ]
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._read, args=(source, clock), name=f"hotrow {clock.name}", daemon=True)
        ]
        self._stuck = ["its source blocks", *(stage.stuck for stage in stages)]
        for i, stage in enumerate(stages):
            name = f"hotrow {stage.clock.name}"
            self._threads.append(threading.Thread(target=self._work, args=(i, stage), name=name, daemon=True))

    def __enter__(self) -> Flow[Item]:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[Item]:
        while (needed := self._needed()) is None or needed > 0:
            self._allow(self._taken + 1)
            item = self._take()
            if item is None:
                return
            begun = self._taken
            self._taken += 1
            self._allow(begun + (1 + self.ahead if needed is None else min(1 + self.ahead, needed)))
            yield item

    def close(self) -> None:
        """End the threads and drop what is under way."""
        self._stopping = True
        self._permits.release()
        for box in self._queues:
            box.put(_End())
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        for thread, why in zip(self._threads, self._stuck, strict=True):
            if thread.is_alive():
                warnings.warn(
                    f"the thread {thread.name!r} has not ended after {PATIENCE:.0f} s: {why}. It ends with the process",
                    stacklevel=2,
                )
        for box in self._queues:
            while True:
                try:
                    item = box.get_nowait()
                except queue.Empty:
                    break
                if not isinstance(item, (_Failed, _End)):
                    self._drop(item)

    def _allow(self, total: int) -> None:
        while self._allowed < total:
            self._allowed += 1
            self._permits.release()

    def _take(self) -> Item | None:
        """The next item; None at the end, or when it was given up."""
        while not self._given_up():
            try:
                item = self._queues[-1].get(timeout=POLL)
            except queue.Empty:
                continue
            if isinstance(item, _Failed):
                raise item.error
            return None if isinstance(item, _End) else item
        return None

    def _read(self, source: Iterator[tuple[Item, int]], clock: Clock) -> None:
        out = self._queues[0]
        try:
            number = 0
            while True:
                with clock.waiting(room=True):
                    self._permits.acquire()
                if self._stopping:
                    return
                begin = now()
                try:
                    item, size = next(source)
                except StopIteration:
                    out.put(_End())
                    return
                number += 1
                clock.worked(begin, now(), size, number)
                out.put(item)
        except BaseException as error:
            out.put(_Failed(error))
        finally:
            close = getattr(source, "close", None)  # a generator's own clean-up, in the thread that ran it
            if close is not None:
                close()

    def _work(self, number: int, stage: Stage[Item]) -> None:
        into, out = self._queues[number], self._queues[number + 1]
        while True:
            with stage.clock.waiting():
                item = into.get()
            if self._stopping or isinstance(item, (_Failed, _End)):
                out.put(item)
                return
            try:
                begin = now()
                size = stage.work(item)
                stage.clock.worked(begin, now(), size, stage.clock.batches + 1)
            except BaseException as error:
                out.put(_Failed(error))
                self._drop(item)
                return
            if self._stopping:  # nobody takes it; and if it came late, nothing more will come
                self._drop(item)
                return
            out.put(item)
