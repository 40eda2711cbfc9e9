"""The front end as a process: a Frontend (ports.py) over an EngineClient, on one event loop.

It writes lines of JSON for its supervisor on stdout: ready with its ports, and figures once a second. It reads lines
from stdin. The first has its options, `{"sockets": [...], "options": {...}}`, with the token, which must not be among
the arguments. The others are `{"others": [...]}`, the figures of the other front ends, for the metrics page. It ends
when stdin ends. On SIGTERM it drains: it accepts nothing new, answers the requests in flight, and exits with 0.

It is started as `python -m hotrow.serve.processes.frontend_process`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from typing import BinaryIO

from hotrow.errors import OptionError
from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.frontend.ports import Frontend, FrontendOptions
from hotrow.serve.processes.child_runtime import freeze_garbage_collector, read_options, report_event
from hotrow.serve.protocol.backend import Figures
from hotrow.serve.protocol.limits import Limits


async def serve(sockets: list[str], options: FrontendOptions, supervisor: BinaryIO) -> int:
    """Serve until SIGTERM or the supervisor's end; returns the exit code."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    others: list[Figures] = []
    threading.Thread(target=_read_supervisor, args=(loop, stop, others, supervisor), daemon=True).start()
    engines = EngineClient(sockets)
    await engines.open()
    frontend = Frontend(engines, options, lambda: others)
    try:
        await frontend.start()
    except OptionError as error:
        report_event("failed", why=str(error))
        return 2
    freeze_garbage_collector()
    report_event("ready", ports=frontend.ports)
    while not stop.is_set():
        report_event("figures", figures=[[*key, value] for key, value in frontend.figures().items()])
        try:
            await asyncio.wait_for(stop.wait(), 1.0)
        except asyncio.TimeoutError:
            continue
    await frontend.close()
    await engines.close()
    return 0


def _read_supervisor(
    loop: asyncio.AbstractEventLoop, stop: asyncio.Event, others: list[Figures], supervisor: BinaryIO
) -> None:
    """Keep the other front ends' figures current; stop at the end of stdin."""
    for line in supervisor:
        figures = json.loads(line)["others"]
        others[:] = [{tuple(key): value for *key, value in front_end} for front_end in figures]
    loop.call_soon_threadsafe(stop.set)


def main() -> int:
    """Run a front end; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="front end %(process)d: %(message)s", stream=sys.stderr)
    given, supervisor = read_options()
    options = FrontendOptions(**{**given["options"], "limits": Limits(**given["options"]["limits"])})
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(serve(given["sockets"], options, supervisor))
    code: int = uvloop.run(serve(given["sockets"], options, supervisor))
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
