"""`hotrow serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrow.cli.terminal import warn, warn_of_passwords
from hotrow.errors import OptionError

SERVE_HELP = """Serve the models of a repository: HTTP and gRPC (Open Inference Protocol v2), and Prometheus metrics.

Examples:

    hotrow serve repository/                       # every model, newest versions, on loopback

    hotrow serve repository/ --model ctr --lanes 2 --deadline 50ms

    hotrow serve repository/ --dram 8GiB --ssd /data/rows --policy initial

    hotrow serve repository/ --devices 0,1,2,3 --hbm 40GiB     # an engine on each GPU

    hotrow serve repository/ --bus dir:/data/publications --stale-after 10s     # follow a trainer

    hotrow serve repository/ --bus redis://10.0.0.5:6379/0?stream=ctr --dram 8GiB --remote redis+cluster://10.0.0.1:7000

    hotrow serve repository/ --rows cluster.toml --rows-token-file rows.token    # rows on row servers: fleet.md

    hotrow serve repository/ --host 0.0.0.0 --token-file /run/secrets/token --poll 5s

Ctrl-C or SIGTERM answers the requests in flight, and ends.
"""


def _with_options(address: str, **given: str | None) -> str:
    """An address of row servers with the options that are given."""
    options = "&".join(f"{name}={value}" for name, value in given.items() if value is not None)
    return address + (("&" if "?" in address else "?") + options if options else "")


def serve(
    context: typer.Context,
    repository: Annotated[str, typer.Argument(help="the folder with exported models")],
    model: Annotated[list[str] | None, typer.Option(help="only this model; may be given several times")] = None,
    host: Annotated[str, typer.Option(help="where to listen")] = "127.0.0.1",
    http: Annotated[int, typer.Option(min=-1, max=65535, help="port; 0 lets the system choose, -1 is none")] = 8000,
    grpc: Annotated[int, typer.Option(min=-1, max=65535, help="port; 0 lets the system choose, -1 is none")] = 8001,
    metrics: Annotated[int, typer.Option(min=-1, max=65535, help="port; 0 lets the system choose, -1 is none")] = 8002,
    lanes: Annotated[int, typer.Option(min=1, help="workers of each engine process")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="threads per lane; default: cores / all lanes")] = None,
    devices: Annotated[
        str, typer.Option(help="an engine on each of these: GPUs by number (0,1), cpu; auto: all GPUs, else the CPU")
    ] = "auto",
    processes: Annotated[int, typer.Option(min=1, help="engine processes on each device")] = 1,
    frontends: Annotated[int, typer.Option(min=1, help="processes that speak HTTP and gRPC")] = 1,
    dram: Annotated[str | None, typer.Option(help="memory for rows, such as 8GiB; with --ssd a cache over it")] = None,
    ssd: Annotated[str | None, typer.Option(help="a folder for rows that do not fit --dram")] = None,
    ssd_limit: Annotated[
        str | None,
        typer.Option(help="with --remote: the most that the --ssd folder of a version may take, such as 200GiB"),
    ] = None,
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
    user_cache: Annotated[
        str | None,
        typer.Option(help="memory for encodings of users whose history is unchanged, such as 256MiB, of each engine"),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="most rows (examples) in a batch")] = 1024,
    max_wait: Annotated[str, typer.Option(help="longest wait of a request for its batch to fill, such as 2ms")] = "2ms",
    poll: Annotated[str, typer.Option(help="check for new versions and releases this often; 0s: never")] = "0s",
    bus: Annotated[
        list[str] | None,
        typer.Option(help="follow a trainer's publications: dir:/path, redis://..., kafka://..., or model=address"),
    ] = None,
    remote: Annotated[
        list[str] | None,
        typer.Option(
            help="the store that has all rows, with --dram a cache over it: redis://host:6379, "
            "redis+cluster://host:port,host:port, rediss..., rocksdb:/folder, or model=address; repeat it for stores "
            "that are read when the ones before fail, the last one perhaps export: (the version's own files)"
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            help="row servers (`hotrow rows`) that hold all rows: HOST:PORT,HOST:PORT, cluster.toml, dns:NAME:PORT, "
            "redis://HOST/0?set=NAME, or model=address"
        ),
    ] = None,
    rows_token_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="the token of the row servers, in one line of a file")
    ] = None,
    rows_ca: Annotated[
        str | None, typer.Option(metavar="PATH", help="TLS to the row servers: the authorities of their certificates")
    ] = None,
    rows_wire: Annotated[str | None, typer.Option(help="how rows are sent: fp32 (the default), fp16 or int8")] = None,
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
        warn("every user of this machine can read --token in the command line (ps): use --token-file or HOTROW_TOKEN")
    warn_of_passwords(*(bus or ()), *(remote or ()))
    options = ServeOptions(
        repository,
        tuple(model or ()),
        host,
        http=None if http < 0 else http,
        grpc=None if grpc < 0 else grpc,
        metrics=None if metrics < 0 else metrics,
        lanes=lanes,
        threads=threads,
        devices=devices,
        processes=processes,
        frontends=frontends,
        dram=dram,
        ssd=ssd,
        ssd_limit=ssd_limit,
        hbm=hbm,
        deadline=None if deadline is None else parse_seconds(deadline, "--deadline"),
        policy=policy,
        compile=compile,
        artifacts=artifacts,
        precision=precision,
        user_cache=user_cache,
        max_batch=max_batch,
        max_wait=parse_seconds(max_wait, "--max-wait"),
        poll=parse_seconds(poll, "--poll"),
        bus=tuple(bus or ()),
        remote=tuple(remote or ()),
        rows=tuple(
            _with_options(address, token_file=rows_token_file, ca=rows_ca, wire=rows_wire) for address in rows or ()
        ),
        stale_after=None if stale_after is None else parse_seconds(stale_after, "--stale-after"),
        token=token,
        drain=parse_seconds(drain, "--drain"),
        loader=loader,
    )
    raise typer.Exit(run(options))
