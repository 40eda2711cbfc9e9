"""Commands of online learning: `hotrow rollback` and `publish-remote`. `hotrow release BUS` is in release.py."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from hotrow.cli.terminal import warn_of_passwords

PUBLISH_REMOTE_HELP = """Keep a remote store (Redis, Redis Cluster) that servers read up to date with a bus.

It fills the store first, from the export of a model or from the newest snapshot that the bus names; then it writes
each new publication. Writing is idempotent: the command may be killed and started again at any moment, and several may
run at once on several machines, for redundancy.

Examples:

    hotrow publish-remote dir:/data/publications redis://10.0.0.1:6379 --export repository/ctr

    hotrow publish-remote kafka://10.0.0.5:9092/ctr "redis+cluster://10.0.0.1:7000?replicas=1" --export repository/ctr

    hotrow publish-remote dir:/data/publications redis://10.0.0.1:6379 --export repository/ctr --once   # and end

Ctrl-C or SIGTERM ends it after the current publication with exit code 0, or at once while it fills the store. A RocksDB
folder is written by the server that reads it: hotrow serve --remote rocksdb:/folder --bus BUS.
"""


def rollback(
    bus: Annotated[str, typer.Argument(help="the bus: dir:/path, redis://host/0?stream=name or kafka://host/topic")],
    to: Annotated[int, typer.Option("--to", min=0, help="the publication to go back to")],
) -> None:
    """Restore an older publication on every server, as a new publication, and hold the trainer's publisher.

    Example: hotrow rollback dir:/data/publications --to 1200
    """
    from hotrow.credentials import public, shows_password
    from hotrow.publish.rollback import default_snapshot_reader
    from hotrow.publish.rollback import rollback as run

    warn_of_passwords(bus)
    done = run(bus, to, default_snapshot_reader)
    again = public(bus) if shows_password(bus) else bus
    Console().print(
        f"[bold]publication {done.number}[/] restores {done.restores}: {done.rows:,} rows as they were, "
        f"{done.deleted:,} removed. The publisher is held; let it go on with `hotrow release {again}`",
        highlight=False,
        soft_wrap=True,
    )


def publish_remote(
    bus: Annotated[str, typer.Argument(help="the bus: dir:/path, redis://host/0?stream=name or kafka://host/topic")],
    url: Annotated[str, typer.Argument(help="the store: redis://..., rediss://..., redis+cluster://...")],
    export: Annotated[str | None, typer.Option(help="a model's folder in a repository, to fill the store from")] = None,
    values: Annotated[
        str | None, typer.Option(help="how a new store keeps rows: fp32, fp16 or int8; else as the export does")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="exit when the store has every publication on the bus")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only problems")] = False,
) -> None:
    """Keep a remote store up to date with a bus."""
    from hotrow.serve.updates.remote_writer import run

    warn_of_passwords(bus, url)
    raise typer.Exit(run(bus, url, export, values, once, quiet))
