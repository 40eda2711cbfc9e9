"""The command line: `hotrow demo | train | export | serve | bench | inspect`, and for online learning `rollback |
release | publish-remote`.

A command parses its options and calls one function; imports are inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hotrow.errors import HotRowError, OptionError, RankError
from hotrow.signals import exit_code, exit_on_sigterm, ignores_ctrl_c

if TYPE_CHECKING:
    from torch.nn import Module

    from hotrow.job import Cluster
    from hotrow.nn import EmbeddingCollection
    from hotrow.train.progressive_validation import Window

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train recommendation models whose embedding tables outgrow memory.",
)

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


@app.command()
def demo(
    output: Annotated[str, typer.Option(help="the folder for all output")] = "runs/demo",
    seconds: Annotated[float | None, typer.Option(min=8, help="approximate duration of the demo")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="keep serving at the end, until Ctrl-C")] = False,
) -> None:
    """Train on a drifting click log with more rows than fit in memory, serve the model, update it live, write a report.

    Example: hotrow demo --seconds 60
    """
    from hotrow.demo.run import demo as run

    with _exit_code_of_signal():
        run(output, seconds, keep)


@app.command(help=TRAIN_HELP)
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

    from hotrow.job import cluster_of, load_job
    from hotrow.parallel.job_token import TOKEN_VARIABLE, read_job_token
    from hotrow.train.interrupt import Interrupted
    from hotrow.train.stage_times import advice, table

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
    token = read_job_token(token_file)
    if processes > 1 and "RANK" not in os.environ:
        from hotrow.parallel.launch import launch, part_of

        towers_of_job = processes if cluster is None else cluster.towers
        part = part_of(processes, towers_of_job, start, meet, token)
        _note_ignored_ctrl_c()
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
        _note_ignored_ctrl_c()
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
            shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if name != "examples")
            console.print(f"{split:>6}: {shown}", highlight=False)
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
    _note_ignored_ctrl_c()
    towers, rows = (ranks, 0) if cluster is None else (cluster.towers, cluster.rows)
    values = read_job(path, ray)
    text = Path(path).read_text()
    return train_on_cluster(ClusterJob(path, text, values, address, towers, rows, tuple(options), resume, max_restarts))


@contextmanager
def _exit_code_of_signal() -> Iterator[None]:
    """Exit with 143 if SIGTERM stopped `fit` in the block, with 130 after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise typer.Exit(exit_code(getattr(stop, "signal", signal.SIGINT))) from None


def _note_ignored_ctrl_c() -> None:
    """Before a long run: if Ctrl-C does nothing, print how to end it."""
    if ignores_ctrl_c():
        Console(stderr=True).print(
            "Ctrl-C is ignored because the parent process ignores SIGINT; "
            f"SIGTERM (kill {os.getpid()}) ends the run in order",
            highlight=False,
            soft_wrap=True,
        )


def _curve(windows: list[Window]) -> str:
    """The first and last points of progressive validation, in a line."""
    shown = [f"{window.auc:.4f}" for window in windows]
    shown = shown if len(shown) <= 8 else [*shown[:2], "...", *shown[-5:]]
    return f"progressive validation AUC, {len(windows)} windows: {' '.join(shown)}"


EXPORT_HELP = """Write a checkpoint into a repository, as the next version of a model that a server opens.

Examples:

    hotrow export runs/ctr repository                    # the newest checkpoint of runs/ctr, as model ctr

    hotrow export runs/ctr/step-000000001000 repository --model home --values fp16

    hotrow export runs/ctr repository --job job.toml     # for a checkpoint that does not say how its tower is built
"""


@app.command(help=EXPORT_HELP)
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


@app.command()
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


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="which benchmark: rows")],
    json: Annotated[str | None, typer.Option(help="write the results to this file as JSON")] = None,
    record: Annotated[str | None, typer.Option(help="append them, with hardware and commit, to this folder")] = None,
) -> None:
    """Measure HotRow beside its peers, in one run on this machine.

    Examples: hotrow bench rows · hotrow bench rows --json rows.json
    """
    from hotrow.bench import run

    with _exit_code_of_signal():
        run(name, json, record)


SERVE_HELP = """Serve the models of a repository: HTTP and gRPC (Open Inference Protocol v2), and Prometheus metrics.

Examples:

    hotrow serve repository/                       # every model, newest versions, on loopback

    hotrow serve repository/ --model ctr --lanes 2 --deadline 50ms

    hotrow serve repository/ --dram 8GiB --ssd /data/rows --policy initial

    hotrow serve repository/ --bus dir:/data/publications --stale-after 10s     # follow a trainer

    hotrow serve repository/ --bus redis://10.0.0.5:6379/0?stream=ctr --dram 8GiB --remote redis+cluster://10.0.0.1:7000

    hotrow serve repository/ --host 0.0.0.0 --token-file /run/secrets/token --poll 5s

Ctrl-C or SIGTERM answers the requests in flight, and ends.
"""


