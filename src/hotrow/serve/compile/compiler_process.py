"""The compile process: `python -m hotrow.serve.compile.compiler_process --reply FD`, started by compiler.py.

It reads one job per line on stdin (JSON: program, rows, lengths, device, threads, schemas, out, and for pieces: aside)
and writes one reply per line to the file descriptor FD (ok, seconds, error; for a refusal also ops and nodes). A job
compiles one tower at one static shape with AOTInductor, as a whole or partitioned around the nodes named in `aside`
(graph_partition.py), and writes the package to `out`, which no other process reads until the manager has renamed it.
The process stays between jobs, because the first job pays for importing the compiler and for its precompiled headers.
It ends when stdin is closed. Compiled pieces are kept for the next job, which may be another attempt at the same shape.

The server may have ops that this process lacks. They are declared here from their `schemas`, so that the graph can be
read and partitioned around them.

torch documents neither the functions used here to compile nor their options. If one is missing, the reply says
`changed`, and the original graph serves every shape.

The process has low priority: nice 19, idle I/O, one thread of torch and one of the compiler. It is killed when the
server's thread that started it ends.
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

OPTIONS = {"aot_inductor.package": True, "cpp.threads": 1}  # of the compiler; each job sets its own cpp.threads


def main() -> None:
    """Run jobs until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reply", type=int, required=True)
    reply = os.fdopen(parser.parse_args().reply, "w", buffering=1)
    os.dup2(2, 1)  # the output of compilers goes to the log
    lower_priority()
    serve(sys.stdin, reply)


def lower_priority() -> None:
    """Take the lowest priority for CPU and disk, and end with the server."""
    os.nice(19)
    with contextlib.suppress(psutil.Error, AttributeError, OSError, ValueError):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    end_with_parent(os.getppid())


class RefusedError(Exception):
    """The compiler refused a graph or a piece of it."""

    def __init__(self, why: str, ops: Collection[str] = (), nodes: Collection[str] = ()) -> None:
        super().__init__(why)
        self.reply = {"ok": False, "error": why, "ops": sorted(ops), "nodes": list(nodes)}


def serve(jobs: TextIO, reply: TextIO) -> None:
    """Read one job per line and write one reply per line."""
    compiler = JobCompiler()
    for line in jobs:
        begin = time.monotonic()
        try:
            compiler.compile(json.loads(line))
            result: dict[str, Any] = {"ok": True}
        except RefusedError as refused:
            result = refused.reply
        except ChangedError as error:
            result = {"ok": False, "error": str(error), "changed": True}
        except Exception as error:  # no graph file, no disk space: no other partition would help
            result = {"ok": False, "error": _short(error), "final": True}
        reply.write(json.dumps({**result, "seconds": time.monotonic() - begin}) + "\n")


class JobCompiler:
    """Compiles jobs. Between jobs it keeps the declared ops, and the compiled pieces of the last shape."""

    def __init__(self) -> None:
        self._declared: dict[str, Any] = {}
        self._last: tuple[Any, ...] = ()
        self._pieces: dict[tuple[str, ...], list[Any]] = {}

    def compile(self, job: dict[str, Any]) -> None:
        """Compile `job` and write its package."""
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
        shape_key = (job["program"], shape, job["device"], job["threads"])
        if shape_key != self._last:
            self._last, self._pieces = shape_key, {}
        files = {}
        for piece in cut(graph, shape, excluded).pieces:
            if piece.nodes not in self._pieces:
                reads = [torch.zeros(sizes, dtype=dtype, device=job["device"]) for sizes, dtype in piece.reads]
                self._pieces[piece.nodes] = _compile(piece.as_tuple(), reads, job, piece.nodes)
            files[piece.name] = self._pieces[piece.nodes]
        if files:
            _package(job["out"], files)

    def _declare(self, schemas: Mapping[str, str]) -> list[str]:
        """Declare ops that this process lacks; returns those that are only declared, without a kernel."""
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
    """Raise ChangedError if torch's compiler lacks a function or an option that is used here."""
    look_up("torch._inductor:aot_compile")
    look_up("torch._inductor.package:package_aoti")
    for option in sorted(set(OPTIONS) - set(look_up("torch._inductor:list_options")())):
        raise ChangedError(describe("torch", f"has no compiler option {option!r}"))


def _package(path: str, files: Mapping[str, Any]) -> None:
    look_up("torch._inductor.package:package_aoti")(path, dict(files))


def _compile(module: Any, inputs: list[Any], job: Mapping[str, Any], nodes: Collection[str]) -> Any:
    """Compile a module at the shapes of `inputs`; returns its files."""
    import torch

    aot_compile = look_up("torch._inductor:aot_compile")
    options = {**OPTIONS, "cpp.threads": job["threads"], **job.get("options", {})}
    ops = {str(node.target) for node in module.graph.nodes}
    try:
        with torch.no_grad():
            return aot_compile(module, tuple(inputs), options=options)
    except OSError:
        raise  # a full disk: another partition would not help
    except Exception as error:  # a compiler may raise anything
        raise RefusedError(_short(error), _named(error) & ops, nodes) from None


def _named(error: BaseException | None) -> set[str]:
    """Ops that an error or its causes name as their target."""
    named: set[str] = set()
    while error is not None:
        named.update(re.findall(r"target\s*[:=]\s*(?:torch\.ops\.)?(\w+\.\w+\.\w+)", str(error)))
        error = error.__cause__ or error.__context__
    return named


def _short(error: Exception) -> str:
    """The first line that is not blank."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:500]


if __name__ == "__main__":
    main()
