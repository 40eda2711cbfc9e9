"""TowerGraph: an exported tower as one flat function of its weights and its inputs.

torch.export turns parameters, buffers and constants into inputs of its graph, and an exported version's graph has its
weights as an argument from the start (tower.py). So the original graph and everything compiled from it are functions
`f(weights, inputs) -> logits`. An artifact has no weights, and new weights need no compilation. Weights are one tuple,
replaced by one assignment, so a run keeps the weights that it began with. (Rejected: AOTInductor's own constant
buffers. An update writes to each artifact in turn, so two buckets could answer one batch with different weights.)

The dimensions of an input are numbers, or free. One free dimension is the `rows`: of a candidate part that of
`user_of`, otherwise the first dimension of the first input that is not jagged (in a user part, the users). Every other
free one is a `length`, numbered in the order of the inputs: the length of padded sequences, the events of a jagged
history, the users of a candidate part. A `Shape` gives values to the free dimensions.

Padding goes to the end of every dimension. Padded histories have masks that are false there. Jagged ones have padding
users without events, whose lengths are 0, and padding rows belong to the last user, so that `user_of` stays sorted.

A TowerGraph never changes after its construction; any thread may call it.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import BatchError, OptionError
from hotrow.serve.graph import graph_rewrite
from hotrow.serve.graph.graph_arguments import arguments_of, output_names
from hotrow.serve.graph.tower_inputs import ENCODING, LENGTHS, TIMES, USER_OF, drop_padding, pad_empty
from hotrow.undocumented import ChangedError, describe

Weights = tuple[Tensor, ...]
Operator: type[Any] = type(torch.ops.aten.relu.default)  # an operator with one signature


@dataclass(frozen=True, order=True)
class Shape:
    """The rows of a batch and the lengths that its sequences are padded to.

    >>> Shape(50), Shape(50, (20,))
    (Shape(rows=50, lengths=()), Shape(rows=50, lengths=(20,)))
    """

    rows: int
    lengths: tuple[int, ...] = ()

    def covers(self, other: Shape) -> bool:
        """Whether `other` can be padded to this shape."""
        return self.rows >= other.rows and self.covers_lengths(other.lengths)

    def covers_lengths(self, lengths: Sequence[int]) -> bool:
        """Whether sequences of these lengths can be padded to this shape."""
        return all(mine >= theirs for mine, theirs in zip(self.lengths, lengths, strict=True))

    @property
    def work(self) -> int:
        """The cost of a run in rows and positions, as a measure of padding."""
        return self.rows * (1 + sum(self.lengths))

    def __str__(self) -> str:
        return "x".join(str(size) for size in (self.rows, *self.lengths))


@dataclass(frozen=True)
class Input:
    """One tensor that a graph reads; `axes` holds a size, or None for rows and -1 - i for the i-th length."""

    name: str
    dtype: torch.dtype
    axes: tuple[int | None, ...]
    vector: str = ""  # its name among the tower's vectors
    of: int | None = None  # for lengths: the axis of the events that they divide; for user_of: that of the users

    def sizes(self, shape: Shape) -> tuple[int, ...]:
        """The tensor's sizes in a batch of that shape."""
        return tuple(shape.rows if a is None else a if a >= 0 else shape.lengths[-1 - a] for a in self.axes)

    @property
    def jagged(self) -> bool:
        """Whether it has a length axis."""
        return any(axis is not None and axis < 0 for axis in self.axes)

    @property
    def has_rows(self) -> bool:
        """Whether its first axis is the rows, so that rows of a batch are a slice of it."""
        return self.axes[:1] == (None,)