@app.command(help=SERVE_HELP)
def serve(
    context: typer.Context,
    repository: Annotated[str, typer.Argument(help="the folder with exported models")],
    model: Annotated[list[str] | None, typer.Option(help="only this model; may be given several times")] = None,
    host: Annotated[str, typer.Option(help="where to listen")] = "127.0.0.1",
    http: Annotated[int, typer.Option(min=-1, max=65535, help="port; 0 lets the system choose, -1 is none")] = 8000,
    grpc: Annotated[int, typer.Option(min=-1, max=65535, help="port; 0 lets the system choose, -1 is none")] = 8001,
    metrics: Annotated[int, typer.Option(min=-1, max=65535, help="port; 0 lets the system choose, -1 is none")] = 8002,
    lanes: Annotated[int, typer.Option(min=1, help="workers of each engine process")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="threads per lane; default: cores / lanes")] = None,
    processes: Annotated[int, typer.Option(min=1, help="engine processes")] = 1,
    frontends: Annotated[int, typer.Option(min=1, help="processes that speak HTTP and gRPC")] = 1,
    dram: Annotated[str | None, typer.Option(help="memory for rows, such as 8GiB; with --ssd a cache over it")] = None,
    ssd: Annotated[str | None, typer.Option(help="a folder for rows that do not fit --dram")] = None,
    hbm: Annotated[str | None, typer.Option(help="GPU memory for hot rows, such as 4GiB")] = None,
    deadline: Annotated[
        str | None, typer.Option(help="deadline of requests without one, such as 50ms; default: the version's, or 1s")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="for rows that miss the deadline: wait, initial or default; else the version's")
    ] = None,
    compile: Annotated[
        bool, typer.Option(help="compile the tower's buckets in the background", envvar="HOTROW_COMPILE")
    ] = True,
    artifacts: Annotated[str | None, typer.Option(help="folder of compiled buckets; else the user's cache")] = None,
    precision: Annotated[str, typer.Option(help="of towers on a GPU: fp32, tf32, bf16 or fp16")] = "fp32",
    max_batch: Annotated[int, typer.Option(min=1, help="most rows (examples) in a batch")] = 1024,
    max_wait: Annotated[str, typer.Option(help="longest wait of a request for its batch to fill, such as 2ms")] = "2ms",
    poll: Annotated[str, typer.Option(help="interval between checks for new versions, such as 5s; 0s: never")] = "0s",
    bus: Annotated[
        list[str] | None,
        typer.Option(help="follow a trainer's publications: dir:/path, redis://..., kafka://..., or model=address"),
    ] = None,
    remote: Annotated[
        list[str] | None,
        typer.Option(
            help="the store that has all rows, with --dram a cache over it: redis://host:6379, "
            "redis+cluster://host:port,host:port, rediss..., rocksdb:/folder, or model=address"
        ),
    ] = None,
    stale_after: Annotated[
        str | None, typer.Option(help="raise an alarm when answers use data older than this, such as 10s")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            help="token for loading and unloading models from other machines; every user of this machine can read it "
            "in the command line, so use --token-file or HOTROW_TOKEN",
            envvar="HOTROW_TOKEN",
        ),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="a file with the token in one line, which others cannot read")
    ] = None,
    drain: Annotated[str, typer.Option(help="longest time to finish requests at shutdown")] = "10s",
    loader: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a repository."""
    from hotrow.credentials import read_secret
    from hotrow.serve.processes.serve_options import ServeOptions
    from hotrow.serve.processes.supervisor import serve as run
    from hotrow.units import parse_seconds

    source = context.get_parameter_source("token")
    typed = source is not None and source.name == "COMMANDLINE"
    if token_file is not None and typed:
        raise OptionError("--token and --token-file: give one of them")
    if token_file is not None:
        token = read_secret(token_file, "--token-file ")
    elif typed:
        _warn("every user of this machine can read --token in the command line (ps): use --token-file or HOTROW_TOKEN")
    _warn_of_passwords(*(bus or ()), *(remote or ()))
    options = ServeOptions(
        repository,
        tuple(model or ()),
        host,
        http=None if http < 0 else http,
        grpc=None if grpc < 0 else grpc,
        metrics=None if metrics < 0 else metrics,
        lanes=lanes,
        threads=threads,
        processes=processes,
        frontends=frontends,
        dram=dram,
        ssd=ssd,
        hbm=hbm,
        deadline=None if deadline is None else parse_seconds(deadline, "--deadline"),
        policy=policy,
        compile=compile,
        artifacts=artifacts,
        precision=precision,
        max_batch=max_batch,
        max_wait=parse_seconds(max_wait, "--max-wait"),
        poll=parse_seconds(poll, "--poll"),
        bus=tuple(bus or ()),
        remote=tuple(remote or ()),
        stale_after=None if stale_after is None else parse_seconds(stale_after, "--stale-after"),
        token=token,
        drain=parse_seconds(drain, "--drain"),
        loader=loader,
    )
    raise typer.Exit(run(options))


def _warn(message: str) -> None:
    Console(stderr=True).print(f"[yellow]{escape(message)}[/]", highlight=False, soft_wrap=True)


def _warn_of_passwords(*addresses: str) -> None:
    from hotrow.credentials import public, shows_password

    for address in filter(shows_password, addresses):
        _warn(
            f"every user of this machine can read the password for {public(address)} in the command line (ps): put it "
            "into a file, and ?password_file=/path behind the address"
        )


@app.command()
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

    _warn_of_passwords(bus)
    done = run(bus, to, default_snapshot_reader)
    again = public(bus) if shows_password(bus) else bus
    Console().print(
        f"[bold]publication {done.number}[/] restores {done.restores}: {done.rows:,} rows as they were, "
        f"{done.deleted:,} removed. The publisher is held; let it go on with `hotrow release {again}`",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def release(bus: Annotated[str, typer.Argument(help="the bus")]) -> None:
    """Release a publisher that `hotrow rollback` holds; it then publishes everything trained since.

    Example: hotrow release dir:/data/publications
    """
    from hotrow.publish.rollback import release as run

    _warn_of_passwords(bus)
    Console().print("released" if run(bus) else "it was not held", highlight=False)


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


@app.command("publish-remote", help=PUBLISH_REMOTE_HELP)
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

    _warn_of_passwords(bus, url)
    raise typer.Exit(run(bus, url, export, values, once, quiet))


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


if __name__ == "__main__":
    main()
