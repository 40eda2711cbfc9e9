"""`hotrow bench kernels` under the interpreter at the smallest sizes: every kernel of a step is in it and runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from hotrow.bench.gpu import kernels
from hotrow.bench.harness import Result

WITHOUT_ROWS = {  # modules that launch nothing by themselves, or only copy numbers
    "__init__", "counts", "current_stream", "graph_capture", "key_hash", "launch", "launch_arguments", "layout",
    "stochastic_rounding", "rules", "sets", "gradient_sums"
}  # fmt: skip
ELSEWHERE = {  # `hotrow bench attention_gpu` and, of lanes of histories, `hotrow bench serve_gpu`
    *(path.stem for path in (Path(kernels.__file__).parents[2] / "kernels" / "attention").glob("[!_]*.py")),
    "jagged_lookup",
}


@pytest.mark.skipif(torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1", reason="interpreted")
def test_every_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTROW_BENCH_SCALE", "0")
    for name, value in {"BAG": 2, "MISSING": 2, "DIM": 4, "WARMUP": 0, "REPEATS": 2, "TABLES": 2}.items():
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr("hotrow.bench.gpu.hbm.TABLES", 2)
    found = [result for result in kernels.results() if isinstance(result, Result)]
    assert all(result.value > 0 and result.peer_value > 0 for result in found)
    names = {result.name.split("/")[1] for result in found}
    assert {"find", "compact", "dedup", "choose", "gather", "group", "update", "collect", "deliver", "pull"} <= names
    assert {result.name for result in found} >= {f"kernels/update/{rule}/fp32" for rule in kernels.RULES}


def test_every_module_of_kernels_is_timed_or_named() -> None:
    """A new module must be timed too, or be named in WITHOUT_ROWS."""
    modules = {path.stem for path in (Path(kernels.__file__).parents[2] / "kernels").rglob("*.py")}
    timed = set(
        re.findall(r"^from hotrow\.kernels\.(?:\w+\.)*(\w+) import", Path(kernels.__file__).read_text(), re.MULTILINE)
    )
    assert modules - timed - ELSEWHERE == WITHOUT_ROWS - timed
