"""JaggedLanes: which buckets the lanes of an engine have for batches with multi-hot features or histories.

    plan(batch) → the runners of the smallest captured bucket that the batch fits, one for each lane; or None

None means that the engine reads the batch without a lane, so no batch ever waits for a capture. A bucket that traffic
asks for is captured on one background thread: it takes a free lane, captures, and gives the lane back, one lane after
another. While it has the only lane, batches go without one. A batch also uses a larger bucket, up to MOST_WASTE times
its work, until its own is captured.

The ladder is first the powers of two, then learned from the traffic seen, every `relearn` seconds. The least recently
used bucket is dropped when there are more than MOST_BUCKETS. A tower whose logits change with padding, which is checked
before the first capture, or whose first capture fails, is not captured again (`refusal` says why).

Any thread may call `plan`.
"""

from __future__ import annotations

import bisect
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from hotrow.batch import KeyedBatch
from hotrow.kernels.graph_capture import capturing
from hotrow.serve.compile.buckets import Ladder, Traffic
from hotrow.serve.execution.cuda_graphs import CaptureError
from hotrow.serve.execution.jagged_lane import JaggedRunner
from hotrow.serve.execution.padding_check import padding_fault
from hotrow.serve.execution.tower_precision import tower_precision
from hotrow.serve.execution.two_part_tower import TwoPartTower
from hotrow.serve.graph.tower import OriginalTower
from hotrow.serve.graph.tower_graph import Shape
from hotrow.serve.graph.tower_inputs import TowerInputs
from hotrow.tiers.hbm.jagged_reader import MOST_IDS, Histories, JaggedReader, Scratch
from hotrow.tiers.hbm.serving_reader import ServingReader

if TYPE_CHECKING:
    from hotrow.serve.execution.device_lane import DeviceLane

log = logging.getLogger("hotrow.serve")

FIRST_SIZE = 16  # of the ladder before any traffic
MOST_BUCKETS = 32
MOST_WASTE = 4.0  # a batch uses a larger bucket up to this times the work of its own
GOOD_ENOUGH = 1.1  # no bucket is captured for a batch that has one with at most this times the work
RELEARN = 60.0  # seconds
Runners = Mapping[int, JaggedRunner]  # by the lane's number


class Bucket(NamedTuple):
    """A captured size, and whether its pooled ids have factors."""

    shape: Shape
    weighted: bool

    def takes(self, shape: Shape, weighted: bool) -> bool:
        """Whether a batch of this shape fits."""
        return self.shape.covers(shape) and self.weighted >= weighted


