"""The order of work on the simulated device, and a detector of accesses to memory without an order (data races).

Agents are streams and host threads. Each has a vector clock: for every agent, the number of its last work that precedes
this agent's present. A launch follows the earlier work of its thread and of its stream. An event carries its stream's
clock to everything that waits for it. Threads exchange clocks through locks (threads.py). Conflicts between two host
threads are not checked.

Memory is tracked in words of four bytes: the last writer, and the readers since. An access that conflicts with one that
it does not follow is a race, whether or not it did harm: work is done when it is enqueued, so results are right, and
only this shows what a real device might have done.

Freed memory may be reused at once, as by torch's allocators: device memory by the stream that it was allocated on,
pinned memory by the host, except for streams that torch knows of (`known`). Memory of a captured graph is not reused
before CUDA frees it, which waits for the device.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

AGENTS, THREADS = 192, 70  # all, and the first of the host's threads
HOST = -1  # the calling thread
WORD = 4


class Event:
    """A point of a stream; `clock` is None before it is recorded."""

    def __init__(self) -> None:
        self.clock: np.ndarray | None = None
        self.agent = 0
        self.captured = False


class Block:
    """Memory that the device may access. `kind` is device, graph, pinned or registered."""

    def __init__(self, kind: str, base: int, size: int, home: int, where: str) -> None:
        self.kind, self.base, self.end, self.home, self.where = kind, base, base + size, home, where
        words = -(-size // WORD) + 1
        self.writer = np.zeros(words, dtype=np.int16)
        self.written = np.zeros(words, dtype=np.int32)
        self.read: dict[int, np.ndarray] = {}
        self.work: dict[int, str] = {}  # an agent's last work here, for reports
        self.known: set[int] = set()

    def __repr__(self) -> str:
        return f"{self.kind} memory of {self.end - self.base} bytes, made at {self.where}"


class Order:
    """The clocks of all agents, and the memory that they access."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.clocks = np.zeros((AGENTS, AGENTS), dtype=np.int32)
        self.names: dict[int, str] = {}
        self.here = threading.local()
        self.caller: int | None = None  # the agent that threads of the core work for
        self._threads = itertools.count(THREADS)
        self.races: dict[str, str] = {}  # long description by short one
        self._bases: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._freed: deque[tuple[Block, np.ndarray, str]] = deque()
        self._arenas: dict[int, Any] = {}

    # --- order ---

    def host(self) -> int:
        """The agent of this thread."""
        agent = getattr(self.here, "agent", None)
        if agent is None:
            known = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
            if known is None and self.caller is not None:
                return self.caller
            agent = self.enter("?" if known is None else known.name)
        return agent

    def enter(self, name: str) -> int:
        """Make this thread a new agent."""
        agent: int = next(self._threads)
        self.here.agent, self.names[agent], self.clocks[agent, agent] = agent, f"thread {name!r}", 1
        return agent

    def send_clock(self) -> np.ndarray:
        """This thread's clock, to pass to another thread. Later work of this thread is not included."""
        host = self.host()
        clock = self.clocks[host].copy()
        self.clocks[host, host] += 1
        return clock

    def receive_clock(self, clock: np.ndarray | None) -> None:
        """This thread follows everything in that clock."""
        if clock is not None:
            host = self.host()
            np.maximum(self.clocks[host], clock, out=self.clocks[host])

    def launch(self, agent: int) -> None:
        """This thread enqueues work on a stream."""
        np.maximum(self.clocks[agent], self.send_clock(), out=self.clocks[agent])
        self.clocks[agent, agent] += 1

    def record(self, event: Event, agent: int) -> None:
        self.launch(agent)
        event.clock, event.agent = self.clocks[agent].copy(), agent

    def wait(self, agent: int, event: Event) -> None:
        """An agent waits for an event."""
        if event.clock is not None:
            agent = self.host() if agent == HOST else agent
            np.maximum(self.clocks[agent], event.clock, out=self.clocks[agent])

    def join(self, agent: int, other: int) -> None:
        """An agent waits for all work of another."""
        self.launch(other)
        agent = self.host() if agent == HOST else agent
        np.maximum(self.clocks[agent], self.clocks[other], out=self.clocks[agent])

    def passed(self, event: Event) -> bool:
        """Whether this thread follows an event."""
        return event.clock is None or bool(event.clock[event.agent] <= self.clocks[self.host(), event.agent])

    # --- memory ---

    def add(self, kind: str, base: int, size: int, home: int) -> Block:
        self.settle()
        block = Block(kind, base, size, home, _here())
        bisect.insort(self._bases, base)
        self._blocks[base] = block
        return block

    def watch(self, array: np.ndarray, kind: str, home: int) -> Block:
        """A block for as long as an array lives."""
        block = self.add(kind, array.ctypes.data, array.nbytes, home)
        weakref.finalize(array, self._let_go, block)
        return block

    def _let_go(self, block: Block) -> None:
        # No lock: the garbage collector may call this anywhere. For pinned memory, a wait by any thread counts.
        clock = self.clocks[THREADS:].max(axis=0) if block.home == HOST else self.clocks[block.home].copy()
        self._freed.append((block, clock, _here()))

    def remove(self, base: int) -> None:
        """Memory was unregistered."""
        with self.lock:
            block = self._blocks[base]
            self._freed.append((block, self.clocks[self.host()].copy(), _here()))
            self.settle()

    def settle(self) -> None:
        """Remove freed blocks. An agent that may still access one is a race."""
        while self._freed:
            block, clock, where = self._freed.popleft()
            agents = {*np.unique(block.writer[block.written > 0]).tolist(), *block.read}
            for agent in agents if block.kind != "graph" else ():
                if agent == block.home or agent >= THREADS or agent in block.known:
                    continue
                last = max(
                    int(block.written[block.writer == agent].max(initial=0)),
                    int(block.read.get(agent, np.zeros(1)).max()),
                )
                if last > clock[agent]:
                    self._report(
                        f"{block.kind} memory let go while {self.names[agent]} may touch it",
                        f"{block}, let go at {where}; {self.names[agent]} did {block.work.get(agent)} there, and "
                        f"{self.names.get(block.home, 'who let it go')} does not come after it",
                    )
            if self._blocks.get(block.base) is block:
                del self._blocks[block.base]
                self._bases.remove(block.base)

    def block_of(self, address: int) -> Block | None:
        at = bisect.bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        block = self._blocks[self._bases[at]]
        return block if address < block.end else None

    def touch(self, agent: int, addresses: np.ndarray, size: int, write: bool, work: str) -> None:
        """An agent reads or writes `size` bytes at each address. The host may access untracked memory."""
        addresses = np.asarray(addresses).reshape(-1)
        while addresses.size:
            block = self.block_of(int(addresses[0]))
            if block is None:
                if agent != HOST:
                    self._report(f"{work} touches memory that the device cannot reach", hex(int(addresses[0])))
                inside = addresses == addresses[0]
                if agent == HOST:
                    return
            else:
                inside = (addresses >= block.base) & (addresses < block.end)
                some = addresses[inside].astype(np.int64) - block.base
                words = np.unique(some // WORD if size <= WORD else (some[:, None] + np.arange(0, size, WORD)) // WORD)
                self._check(agent, block, words, write, work)
            addresses = addresses[~inside]

    def touch_range(self, agent: int, address: int, size: int, write: bool, work: str) -> None:
        """The same for a range of bytes."""
        block = self.block_of(address) if size else None
        if block is not None:
            begin, end = (address - block.base) // WORD, -(-(min(address + size, block.end) - block.base) // WORD)
            self._check(agent, block, slice(begin, end), write, work)
        elif size and agent != HOST:
            self._report(f"{work} touches memory that the device cannot reach", hex(address))

    def _check(self, agent: int, block: Block, words: Any, write: bool, work: str) -> None:
        agent = self.host() if agent == HOST else agent
        clock = self.clocks[agent]
        writer, written = block.writer[words], block.written[words]
        late = written > clock[writer]
        if late.any():
            other = int(writer[late][0])
            if other != agent and min(other, agent) < THREADS:
                self._conflict(agent, other, block, write, True, work, int(late.sum()))
        now = int(clock[agent])
        if write:
            for other, read in block.read.items():
                if other != agent and min(other, agent) < THREADS and (late := read[words] > clock[other]).any():
                    self._conflict(agent, other, block, True, False, work, int(late.sum()))
            block.writer[words], block.written[words] = agent, now
        else:
            block.read.setdefault(agent, np.zeros(block.writer.size, dtype=np.int32))[words] = now
        block.work[agent] = work

    def _conflict(self, agent: int, other: int, block: Block, write: bool, wrote: bool, work: str, words: int) -> None:
        what = f"{work} on {self.names[agent]} {'writes' if write else 'reads'}"
        then = f"{block.work.get(other)} on {self.names[other]} {'wrote' if wrote else 'read'}"
        self._report(f"{what} what {then}", f"{words} words of {block}, without waiting for it")

    def _report(self, short: str, long: str) -> None:
        self.races.setdefault(short, f"{short}: {long}\n    at {_here(12)}")


def _here(frames: int = 3) -> str:
    """The innermost frames of the project's code."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < frames:
        name = frame.f_code.co_filename
        if ("/hotrow/" in name or "/tests/" in name) and "/simulated_gpu/" not in name:
            found.append(f"{name.rsplit('/hotrow/', 1)[-1].rsplit('/tests/', 1)[-1]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "?"
