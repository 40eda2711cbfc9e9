"""The tower as a graph: exported by torch.export, with every batch-dependent size free and the weights as inputs.

The graph takes (weights, vectors, dense). Weights are inputs, so new weights need neither an export nor a compilation.
The number of rows may be any from 1 up, and so may the length of each sequence. Before it is saved, the graph is
compared with the tower over several sizes. If torch.export specialised the tower to the example's size, the error says
so.

`OriginalTower` runs the graph operator by operator, with the rewrites of graph_rewrite.py. It always exists and is
always right; compiled buckets are compared with it. Any thread may call `run`. `replace_weights` replaces all weights
at once, and a run in progress keeps the weights that it began with. The graph is called with its arguments in order,
not through `ExportedProgram.module()`, which would repeat the engine's checks of the inputs at every call.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from hotrow.errors import OptionError, RepositoryError, choices
from hotrow.serve.graph import export_errors, graph_rewrite, two_parts
from hotrow.serve.graph.graph_arguments import arguments_of, output_names
from hotrow.serve.graph.tower_inputs import (
    CANDIDATES,
    ENCODING,
    LENGTHS,
    USER,
    USER_OF,
    WHOLE,
    TowerInputs,
    drop_padding,
    pad_empty,
)

TOLERANCE = 1e-5  # between graph and tower, relative to the largest logit
CHECKED = ((1, 1), (2, 3), (7, 1), (5, 4))  # rows and length of sequences
DETECT_CAUSAL = "_detect_is_causal_mask"  # of torch.nn.modules.transformer; undocumented, so it may not exist
LONGEST_CHECKED = 4096  # a plain attention over it takes 64 MB a head


class Tower(Protocol):
    """The interface of a tower that the engine runs: the original graph, or compiled buckets."""

    def run(self, vectors: Mapping[str, Tensor], dense: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class Traced:
    """A tower's graph, its weights by name, names tied to another weight, and the number of logits per row.

    For a tower with a user part, `program` is the candidate part and `user` the user part. Each takes those of the
    weights that it reads.
    """

    program: ExportedProgram
    weights: dict[str, Tensor]
    tied: dict[str, str]
    tasks: int
    user: ExportedProgram | None = None


def trace(tower: nn.Module, inputs: TowerInputs) -> Traced:
    """Export a tower's graph in eval mode, on the CPU, in float32. The tower itself is not changed."""
    tower = copy.deepcopy(tower).cpu().float().eval().requires_grad_(False)
    weights, tied = split_weights(tower)
    with plain_attention():
        if inputs.user:
            return two_parts.trace(tower, inputs, weights, tied)
        vectors, dense = inputs.example(3, 5, least=1)
        logits = tower(dict(vectors), dense)
        tasks = check_logits(logits, 3)
        program = export_graph(
            WeightsAsInputs(tower), tower, weights, inputs.free_sizes(), vectors, dense, inputs.limited
        )
        _compare(tower, OriginalTower(program, inputs, weights), inputs)
        drop_size_assertions(program)
    return Traced(program, weights, tied, tasks)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Without what nn.TransformerEncoder does by the values of masks, which a graph cannot: its fast path over nested
    tensors, and the comparison of its mask with a causal one. Results are the same to rounding."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    detect = getattr(torch.nn.modules.transformer, DETECT_CAUSAL, None)
    if detect is not None:
        setattr(torch.nn.modules.transformer, DETECT_CAUSAL, lambda mask, is_causal=None, size=None: bool(is_causal))
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
        if detect is not None:
            setattr(torch.nn.modules.transformer, DETECT_CAUSAL, detect)


def check_logits(logits: Any, rows: int) -> int:
    """The number of logits per row, or an error if these are not logits of so many rows."""
    if not isinstance(logits, Tensor) or logits.shape[:1] != (rows,) or logits.dim() > 2:
        shape = f"{list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise OptionError(
            f"the tower gives {shape} for {rows} rows; it must give logits of shape [rows] or [rows, tasks]"
        )
    return 1 if logits.dim() == 1 else int(logits.shape[1])


