"""Padded inputs: each lane's input tensors for each bucket, into which a batch is copied in one call.

Padding rows keep the contents of earlier batches, because a tower is row-wise. Padding lengths are zeroed, so that
masks are false there. Of jagged histories all padding is zeroed, so padding users have no events. Padding rows belong
to the last user of the bucket, so `user_of` stays sorted. On CUDA a set of tensors also holds the graph captured over
it.

Each thread has its own sets, so nothing here needs a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.serve.compile.compiled_tower import Runner
from hotrow.serve.execution.cuda_graphs import BucketGraph, LanePool
from hotrow.serve.graph.tower_graph import Input, Shape
from hotrow.serve.graph.tower_inputs import USER_OF
from hotrow.undocumented import find

MOST_VIEWS = 4096  # shapes of batches whose views of a set of tensors are kept


class PaddedInputs:
    """A lane's input tensors of one bucket."""

    def __init__(self, runner: Runner, inputs: Sequence[Input], bucket: Shape, device: torch.device) -> None:
        self.runner, self._inputs, self.bucket = runner, inputs, bucket
        self.tensors = [torch.zeros(i.sizes(bucket), dtype=i.dtype, device=device) for i in inputs]
        self._views: dict[Shape, list[Tensor]] = {}
        self.graph: BucketGraph | None = None

    def fill(self, shape: Shape, inputs: Sequence[Tensor]) -> None:
        """Copy a batch in."""
        views = self._views.get(shape)
        if views is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            views = self._views[shape] = [
                tensor[tuple(slice(size) for size in given.sizes(shape))]
                for given, tensor in zip(self._inputs, self.tensors, strict=True)
            ]
        for given, tensor in zip(self._inputs, self.tensors, strict=True):
            if given.vector == USER_OF and given.of is not None:
                tensor.fill_(self.bucket.lengths[-1 - given.of] - 1)
            elif given.of is not None or (given.jagged and shape.lengths != self.bucket.lengths):
                tensor.zero_()
        _copy_all(views, list(inputs))


class LaneInputs(threading.local):
    """The calling thread's padded inputs by bucket, and its memory pool for CUDA graphs."""

    def __init__(self) -> None:
        self._by_bucket: dict[Shape, PaddedInputs] = {}
        self._pool: LanePool | None = None

    def of(self, bucket: Shape, runner: Runner, inputs: Sequence[Input], device: torch.device) -> PaddedInputs:
        """The inputs of a bucket; new ones if another artifact runs it now."""
        found = self._by_bucket.get(bucket)
        if found is None or found.runner is not runner:
            found = self._by_bucket[bucket] = PaddedInputs(runner, inputs, bucket, device)
        return found

    def drop(self, bucket: Shape) -> None:
        """Drop a bucket whose capture failed, and the memory pool of that capture."""
        self._by_bucket.pop(bucket, None)
        self._pool = None

    def pool(self, device: torch.device) -> LanePool:
        """The pool of this thread's graphs."""
        if self._pool is None:
            self._pool = LanePool(device)
        return self._pool


def _copy_each(into: list[Tensor], tensors: list[Tensor]) -> None:
    for one, tensor in zip(into, tensors, strict=True):
        one.copy_(tensor)


# Copies all tensors in one call; torch does not document it.
_copy_all = find("torch:_foreach_copy_", "A tower's inputs are copied one by one") or _copy_each
