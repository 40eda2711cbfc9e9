"""`hotrow export` and `hotrow inspect`: what training has saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hotrow.errors import OptionError

if TYPE_CHECKING:
    from torch.nn import Module

    from hotrow.nn import EmbeddingCollection

EXPORT_HELP = """Write a checkpoint into a repository, as the next version of a model that a server opens.

Examples:

    hotrow export runs/ctr repository                    # the newest checkpoint of runs/ctr, as model ctr

    hotrow export runs/ctr/step-000000001000 repository --model home --values fp16

    hotrow export runs/ctr repository --job job.toml     # for a checkpoint that does not say how its tower is built
"""


def export(
    checkpoint: Annotated[str, typer.Argument(help="a checkpoint, or a folder of them: then the newest")],
    repository: Annotated[str, typer.Argument(help="the folder of models")],
    model: Annotated[str | None, typer.Option(help="the model's name; without it, that of the run's folder")] = None,
    values: Annotated[str, typer.Option(help="how rows are stored: fp32, fp16 or int8")] = "fp32",
    job: Annotated[str | None, typer.Option(help="the job file that trained it, if the checkpoint lacks it")] = None,
    policy: Annotated[str, typer.Option(help="for rows that miss the deadline: wait, initial or default")] = "wait",
    deadline: Annotated[float | None, typer.Option(help="default deadline of a request, in milliseconds")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
) -> None:
    """Write a checkpoint into a repository."""
    from hotrow.job import build_recorded_tower, recorded_tower
    from hotrow.progress import ProgressBar
    from hotrow.serve.repository.from_checkpoint import export_checkpoint
    from hotrow.train.checkpoint.manifest import Checkpoint
    from hotrow.units import format_size

    def tower_of(opened: Checkpoint, embeddings: EmbeddingCollection) -> Module:
        record = opened.manifest.get("job") if job is None else recorded_tower(job, opened.features())
        if record is None:
            raise OptionError(
                f"{opened.path} does not say how its tower is built (a Trainer of your own saved it, or an older "
                "release): pass --job job.toml, or call hr.export(model, ...) where the model is"
            )
        return build_recorded_tower(record, embeddings)

    console = Console()
    seconds = None if deadline is None else deadline / 1000
    with ProgressBar("export", console=console, enabled=not quiet) as bar:
        version = export_checkpoint(
            checkpoint, repository, model, tower_of, values=values, policy=policy, deadline=seconds, bar=bar
        )
    rows = sum(table["rows"] for table in version.manifest["tables"])
    size = format_size(sum(file["bytes"] for file in version.manifest["files"].values()))
    console.print(
        f"[bold]exported[/] step {version.manifest['trained']['step']:,} as version {version.number} of "
        f"[bold]{version.model}[/]: {rows:,} rows, {size}, in [bold]{version.path}[/]",
        highlight=False,
        soft_wrap=True,
    )


def inspect(
    path: Annotated[str, typer.Argument(help="a checkpoint, a folder of them, a table's rows, or an SSD folder")],
    table: Annotated[str | None, typer.Option(help="show one table's rows and hottest keys")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many of the hottest keys")] = 10,
) -> None:
    """Show what is on disk: checkpoints, their tables, rows and hottest keys; verify the files that are read.

    Examples: hotrow inspect runs/demo · hotrow inspect runs/demo --table C3 --top 20 · hotrow inspect /data/rows
    """
    from hotrow.inspect import inspect as run

    run(path, table, top, Console())