def export_graph(
    module: nn.Module,
    tower: nn.Module,
    weights: Mapping[str, Tensor],
    free_sizes: Mapping[str, Any],
    vectors: Mapping[str, Tensor],
    dense: Tensor | None,
    limited: bool,
) -> ExportedProgram:
    """The graph of `module`, called as (weights, vectors) or (weights, vectors, dense). `tower` is named in errors.

    torch.export refuses a graph if it cannot prove a relation of sizes for all of them, such as min(1 + n, 2 + 2n) ==
    1 + n. With `limited` (every size of a history has a largest value) such relations become assertions in the graph.
    The comparison with the tower runs them at the smallest and the largest size; then `drop_size_assertions`.
    """
    sizes: tuple[Any, ...] = (dict.fromkeys(weights), dict(free_sizes))
    example: tuple[Any, ...] = (dict(weights), dict(vectors))
    if dense is not None:
        rows = free_sizes.get(USER_OF) or next(iter(free_sizes.values()))
        sizes, example = (*sizes, {0: rows[0]}), (*example, dense)
    try:
        return _export(module, example, sizes)
    except Exception as error:
        if limited and export_errors.is_about_sizes(error):
            with suppress(Exception):
                return _export(module, example, sizes, defer=True)
        retry = partial(_export, module, example, sizes)
        raise OptionError(export_errors.describe(tower, error, retry)) from error


def _export(
    module: nn.Module, example: tuple[Any, ...], sizes: tuple[Any, ...], defer: bool = False
) -> ExportedProgram:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(
            module, example, dynamic_shapes=sizes, prefer_deferred_runtime_asserts_over_guards=defer
        )


