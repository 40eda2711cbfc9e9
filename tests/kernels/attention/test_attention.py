"""Forward and backward beside the reference (nn/jagged/reference.py), in float64, over random inputs."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import LAYERS, Case, compare, converted, draw

SOME = [3, 0, 35, 1]  # more than a tile, a whole user without rows, one row
OTHER = [5, 4, 40, 0]


def _lengths(layer: str) -> tuple[list[int], list[int]]:
    return (SOME, SOME) if layer in ("causal", "bidirectional") else (SOME, OTHER)


@pytest.mark.parametrize("kind", ["softmax", "silu"])
@pytest.mark.parametrize("layer", LAYERS)
def test_outputs_and_all_gradients_equal_the_reference(layer: str, kind: str, device: torch.device) -> None:
    inputs = draw(Case(layer, kind), *_lengths(layer))
    compare(converted(inputs, torch.float32, device), 1e-4)
