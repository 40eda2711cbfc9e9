"""The memory that a step frees stays with the process, so the next step does not fault it in again."""

from __future__ import annotations

import json
import platform
import resource
from pathlib import Path

import forked
import pytest

COUNTS = """
import json, resource, torch
from hotrow.train.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        matrices = [torch.ones(256, 1024) for _ in range(12)]  # 12 MiB
        del matrices
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

raised = keep_freed_memory()
first = faults()
print(json.dumps([raised, faults()]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")
def test_freed_matrices_are_not_faulted_in_again(tmp_path: Path) -> None:
    def run(**env: str) -> list[int]:
        done = forked.python(COUNTS, log=tmp_path / "log", env=env)
        assert done.wait(60) == 0, done.text()
        return json.loads(done.text().splitlines()[-1])

    pages = 20 * (12 << 20) // resource.getpagesize()
    raised, faults = run()
    assert raised and faults < pages / 20
    raised, _ = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert not raised
