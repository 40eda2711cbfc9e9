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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.passes import move_to_device_pass

from hotrow.errors import OptionError, RepositoryError, choices
from hotrow.nn import EmbeddingCollection
from hotrow.serve.graph import graph_rewrite

TOLERANCE = 1e-5  # between graph and tower, relative to the largest logit
CHECKED = ((1, 1), (2, 3), (7, 1), (5, 4))  # rows and length of sequences


class Tower(Protocol):
    """The interface of a tower that the engine runs: the original graph, or compiled buckets."""

    def run(self, vectors: Mapping[str, Tensor], dense: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class TowerInputs:
    """A tower's inputs, in the collection's order: width by feature, which features are sequences, dense columns."""

    widths: dict[str, int]
    sequences: frozenset[str]
    dense: int

    @staticmethod
    def of(embeddings: EmbeddingCollection, dense: int) -> TowerInputs:
        """The inputs that this collection produces."""
        widths = {f: rows.table.dim for rows in embeddings.tables for f in rows.table.poolings}
        return TowerInputs(widths, frozenset(embeddings.sequences), dense)

    @property
    def names(self) -> list[str]:
        """The names of the vectors in order. The mask of a sequence follows it.

        >>> TowerInputs({"seen": 4, "user": 4}, frozenset({"seen"}), 0).names
        ['seen', 'seen_mask', 'user']
        """
        return [name for feature in self.widths for name in self._with_mask(feature)]

    def example(self, rows: int, length: int = 1, seed: int = 0) -> tuple[dict[str, Tensor], Tensor | None]:
        """Random vectors and dense features of a size, drawn without changing torch's random state."""
        draw = torch.Generator().manual_seed(seed)
        vectors = {}
        for feature, width in self.widths.items():
            shape = (rows, length, width) if feature in self.sequences else (rows, width)
            vectors[feature] = torch.randn(*shape, generator=draw) * 0.1
            if feature in self.sequences:
                lengths = torch.randint(0, length + 1, (rows, 1), generator=draw)
                vectors[f"{feature}_mask"] = torch.arange(length) < lengths
                vectors[feature] *= vectors[f"{feature}_mask"].unsqueeze(2)
        return vectors, torch.randn(rows, self.dense, generator=draw) if self.dense else None

    def free_sizes(self) -> dict[str, dict[int, Any]]:
        """The dimensions of the vectors that may change, for torch.export."""
        rows, sizes = Dim("rows", min=1), {}
        for number, feature in enumerate(self.widths):
            sizes[feature] = {0: rows}
            if feature in self.sequences:
                sizes[feature][1] = Dim(f"length_{number}", min=1)
                sizes[f"{feature}_mask"] = sizes[feature]
        return sizes

    def _with_mask(self, feature: str) -> Iterator[str]:
        yield feature
        if feature in self.sequences:
            yield f"{feature}_mask"


@dataclass(frozen=True)
class Traced:
    """A tower's graph, its weights by name, names tied to another weight, and the number of logits per row."""

    program: ExportedProgram
    weights: dict[str, Tensor]
    tied: dict[str, str]
    tasks: int


def trace(tower: nn.Module, inputs: TowerInputs) -> Traced:
    """Export a tower's graph in eval mode, on the CPU, in float32. The tower itself is not changed."""
    tower = copy.deepcopy(tower).cpu().float().eval().requires_grad_(False)
    weights, tied = split_weights(tower)
    vectors, dense = inputs.example(3, 5)
    logits = tower(vectors, dense)
    if not isinstance(logits, Tensor) or logits.shape[:1] != (3,) or logits.dim() > 2:
        shape = f"{list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise OptionError(f"the tower gives {shape} for 3 rows; it must give logits of shape [rows] or [rows, tasks]")
    sizes: tuple[Any, ...] = (dict.fromkeys(weights), inputs.free_sizes())
    example: tuple[Any, ...] = (weights, vectors)
    if dense is not None:
        sizes, example = (*sizes, {0: sizes[1][next(iter(inputs.widths))][0]}), (*example, dense)
    try:
        program = torch.export.export(_WeightsAsInputs(tower), example, dynamic_shapes=sizes)
    except Exception as error:
        raise OptionError(
            f"torch.export cannot take the tower {type(tower).__name__}: {str(error).strip()[:1000]}. A tower must not "
            "branch on the values of tensors, and every size that depends on the batch must come from its inputs"
        ) from error
    _compare(tower, OriginalTower(program, inputs, weights), inputs)
    return Traced(program, weights, tied, 1 if logits.dim() == 1 else logits.shape[1])


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


class _WeightsAsInputs(nn.Module):
    """The tower with its weights as an argument. It hides the tower from torch.export, which would save its weights."""

    tower: nn.Module

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "tower", tower)

    def forward(self, weights: dict[str, Tensor], vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        logits: Tensor = torch.func.functional_call(self.tower, weights, (vectors, dense))
        return logits.float()


def _drop_assertions(program: ExportedProgram) -> None:
    """Remove assertions on tensors' metadata at export. They would all fail on another device, and the engine checks
    the inputs before."""
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if str(node.target) == graph_rewrite.ASSERTS_METADATA:
            graph.erase_node(node)
    program.graph_module.recompile()


def _compare(tower: nn.Module, graph: OriginalTower, inputs: TowerInputs) -> None:
    for rows, length in CHECKED:
        vectors, dense = inputs.example(rows, length, seed=rows)
        with torch.inference_mode():
            expected = tower(vectors, dense).float()
            try:
                got = graph.run(vectors, dense)
            except Exception as error:
                raise OptionError(
                    f"the exported tower fails for {rows} rows and sequences of {length}: {error}. It has a size of "
                    "the example in it; take sizes from the inputs"
                ) from error
        bound = TOLERANCE * max(1.0, float(expected.abs().max()))
        if got.shape != expected.shape or not bool(((got - expected).abs() <= bound).all()):
            raise OptionError(
                f"the exported tower gives other logits than the tower itself for {rows} rows and sequences of "
                f"{length}; it must be a function of its inputs alone, with no size of a batch written into it"
            )


class OriginalTower:
    """A saved graph with its weights."""

    def __init__(
        self,
        program: ExportedProgram,
        inputs: TowerInputs,
        weights: Mapping[str, Tensor],
        tied: Mapping[str, str] | None = None,
        device: torch.device | None = None,
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
        self._names = inputs.names
        self._weights = {name: value.to(self.device) for name, value in weights.items()}
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
        chosen = self._weights if weights is None else weights
        arguments = [*self._constants, *chosen.values(), *[vectors[name] for name in self._names]]
        if self.inputs.dense:
            assert dense is not None
            arguments.append(dense)
        logits: Tensor = self._call(*arguments)[0]
        return logits

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
        given = len(self._constants) + len(self._weights) + len(self._names) + bool(self.inputs.dense)
        outputs = self.program.graph_signature.output_specs
        if wanted != given or len(outputs) != 1:
            raise RepositoryError(
                f"the tower's graph takes {wanted} tensors and returns {len(outputs)}, but its manifest names {given} "
                "and one; export the model again"
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
