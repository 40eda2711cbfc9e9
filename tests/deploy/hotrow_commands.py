"""Checks of hotrow commands as a manifest gives them: the command has these options, and their values parse."""

from __future__ import annotations

from collections.abc import Sequence

import click
import pytest
import typer

from hotrow.cli import app


def options(words: Sequence[str]) -> dict[str, str]:
    """A command's options by name. A wrong one fails the test, which skips while HotRow has no such command."""
    name, arguments = words[0], list(words[1:])
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group) or hasattr(command, "commands")
    known = command.commands
    if name not in known:
        if name == "rows":
            pytest.skip("this version has no command `hotrow rows`")
        raise AssertionError(f"there is no command hotrow {name}")
    missing = {word.partition("=")[0] for word in arguments if word.startswith("--")} - {
        one for parameter in known[name].params for one in (*parameter.opts, *parameter.secondary_opts)
    }
    if missing and missing <= {"--rows", "--rows-token-file", "--rows-ca"} and "rows" not in known:
        pytest.skip(f"this version's hotrow {name} has no {', '.join(sorted(missing))}")
    assert not missing, f"hotrow {name} has no {', '.join(sorted(missing))}"
    known[name].make_context(name, arguments)  # raises an error that names a wrong value
    return given(arguments)


def given(arguments: Sequence[str]) -> dict[str, str]:
    """--name=value and --name value of a command line."""
    found: dict[str, str] = {}
    for at, word in enumerate(arguments):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else arguments[at + 1] if at + 1 < len(arguments) else ""
    return found


def port(address: str) -> int:
    """The port of HOST:PORT, or of a port alone."""
    return int(address.rpartition(":")[2])
