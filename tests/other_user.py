"""What another user of this machine can do: a process forked from this one, with the user `nobody`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

NOBODY = 65534


def as_nobody(work: Callable[[], object]) -> str:
    """The name of the error that `work` raises in such a process; "" if it succeeds. Skips where we are not root."""
    if os.getuid():
        pytest.skip("only root can become another user")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(60)  # a fork of a process with threads may hang
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
        except BaseException as error:
            os.write(writing, type(error).__name__.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as said:
        name = said.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return name
