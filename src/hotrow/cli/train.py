"""`hotrow train`: one process, ranks on this machine or a part of them, or ranks on a Ray cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hotrow.cli.terminal import note_ignored_ctrl_c
from hotrow.errors import OptionError
from hotrow.signals import exit_code

if TYPE_CHECKING:
    from hotrow.job import Cluster
    from hotrow.train.progressive_validation import Window

TRAIN_HELP = escape("""Train a model from a job file, evaluate it, and save it.

A job file to start from:

    [data]
    source = "synthetic"       # or parquet, criteo, avazu, with a path =
    examples = 500_000
    [embeddings]
    dim = 16
    optimizer = { kind = "RowWiseAdagrad", lr = 0.05 }
    [tower]
    kind = "dlrm"              # or wide_and_deep, deepfm, dcn_v2, din
    bottom = [64]
    top = [128, 64]
    [memory]
    dram = "4GiB"
    [checkpoints]
    folder = "runs/first"      # what hotrow inspect reads
    every = 50

Examples:

    hotrow train job.toml

    hotrow train job.toml --steps 100

    hotrow train job.toml --resume   # after a crash: continues from the newest checkpoint, to the same result

    hotrow train job.toml --ranks 4  # four processes that share the rows (or torchrun -m hotrow train job.toml)

    hotrow train job.toml --towers 1 --rows 2   # one process trains the tower, two own the rows, to the same result

    hotrow train job.toml --towers 1 --rows 2 --start towers --meet 10.0.0.1:29500 --token-file job.token   # there

    hotrow train job.toml --towers 1 --rows 2 --start rows --meet 10.0.0.1:29500 --token-file job.token   # elsewhere

    hotrow train job.toml --trace run.json   # a trace of all stages; open it at https://ui.perfetto.dev

    hotrow train job.toml --ray 10.0.0.5:6379   # read and make features on a Ray cluster, to the same result

    hotrow train job.toml --on 10.0.0.5:6379   # start its ranks on the nodes of a Ray cluster, again when one dies

    hotrow train job.toml --follow   # wait for more events (a growing folder of Parquet, Kafka, Redis Streams)

