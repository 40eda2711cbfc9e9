"""`hotrow rows`."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrow.cli.terminal import warn_of_passwords

ROWS_HELP = """Serve the rows of exported models to tower servers (`hotrow serve --rows`).

A row server holds the rows of some of the 1,024 shards, in DRAM over SSD, and follows the trainer's bus. Several of
them hold all shards together; several with the same shards are replicas of each other.

Examples:

    hotrow rows repository/                                    # all shards, on loopback, port 8010

    hotrow rows repository/ --shards 0:512 --listen 10.0.0.1:8010 --token-file rows.token

    hotrow rows repository/ --dram 64GiB --ssd /data/rows --bus dir:/data/publications

    hotrow rows repository/ --listen unix:/run/hotrow/rows.sock                # clients of this machine alone

    hotrow rows repository/ --listen 0.0.0.0:8010 --token-file rows.token --register redis://10.0.0.9/0?set=rows \\
        --advertise 10.0.0.1:8010

Ctrl-C or SIGTERM hands the lookups to the replicas, and ends.
"""


def rows(
    repository: Annotated[str, typer.Argument(help="the folder with exported models")],
    model: Annotated[list[str] | None, typer.Option(help="only this model; may be given several times")] = None,
    shards: Annotated[str, typer.Option(help="the shards to hold, BEGIN:END of 0:1024")] = "0:1024",
    listen: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT or unix:/path; may be given several times; default 127.0.0.1:8010"),
    ] = None,
    metrics: Annotated[
        int,
        typer.Option(
            min=-1, max=65535, help="port of /metrics, /live and /ready; 0 lets the system choose, -1 is none"
        ),
    ] = 8012,
    dram: Annotated[str | None, typer.Option(help="memory for rows, such as 8GiB; with --ssd a cache over it")] = None,
    ssd: Annotated[str | None, typer.Option(help="a folder for rows that do not fit --dram")] = None,
    bus: Annotated[
        list[str] | None,
        typer.Option(help="follow a trainer's publications: dir:/path, redis://..., kafka://..., or model=address"),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="a file with the token that tower servers prove, in one line")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="PATH", help="the certificate for TLS, PEM")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="PATH", help="its key, PEM")] = None,
    threads: Annotated[int, typer.Option(min=1, help="threads that answer lookups")] = 1,
    history: Annotated[
        str, typer.Option(help="memory for old values of rows that changed recently, for tower servers that are behind")
    ] = "64MiB",
    register: Annotated[
        str | None, typer.Option(help="keep the address in a set in Redis: redis://HOST/0?set=NAME")
    ] = None,
    advertise: Annotated[str | None, typer.Option(help="the address to register, HOST:PORT")] = None,
    drain: Annotated[str, typer.Option(help="longest time to finish lookups at shutdown")] = "5s",
) -> None:
    """Serve rows."""
    from hotrow.credentials import read_secret
    from hotrow.serve.rows.row_server_options import RowServerOptions
    from hotrow.serve.rows.row_server_process import run
    from hotrow.tiers.rows.cluster_file import parse_shards
    from hotrow.units import parse_seconds

    warn_of_passwords(*(bus or ()), *([register] if register else ()))
    options = RowServerOptions(
        repository,
        tuple(model or ()),
        shards=parse_shards(shards, "--shards"),
        listen=tuple(listen or ("127.0.0.1:8010",)),
        metrics=None if metrics < 0 else metrics,
        dram=dram,
        ssd=ssd,
        bus=tuple(bus or ()),
        token=None if token_file is None else read_secret(token_file, "--token-file "),
        tls_cert=tls_cert,
        tls_key=tls_key,
        threads=threads,
        history=history,
        register=register,
        advertise=advertise,
        drain=parse_seconds(drain, "--drain"),
    )
    raise typer.Exit(run(options))
