"""The command line.

    train.py            hotrow train
    models.py           hotrow export, inspect
    serve.py            hotrow serve
    rows.py             hotrow rows
    online.py           hotrow rollback, publish-remote
    release.py          hotrow release
    demo_and_bench.py   hotrow demo, bench
    terminal.py         what several commands print, and exit codes of signals

A command parses its options and calls one function; imports are inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console
from rich.markup import escape

from hotrow.cli import demo_and_bench, models, online, release, rows, serve, train
from hotrow.errors import HotRowError, RankError
from hotrow.signals import exit_on_sigterm

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train recommendation models whose embedding tables outgrow memory.",
)
app.command()(demo_and_bench.demo)
app.command(help=train.TRAIN_HELP)(train.train)
app.command(help=models.EXPORT_HELP)(models.export)
app.command()(models.inspect)
app.command()(demo_and_bench.bench)
app.command(help=serve.SERVE_HELP)(serve.serve)
app.command(help=rows.ROWS_HELP)(rows.rows)
app.command()(online.rollback)
app.command(help=release.RELEASE_HELP)(release.release)
app.command("publish-remote", help=online.PUBLISH_REMOTE_HELP)(online.publish_remote)


def main() -> None:
    """Run the command line; HotRow's own errors become one line and exit code 2."""
    try:
        with exit_on_sigterm():
            app(prog_name="hotrow")
    except HotRowError as error:
        from hotrow.parallel.ranks import joined

        if (ranks := joined()) is not None:
            ranks.report_failure(error)
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        # A launcher that restarts jobs can tell the loss of another rank from an error of the job itself.
        code = int(os.environ.get("HOTROW_LOST_RANK_EXIT_CODE", 2)) if isinstance(error, RankError) else 2
        if ranks is not None:
            ranks.end_if_broken(code)
        sys.exit(code)
