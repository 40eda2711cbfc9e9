"""A front end as a process: a RemoteBackend over the engines' sockets, and the ports of frontend.py over it.

It writes lines of JSON for its supervisor on stdout (ready with its ports, figures once a second), and reads lines from
stdin: `{"others": [...]}`, the figures of the other front ends, for the metrics page of the one that has that port. It
ends when stdin does. SIGTERM drains: no new connections, what was asked is answered, then it ends with 0.

Started as `python -m hotrow.serve.frontend_process '{"sockets": [...], "options": {...}}'`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

from hotrow.errors import OptionError
from hotrow.serve.backend import Figures
from hotrow.serve.frontend import Frontend, FrontendOptions
from hotrow.serve.limits import Limits
from hotrow.serve.processes import spare_collection
from hotrow.serve.remote_backend import RemoteBackend


def tell(event: str, **content: Any) -> None:
    """A line for the supervisor."""
    try:
        sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        pass


async def serve(sockets: list[str], options: FrontendOptions) -> int:
    """Until told to stop."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    others: list[Figures] = []
    threading.Thread(target=_listen, args=(loop, stop, others), daemon=True).start()
    backend = RemoteBackend(sockets)
    await backend.open()
    frontend = Frontend(backend, options, lambda: others)
    try:
        await frontend.start()
    except OptionError as error:
        tell("failed", why=str(error))
        return 2
    spare_collection()
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


def _listen(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, others: list[Figures]) -> None:
    """What the supervisor says; its end is ours."""
    with os.fdopen(os.dup(0), "rb") as lines:
        for line in lines:
            said = json.loads(line)
            others[:] = [{tuple(key): value for *key, value in figures} for figures in said["others"]]
    loop.call_soon_threadsafe(stop.set)


def main(arguments: list[str]) -> int:
    """The process."""
    logging.basicConfig(level=logging.INFO, format="front end %(process)d: %(message)s", stream=sys.stderr)
    says = json.loads(arguments[0])
    options = FrontendOptions(**{**says["options"], "limits": Limits(**says.get("limits", {}))})
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(serve(says["sockets"], options))
    code: int = uvloop.run(serve(says["sockets"], options))
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
