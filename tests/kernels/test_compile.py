"""Every kernel compiles with Triton's real compiler, for sm_90 and without a GPU (compile_only.py).

launches.py has a launch of every kernel in each of its branches. They are made in a process of their own that does not
interpret: 50 s of one core, half of them for the update. test_ptx.py runs the compiled kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("compile_only.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report on launches.py."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run([sys.executable, PROGRAM], env=env, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_every_launch_compiles_and_passes_what_triton_passes(report: dict[str, Any]) -> None:
    assert not report["errors"], "\n\n".join(report["errors"])


def test_the_compiler_sees_every_statement_of_every_kernel(report: dict[str, Any]) -> None:
    assert report["unseen"] == [], "add launches that come there to tests/kernels/launches.py"


def test_rows_outputs_and_gradients_of_every_type_and_all_rules_are_compiled(report: dict[str, Any]) -> None:
    def values(kernel: str, option: str) -> set[str]:
        return {made["options"][option] for made in report["made"] if made["kernel"] == kernel}

    trained = {"fp32", "fp16", "bf16"}
    assert (
        values("gather._gather_kernel", "TYPE")
        == values("serving_lookup._lookup_kernel", "TYPE")
        == {*trained, "uint8"}
    )
    assert values("gather._gather_kernel", "OUT") == values("finite._check_kernel", "TYPE") == trained
    assert values("update._apply_kernel", "TYPE") == values("update._apply_kernel", "GRADIENT") == trained
    assert values("update._apply_kernel", "RULE") == set("012345")


def test_a_step_at_dim_128_keeps_everything_in_registers(report: dict[str, Any]) -> None:
    step = {"gather._gather_kernel", "gradient_sums._partial_kernel", "update._apply_kernel"}
    made = [made for made in report["made"] if made["kernel"] in step and made["options"]["DIM"] == "128"]
    assert {one["kernel"] for one in made} == step
    assert [one for one in made if one["stack"]] == []
