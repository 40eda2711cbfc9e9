"""A front end as a process: a EngineClient over the engines' sockets, and the ports of ports.py over it.

It writes lines of JSON for its supervisor on stdout (ready with its ports, figures once a second), and reads lines from
stdin: first its options (`{"sockets": [...], "options": {...}}`, FrontendOptions with the token, which must not be seen
among the arguments), then `{"others": [...]}`, the figures of the other front ends, for the metrics page of the one
that has that port. It ends when stdin does. SIGTERM drains: no new connections, what was asked is answered, then it
ends with 0.

Started as `python -m hotrow.serve.processes.frontend_process`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from typing import Any, BinaryIO

from hotrow.errors import OptionError
from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.frontend.ports import Frontend, FrontendOptions
from hotrow.serve.processes.child import freeze_garbage_collector, read_options
from hotrow.serve.protocol.backend import Figures
from hotrow.serve.protocol.limits import Limits


def tell(event: str, **content: Any) -> None:
    """A line for the supervisor."""
    try:
        sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass


async def serve(sockets: list[str], options: FrontendOptions, said: BinaryIO) -> int:
    """Until told to stop."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    others: list[Figures] = []
    threading.Thread(target=_listen, args=(loop, stop, others, said), daemon=True).start()
    backend = EngineClient(sockets)
    await backend.open()
    frontend = Frontend(backend, options, lambda: others)
    try:
        await frontend.start()
    except OptionError as error:
        tell("failed", why=str(error))
        return 2
    freeze_garbage_collector()
    tell("ready", ports=frontend.ports)
    while not stop.is_set():
        tell("figures", figures=[[*key, value] for key, value in frontend.figures().items()])
        try:
            await asyncio.wait_for(stop.wait(), 1.0)
        except asyncio.TimeoutError:
            continue
    await frontend.close()
    await backend.close()
    return 0


def _listen(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, others: list[Figures], said: BinaryIO) -> None:
    """What the supervisor says; its end is ours."""
    for line in said:
        figures = json.loads(line)["others"]
        others[:] = [{tuple(key): value for *key, value in front_end} for front_end in figures]
    loop.call_soon_threadsafe(stop.set)


def main() -> int:
    """The process."""
    logging.basicConfig(level=logging.INFO, format="front end %(process)d: %(message)s", stream=sys.stderr)
    given, said = read_options()
    options = FrontendOptions(**{**given["options"], "limits": Limits(**given["options"]["limits"])})
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(serve(given["sockets"], options, said))
    code: int = uvloop.run(serve(given["sockets"], options, said))
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
