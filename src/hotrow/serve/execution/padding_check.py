"""Checks that padding does not change a tower's logits, before its batches run on padded buckets.

Export checks that a graph equals its tower at several sizes, but not that a batch may be padded: a tower that divides
by the padded length of a history gives other logits then. The exporter has checked towers with two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hotrow.serve.graph.tower_inputs import EVENTS, LENGTH, MASK, TowerInputs

TOLERANCE = 1e-4  # of the largest logit
ROWS, LONGEST, MORE = 5, 4, 3
Run = Callable[[Mapping[str, Tensor], Tensor | None], Tensor]


def padding_fault(run: Run, inputs: TowerInputs, device: torch.device) -> str:
    """How a tower's logits change if its inputs are padded, or an empty string."""
    if inputs.user:
        return ""
    vectors, dense = inputs.example(ROWS, LONGEST, seed=1)
    vectors = {name: value.to(device) for name, value in vectors.items()}
    dense = None if dense is None else dense.to(device)
    expected = run(vectors, dense).float()
    wide = None if dense is None else torch.cat([dense, dense[:1].expand(MORE, -1)])
    got = run(_padded(inputs, vectors), wide).float()[:ROWS]
    apart = float((got - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
    if apart <= TOLERANCE:
        return ""
    return f"the tower's logits change by {apart:.1e} of the largest if the batch or a history is padded"


def _padded(inputs: TowerInputs, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vectors with more rows, without events; longer histories, masked; and events of no one."""
    found = {}
    for tensor in inputs.tensors():
        value = vectors[tensor.name]
        for axis, size in enumerate(tensor.sizes):
            if not isinstance(size, str):
                continue
            more = MORE
            if size.startswith(LENGTH):
                most = inputs.max_length(size.removeprefix(LENGTH))
                more = MORE if most is None else max(0, min(MORE, most - value.shape[axis]))
            shape = [*value.shape[:axis], more, *value.shape[axis + 1 :]]
            zero = tensor.name.endswith(MASK) or size.startswith(LENGTH) or value.dtype == torch.int64
            fill = value.new_zeros(shape) if zero and not size.startswith(EVENTS) else value.new_full(shape, 1)
            value = torch.cat([value, fill], dim=axis)
        found[tensor.name] = value
    return found
