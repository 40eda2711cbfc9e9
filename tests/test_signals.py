"""SIGINT and SIGTERM: orderly end at the first, immediate end at the second; other handlers are left alone.

Each program runs in a process of its own, which starts as a shell would start it and sends the signals to itself.
"""

from __future__ import annotations

import signal
from pathlib import Path

import forked
import pytest

PROGRAM = """
import os, signal, sys, time
from hotrow import signals
from hotrow.signals import StopSignals, exit_on_sigterm

INT, TERM = signal.SIGINT, signal.SIGTERM
say = lambda *words: print(*words, flush=True)
def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)
"""


def run(code: str, home: Path) -> tuple[int, list[str]]:
    """Exit code and lines."""
    process = forked.python(PROGRAM + code, log=home / "log")
    return process.wait(60), process.text().splitlines()


def test_sigterm_leaves_all_blocks_and_exits_with_143(tmp_path: Path) -> None:
    code = "with exit_on_sigterm():\n    try:\n        send(TERM)\n    finally:\n        say('cleaned up')"
    assert run(code, tmp_path) == (143, ["cleaned up"])


STUCK = """
with exit_on_sigterm():
    try:
        send(TERM)
    finally:
        send(TERM)
        say('twice within a second is once')
        signals.DUPLICATE_SECONDS = 0
        send(TERM)
        say('not reached')
"""


def test_a_second_sigterm_ends_a_clean_up_that_hangs(tmp_path: Path) -> None:
    assert run(STUCK, tmp_path) == (-signal.SIGTERM, ["twice within a second is once"])


HELD = """
with exit_on_sigterm():
    try:
        with StopSignals(lambda number: say('told', number.name)):
            for number in {numbers}:
                send(number)
                send(number)
                signals.DUPLICATE_SECONDS = {same}
    except KeyboardInterrupt:
        say('interrupted')
    finally:
        say('cleaned up')
"""


@pytest.mark.parametrize(
    ("numbers", "same", "ends", "says"),
    [
        ("[TERM]", 1, 0, ["told SIGTERM", "cleaned up"]),
        ("[INT]", 1, 0, ["told SIGINT", "cleaned up"]),
        ("[TERM, TERM]", 0, 143, ["told SIGTERM", "cleaned up"]),
        ("[TERM, INT]", 1, 0, ["told SIGTERM", "interrupted", "cleaned up"]),
        ("[INT, TERM]", 1, 143, ["told SIGINT", "cleaned up"]),
    ],
)
def test_the_first_signal_calls_the_function_and_the_second_ends_the_process(
    tmp_path: Path, numbers: str, same: int, ends: int, says: list[str]
) -> None:
    assert run(HELD.format(numbers=numbers, same=same), tmp_path) == (ends, says)


OTHERS = """
signal.signal(INT, signal.SIG_IGN)
signal.signal(TERM, lambda *_: say('my handler'))
before = signal.getsignal(INT), signal.getsignal(TERM)
with exit_on_sigterm(), StopSignals(lambda number: say('told')):
    send(INT)
    send(TERM)
assert before == (signal.getsignal(INT), signal.getsignal(TERM))
signal.signal(INT, signal.default_int_handler)
signal.signal(TERM, signal.SIG_DFL)
with StopSignals(lambda number: say('told')):
    send(TERM)
assert (signal.getsignal(INT), signal.getsignal(TERM)) == (signal.default_int_handler, signal.SIG_DFL)
"""


def test_other_handlers_and_ignored_signals_stay(tmp_path: Path) -> None:
    assert run(OTHERS, tmp_path) == (0, ["my handler", "told"])


FORKS = """
from contextlib import nullcontext

wait, began = os.pipe()
ends = []
with exit_on_sigterm():
    for held in (nullcontext(), StopSignals(lambda number: say('told'))):
        with held:
            child = os.fork()
            if not child:
                try:
                    os.write(began, b"x")
                    for _ in range(6000):  # one long sleep may begin just after the signal
                        time.sleep(0.01)
                finally:
                    say('the child left the blocks of its parent')
                    os._exit(1)
            os.read(wait, 1)
            os.kill(child, TERM)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
say(ends)
"""


def test_a_forked_process_is_ended_by_sigterm_as_pools_rely_on(tmp_path: Path) -> None:
    code, lines = run(FORKS, tmp_path)
    assert (code, lines) == (0, ["[-15, -15]"])


INHERITS = """
signal.signal(INT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {TERM})
import forked
forked.default_signals()
try:
    send(INT)
except KeyboardInterrupt:
    say('Ctrl-C')
send(TERM)
"""


def test_tests_get_ctrl_c_even_if_their_parent_ignores_it(tmp_path: Path) -> None:
    assert run(INHERITS, tmp_path) == (-signal.SIGTERM, ["Ctrl-C"])
