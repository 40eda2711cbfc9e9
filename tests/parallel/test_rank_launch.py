"""The launcher of `hotrow train --ranks` handles signals and deaths. Its ranks here are small programs."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import forked
import psutil
import pytest

LAUNCHER = """
import sys
from hotrow import signals
from hotrow.parallel.launch import launch

signals.DUPLICATE_SECONDS = 0
try:
    with signals.exit_on_sigterm():
        sys.exit(launch(2, [sys.executable, "-u", "-S", "-c", sys.argv[1]], patience=0.5))
except KeyboardInterrupt:
    sys.exit(130)  # as the command line does
"""
STUBBORN = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: print("told"))
print("rank", os.environ["RANK"], "is process", os.getpid())
while True:
    time.sleep(0.01)
"""


class Launched:
    """A launcher whose two ranks ignore signals."""

    def __init__(self, home: Path) -> None:
        self.launcher = forked.python(LAUNCHER, STUBBORN, log=home / "log")
        self.until("rank . is process", 2)
        found = re.findall(r"rank (.) is process (\d+)", self.launcher.text())
        self.ranks = {int(rank): psutil.Process(int(pid)) for rank, pid in found}

    def until(self, words: str, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(re.findall(words, self.launcher.text())) < count:
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.launcher.text()
            time.sleep(0.02)

    def check_ranks_are_gone(self) -> None:
        _, alive = psutil.wait_procs(self.ranks.values(), timeout=20)
        assert not alive


@pytest.fixture
def launched(tmp_path: Path) -> Launched:
    return Launched(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_goes_to_all_ranks_and_the_second_kills_them(
    launched: Launched, number: signal.Signals, code: int
) -> None:
    launched.launcher.send_signal(number)
    launched.until("told", 2)
    launched.launcher.send_signal(number)
    assert launched.launcher.wait(20) == code, launched.launcher.text()
    launched.check_ranks_are_gone()


def test_a_rank_that_is_killed_ends_the_others_and_names_its_signal(launched: Launched) -> None:
    launched.ranks[0].send_signal(signal.SIGSTOP)
    launched.ranks[1].send_signal(signal.SIGKILL)
    assert launched.launcher.wait(20) == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in launched.launcher.text()
    launched.check_ranks_are_gone()


def test_ranks_do_not_outlive_their_launcher(launched: Launched) -> None:
    launched.ranks[0].send_signal(signal.SIGSTOP)
    launched.launcher.kill()
    launched.check_ranks_are_gone()
