"""`hotrow demo` and `hotrow bench`: try HotRow, and measure it."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrow.cli.terminal import exit_code_of_signal


def demo(
    output: Annotated[str, typer.Option(help="the folder for all output")] = "runs/demo",
    seconds: Annotated[float | None, typer.Option(min=8, help="approximate duration of the demo")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="keep serving at the end, until Ctrl-C")] = False,
) -> None:
    """Train on a drifting click log with more rows than fit in memory, serve the model, update it live, write a report.

    Example: hotrow demo --seconds 60
    """
    from hotrow.demo.run import demo as run

    with exit_code_of_signal():
        run(output, seconds, keep)


def bench(
    name: Annotated[str, typer.Argument(help="which benchmark: rows")],
    json: Annotated[str | None, typer.Option(help="write the results to this file as JSON")] = None,
    record: Annotated[str | None, typer.Option(help="append them, with hardware and commit, to this folder")] = None,
    device: Annotated[str | None, typer.Option(help="where sequences runs: cpu or cuda")] = None,
) -> None:
    """Measure HotRow beside its peers, in one run on this machine.

    Examples: hotrow bench rows · hotrow bench rows --json rows.json
    """
    from hotrow.bench import run

    with exit_code_of_signal():
        run(name, json, record, device)
