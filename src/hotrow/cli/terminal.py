"""What several commands print or do at their ends: warnings, Ctrl-C that is ignored, exit codes of signals."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from hotrow.signals import exit_code, ignores_ctrl_c


@contextmanager
def exit_code_of_signal() -> Iterator[None]:
    """Exit with 143 if SIGTERM stopped `fit` in the block, with 130 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise typer.Exit(exit_code(getattr(stop, "signal", signal.SIGINT))) from None


def note_ignored_ctrl_c() -> None:
    """Before a long run: if Ctrl-C does nothing, print how to end it."""
    if ignores_ctrl_c():
        Console(stderr=True).print(
            "Ctrl-C is ignored because the parent process ignores SIGINT; "
            f"SIGTERM (kill {os.getpid()}) ends the run in order",
            highlight=False,
            soft_wrap=True,
        )


def warn(message: str) -> None:
    """Print a warning to stderr."""
    Console(stderr=True).print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)


def warn_of_passwords(*addresses: str) -> None:
    """Warn of passwords in addresses, which every user of the machine can read."""
    from hotrow.credentials import public, shows_password

    for address in filter(shows_password, addresses):
        warn(
            f"every user of this machine can read the password for {public(address)} in the command line (ps): put it "
            "into a file, and ?password_file=/path behind the address"
        )