def split_weights(tower: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tower's weights, each once, and the names that are tied to an earlier name."""
    weights: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in tower.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise OptionError(f"the tower's state {name!r} is {type(value).__name__}; a tower's state must be tensors")
        if id(value) in first:
            tied[name] = first[id(value)]
        else:
            first[id(value)] = name
            weights[name] = value.detach().clone().contiguous()
    return weights, tied


class WeightsAsInputs(nn.Module):
    """The tower with its weights as an argument. It hides the tower from torch.export, which would save its weights."""

    tower: nn.Module

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "tower", tower)

    def forward(self, weights: dict[str, Tensor], vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        logits: Tensor = torch.func.functional_call(self.tower, weights, (vectors, dense))
        return logits.float()


def drop_size_assertions(program: ExportedProgram) -> None:
    """Remove assertions on the sizes of inputs, which the comparison with the tower has run."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if str(node.target) == "aten._assert_scalar.default" and isinstance(node.args[0], torch.fx.Node):
            condition = getattr(getattr(node.args[0].meta.get("val"), "node", None), "expr", None)
            if condition is not None and not any(str(s).startswith("u") for s in condition.free_symbols):
                graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()


def _drop_assertions(program: ExportedProgram) -> None:
    """Remove assertions on tensors' metadata at export. They would all fail on another device, and the engine checks
    the inputs before."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if str(node.target) == graph_rewrite.ASSERTS_METADATA:
            graph.erase_node(node)
    program.graph_module.recompile()


def _compare(tower: nn.Module, graph: OriginalTower, inputs: TowerInputs) -> None:
    for rows, length in checked_sizes(inputs):
        vectors, dense = inputs.example(rows, length, seed=rows)
        with torch.inference_mode():
            expected = tower(dict(vectors), dense).float()
            try:
                got = graph.run(vectors, dense)
            except Exception as error:
                raise OptionError(
                    f"the exported tower fails for {rows} rows and sequences of {length}: {error}. It has a size of "
                    "the example in it; take sizes from the inputs"
                ) from error
        check_finite(expected, f"{rows} rows and sequences of {length}")
        if not is_close(got, expected):
            raise OptionError(
                f"the exported tower gives other logits than the tower itself for {rows} rows and sequences of "
                f"{length}; it must be a function of its inputs alone, with no size of a batch written into it"
            )


def checked_sizes(inputs: TowerInputs) -> list[tuple[int, int]]:
    """Rows and length of the sequences at which graph and tower are compared: CHECKED, and the longest sequence."""
    longest = max(inputs.max_lengths.values(), default=0)
    return [*CHECKED, *([(1, longest)] if 4 < longest <= LONGEST_CHECKED else [])]


def check_finite(logits: Tensor, where: str) -> None:
    """Raise if the tower itself gives NaN."""
    if not bool(torch.isfinite(logits).all()):
        raise OptionError(
            f"the tower gives NaN or infinite logits for {where}, some of them empty: attention to masked events alone "
            "has no value. Let a row without events see one position (a cls token, the target), or use nan_to_num"
        )


def is_close(got: Tensor, expected: Tensor) -> bool:
    """Whether they are equal within TOLERANCE of the largest element. NaN equals nothing."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    bound = TOLERANCE * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
    return bool(((got - expected).abs() <= bound).all())


class OriginalTower:
    """A saved graph with its weights."""

    def __init__(
        self,
        program: ExportedProgram,
        inputs: TowerInputs,
        weights: Mapping[str, Tensor],
        tied: Mapping[str, str] | None = None,
        device: torch.device | None = None,
        part: str = WHOLE,
    ) -> None:
        self.device = device or torch.device("cpu")
        if self.device.type != "cpu":
            program = move_to_device_pass(program, self.device)
        _drop_assertions(program)
        self.program, self.inputs, self.tied = program, inputs, dict(tied or {})
        self._module = graph_rewrite.copy_of(program)
        if self.device.type == "cpu":
            graph_rewrite.join_pairs(self._module, program)
        self._call = self._module.forward
        self._constants = [constant.to(self.device) for constant in _constants(program)]
        arguments = arguments_of(program)
        self.outputs = output_names(program)
        self._names = [tensor.name for tensor in inputs.tensors(part)]
        self._reads_dense = bool(inputs.dense) and part != USER
        if part == CANDIDATES:
            self._names += [name for name in arguments["vectors"] if name.startswith(ENCODING)]
        self._jagged = [at for at, name in enumerate(self._names) if f"{name}{LENGTHS}" in self._names]
        mine = weights if part == WHOLE else {name: weights[name] for name in arguments["weights"]}
        self._weights = {name: value.to(self.device) for name, value in mine.items()}
        self._check_arguments()

    @property
    def weights(self) -> dict[str, Tensor]:
        """The current weights by name. The dictionary is never changed, only replaced by another."""
        return self._weights

    def run(
        self, vectors: Mapping[str, Tensor], dense: Tensor | None, weights: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Logits, [rows] or [rows, tasks], with the current weights, or with an earlier value of `self.weights`.

        Requires: vectors of the widths that the graph was exported with, on its device.
        """
        return self.run_part(vectors, dense, weights)[0]

    def run_part(
        self, vectors: Mapping[str, Tensor], dense: Tensor | None, weights: Mapping[str, Tensor] | None = None
    ) -> Sequence[Tensor]:
        """All outputs, in the order of `outputs`: of a user part, the tensors of the encoding."""
        chosen = self._weights if weights is None else weights
        read = [vectors[name] for name in self._names]
        padded = pad_empty(read, self._jagged)
        arguments = [*self._constants, *chosen.values(), *(padded or read)]
        if self._reads_dense:
            assert dense is not None
            arguments.append(dense)
        outputs: Sequence[Tensor] = self._call(*arguments)
        return outputs if padded is None else drop_padding(self.outputs, outputs)

    def join_activations(self) -> int:
        """On a GPU: fuse linear layers with their ReLU (graph_rewrite.py). Returns how many."""
        joined = graph_rewrite.join_activations(self._module)
        self._call = self._module.forward
        return joined

    def replace_weights(self, state: Mapping[str, Tensor]) -> None:
        """Use other weights from the next call on. If one of them is wrong, none is changed."""
        self.set_weights(self.prepare_weights(state))

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Use what `prepare_weights` returned."""
        self._weights = weights

    def prepare_weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert a tower's state dict for this graph, or raise an error that names the first wrong weight."""
        for name in state:
            if name not in self._weights and name not in self.tied:
                raise OptionError(f"the tower has no weight {name!r}; {choices(name, self._weights)}")
        weights = {}
        for name, mine in self._weights.items():
            if name not in state:
                raise OptionError(f"the weight {name!r} is missing; give all {len(self._weights)} weights of the tower")
            given = state[name].detach()
            if given.shape != mine.shape:
                raise OptionError(
                    f"the weight {name!r} has shape {list(given.shape)} but the tower's has {list(mine.shape)}; a "
                    "tower of other sizes needs a new version: hr.export()"
                )
            if given.is_floating_point() and not bool(torch.isfinite(given).all()):
                raise OptionError(f"the weight {name!r} has NaN or infinite elements; no weight was changed")
            weights[name] = given.to(self.device, mine.dtype, copy=True).contiguous()
        return weights

    def _check_arguments(self) -> None:
        """Check that the graph takes the tensors that `run` passes."""
        wanted = sum(1 for node in self.program.graph.nodes if node.op == "placeholder")
        given = len(self._constants) + len(self._weights) + len(self._names) + self._reads_dense
        outputs = self.program.graph_signature.output_specs
        if wanted != given or len(outputs) != len(self.outputs):
            raise RepositoryError(
                f"the tower's graph takes {wanted} tensors and returns {len(outputs)}, but its manifest names {given} "
                f"and {len(self.outputs)}; export the model again"
            )


def _constants(program: ExportedProgram) -> list[Tensor]:
    """The constants that the graph takes before its inputs, in order."""
    users, values = set(program.graph_signature.user_inputs), []
    for spec in program.graph_signature.input_specs:
        if getattr(spec.arg, "name", None) in users:
            break
        constant = program.constants.get(str(spec.target))
        if not isinstance(constant, Tensor):
            raise RepositoryError(f"the tower's graph has {spec.target!r}, which is not a tensor; export it again")
        values.append(constant)
    return values
