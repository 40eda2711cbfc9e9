"""Shared by the tests of training."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def one_torch_thread(one_thread: None) -> None:
    """Small towers gain nothing from threads, and two test processes on two cores lose much."""