class JaggedLanes:
    """The buckets of all lanes."""

    def __init__(
        self,
        reader: ServingReader,
        tower: OriginalTower | TwoPartTower,
        lanes: Sequence[DeviceLane],
        free: queue.SimpleQueue[DeviceLane],
        ladder: Sequence[int],
        relearn: float = RELEARN,
    ) -> None:
        self.tower, self.lanes, self.free, self.relearn = tower, list(lanes), free, relearn
        self.reader = JaggedReader(reader, histories_of(tower.inputs))
        self.most_rows = max(ladder)
        self._first = tuple(_sizes_up_to(limit) for limit in self.reader.limits())
        self.ladder = Ladder(tuple(sorted(set(ladder))), self._first)
        self._first_rows = self.ladder.rows
        self._traffic = Traffic(lengths=4)
        self.refusal = ""  # why no batch runs in a lane; empty: nothing is against it
        self.refused: dict[Bucket, str] = {}
        self.captured: dict[Bucket, Runners] = {}  # never changed, only replaced
        self._used: dict[Bucket, float] = {}
        self._wanted: Counter[Bucket] = Counter()
        self._held = 0  # lanes that a capture has
        self._checked = self._stop = False
        self._scratch: dict[int, Scratch] = {lane.number: Scratch() for lane in self.lanes}
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def all_held(self) -> bool:
        """Whether a capture has the only lane."""
        return self._held >= len(self.lanes)

    def plan(self, batch: KeyedBatch) -> Runners | None:
        """The runners that take the batch, one for each lane; None: the engine reads it without a lane."""
        if self.refusal or batch.size > self.most_rows or not self.reader.supports(batch):
            return None
        shape = Shape(batch.size, self.reader.lengths_of(batch))
        weighted = self.reader.weighted(batch)
        self._traffic.count(shape)
        wanted = self._cover(shape)
        if wanted is None:
            return None
        exact = Bucket(wanted, weighted)
        captured = self.captured
        found: Bucket | None = exact
        if exact not in captured:
            work = self._work(wanted)
            fitting = [bucket for bucket in captured if bucket.takes(shape, weighted)]
            found = min(fitting, key=lambda bucket: self._work(bucket.shape), default=None)
            if found is None or self._work(found.shape) > GOOD_ENOUGH * work:
                self._request(exact)
            if found is not None and self._work(found.shape) > MOST_WASTE * work:
                found = None
        if found is None:
            return None
        self._used[found] = time.monotonic()
        return captured[found]

    def wait(self, seconds: float = 120.0) -> bool:
        """Block until all buckets that traffic asked for are captured or refused. Returns False if time was up."""
        with self._change:
            return self._change.wait_for(lambda: not self._wanted, seconds)

    def capture(self, bucket: Bucket) -> None:
        """Capture a bucket in every lane, one after another, and put it in service. What cannot be captured is noted
        in `refused`."""
        if not self._checked:
            self._check()
        if self.refusal:
            return
        made: dict[int, JaggedRunner] = {}
        try:
            while len(made) < len(self.lanes):
                lane = self._take_lane(made)
                try:
                    made[lane.number] = JaggedRunner(
                        lane, self.reader, bucket.shape, bucket.weighted, self._scratch[lane.number]
                    )
                finally:
                    self._held -= 1
                    self.free.put(lane)
        except Exception as error:  # also too little memory; the batches go without a lane
            reason = str(error).partition("\n")[0]
            log.warning("batches of %s run without a GPU lane: %s", bucket.shape, reason)
            log.debug("the capture failed", exc_info=True)
            self.refused[bucket] = reason
            if isinstance(error, CaptureError) and not self.captured:
                self.refusal = reason
            return
        kept = dict(self.captured)
        while len(kept) >= MOST_BUCKETS:
            del kept[min(kept, key=lambda one: self._used.get(one, 0.0))]
        self.captured = {**kept, bucket: made}

    def relearn_ladder(self) -> None:
        """Use a better ladder for the traffic seen, if there is one. Captured buckets stay until others need the
        place."""
        ladder = self._traffic.propose(self.ladder)
        if ladder != self.ladder:
            log.info("a better ladder of GPU lanes: rows %s, lengths %s", ladder.rows, ladder.lengths)
            self.ladder = ladder

    def close(self) -> None:
        """End the thread. Waits for a capture in progress."""
        with self._change:
            self._stop = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        learned = time.monotonic()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stop or bool(self._wanted), self.relearn)
                if self._stop:
                    return
                bucket = self._wanted.most_common(1)[0][0] if self._wanted else None
            if bucket is not None:
                self.capture(bucket)
                with self._change:
                    del self._wanted[bucket]
                    self._change.notify_all()
            if time.monotonic() - learned >= self.relearn:
                self.relearn_ladder()
                learned = time.monotonic()

    def _request(self, bucket: Bucket) -> None:
        with self._change:
            if bucket in self.refused or bucket in self.captured or self._stop:
                return
            self._wanted[bucket] += 1
            self._change.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hotrow capture", daemon=True)
                self._thread.start()

    def _take_lane(self, made: Mapping[int, JaggedRunner]) -> DeviceLane:
        """A free lane that has no runner in `made`."""
        self._held += 1
        while True:
            lane = self.free.get()
            if lane.number not in made:
                return lane
            self.free.put(lane)
            time.sleep(0.0005)

    def _check(self) -> None:
        """Whether padding changes the tower's logits."""
        with torch.inference_mode(), capturing(), tower_precision("fp32"):
            self.refusal = padding_fault(self.tower.run, self.tower.inputs, self.reader.device)
            torch.cuda.current_stream(self.reader.device).synchronize()
        self._checked = True
        if self.refusal:
            log.warning("batches with histories run without a GPU lane: %s", self.refusal)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _cover(self, shape: Shape) -> Shape | None:
        """The bucket of a batch on the ladder, or beyond it on the first one; None if it is too large for that, too."""
        ladder = self.ladder
        rows = _round_up(shape.rows, ladder.rows, self._first_rows)
        axes = zip(shape.lengths, ladder.lengths, self._first, strict=True)
        lengths = [_round_up(length, sizes, first) for length, sizes, first in axes]
        if rows is None or any(length is None for length in lengths):
            return None
        return Shape(rows, tuple(length for length in lengths if length is not None))

    def _work(self, shape: Shape) -> int:
        return self.reader.positions(shape.rows, shape.lengths)


def histories_of(inputs: TowerInputs) -> Histories:
    """How a tower reads histories."""
    groups: dict[str, list[str]] = {}
    for name in (*(name for name in inputs.widths if name in inputs.sequences), *inputs.numbers):
        groups.setdefault(inputs.group(name), []).append(name)
    longest = tuple(inputs.max_length(name) for name in groups)
    return Histories(tuple(map(tuple, groups.values())), inputs.jagged, frozenset(inputs.user), longest)


def _sizes_up_to(limit: int | None) -> tuple[int, ...]:
    """Powers of two from FIRST_SIZE to the limit, which is the last size."""
    most = MOST_IDS if limit is None else limit
    sizes = []
    size = FIRST_SIZE
    while size < most:
        sizes.append(size)
        size *= 2
    return (*sizes, most)


def _round_up(value: int, sizes: Sequence[int], first: Sequence[int]) -> int | None:
    for ladder in (sizes, first):
        if (at := bisect.bisect_left(ladder, value)) < len(ladder):
            return ladder[at]
    return None
