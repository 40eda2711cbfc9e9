"""Training gives the same bits when it is repeated, with any number of threads, and with any instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_digest import digest

from hotrow import _core


@pytest.fixture(scope="module")
def first() -> str:
    return digest()


@pytest.fixture
def threads() -> Iterator[None]:
    before = _core.threads()
    yield
    _core.set_threads(before)


def test_the_same_training_twice_gives_the_same_bits(first: str) -> None:
    assert digest() == first


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(first: str, count: int) -> None:
    _core.set_threads(count)
    assert _core.threads() == count
    assert digest() == first


def test_the_plain_instruction_set_gives_the_same_bits(first: str) -> None:
    script = Path(__file__).parent / "training_digest.py"
    environment = {**os.environ, "HOTROW_SIMD": "baseline"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["baseline", first]


def test_other_batches_give_other_bits(first: str) -> None:
    assert digest(steps=1) != first
