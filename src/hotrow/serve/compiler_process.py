"""The process that compiles: `python -m hotrow.serve.compiler_process --reply FD`, started by serve/compiler.py.

One job a line on stdin (JSON: program, rows, lengths, device, threads, out), one answer a line on the file
descriptor FD (ok, seconds, error). It compiles one tower at one static shape with AOTInductor and writes the package
to `out`, a name that nobody reads until the manager has renamed it. It stays between jobs, because the first one
pays for importing the compiler and for its precompiled headers, and ends when stdin does.

It takes what others leave: nice 19, idle I/O, one thread of torch's and one of the compiler's. It dies with the
server's thread that started it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, TextIO

import psutil  # type: ignore[import-untyped]


def main() -> None:
    """Answer jobs until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply", type=int, required=True)
    reply = os.fdopen(parser.parse_args().reply, "w", buffering=1)
    os.dup2(2, 1)  # what compilers print belongs to the log
    step_back()
    serve(sys.stdin, reply)


def step_back() -> None:
    """Lowest priority for CPU and disk, and an end when the server ends."""
    os.nice(19)
    with contextlib.suppress(psutil.Error, AttributeError, OSError, ValueError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve(jobs: TextIO, reply: TextIO) -> None:
    """One line in, one line out."""
    for line in jobs:
        begin = time.monotonic()
        try:
            compile_job(json.loads(line))
            answer: dict[str, Any] = {"ok": True}
        except Exception as error:  # whatever a compiler may raise
            answer = {"ok": False, "error": _short(error)}
        reply.write(json.dumps({**answer, "seconds": time.monotonic() - begin}) + "\n")


def compile_job(job: dict[str, Any]) -> None:
    """Write the package of `job`."""
    import torch
    from torch._inductor import aot_compile
    from torch._inductor.package.package import package_aoti

    from hotrow.serve.tower_graph import Shape, TowerGraph

    torch.set_num_threads(1)
    graph = TowerGraph.load(job["program"])
    device = torch.device(job["device"])
    weights = [weight.to(device) for weight in graph.weights]  # only their shapes matter
    inputs = graph.draw(Shape(job["rows"], tuple(job["lengths"])), device)
    options = {"aot_inductor.package": True, "cpp.threads": job["threads"], **job.get("options", {})}
    with torch.no_grad():
        files = aot_compile(graph.module, (*weights, *inputs), options=options)
    package_aoti(job["out"], {"model": files})  # type: ignore[dict-item]


def _short(error: Exception) -> str:
    """The first line that says something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:500]


if __name__ == "__main__":
    main()
