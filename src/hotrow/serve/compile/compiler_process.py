"""The process that compiles: `python -m hotrow.serve.compile.compiler_process --reply FD`, started by compiler.py.

One job a line on stdin (JSON: program, rows, lengths, device, threads, schemas, out, and for pieces: aside), one answer
a line on the file descriptor FD (ok, seconds, error; of a refusal also ops and nodes). It compiles one tower at one
static shape with AOTInductor, whole or cut around the nodes named in `aside` (graph_partition.py), and writes the
package to `out`, a name that nobody reads until the manager has renamed it. It stays between jobs, because the first
one pays for importing the compiler and for its precompiled headers, and ends when stdin does. Pieces that were compiled
for a shape are kept for its next job, which is one more attempt at it.

The server may have ops that this process lacks. They are declared here by their `schemas`, so that the graph can be
read, and cut around; no more is known of them.

torch documents neither the functions that compile here nor their options. Without one of them the answer says
`changed`, and the original graph serves every shape.

It takes what others leave: nice 19, idle I/O, one thread of torch's and one of the compiler's. It dies with the
server's thread that started it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any, TextIO

import psutil  # type: ignore[import-untyped]

from hotrow.child_process import end_with_parent
from hotrow.undocumented import ChangedError, describe, look_up

OPTIONS = {"aot_inductor.package": True, "cpp.threads": 1}  # of the compiler; a job has its own number of threads


def main() -> None:
    """Answer jobs until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply", type=int, required=True)
    reply = os.fdopen(parser.parse_args().reply, "w", buffering=1)
    os.dup2(2, 1)  # what compilers print belongs to the log
    lower_priority()
    serve(sys.stdin, reply)


def lower_priority() -> None:
    """Lowest priority for CPU and disk, and an end when the server ends."""
    os.nice(19)
    with contextlib.suppress(psutil.Error, AttributeError, OSError, ValueError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    end_with_parent(os.getppid())


class RefusedError(Exception):
    """A graph, or a piece of it, that was not compiled."""

    def __init__(self, why: str, ops: Collection[str] = (), nodes: Collection[str] = ()) -> None:
        super().__init__(why)
        self.answer = {"ok": False, "error": why, "ops": sorted(ops), "nodes": list(nodes)}


def serve(jobs: TextIO, reply: TextIO) -> None:
    """One line in, one line out."""
    bench = JobCompiler()
    for line in jobs:
        begin = time.monotonic()
        try:
            bench.compile(json.loads(line))
            answer: dict[str, Any] = {"ok": True}
        except RefusedError as refused:
            answer = refused.answer
        except ChangedError as error:
            answer = {"ok": False, "error": str(error), "changed": True}
        except Exception as error:  # no program, no space: no other cut will help
            answer = {"ok": False, "error": _short(error), "final": True}
        reply.write(json.dumps({**answer, "seconds": time.monotonic() - begin}) + "\n")


class JobCompiler:
    """What stays between jobs: ops that were declared, and pieces of the last shape."""

    def __init__(self) -> None:
        self._declared: dict[str, Any] = {}
        self._last: tuple[Any, ...] = ()
        self._pieces: dict[tuple[str, ...], list[Any]] = {}

    def compile(self, job: dict[str, Any]) -> None:
        """Write the package of `job`."""
        import torch

        check_compiler()
        from hotrow.serve.compile.compiled_tower import WHOLE
        from hotrow.serve.compile.graph_partition import cut
        from hotrow.serve.graph.tower_graph import Shape, TowerGraph

        torch.set_num_threads(1)
        foreign = self._declare(job.get("schemas", {}))
        graph, shape = TowerGraph.load(job["program"]), Shape(job["rows"], tuple(job["lengths"]))
        excluded = job.get("aside")
        if excluded is None:
            if foreign:
                raise RefusedError(f"the compile process has no {', '.join(foreign)}", foreign)
            device = torch.device(job["device"])
            inputs = [
                *(weight.to(device) for weight in graph.weights),
                *graph.random_inputs(shape, device),
            ]  # shapes matter
            _package(job["out"], {WHOLE: _compile(graph.module, inputs, job, ())})
            return
        here = (job["program"], shape, job["device"], job["threads"])
        if here != self._last:
            self._last, self._pieces = here, {}
        files = {}
        for piece in cut(graph, shape, excluded).pieces:
            if piece.nodes not in self._pieces:
                reads = [torch.zeros(sizes, dtype=dtype, device=job["device"]) for sizes, dtype in piece.reads]
                self._pieces[piece.nodes] = _compile(piece.as_tuple(), reads, job, piece.nodes)
            files[piece.name] = self._pieces[piece.nodes]
        if files:
            _package(job["out"], files)

    def _declare(self, schemas: Mapping[str, str]) -> list[str]:
        """Ops that this process knows by name alone."""
        import torch

        for op, schema in schemas.items():
            space, name, overload = op.split(".")
            packet = getattr(getattr(torch.ops, space), name, None)
            if op not in self._declared and not hasattr(packet, overload):
                library = torch.library.Library(space, "FRAGMENT")  # the declaration lives as long as this
                library.define(schema.partition("::")[2])
                self._declared[op] = library
        return [op for op in schemas if op in self._declared]


def check_compiler() -> None:
    """Raise ChangedError where torch's compiler lacks what is used of it."""
    look_up("torch._inductor:aot_compile")
    look_up("torch._inductor.package:package_aoti")
    for option in sorted(set(OPTIONS) - set(look_up("torch._inductor:list_options")())):
        raise ChangedError(describe("torch", f"has no compiler option {option!r}"))


def _package(path: str, files: Mapping[str, Any]) -> None:
    look_up("torch._inductor.package:package_aoti")(path, dict(files))


def _compile(module: Any, inputs: list[Any], job: Mapping[str, Any], nodes: Collection[str]) -> Any:
    """The files of a module at the shapes of `inputs`."""
    import torch

    aot_compile = look_up("torch._inductor:aot_compile")
    options = {**OPTIONS, "cpp.threads": job["threads"], **job.get("options", {})}
    ops = {str(node.target) for node in module.graph.nodes}
    try:
        with torch.no_grad():
            return aot_compile(module, tuple(inputs), options=options)
    except OSError:
        raise  # a full disk: another cut would not help
    except Exception as error:  # whatever a compiler may raise
        raise RefusedError(_short(error), _named(error) & ops, nodes) from None


def _named(error: BaseException | None) -> set[str]:
    """Ops that an error and its causes name as what they were at."""
    named: set[str] = set()
    while error is not None:
        named.update(re.findall(r"target\s*[:=]\s*(?:torch\.ops\.)?(\w+\.\w+\.\w+)", str(error)))
        error = error.__cause__ or error.__context__
    return named


def _short(error: Exception) -> str:
    """The first line that says something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:500]


if __name__ == "__main__":
    main()
