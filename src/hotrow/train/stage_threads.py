"""StageThreads: passes items through stages in order, each on its own thread, with a bound on items in flight.

    with StageThreads(numbers(), clock, [Stage("double", clock, double)], ahead=2, drop=discard) as threads:
        for item in threads:
            ...

The bound is enforced at the source: its thread acquires a permit for each item. While the caller uses one item, at most
`ahead` others exist, in a stage or in a queue between two. This back-pressure is exact: the number of items started is
a function of the number taken, never of the speed of a thread. (With ranks, all must start the same ones.) `needed`
returns how many items will be wanted in total; nothing is read beyond that.

An error in a stage replaces its item in the queue. The items before it are still delivered; then the iterator raises
the same exception. `close`, which the end of the block calls, ends all threads and passes the items in flight to
`drop`. Threads are daemons because a source may block for ever; `close` then warns and names the thread.

One thread takes items and closes. Queues are queue.SimpleQueue, whose operations cost a microsecond; one Condition for
all of them would wake every stage for every item.
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
POLL, JOIN_TIMEOUT = 0.1, 10.0  # seconds: between two calls of should_stop; for a thread to end


@dataclass(frozen=True)
class Stage(Generic[Item]):
    """One stage, on the thread `hotrow NAME`: `work` takes an item and returns the bytes it moved. `blocked` is the
    warning's text if it hangs."""

    name: str
    clock: Clock
    work: Callable[[Item], int]
    blocked: str = "its work on a batch does not come to its end"


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _End:
    """In a queue: no item follows."""


class StageThreads(Generic[Item]):
    """See above. `should_stop` is polled while an item is awaited; once it is true, iteration ends."""

    def __init__(
        self,
        source: Iterator[tuple[Item, int]],
        clock: Clock,
        stages: Sequence[Stage[Item]],
        ahead: int,
        drop: Callable[[Item], None],
        needed: Callable[[], int | None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.ahead = ahead
        self._drop, self._needed, self._should_stop = drop, needed, should_stop
        self._taken = self._permitted = 0
        self._permits = threading.Semaphore(0)
        self._queues: list[queue.SimpleQueue[Item | _Failed | _End]] = [
            queue.SimpleQueue() for _ in range(len(stages) + 1)
        ]
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._read, args=(source, clock), name=f"hotrow {clock.name}", daemon=True)
        ]
        self._blocked = ["its source blocks", *(stage.blocked for stage in stages)]
        for i, stage in enumerate(stages):
            name = f"hotrow {stage.name}"
            self._threads.append(threading.Thread(target=self._work, args=(i, stage), name=name, daemon=True))

    def __enter__(self) -> StageThreads[Item]:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[Item]:
        while (needed := self._needed()) is None or needed > 0:
            self._permit(self._taken + 1)
            item = self._take()
            if item is None:
                return
            begun = self._taken
            self._taken += 1
            self._permit(begun + (1 + self.ahead if needed is None else min(1 + self.ahead, needed)))
            yield item

    def close(self) -> None:
        """End the threads and drop the items in flight."""
        self._stopping = True
        self._permits.release()
        for items in self._queues:
            items.put(_End())
        deadline = time.monotonic() + JOIN_TIMEOUT
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        for thread, why in zip(self._threads, self._blocked, strict=True):
            if thread.is_alive():
                warnings.warn(
                    f"the thread {thread.name!r} has not ended after {JOIN_TIMEOUT:.0f} s: {why}. "
                    "It ends with the process",
                    stacklevel=2,
                )
        for items in self._queues:
            while True:
                try:
                    item = items.get_nowait()
                except queue.Empty:
                    break
                if not isinstance(item, (_Failed, _End)):
                    self._drop(item)

    def _permit(self, total: int) -> None:
        while self._permitted < total:
            self._permitted += 1
            self._permits.release()

    def _take(self) -> Item | None:
        """The next item; None at the end, or once `should_stop` is true."""
        while not self._should_stop():
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
                with clock.waiting(output=True):
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
                clock.record(begin, now(), size, number)
                out.put(item)
        except BaseException as error:
            out.put(_Failed(error))
        finally:
            close = getattr(source, "close", None)  # a generator cleans up in the thread that ran it
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
                stage.clock.record(begin, now(), size, stage.clock.batches + 1)
            except BaseException as error:
                out.put(_Failed(error))
                self._drop(item)
                return
            if self._stopping:  # no thread will take it
                self._drop(item)
                return
            out.put(item)
