"""Towers: one model's tower, run by all lanes: on compiled buckets where there are some, on the original graph
otherwise.

`run` never waits for a compilation. It cuts the batch by `buckets.plan`, runs each part on its bucket's artifact,
and takes the padding off; a shape whose bucket is not compiled yet runs on the original graph, and the compiler is
asked for it.

An artifact takes traffic after `_adopt`, in the compiler's thread, has found that
    it equals the original graph on random inputs and the real weights, at the bucket's full shape and at a smaller one
    that is padded, to TOLERANCE of the largest logit (so a tower that is not row-wise keeps its original graph), and
    its best of TRIALS runs takes less than `faster` (0.95) of the original graph's best, measured in turns.
An artifact that is not faster is left alone: compilation that brings nothing is noticed and not used. A tower that the
compiler does not take whole comes as pieces with eager ops between them (graph_partition.py); the same holds for all of
them together. On CUDA a bucket is captured unless its ops cannot be, by their declaration or when it is tried.

Padding. A lane (a thread) has one set of input tensors for each bucket and copies a batch into them in one call;
rows behind the batch keep what was there, since a tower is row-wise; lengths behind it are zeros, so a mask says
false there.

Weights are one tuple. A run reads it once, so it sees old or new weights whole, on all parts. On CUDA the graphs know
addresses, so new weights are copied into the same storage while no run is under way.

Buckets follow the traffic: every `relearn` seconds (`tick`) a better ladder may be proposed; buckets of the old one
serve until those of the new one have come.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.serve.compile import compiled_tower
from hotrow.serve.compile.artifacts import ArtifactCache, default_folder
from hotrow.serve.compile.buckets import Costs, Ladder, Part, Traffic, plan
from hotrow.serve.compile.compiled_tower import ArtifactError, Runner
from hotrow.serve.compile.compiler import Compiler
from hotrow.serve.compile.graph_partition import Cut, assemble, uncapturable
from hotrow.serve.execution.cuda_graphs import BucketGraph, CaptureError, LanePool
from hotrow.serve.graph.tower_graph import Input, Shape, TowerGraph, Weights
from hotrow.undocumented import find

log = logging.getLogger("hotrow.serve")

TOLERANCE = 1e-6  # of the largest logit, float32 on a CPU
CUDA_TOLERANCE = 1e-4  # other kernels add in another order, over other tiles
TRIALS = 9
PLANS = 4096  # shapes whose plan is kept


@dataclass(frozen=True)
class TowerOptions:
    """How a tower is compiled and served."""

    compile: bool = True
    ladder: Ladder | None = None  # None: the one of the last run, or powers of two
    most_rows: int = 1024  # of the first ladder
    most_length: int = 256
    lanes: int = 1
    threads: int = 1  # of each lane; generated code is built for it
    cache: str | Path | None = None  # folder of artifacts; None: artifacts.default_folder()
    cache_bytes: int = 1 << 30
    limit: float = 900.0  # seconds of one compilation
    relearn: float = 60.0  # seconds between two looks at the traffic
    tolerance: float | None = None  # None: TOLERANCE, or CUDA_TOLERANCE
    faster: float = 0.95  # an artifact's seconds must be under this part of the original graph's


@dataclass
class Counts:
    """What ran where."""

    hits: dict[Shape, int] = field(default_factory=dict)  # runs of each bucket
    rows: int = 0  # that were asked for
    padded_rows: int = 0  # that were run beside them
    fallback_rows: int = 0  # run by the original graph
    batches: int = 0
    fallback_batches: int = 0  # with any such rows
    errors: int = 0  # runs of an artifact that failed


class Towers:
    """The tower of a model in service: `run(vectors, dense)` from any thread."""

    def __init__(
        self,
        original: TowerGraph | torch.export.ExportedProgram,
        weights: Mapping[str, Tensor] | None = None,
        device: torch.device | str = "cpu",
        options: TowerOptions | None = None,
    ) -> None:
        if isinstance(original, torch.export.ExportedProgram):
            original = TowerGraph(original)
        if not isinstance(original, TowerGraph):
            raise OptionError(
                f"a tower of type {type(original).__name__} cannot be bucketed; give a torch.export.ExportedProgram, "
                "or TowerGraph.of(tower, vectors, dense)"
            )
        self.graph, self.device = original, torch.device(device)
        self.options = options or TowerOptions()
        self.counts = Counts()
        self._weights = original.arrange(weights or {}, self.device)
        self._gate = Crossing() if self.device.type == "cuda" else None
        self._lane = _Lane()
        self._live: dict[Shape, Runner] = {}
        self._uncaptured: dict[Shape, str] = {}  # why a bucket has no CUDA graph; written by `_adopt` alone
        self._costs = Costs()
        self._plans: dict[Shape, tuple[Part, ...]] = {}
        self._change = threading.Lock()  # of the four names above, and of counts
        self._traffic = Traffic()
        self._cache = ArtifactCache(self.options.cache or default_folder(), self.options.cache_bytes)
        self._memory = f"ladder-{original.digest[:16]}-{self.device.type}.json"
        self.ladder, self._remembered = self._first_ladder()
        self._compiler: Compiler | None = None
        if self.options.compile:
            self._compiler = Compiler(
                original, self._cache, self._adopt, self.device, self.options.threads, self.options.limit
            )
        self._ticks = threading.Event()
        self._ticker = threading.Thread(target=self._tick_on, name="buckets", daemon=True)
        self._ticker.start()

    def run(self, vectors: Mapping[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """Logits of a batch, `[rows]` or `[rows, tasks]`."""
        return self.answer(vectors, dense)[0]

    @property
    def weights(self) -> Weights:
        """Those of now: on a CPU a value, which is replaced whole."""
        return self._weights

    def answer(
        self, vectors: Mapping[str, Tensor], dense: Tensor | None = None, weights: Weights | None = None
    ) -> tuple[Tensor, bool]:
        """Logits of a batch with the weights of now, or on a CPU with some that `weights` gave before; and whether
        buckets alone gave them."""
        inputs = self.graph.flatten(vectors, dense)
        shape = self.graph.shape_of(inputs)
        if not shape.rows:
            return self.graph(weights or self._weights, inputs), False
        parts = self._plans.get(shape) or self._make_plan(shape)
        self._traffic.count(shape)
        with torch.inference_mode(), self._running() as newest:
            weights = weights or newest
            if len(parts) == 1:
                logits = self._run_part(parts[0], shape, inputs, weights)
            else:
                pieces, at = [], 0
                for part in parts:
                    piece = [tensor[at : at + part.rows] for tensor in inputs]
                    pieces.append(self._run_part(part, Shape(part.rows, shape.lengths), piece, weights))
                    at += part.rows
                logits = torch.cat(pieces)
        self._count(shape, parts)
        return logits, all(part.bucket is not None for part in parts)

    def replace_weights(self, state: Mapping[str, Tensor]) -> None:
        """New weights by name, from the next run on, in the original graph and all artifacts; none is compiled again.

        What `state` lacks keeps the value it has now.
        """
        self.set_weights(self.arrange(state))

    def arrange(self, state: Mapping[str, Tensor]) -> Weights:
        """Weights by name as `set_weights` takes them."""
        now = dict(zip(self.graph.names, self._weights, strict=True))
        return self.graph.arrange({**now, **state}, self.device)

    def set_weights(self, fresh: Weights) -> None:
        """Run with what `arrange` gave, from the next run on."""
        if self._gate is None:
            self._weights = fresh  # runs under way keep the tuple they took
            return
        with self._gate.alone():
            torch.cuda.synchronize(self.device)
            for old, new in zip(self._weights, fresh, strict=True):
                old.copy_(new)
            torch.cuda.synchronize(self.device)

    def start(self, wait: bool = False, seconds: float | None = None) -> bool:
        """Compile the ladder that was given or remembered, before traffic (`wait`) or behind it.

        False if the time was over before.
        """
        shapes = list(self.ladder.shapes) if self.options.ladder is not None else self._remembered
        for shape in shapes:
            self._ask(shape)
        return not wait or self._compiler is None or self._compiler.wait(shapes, seconds)

    def tick(self) -> None:
        """Look at the traffic: take a better ladder, and let go of buckets that nobody wants any more."""
        ladder = self._traffic.propose(self.ladder, self._cost_of_rows())
        if ladder != self.ladder:
            log.info("a better ladder: rows %s, lengths %s", ladder.rows, ladder.lengths)
            self.ladder = ladder
            with self._change:
                self._plans = {}  # so that the next batches ask for its buckets
        wanted = set(self.ladder.shapes)
        pending = self._compiler is not None and self._compiler.seen.count("queued", "compiling")
        if not pending and any(shape in wanted for shape in self._live):
            self._let_go([shape for shape in self._live if shape not in wanted])
        self._remember()

    def metrics(self) -> dict[str, float]:
        """Numbers of now, by name."""
        counts, seen = self.counts, self._compiler.seen if self._compiler else None
        run = counts.rows + counts.padded_rows
        return {
            "bucket_hits": sum(counts.hits.values()),
            "padding_waste": counts.padded_rows / run if run else 0.0,
            "fallback_rate": counts.fallback_batches / counts.batches if counts.batches else 0.0,
            "fallback_rows": counts.fallback_rows,
            "artifact_errors": counts.errors,
            "buckets": len(self._live),
            "compiled_pieces": sum(seen.pieces.get(shape, 0) for shape in list(self._live)) if seen else 0,
            "eager_ops": len(self.eager_ops()),
            "compile_queue": seen.count("queued", "compiling") if seen else 0,
            "compile_seconds": sum(seen.seconds) if seen else 0.0,
            "compilations": len(seen.seconds) if seen else 0,
            "compile_tries": seen.tries if seen else 0,
            "compile_failures": seen.count("failed") if seen else 0,
            "compile_deaths": seen.died if seen else 0,
            "artifacts_reused": seen.reused if seen else 0,
            "artifacts_slower": seen.count("slower") if seen else 0,
            "artifacts_quarantined": seen.count("mismatch") if seen else 0,
            "artifacts_damaged": self._cache.damaged,
            "artifact_bytes": self._cache.bytes,
        }

    def eager_ops(self) -> Counter[str]:
        """Ops that live buckets do not compile, and in how many of them."""
        eager = self._compiler.seen.eager if self._compiler else {}
        return Counter(op for shape in list(self._live) for op in eager.get(shape, ()))

    def describe(self) -> dict[str, Any]:
        """Each bucket's state and why, how many pieces are compiled and which ops stay eager, for people."""
        if self._compiler is None:
            return {"compiler": "compile=False", "buckets": {}}
        seen = self._compiler.seen
        buckets = {
            str(shape): {
                "state": state,
                "why": seen.reasons.get(shape, ""),
                "hits": self.counts.hits.get(shape, 0),
                "pieces": seen.pieces.get(shape, 0),
                "eager": list(seen.eager.get(shape, ())),
                "uncaptured": self._uncaptured.get(shape, ""),
            }
            for shape, state in list(seen.states.items())
        }
        return {"compiler": self._compiler.missing or "present", "buckets": buckets}

    def close(self) -> None:
        """End the threads and the compile process."""
        self._ticks.set()
        self._ticker.join()
        if self._compiler is not None:
            self._compiler.close()
        self._remember()

    # --- a run ------------------------------------------------------------------------------------------------------

    def _run_part(self, part: Part, shape: Shape, inputs: Sequence[Tensor], weights: Weights) -> Tensor:
        runner = None if part.bucket is None else self._live.get(part.bucket)
        if part.bucket is None or runner is None:
            return self.graph(weights, inputs)
        try:
            return self._run_bucket(part.bucket, runner, shape, inputs, weights)
        except (ArtifactError, CaptureError) as error:
            log.warning("bucket %s is taken out of service: %s", part.bucket, error)
            self.counts.errors += 1
            self._let_go([part.bucket])
            return self.graph(weights, inputs)

    def _run_bucket(
        self, bucket: Shape, runner: Runner, shape: Shape, inputs: Sequence[Tensor], weights: Weights
    ) -> Tensor:
        padded = self._lane.padded(bucket, runner, self.graph.inputs, self.device)
        padded.fill(shape, inputs)
        if self.device.type != "cuda" or bucket in self._uncaptured:
            return runner((*weights, *padded.tensors))[: shape.rows]
        if padded.graph is None:
            padded.graph = BucketGraph(
                lambda held: runner((*weights, *held)), padded.tensors, self._lane.pool(self.device)
            )
        return padded.graph.replay(shape.rows)

    @contextlib.contextmanager
    def _running(self) -> Iterator[Weights]:
        if self._gate is None:
            yield self._weights
        else:
            with self._gate.together():
                yield self._weights

    def _make_plan(self, shape: Shape) -> tuple[Part, ...]:
        """How a shape runs now, after asking for the bucket it should have."""
        wanted = self.ladder.cover(shape)
        if wanted is not None and wanted not in self._live:
            self._ask(wanted)
        with self._change:
            parts = plan(shape, self._live, self._costs)
            if len(self._plans) < PLANS:
                self._plans[shape] = parts
        return parts

    def _ask(self, shape: Shape) -> None:
        if self._compiler is not None:
            self._compiler.request(shape)

    def _count(self, shape: Shape, parts: Sequence[Part]) -> None:
        with self._change:
            counts = self.counts
            counts.batches += 1
            counts.rows += shape.rows
            eager = 0
            for part in parts:
                if part.bucket is None:
                    eager += part.rows
                else:
                    counts.hits[part.bucket] = counts.hits.get(part.bucket, 0) + 1
                    counts.padded_rows += part.bucket.rows - part.rows
            counts.fallback_rows += eager
            counts.fallback_batches += eager > 0

    # --- a new artifact ---------------------------------------------------------------------------------------------

    def _adopt(self, shape: Shape, path: Path | None, made: Cut | None) -> tuple[str, str]:
        """Compare and time an artifact; then it takes traffic, or not. Called by the compiler's thread.

        Without one (`path` None, on CUDA alone) the original graph itself is captured at that shape; `made` says how
        the graph was cut.
        """
        torch.set_num_threads(self.options.threads)  # this thread's, as a lane's
        runner = self._load(path, made)
        with torch.inference_mode(), self._running() as weights:
            if self.device.type == "cuda":
                self._try_capture(shape, runner, weights, made)
            smaller = Shape(max(1, shape.rows - 1), tuple(max(1, length - 1) for length in shape.lengths))
            for seed, seen in enumerate((shape, smaller)):
                wrong = self._compare(shape, seen, runner, weights, seed)
                if wrong:
                    return "mismatch", wrong
            inputs = self.graph.draw(shape, self.device)
            ours, theirs = _in_turns(
                lambda: self._run_bucket(shape, runner, shape, inputs, weights),
                lambda: self.graph(weights, inputs),
                self.device,
            )
            half = Shape(max(1, shape.rows // 2), shape.lengths)  # two points make the original graph's line
            less = self.graph.draw(half, self.device)
            at_half = _best(lambda: self.graph(weights, less), self.device)
        fast = ours < self.options.faster * theirs
        with self._change:
            buckets = {**self._costs.buckets, **({shape: ours} if fast else {})}
            self._costs = Costs(buckets, {half: at_half, **self._costs.original, shape: theirs})
            if fast:
                self._live = {**self._live, shape: runner}
            self._plans = {}
        told = f"{ours * 1e6:.0f} us against {theirs * 1e6:.0f} us on the original graph"
        if made is not None:
            told += f", with {len(made.pieces)} compiled pieces and eager {', '.join(made.ops)}"
        return ("live", told) if fast else ("slower", told)

    def _load(self, path: Path | None, made: Cut | None) -> Runner:
        if path is None:
            return self._uncompiled
        if made is None:
            return compiled_tower.load(path, self.device, self.options.lanes)
        names = [piece.name for piece in made.pieces]
        return assemble(
            made, {name: compiled_tower.load_piece(path, name, self.device, self.options.lanes) for name in names}
        )

    def _try_capture(self, shape: Shape, runner: Runner, weights: Weights, made: Cut | None) -> None:
        """Find out whether a bucket becomes a CUDA graph."""
        self._uncaptured.pop(shape, None)
        nodes = self.graph.module.graph.nodes
        why = uncapturable(nodes) if made is None else made.uncapturable
        if not why:
            try:
                self._run_bucket(shape, runner, shape, self.graph.draw(shape, self.device), weights)
            except CaptureError as error:
                why = str(error)
                self._lane.forget(shape)
        if why:
            log.info("bucket %s is run without a CUDA graph: %s", shape, why)
            self._uncaptured[shape] = why

    def _uncompiled(self, tensors: Sequence[Tensor]) -> Tensor:
        count = len(self._weights)
        return self.graph(tensors[:count], tensors[count:])

    def _compare(self, bucket: Shape, shape: Shape, runner: Runner, weights: Weights, seed: int) -> str:
        """What differs, or nothing."""
        inputs = self.graph.draw(shape, self.device, seed)
        ours = self._run_bucket(bucket, runner, shape, inputs, weights)
        theirs = self.graph(weights, inputs)
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"it gives {ours.dtype} {list(ours.shape)}, the original graph {theirs.dtype} {list(theirs.shape)}"
        tolerance = self.options.tolerance or (CUDA_TOLERANCE if self.device.type == "cuda" else TOLERANCE)
        largest = max(float(theirs.abs().max()), 1e-30)
        apart = float((ours - theirs).abs().max()) / largest
        return "" if apart <= tolerance else f"{apart:.1e} of the largest logit apart at {shape}, over {tolerance:g}"

    def _let_go(self, shapes: Sequence[Shape]) -> None:
        with self._change:
            self._live = {shape: runner for shape, runner in self._live.items() if shape not in shapes}
            kept = {shape: cost for shape, cost in self._costs.buckets.items() if shape not in shapes}
            self._costs = Costs(kept, self._costs.original)
            self._plans = {}

    # --- the ladder -------------------------------------------------------------------------------------------------

    def _first_ladder(self) -> tuple[Ladder, list[Shape]]:
        lengths = self.graph.lengths
        if self.options.ladder is not None:
            if len(self.options.ladder.lengths) != lengths:
                raise OptionError(
                    f"the ladder has lengths for {len(self.options.ladder.lengths)} sequences, but the tower reads "
                    f"{lengths}; give one tuple of lengths for each"
                )
            return self.options.ladder, []
        known = self._cache.recall(self._memory)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            ladder = Ladder(tuple(known["rows"]), tuple(map(tuple, known["lengths"])))
            if len(ladder.lengths) == lengths:
                return ladder, [Shape(rows, tuple(rest)) for rows, *rest in known["live"]]
        return Ladder.doubling(self.options.most_rows, [self.options.most_length] * lengths), []

    def _remember(self) -> None:
        live = [[shape.rows, *shape.lengths] for shape in self._live]
        self._cache.remember(self._memory, {"rows": self.ladder.rows, "lengths": self.ladder.lengths, "live": live})

    def _cost_of_rows(self) -> Callable[[int], float] | None:
        """Seconds of a bucket by its rows, where the tower has no lengths and at least two were measured."""
        known = sorted((shape.rows, seconds) for shape, seconds in self._costs.buckets.items())
        if self.graph.lengths or len(known) < 2:
            return None
        measured = Costs(original={Shape(rows): seconds for rows, seconds in known})
        return lambda rows: measured.of_original(Shape(rows))

    def _tick_on(self) -> None:
        while not self._ticks.wait(self.options.relearn):
            try:
                self.tick()
            except Exception as error:  # a full disk: the buckets stay as they are
                log.warning("the ladder was not looked at: %s", error)


class _Padded:
    """A lane's input tensors of one bucket."""

    def __init__(self, runner: Runner, inputs: Sequence[Input], bucket: Shape, device: torch.device) -> None:
        self.runner, self._inputs, self.bucket = runner, inputs, bucket
        self.tensors = [torch.zeros(i.sizes(bucket), dtype=i.dtype, device=device) for i in inputs]
        self._views: dict[Shape, list[Tensor]] = {}
        self.graph: BucketGraph | None = None

    def fill(self, shape: Shape, inputs: Sequence[Tensor]) -> None:
        """Copy a batch in."""
        views = self._views.get(shape)
        if views is None:
            if len(self._views) >= PLANS:
                self._views.clear()
            views = self._views[shape] = [
                tensor[tuple(slice(size) for size in given.sizes(shape))]
                for given, tensor in zip(self._inputs, self.tensors, strict=True)
            ]
        if shape.lengths != self.bucket.lengths:
            for given, tensor in zip(self._inputs, self.tensors, strict=True):
                if given.jagged:
                    tensor.zero_()
        _copy_all(views, list(inputs))


def _copy_each(into: list[Tensor], tensors: list[Tensor]) -> None:
    for one, tensor in zip(into, tensors, strict=True):
        one.copy_(tensor)


# All in one call, which torch does not document.
_copy_all = find("torch:_foreach_copy_", "A tower's inputs are copied one by one") or _copy_each


class _Lane(threading.local):
    """What a thread has for itself."""

    def __init__(self) -> None:
        self._padded: dict[Shape, _Padded] = {}
        self._pool: LanePool | None = None

    def padded(self, bucket: Shape, runner: Runner, inputs: Sequence[Input], device: torch.device) -> _Padded:
        found = self._padded.get(bucket)
        if found is None or found.runner is not runner:
            found = self._padded[bucket] = _Padded(runner, inputs, bucket, device)
        return found

    def forget(self, bucket: Shape) -> None:
        """Drop a bucket whose capture failed, and the pool it was to be captured in."""
        self._padded.pop(bucket, None)
        self._pool = None

    def pool(self, device: torch.device) -> LanePool:
        if self._pool is None:
            self._pool = LanePool(device)
        return self._pool


class Crossing:
    """Many runs together, or one change of the weights alone; who waits to change goes before new runs."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._running = self._waiting = 0
        self._changing = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting and not self._changing)
            self._running += 1
        try:
            yield
        finally:
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with self._condition:
            self._waiting += 1
            self._condition.wait_for(lambda: not self._running and not self._changing)
            self._waiting -= 1
            self._changing = True
        try:
            yield
        finally:
            with self._condition:
                self._changing = False
                self._condition.notify_all()


def _best(function: Callable[[], Tensor], device: torch.device) -> float:
    """Its best seconds."""
    return _in_turns(function, function, device)[0]


def _in_turns(ours: Callable[[], Tensor], theirs: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    """The best seconds of each, of TRIALS in turns, after two runs each that do not count."""
    best = [float("inf"), float("inf")]
    for trial in range(-2, TRIALS):
        for which, function in enumerate((ours, theirs)):
            begin = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if trial >= 0:
                best[which] = min(best[which], time.perf_counter() - begin)
    return best[0], best[1]
