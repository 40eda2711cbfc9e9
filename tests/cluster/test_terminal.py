"""Output of ranks on one terminal."""

from __future__ import annotations

import sys

import pytest

from hotrow.cluster.terminal import ERASE, SHOW_CURSOR, Terminal

NAMES = ["tower rank 0", "row rank 0", "row rank 1"]


@pytest.fixture(params=[True, False], ids=["terminal", "pipe"])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: request.param)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    return Terminal(NAMES)


def test_rank_0_passes_through_and_others_are_named(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(0, b"trained\n")
    terminal.write(2, b"one\ntw")
    terminal.write(1, b"other\n")
    terminal.write(2, "o \u00e9\n".encode()[:3])  # a character in two parts
    terminal.write(2, "o \u00e9\n".encode()[3:])
    terminal.note("done")
    assert capsys.readouterr().out == ("trained\nrow rank 1 | one\nrow rank 0 | other\nrow rank 1 | two \u00e9\ndone\n")


def test_the_bar_is_below_the_lines_of_others(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.write(0, b"begin\nbar 1%\rbar 2%")
    terminal.write(1, b"late\n")
    terminal.write(0, b"\rbar 3%")
    shown = capsys.readouterr().out
    if terminal.live:
        assert shown == f"begin\nbar 1%\rbar 2%{ERASE}row rank 0 | late\nbar 2%\rbar 3%"
    else:
        assert shown == "begin\nrow rank 0 | late\n"
        terminal.end_ranks()
        assert capsys.readouterr().out == "bar 1%\rbar 2%\rbar 3%\n"


def test_a_line_that_comes_in_parts_stays_one_line(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    """A program whose output is not buffered writes each word of a line by itself."""
    terminal.write(0, b"told")
    terminal.write(1, b"other\n")
    terminal.write(0, b" 2\n")
    shown = capsys.readouterr().out
    assert shown == (f"told{ERASE}row rank 0 | other\ntold 2\n" if terminal.live else "row rank 0 | other\ntold 2\n")


def test_ranks_that_end_in_the_middle_of_a_line_leave_whole_lines(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.write(0, b"bar 2%")
    terminal.write(1, b"dying wor")
    terminal.end_ranks()
    terminal.note("starting again")
    terminal.write(1, b"hello\n")
    shown = capsys.readouterr().out
    assert shown.count("row rank 0 | dying wor\n") == 1 and shown.endswith("starting again\nrow rank 0 | hello\n")
    assert (SHOW_CURSOR in shown) == terminal.live


def test_lines_of_others_have_the_room_that_their_names_leave(terminal: Terminal) -> None:
    assert terminal.size == ((100, 30) if terminal.live else None)
    assert terminal.columns(1) == (100 - len("row rank 0 | ") if terminal.live else 500)