Ctrl-C or SIGTERM (kill PID) stops after a whole step, saves there, and exits with 130 or 143 (with --follow: 0). A
second one ends it at once.
""")


def train(
    job: Annotated[str, typer.Argument(help="the job file")],
    steps: Annotated[int | None, typer.Option(min=1, help="stop after this many steps")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the newest checkpoint")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress bar")] = False,
    trace: Annotated[str | None, typer.Option(help="write a trace for ui.perfetto.dev to this file")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="number of processes on this machine")] = 1,
    towers: Annotated[
        int | None, typer.Option(min=1, help="number of processes that read batches and run the tower, beside --rows")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="number of processes that own the rows")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            help="start only these on this machine: towers, rows, or FIRST:END of the ranks (towers come first)",
        ),
    ] = None,
    meet: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="where ranks of several machines meet; HOST is the one with rank 0"),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="a file with the job token, the same on all machines; others cannot read it"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="wait for more events instead of ending")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="read on a Ray cluster: HOST:PORT of its head, auto (the one this machine has joined) or local; "
            "like ray in the job's \\[data]",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="start the ranks on a Ray cluster: HOST:PORT of its head, auto (the one this machine has joined) or "
            "local; \\[cluster] in the job says what each takes",
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            show_default="3, and 0 without checkpoints",
            help="with --on: how often to start again from the newest checkpoint when a rank or a node dies",
        ),
    ] = None,
) -> None:
    """Train a model from a job file."""
    from dataclasses import replace

    from hotrow.job import cluster_of, load_job, token_file_of
    from hotrow.parallel.job_token import TOKEN_VARIABLE, read_job_token
    from hotrow.train.interrupt import Interrupted
    from hotrow.train.stage_times import advice, table
    from hotrow.train.task_metrics import describe_figures

    cluster = cluster_of(job, towers, rows)
    if cluster is not None and ranks > 1:
        raise OptionError(
            f"--ranks {ranks} beside {cluster.towers} towers and {cluster.rows} row ranks: --ranks is for processes "
            "that have both; leave it out, or --towers, --rows and the job's [cluster]"
        )
    if max_restarts is not None and on is None:
        raise OptionError(f"--max-restarts {max_restarts} without --on: it is for ranks on Ray; torchrun has its own")
    if on is not None:
        chosen: dict[str, object] = {"--steps": steps, "--trace": trace, "--towers": towers, "--rows": rows}
        chosen |= {"--ray": ray, "--ranks": ranks if ranks > 1 else None}
        for name, value in (("--start", start), ("--meet", meet), ("--token-file", token_file)):
            if value is not None:
                raise OptionError(f"{name} {value} with --on {on}: Ray starts all ranks; leave {name} out")
        options = [word for name, value in chosen.items() if value is not None for word in (name, str(value))]
        options += [name for name, given in (("--quiet", quiet), ("--follow", follow)) if given]
        raise typer.Exit(_train_on_cluster(job, on, ranks, cluster, options, ray, resume, max_restarts))
    processes = ranks if cluster is None else cluster.ranks
    token = read_job_token(token_file or token_file_of(job))
    if processes > 1 and "RANK" not in os.environ:
        from hotrow.parallel.launch import launch, part_of

        towers_of_job = processes if cluster is None else cluster.towers
        part = part_of(processes, towers_of_job, start, meet, token)
        note_ignored_ctrl_c()
        raise typer.Exit(launch(part, [sys.executable, "-m", "hotrow", *sys.argv[1:]]))
    if token is not None:
        os.environ[TOKEN_VARIABLE] = token  # for join_ranks
    loaded = load_job(job, ray, follow, towers, rows)
    team = loaded.trainer.team
    if ranks > 1 and team is not None and team.ranks.world != ranks:
        raise OptionError(f"--ranks {ranks}, but the launcher started {team.ranks.world}; leave --ranks out")
    console = Console(quiet=team is not None and not team.ranks.first)
    if steps is not None:
        loaded = replace(loaded, steps=steps)
    if trace is not None:
        loaded.trainer.trace = Path(trace)
    if processes == 1 and not console.quiet:
        note_ignored_ctrl_c()
    console.print(f"{loaded.source.describe()}", highlight=False)
    try:
        report, tested = loaded.run(progress=not quiet, resume=resume)
    except Interrupted as stop:
        again = os.environ.get("HOTROW_TRAIN_COMMAND", f"hotrow train {job}")
        go_on = f"; go on with `{again} --resume`" if stop.checkpoint is not None else ""
        where = f"saved to [bold]{stop.checkpoint}[/]{go_on}" if stop.checkpoint is not None else escape(stop.why)
        console.print(f"[bold]stopped[/] after step {stop.step:,}; {where}", highlight=False, soft_wrap=True)
        if stop.report is not None and stop.report.windows:
            console.print(_curve(stop.report.windows), highlight=False)
        raise typer.Exit(0 if loaded.follows and stop.checkpoint is not None else exit_code(stop.signal)) from None
    if report.resumed_from is not None:
        console.print(f"[bold]resumed[/] after step {report.resumed_from:,}", highlight=False)
    console.print(
        f"[bold]trained[/] {report.steps:,} steps, {report.examples:,} examples in {report.seconds:.1f} s "
        f"({report.examples_per_second:,.0f} examples/s, {report.ids_per_second:,.0f} ids/s)",
        highlight=False,
    )
    for role, stages in (report.stages_by_role or {"": report.stages}).items():
        console.print(table(stages, report.seconds, role))
    if cluster is not None and report.stages_by_role:
        by_role = report.stages_by_role
        console.print(advice(by_role["towers"], by_role["rows"], cluster.rows, report.seconds), highlight=False)
    for split, figures in (("train", report.metrics), ("test", tested)):
        if figures:
            console.print(f"{split:>6}: {describe_figures(figures)}", highlight=False)
    if report.windows:
        console.print(_curve(report.windows), highlight=False)
    if report.saves:
        console.print(
            f"{len(report.saves)} checkpoints; the longest pause of training was {report.longest_pause * 1000:.0f} ms",
            highlight=False,
        )
    if loaded.output:
        console.print(f"saved to [bold]{loaded.output}[/]; `hotrow inspect {loaded.output}` shows its contents")


def _train_on_cluster(
    path: str,
    address: str,
    ranks: int,
    cluster: Cluster | None,
    options: list[str],
    ray: str | None,
    resume: bool,
    max_restarts: int | None,
) -> int:
    """`hotrow train --on`. `options` are those of every rank."""
    from hotrow.cluster import ClusterJob, train_on_cluster
    from hotrow.job import read_job

    if cluster is None and ranks == 1:
        raise OptionError(
            f"--on {address}: say how many ranks to start, by [cluster] towers and rows in the job file, by --towers "
            "and --rows, or by --ranks"
        )
    note_ignored_ctrl_c()
    towers, rows = (ranks, 0) if cluster is None else (cluster.towers, cluster.rows)
    values = read_job(path, ray)
    text = Path(path).read_text()
    return train_on_cluster(ClusterJob(path, text, values, address, towers, rows, tuple(options), resume, max_restarts))


def _curve(windows: list[Window]) -> str:
    """The first and last points of progressive validation, in a line."""
    shown = [f"{window.auc:.4f}" for window in windows]
    shown = shown if len(shown) <= 8 else [*shown[:2], "...", *shown[-5:]]
    return f"progressive validation AUC, {len(windows)} windows: {' '.join(shown)}"
