from __future__ import annotations

import sys

import pytest
import torch

from hotrow.errors import OptionError
from hotrow.nn.jagged import attention_cuda


def test_without_triton_the_first_call_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    rows, lengths = torch.zeros(2, 1, 4), torch.tensor([2])
    inputs = (rows, rows, rows, lengths, lengths, *[None] * 7, "softmax", True, 1.0, 1.0)
    with pytest.raises(OptionError, match=r"needs Triton, which is not installed: pip install hotrow\[hbm\]"):
        attention_cuda.forward(*inputs)
    with pytest.raises(OptionError, match="needs Triton"):
        attention_cuda.backward(rows, rows, torch.zeros(2, 1), *inputs)
