"""Towers: runs one model's tower for all lanes, on compiled buckets if there are any, otherwise on the original graph.

`run` never waits for a compilation. It splits the batch by `buckets.plan`, runs each part on its bucket's artifact and
drops the padding. A shape whose bucket is not compiled yet runs on the original graph, and its bucket is requested from
the compiler.

An artifact takes traffic only if `_adopt`, on the compile manager's thread, finds that
    it equals the original graph on random inputs and the real weights, at the bucket's full shape and at a smaller
    padded one, within TOLERANCE of the largest logit (so a tower that is not row-wise keeps its original graph),
    and its best of TRIALS runs takes less than `faster` (0.95) of the original graph's best, measured in turns.
An artifact that is not faster is not used. A tower that the compiler refuses as a whole is compiled in pieces with
eager ops between them (compile/graph_partition.py) and must pass the same checks. On CUDA a bucket is captured as a
graph, unless its ops declare that they cannot be captured, or the capture fails.

Weights are one tuple. A run reads it once, so all of its parts use the old weights or all use the new. On CUDA the
graphs contain addresses, so new weights are copied into the same storage while no run is in progress.

Every `relearn` seconds, `tick` may replace the ladder of buckets by one with less padding for the traffic seen. Buckets
of the old ladder serve until those of the new one are compiled.

Any thread may call any method.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import OptionError
from hotrow.kernels.graph_capture import capturing
from hotrow.serve.compile import compiled_tower
from hotrow.serve.compile.artifacts import ArtifactCache, default_folder
from hotrow.serve.compile.buckets import Costs, Ladder, Part, Traffic, plan
from hotrow.serve.compile.compiled_tower import ArtifactError, Runner
from hotrow.serve.compile.compiler import Compiler
from hotrow.serve.compile.graph_partition import Cut, assemble, uncapturable
from hotrow.serve.execution.artifact_check import best_seconds, best_seconds_in_turns, difference
from hotrow.serve.execution.cuda_graphs import BucketGraph, CaptureError
from hotrow.serve.execution.padded_inputs import LaneInputs
from hotrow.serve.execution.reader_writer_gate import ReaderWriterGate
from hotrow.serve.graph.tower_graph import Shape, TowerGraph, Weights

log = logging.getLogger("hotrow.serve")

MOST_PLANS = 4096  # shapes of batches whose plan is kept


@dataclass(frozen=True)
class TowerOptions:
    """How a tower is compiled and served."""

    compile: bool = True
    ladder: Ladder | None = None  # None: the one of the last run, or powers of two
    most_rows: int = 1024  # of the first ladder
    most_length: int = 256
    most_events: int = 16384  # of a batch, for graphs over jagged histories
    lanes: int = 1
    threads: int = 1  # of each lane; generated code is built for it
    cache: str | Path | None = None  # folder of artifacts; None: artifacts.default_folder()
    cache_bytes: int = 1 << 30
    limit: float = 900.0  # seconds of one compilation
    relearn: float = 60.0  # seconds between two proposals of a ladder
    tolerance: float | None = None  # None: TOLERANCE, or CUDA_TOLERANCE
    faster: float = 0.95  # an artifact must take less than this fraction of the original graph's time


@dataclass
class Counts:
    """How many rows and batches ran on buckets and on the original graph."""

    hits: dict[Shape, int] = field(default_factory=dict)  # runs of each bucket
    rows: int = 0  # of batches
    padded_rows: int = 0  # added by padding
    fallback_rows: int = 0  # run by the original graph
    batches: int = 0
    fallback_batches: int = 0  # with any fallback rows
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
        self._weights = original.order_weights(weights or {}, self.device)
        self._weights_gate = ReaderWriterGate() if self.device.type == "cuda" else None
        self._lane_inputs = LaneInputs()
        self._live: dict[Shape, Runner] = {}
        self._uncaptured: dict[Shape, str] = {}  # why a bucket has no CUDA graph; only `_adopt` writes it
        self._costs = Costs(totals=original.totals)
        self._plans: dict[Shape, tuple[Part, ...]] = {}
        self._change = threading.Lock()  # of the four names above, and of counts
        self._traffic = Traffic(original.totals)
        self._cache = ArtifactCache(self.options.cache or default_folder(), self.options.cache_bytes)
        self._ladder_file = f"ladder-{original.digest[:16]}-{self.device.type}.json"
        self.ladder, self._saved_shapes = self._first_ladder()
        self._compiler: Compiler | None = None
        if self.options.compile:
            self._compiler = Compiler(
                original, self._cache, self._adopt, self.device, self.options.threads, self.options.limit
            )
        self._ticks = threading.Event()
        self._ticker = threading.Thread(target=self._tick_loop, name="buckets", daemon=True)
        self._ticker.start()

    def run(self, vectors: Mapping[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """Logits of a batch, `[rows]` or `[rows, tasks]`."""
        return self.answer(vectors, dense)[0]

    @property
    def weights(self) -> Weights:
        """The current weights. On a CPU the tuple is never changed, only replaced by another."""
        return self._weights

    def answer(
        self, vectors: Mapping[str, Tensor], dense: Tensor | None = None, weights: Weights | None = None
    ) -> tuple[Tensor, bool]:
        """Logits of a batch, and whether buckets computed all of them. On a CPU, `weights` may be an earlier value of
        `self.weights`; by default the current one is used."""
        outputs, compiled = self._run(self.graph.flatten(vectors, dense), weights)
        return outputs[0], compiled

    def encode(self, vectors: Mapping[str, Tensor], weights: Weights | None = None) -> dict[str, Tensor]:
        """The encoding of the users whose vectors these are, where the graph is a user part. `weights` as in
        `answer`."""
        outputs, _ = self._run(self.graph.flatten(vectors, None), weights)
        return dict(zip(self.graph.outputs, outputs, strict=True))

    def _run(self, inputs: Sequence[Tensor], weights: Weights | None) -> tuple[Sequence[Tensor], bool]:
        """All outputs for a batch, and whether buckets computed all of them."""
        shape = self.graph.shape_of(inputs)
        if not shape.rows:
            return self.graph.run_all(weights or self._weights, inputs), False
        parts = self._plans.get(shape) or self._make_plan(shape)
        self._traffic.count(shape)
        with torch.inference_mode(), self._running() as current:
            weights = weights or current
            if len(parts) == 1:
                outputs = self._run_part(parts[0], shape, inputs, weights)
            else:
                pieces, at = [], 0
                for part in parts:
                    rows = slice(at, at + part.rows)
                    piece = [t[rows] if i.has_rows else t for i, t in zip(self.graph.inputs, inputs, strict=True)]
                    pieces.append(self._run_part(part, Shape(part.rows, shape.lengths), piece, weights))
                    at += part.rows
                outputs = [torch.cat(tensors) for tensors in zip(*pieces, strict=True)]
        self._count(shape, parts)
        return outputs, all(part.bucket is not None for part in parts)

    def replace_weights(self, state: Mapping[str, Tensor]) -> None:
        """Use new weights from the next run on, in the original graph and all artifacts. Nothing is compiled again.

        Weights that `state` lacks keep their values.
        """
        self.set_weights(self.order_weights(state))

    def order_weights(self, state: Mapping[str, Tensor]) -> Weights:
        """A state dict as the tuple that `set_weights` takes."""
        current = dict(zip(self.graph.names, self._weights, strict=True))
        return self.graph.order_weights({**current, **state}, self.device)

    def set_weights(self, weights: Weights) -> None:
        """Use what `order_weights` returned from the next run on."""
        if self._weights_gate is None:
            self._weights = weights  # a run that began keeps the tuple it took
            return
        with self._weights_gate.exclusive(), capturing():
            torch.cuda.synchronize(self.device)
            for old, new in zip(self._weights, weights, strict=True):
                old.copy_(new)
            torch.cuda.synchronize(self.device)

    def start(self, wait: bool = False, seconds: float | None = None) -> bool:
        """Compile the ladder from the options, or the buckets of the last run. With `wait`, block until they are done.

        Returns False if `seconds` passed first.
        """
        shapes = list(self.ladder.shapes) if self.options.ladder is not None else self._saved_shapes
        for shape in shapes:
            self._request(shape)
        return not wait or self._compiler is None or self._compiler.wait(shapes, seconds)

    def tick(self) -> None:
        """Switch to a better ladder for the traffic seen, if there is one, and retire buckets that are on no ladder."""
        ladder = self._traffic.propose(self.ladder, self._cost_of_rows())
        if ladder != self.ladder:
            log.info("a better ladder: rows %s, lengths %s", ladder.rows, ladder.lengths)
            self.ladder = ladder
            with self._change:
                self._plans = {}  # so that the next batches request its buckets
        wanted = set(self.ladder.shapes)
        pending = self._compiler is not None and self._compiler.compilations.count("queued", "compiling")
        if not pending and any(shape in wanted for shape in self._live):
            self._retire([shape for shape in self._live if shape not in wanted])
        self._save_ladder()

    def metrics(self) -> dict[str, float]:
        """Current numbers by name."""
        counts, compiled = self.counts, self._compiler.compilations if self._compiler else None
        run = counts.rows + counts.padded_rows
        return {
            "bucket_hits": sum(counts.hits.values()),
            "padding_waste": counts.padded_rows / run if run else 0.0,
            "fallback_rate": counts.fallback_batches / counts.batches if counts.batches else 0.0,
            "fallback_rows": counts.fallback_rows,
            "artifact_errors": counts.errors,
            "buckets": len(self._live),
            "compiled_pieces": sum(compiled.pieces.get(shape, 0) for shape in list(self._live)) if compiled else 0,
            "eager_ops": len(self.eager_ops()),
            "compile_queue": compiled.count("queued", "compiling") if compiled else 0,
            "compile_seconds": sum(compiled.seconds) if compiled else 0.0,
            "compilations": len(compiled.seconds) if compiled else 0,
            "compile_tries": compiled.tries if compiled else 0,
            "compile_failures": compiled.count("failed") if compiled else 0,
            "compile_deaths": compiled.died if compiled else 0,
            "artifacts_reused": compiled.reused if compiled else 0,
            "artifacts_slower": compiled.count("slower") if compiled else 0,
            "artifacts_quarantined": compiled.count("mismatch") if compiled else 0,
            "artifacts_damaged": self._cache.damaged,
            "artifact_bytes": self._cache.bytes,
        }

    def eager_ops(self) -> Counter[str]:
        """Ops that live buckets run eagerly, and in how many buckets."""
        eager = self._compiler.compilations.eager if self._compiler else {}
        return Counter(op for shape in list(self._live) for op in eager.get(shape, ()))

    def describe(self) -> dict[str, Any]:
        """For display: each bucket's state and its reason, its compiled pieces, and the ops that stay eager."""
        if self._compiler is None:
            return {"compiler": "compile=False", "buckets": {}}
        compiled = self._compiler.compilations
        buckets = {
            str(shape): {
                "state": state,
                "why": compiled.reasons.get(shape, ""),
                "hits": self.counts.hits.get(shape, 0),
                "pieces": compiled.pieces.get(shape, 0),
                "eager": list(compiled.eager.get(shape, ())),
                "uncaptured": self._uncaptured.get(shape, ""),
            }
            for shape, state in list(compiled.states.items())
        }
        return {"compiler": self._compiler.missing or "present", "buckets": buckets}

    def close(self) -> None:
        """End the threads and the compile process."""
        self._ticks.set()
        self._ticker.join()
        if self._compiler is not None:
            self._compiler.close()
        self._save_ladder()

    # --- one run ------------------------------------------------------------------------------------------------------

    def _run_part(self, part: Part, shape: Shape, inputs: Sequence[Tensor], weights: Weights) -> Sequence[Tensor]:
        runner = None if part.bucket is None else self._live.get(part.bucket)
        if part.bucket is None or runner is None:
            return self.graph.run_all(weights, inputs)
        try:
            return self._run_bucket(part.bucket, runner, shape, inputs, weights)
        except (ArtifactError, CaptureError) as error:
            log.warning("bucket %s is taken out of service: %s", part.bucket, error)
            self.counts.errors += 1
            self._retire([part.bucket])
            return self.graph.run_all(weights, inputs)

    def _run_bucket(
        self, bucket: Shape, runner: Runner, shape: Shape, inputs: Sequence[Tensor], weights: Weights
    ) -> Sequence[Tensor]:
        padded = self._lane_inputs.of(bucket, runner, self.graph.inputs, self.device)
        padded.fill(shape, inputs)
        if self.device.type != "cuda" or bucket in self._uncaptured:
            return self._cut(runner((*weights, *padded.tensors)), shape, padded.tensors)
        if padded.graph is None:
            padded.graph = BucketGraph(
                lambda held: runner((*weights, *held)), padded.tensors, self._lane_inputs.pool(self.device)
            )
        return padded.graph.replay(lambda outputs: self.graph.cut_outputs(outputs, shape))

    def _cut(self, outputs: Sequence[Tensor], shape: Shape, padded: Sequence[Tensor]) -> list[Tensor]:
        """The outputs without padding. One that is an input, which the next batch overwrites, is copied."""
        if len(outputs) == 1:
            return [outputs[0][: shape.rows]]
        held = {tensor.untyped_storage().data_ptr() for tensor in padded}
        cut = self.graph.cut_outputs(outputs, shape)
        return [tensor.clone() if tensor.untyped_storage().data_ptr() in held else tensor for tensor in cut]

    @contextlib.contextmanager
    def _running(self) -> Iterator[Weights]:
        if self._weights_gate is None:
            yield self._weights
        else:
            with self._weights_gate.shared():
                yield self._weights

    def _make_plan(self, shape: Shape) -> tuple[Part, ...]:
        """Choose how a shape runs now, and request the compilation of its bucket."""
        wanted = self.ladder.cover(shape)
        if wanted is not None and wanted not in self._live:
            self._request(wanted)
        with self._change:
            parts = plan(shape, self._live, self._costs, self.graph.splits)
            if len(self._plans) < MOST_PLANS:
                self._plans[shape] = parts
        return parts

    def _request(self, shape: Shape) -> None:
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

    def _adopt(self, shape: Shape, path: Path | None, cut: Cut | None) -> tuple[str, str]:
        """Compare and time an artifact, and put it in service if it passes. The compiler's thread calls this.

        Without an artifact (`path` None, only on CUDA) the original graph itself is captured at that shape; `cut` says
        how the graph was partitioned.
        """
        torch.set_num_threads(self.options.threads)  # of this thread; the same as a lane's
        runner = self._load(path, cut)
        with torch.inference_mode(), self._running() as weights:
            if self.device.type == "cuda":
                self._try_capture(shape, runner, weights, cut)
            smaller = Shape(max(1, shape.rows - 1), tuple(max(1, length - 1) for length in shape.lengths))
            for seed, compared in enumerate((shape, smaller)):
                wrong = self._compare(shape, compared, runner, weights, seed)
                if wrong:
                    return "mismatch", wrong
            inputs = self.graph.random_inputs(shape, self.device)
            seconds, original_seconds = best_seconds_in_turns(
                lambda: self._run_bucket(shape, runner, shape, inputs, weights),
                lambda: self.graph.run_all(weights, inputs),
                self.device,
            )
            half = Shape(max(1, shape.rows // 2), shape.lengths)  # a second point for the original graph's cost line
            less = self.graph.random_inputs(half, self.device)
            half_seconds = best_seconds(lambda: self.graph.run_all(weights, less), self.device)
        fast = seconds < self.options.faster * original_seconds
        with self._change:
            buckets = {**self._costs.buckets, **({shape: seconds} if fast else {})}
            original = {half: half_seconds, **self._costs.original, shape: original_seconds}
            self._costs = Costs(buckets, original, self.graph.totals)
            if fast:
                self._live = {**self._live, shape: runner}
            self._plans = {}
        why = f"{seconds * 1e6:.0f} us against {original_seconds * 1e6:.0f} us on the original graph"
        if cut is not None:
            why += f", with {len(cut.pieces)} compiled pieces and eager {', '.join(cut.ops)}"
        return ("live", why) if fast else ("slower", why)

    def _load(self, path: Path | None, cut: Cut | None) -> Runner:
        if path is None:
            return self._uncompiled
        if cut is None:
            return compiled_tower.load(path, self.device, self.options.lanes)
        names = [piece.name for piece in cut.pieces]
        return assemble(
            cut, {name: compiled_tower.load_piece(path, name, self.device, self.options.lanes) for name in names}
        )

    def _try_capture(self, shape: Shape, runner: Runner, weights: Weights, cut: Cut | None) -> None:
        """Find out whether a bucket can be captured as a CUDA graph."""
        self._uncaptured.pop(shape, None)
        nodes = self.graph.module.graph.nodes
        why = uncapturable(nodes) if cut is None else cut.uncapturable
        if not why:
            try:
                self._run_bucket(shape, runner, shape, self.graph.random_inputs(shape, self.device), weights)
            except CaptureError as error:
                why = str(error)
                self._lane_inputs.drop(shape)
        if why:
            log.info("bucket %s runs without a CUDA graph: %s", shape, why)
            self._uncaptured[shape] = why

    def _uncompiled(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        count = len(self._weights)
        return self.graph.run_all(tensors[:count], tensors[count:])

    def _compare(self, bucket: Shape, shape: Shape, runner: Runner, weights: Weights, seed: int) -> str:
        """How the artifact's outputs differ from the original graph's, or an empty string."""
        inputs = self.graph.random_inputs(shape, self.device, seed)
        outputs = self._run_bucket(bucket, runner, shape, inputs, weights)
        expected = self.graph.run_all(weights, inputs)
        for name, one, other in zip(self.graph.outputs, outputs, expected, strict=True):
            wrong = difference(one, other, self.options.tolerance, shape)
            if wrong:
                return wrong if len(outputs) == 1 else f"{name}: {wrong}"
        return ""

    def _retire(self, shapes: Sequence[Shape]) -> None:
        with self._change:
            self._live = {shape: runner for shape, runner in self._live.items() if shape not in shapes}
            kept = {shape: cost for shape, cost in self._costs.buckets.items() if shape not in shapes}
            self._costs = Costs(kept, self._costs.original, self.graph.totals)
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
        known = self._cache.recall(self._ladder_file)
        with contextlib.suppress(KeyError, TypeError, ValueError):
            ladder = Ladder(tuple(known["rows"]), tuple(map(tuple, known["lengths"])))
            if len(ladder.lengths) == lengths:
                return ladder, [Shape(rows, tuple(rest)) for rows, *rest in known["live"]]
        if self.graph.totals:
            return Ladder.of_totals(self.options.most_rows, [self.options.most_events] * lengths), []
        return Ladder.doubling(self.options.most_rows, [self.options.most_length] * lengths), []

    def _save_ladder(self) -> None:
        live = [[shape.rows, *shape.lengths] for shape in self._live]
        self._cache.remember(
            self._ladder_file, {"rows": self.ladder.rows, "lengths": self.ladder.lengths, "live": live}
        )

    def _cost_of_rows(self) -> Callable[[int], float] | None:
        """Seconds of a bucket by its rows; None if the tower has lengths or fewer than two buckets were measured."""
        known = sorted((shape.rows, seconds) for shape, seconds in self._costs.buckets.items())
        if self.graph.lengths or len(known) < 2:
            return None
        measured = Costs(original={Shape(rows): seconds for rows, seconds in known})
        return lambda rows: measured.of_original(Shape(rows))

    def _tick_loop(self) -> None:
        while not self._ticks.wait(self.options.relearn):
            try:
                self.tick()
            except Exception as error:  # for example a full disk: the buckets stay as they are
                log.warning("the ladder was not updated: %s", error)