class TowerGraph:
    """An exported tower: its saved `weights`, the `inputs` it reads, and a digest that does not depend on weights."""

    def __init__(self, program: torch.export.ExportedProgram, path: str | os.PathLike[str] | None = None) -> None:
        signature = program.graph_signature
        if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
            changed = next(iter([*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]))
            raise OptionError(f"the tower writes to {changed!r} when it runs; export it after tower.eval()")
        self.outputs = output_names(program)
        if len(signature.user_outputs) != len(self.outputs):
            raise OptionError(f"the tower gives {len(signature.user_outputs)} outputs; give one tensor of logits")
        self.program = program
        self.path = None if path is None else Path(path)
        self.module = _without_none(program)
        self._rewritten = _rewritten(program, self.module)
        held = {**program.constants, **program.state_dict}
        lifted = [str(spec.target) for spec in signature.input_specs if spec.target is not None]
        given = _given_weights(program)
        self.names = (*lifted, *given)
        self.weights: Weights = (*(held[name].detach() for name in lifted), *given.values())
        self._unsaved = frozenset(given)
        self._input_names = _input_names(program)
        self.inputs, self.lengths = _inputs(program, self._input_names)
        self._rows_at = next((i, given.axes.index(None)) for i, given in enumerate(self.inputs) if None in given.axes)
        # Whether the lengths are totals of the batch (events, users), not of each row.
        self.totals = any(i.of is not None for i in self.inputs)
        # Whether a batch may be run in slices of its rows: not if its rows divide the events of a jagged history.
        self.splits = not any(i.has_rows and i.vector.endswith(LENGTHS) and i.of is not None for i in self.inputs)
        events = {i.of for i in self.inputs if i.of is not None and i.vector != USER_OF}
        self._jagged = [at for at, given in enumerate(self.inputs) if given.axes and given.axes[0] in events]
        self.output_axes = _output_axes(program, self.inputs)
        self.digest = _digest(program)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TowerGraph:
        """Read a file that torch.export.save wrote."""
        with open(path, "rb") as file:  # given a path, torch.export.load warns unless it ends with .pt2
            return cls(torch.export.load(file), path)

    @classmethod
    def of(cls, tower: torch.nn.Module, vectors: Mapping[str, Tensor], dense: Tensor | None = None) -> TowerGraph:
        """Export a tower with free rows (and free lengths of sequences), from one batch of at least two rows."""
        rows, free = torch.export.Dim("rows", min=1, max=1 << 24), torch.export.Dim.AUTO
        axes: dict[str, dict[int, Any]] = {}
        for name, vector in vectors.items():
            sequence = vector.dim() == 3 or name.endswith("_mask")
            axes[name] = {0: rows, 1: free} if sequence else {0: rows}
        with torch.no_grad():
            program = torch.export.export(
                tower.eval(), (dict(vectors), dense), dynamic_shapes=(axes, None if dense is None else {0: rows})
            )
        return cls(program)

    def __call__(self, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Run the original graph; returns its first output, the logits of a tower or a candidate part."""
        return self.run_all(weights, inputs)[0]

    def run_all(self, weights: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the original graph; returns its outputs, in the order of `outputs`."""
        padded = pad_empty(inputs, self._jagged)
        found: Sequence[Tensor] = self._rewritten(*weights, *(padded or inputs))
        return found if padded is None else drop_padding(self.outputs, found)

    @property
    def custom_ops(self) -> dict[str, str]:
        """Ops that are not torch's own, with their schemas: another process may lack them."""
        ops = [node.target for node in self.module.graph.nodes if isinstance(node.target, Operator)]
        return {str(op): str(schema_of(op)) for op in ops if op.namespace not in ("aten", "prims")}

    def flatten(self, vectors: Mapping[str, Tensor], dense: Tensor | None) -> list[Tensor]:
        """The tensors in the graph's order, without vectors that the tower does not read."""
        flat: list[Tensor] = []
        for name, given in zip(self._input_names, self.inputs, strict=True):
            tensor = dense if name is None else vectors.get(name)
            if tensor is None:
                have = ", ".join(vectors) or "none"
                raise BatchError(f"the tower reads {given.name!r}, which the batch lacks; it has vectors of: {have}")
            flat.append(tensor)
        return flat

    def shape_of(self, inputs: Sequence[Tensor]) -> Shape:
        """The shape of these inputs."""
        rows, axis = self._rows_at
        if not self.lengths:
            return Shape(inputs[rows].shape[axis])
        lengths = [0] * self.lengths
        for given, tensor in zip(self.inputs, inputs, strict=True):
            for size_of, size in zip(given.axes, tensor.shape, strict=True):
                if size_of is not None and size_of < 0:
                    lengths[-1 - size_of] = size
        return Shape(inputs[rows].shape[axis], tuple(lengths))

    def random_inputs(self, shape: Shape, device: torch.device, seed: int = 0) -> list[Tensor]:
        """Random inputs of a shape: normal numbers, times of events, masks that are true for a prefix of at least one
        position, lengths that sum to at most the events, and sorted users of rows."""
        generator = torch.Generator().manual_seed(seed)
        drawn: dict[tuple[int | None, int], Tensor] = {}  # aligned histories have equal lengths
        tensors = []
        for given in self.inputs:
            sizes = given.sizes(shape)
            if given.of is None:
                tensor = _drawn(given, sizes, generator)
            elif given.vector == USER_OF:
                tensor = torch.randint(0, shape.lengths[-1 - given.of], sizes, generator=generator).sort().values
            else:
                key = (given.axes[0], given.of)
                if key not in drawn:
                    drawn[key] = _drawn_lengths(shape.lengths[-1 - given.of], sizes[0], generator)
                tensor = drawn[key].clone()
            tensors.append(tensor.to(device))
        return tensors

    def cut_outputs(self, outputs: Sequence[Tensor], shape: Shape) -> list[Tensor]:
        """Outputs of a padded batch without the padding: of a user part, the encoding of its users and events."""
        found = dict(zip(self.outputs, outputs, strict=True))
        cut = []
        for (name, tensor), axis in zip(found.items(), self.output_axes, strict=True):
            if axis is None:
                size = shape.rows
            elif axis < 0:
                size = shape.lengths[-1 - axis]
            else:  # neither rows nor an input's events: the lengths say how many
                size = int(found[f"{name}{LENGTHS}"][: shape.rows].sum())
            cut.append(tensor[:size])
        return cut

    def order_weights(self, state: Mapping[str, Tensor], device: torch.device) -> Weights:
        """Weights by name as one tuple in the graph's order; weights that `state` lacks keep their saved value.

        A name that the graph does not have, or another shape, is an error.
        """
        known = dict(zip(self.names, self.weights, strict=True))
        for name in self._unsaved:
            if name not in state:
                raise OptionError(f"the weight {name!r} is missing, and the graph was saved without weights: give it")
        for name, tensor in state.items():
            if name not in known:
                raise OptionError(f"the tower has no weight {name!r}; it has: {', '.join(self.names)}")
            if tensor.shape != known[name].shape or tensor.dtype != known[name].dtype:
                raise OptionError(
                    f"weight {name!r} came as {tensor.dtype} {list(tensor.shape)}, but the tower was exported with "
                    f"{known[name].dtype} {list(known[name].shape)}; export it again"
                )
        return tuple(state.get(name, known[name]).detach().to(device).contiguous() for name in self.names)


def schema_of(op: Any) -> Any:
    """An operator's schema: its arguments' types and which it writes to. torch does not document the attribute."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        raise ChangedError(describe("torch", "has operators without _schema"))
    return schema


def _rewritten(program: torch.export.ExportedProgram, module: torch.fx.GraphModule) -> Callable[..., Any]:
    """The function that runs the graph, on a CPU with rewrites (graph_rewrite.py)."""
    values = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    if any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values):
        return module.forward
    rewritten = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    graph_rewrite.join_pairs(rewritten, program)
    return rewritten.forward


def _without_none(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """The graph without arguments that were None at export. Nothing reads them, but a call would have to pass them."""
    module = graph_rewrite.copy_of(program)
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and not node.users and node.meta.get("val") is None:
            module.graph.erase_node(node)
    module.recompile()
    return module


def _drawn_lengths(events: int, count: int, generator: torch.Generator) -> Tensor:
    """Lengths of `count` users that sum to at most `events`."""
    cuts = torch.randint(0, events + 1, (count,), generator=generator).sort().values
    return cuts.diff(prepend=torch.zeros(1, dtype=torch.int64))


def _drawn(given: Input, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if given.dtype == torch.bool:
        lengths = torch.randint(1, max(2, sizes[-1] + 1), sizes[:-1], generator=generator)
        return torch.arange(sizes[-1]) < lengths.unsqueeze(-1)
    if given.dtype.is_floating_point:
        return torch.randn(sizes, generator=generator).to(given.dtype)
    if given.dtype == torch.int64 and given.jagged:  # the times of events
        return TIMES + torch.randint(0, 1 << 31, sizes, generator=generator)
    return torch.zeros(sizes, dtype=given.dtype)


def _given_weights(program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    """For weights that are an argument of the graph: zeros of their shapes, by name."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    names = list(program.graph_signature.user_inputs)
    places = arguments_of(program).get("weights", {})
    found = {name: values[str(names[leaf])] for name, leaf in places.items()}
    return {name: torch.zeros(tuple(value.shape), dtype=value.dtype) for name, value in found.items()}


def _user_inputs(program: torch.export.ExportedProgram) -> list[str]:
    """The graph's names of its inputs other than weights."""
    skipped = len(arguments_of(program).get("weights", {}))
    return [str(name) for name in program.graph_signature.user_inputs[skipped:]]


def _inputs(program: torch.export.ExportedProgram, names: Sequence[str | None]) -> tuple[tuple[Input, ...], int]:
    """The inputs and the number of lengths. Dimensions with the same symbol are the same size."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    read = []
    for name in _user_inputs(program):
        value = values.get(str(name))
        if isinstance(value, Tensor):
            read.append((str(name), value))
        elif value is not None:  # None: an argument that was None at export
            raise OptionError(f"the tower reads {name!r}, which is not a tensor; pass tensors only")
    rows = _rows_symbol(names, [value for _, value in read])
    symbols: dict[str, int | None] = {rows: None}
    found = []
    for (name, value), vector in zip(read, names, strict=True):
        axes: list[int | None] = []
        for size in value.shape:
            if isinstance(size, int):
                axes.append(size)
            else:
                axes.append(symbols.setdefault(str(size), -len(symbols)))
        found.append(Input(name, value.dtype, tuple(axes), vector or ""))
    first_axis = {given.vector: given.axes[0] for given in found if given.axes}
    return tuple(replace(given, of=_divides(given, first_axis)) for given in found), len(symbols) - 1


def _divides(given: Input, first_axis: Mapping[str, int | None]) -> int | None:
    """For lengths, the axis of their history's events; for user_of, that of the users; otherwise None."""
    if given.vector == USER_OF:
        by_user = [a for name, a in first_axis.items() if name.startswith(ENCODING) and name.endswith(LENGTHS)]
        return next((axis for axis in (*by_user, *_encoding_axes(first_axis)) if axis is not None and axis < 0), None)
    values = first_axis.get(given.vector.removesuffix(LENGTHS)) if given.vector.endswith(LENGTHS) else None
    return values if values is not None and values < 0 and given.dtype == torch.int64 else None


def _encoding_axes(first_axis: Mapping[str, int | None]) -> list[int | None]:
    """The first axes of an encoding's tensors that are not jagged: the users."""
    names = [name for name in first_axis if name.startswith(ENCODING) and f"{name}{LENGTHS}" not in first_axis]
    return [first_axis[name] for name in names]


def _output_axes(program: torch.export.ExportedProgram, inputs: Sequence[Input]) -> tuple[int | None, ...]:
    """The first axis of each output as Input.axes has it; 0 for a size that is no input's."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    axes: dict[str, int | None] = {}
    for given in inputs:
        for axis, size in zip(given.axes, values[given.name].shape, strict=True):
            if axis is None or axis < 0:
                axes[str(size)] = axis
    outputs = [values.get(name) for name in map(str, program.graph_signature.user_outputs)]
    return tuple(axes.get(str(v.shape[0]), 0) if isinstance(v, Tensor) and v.dim() else None for v in outputs)


def _rows_symbol(names: Sequence[str | None], values: Sequence[Tensor]) -> str:
    """The size that is the rows: that of `user_of`, else the first dimension of the first input that is not the events
    of a jagged history. In a user part these are the users."""
    known = set(names)
    jagged = {name for name in known if name is not None and f"{name}{LENGTHS}" in known}
    first = {name: value.shape[0] for name, value in zip(names, values, strict=True) if value.dim()}
    rows = next((first[n] for n in (USER_OF, *names) if n in first and n not in jagged), None)
    if rows is None or isinstance(rows, int):
        raise OptionError("the tower was exported with a fixed number of rows; export it with a free first dimension")
    return str(rows)


def _input_names(program: torch.export.ExportedProgram) -> list[str | None]:
    """For each input the name of its vector, or None for the dense features."""
    given = arguments_of(program)
    by_leaf: dict[int, str | None] = {leaf: name for name, leaf in given["vectors"].items()}
    if isinstance(given.get("dense"), int):
        by_leaf[given["dense"]] = None
    skipped = len(given.get("weights", {}))
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    read = enumerate(_user_inputs(program), start=skipped)
    return [by_leaf[leaf] for leaf, name in read if isinstance(values.get(name), Tensor)]


def _digest(program: torch.export.ExportedProgram) -> str:
    """A hash of the ops, their arguments and the sizes of their inputs, not of the weights' values."""
    digest = hashlib.sha256()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        seen = f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else ""
        digest.update(f"{node.op} {node.target} {node.args} {node.kwargs} {seen}\n".encode())
    return digest.hexdigest()
