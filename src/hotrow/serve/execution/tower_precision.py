"""The arithmetic that towers on a GPU run in: fp32, tf32, bf16 or fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

EXACT = ("fp32", "tf32")  # without autocast; the other precisions cast the inputs of a layer
PRECISIONS = (*EXACT, "bf16", "fp16")


def tower_precision(name: str) -> AbstractContextManager[Any]:
    """Run towers in this precision inside the block. fp32 is exact; the others are faster and agree to about three
    digits."""
    if name in ("bf16", "fp16"):
        return torch.autocast("cuda", torch.bfloat16 if name == "bf16" else torch.float16, cache_enabled=False)
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    return nullcontext()
