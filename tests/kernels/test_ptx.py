"""Tests that interpret kernels pass with the compiled kernels too, whose PTX runs on the CPU (on_ptx.py).

`make test` runs the arithmetic whose bits are promised: stochastic rounding and counts. `make soak` runs all tests of
kernels and of rows in HBM: three minutes of one core, half of them compilation. Attention's are left out: ptx.py does
not translate the instructions of tensor cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ARITHMETIC = ("kernels/rows/test_stochastic_rounding.py", "kernels/rows/test_counts.py")
ALL = (
    "kernels", "nn/hbm", "nn/test_row_dtype.py", "tiers/hbm/test_miss_list.py", "tiers/hbm/test_serving_reader.py",
)  # fmt: skip


@pytest.mark.parametrize(
    "tests", [pytest.param(ARITHMETIC, id="arithmetic"), pytest.param(ALL, id="all", marks=pytest.mark.soak)]
)
def test_interpreted_tests_pass_compiled(tests: tuple[str, ...], tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "on_ptx", "-p", "no:cacheprovider", "-m", "not soak and not gpu"]
    command += [f"--ignore={HERE / name}" for name in ("test_compile.py", "test_ptx.py", "attention")]
    command += [str(HERE.parent / name) for name in tests]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
