"""TowerPart: the part of a model behind its lookups, as a tower of HotRow.

It runs the exported graph from the vectors on, with copies of the model's weights under the model's names. In training
mode it runs the graph of the model in training mode (dropout, batch norm), if that differs. A row that an nn.Embedding
has for padding gets no gradient, as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from hotrow.errors import OptionError
from hotrow.model_partition.cut import LookupNode, shape_of, source_line
from hotrow.model_partition.key_part import IDS, Passed

_SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True)
class Vectors:
    """How a feature's vectors become the value of its lookup. `sizes`: of the ids, without the batch."""

    feature: str
    pooled: bool
    sizes: tuple[int, ...] = ()  # -1: any size
    padding: int | None = None  # the id of a row without gradient; the ids are then the number feature IDS


class TowerPart(nn.Module):
    """The tower: `forward(vectors, dense)` as the rest of the model."""

    def __init__(
        self, graphs: Mapping[bool, GraphModule], vectors: Sequence[Vectors], passed: Sequence[Passed], dense: int,
        squeezes: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rest = graphs[False]
        if True in graphs:
            self.rest_in_training = graphs[True]
        self.dense_features = dense
        self._vectors, self._passed, self._squeezes = list(vectors), list(passed), squeezes

    def forward(self, vectors: Mapping[str, Tensor], dense: Tensor | None = None) -> Tensor:
        """The model's output. One of shape [rows, 1] is returned as [rows]."""
        values = [self._value(one, vectors) for one in self._vectors]
        values += [_passed_value(one, vectors, dense) for one in self._passed]
        rest = self.rest_in_training if self.training and hasattr(self, "rest_in_training") else self.rest
        out: Tensor = rest(*values)[0]
        return out.squeeze(1) if self._squeezes else out

    def _value(self, one: Vectors, vectors: Mapping[str, Tensor]) -> Tensor:
        value = vectors[one.feature]
        if one.padding is not None:
            padding = (vectors[one.feature + IDS] == one.padding).unsqueeze(-1)
            padding = padding.squeeze(1) if one.pooled else padding
            value = torch.where(padding, value.detach(), value)
        if one.pooled or len(one.sizes) == 1:
            return value
        return value.reshape(value.shape[0], *one.sizes, value.shape[-1])


def tower_inputs(program: ExportedProgram, lookups: Sequence[LookupNode], output: Node) -> list[Node]:
    """The model's inputs that the part behind the lookups reads, in their order."""
    needed = _behind(lookups, output)
    inputs = set(program.graph_signature.user_inputs)
    shapes = [shape_of(lookup.vectors) for lookup in lookups]
    read = {node for node in needed if node.op == "placeholder" and node.name in inputs}
    for node in needed:
        if node.target is _SIZE and not _find_size(node, [*shapes, *map(shape_of, read)]):
            read |= {n for n in node.all_input_nodes if n.name in inputs}
    return [node for node in program.graph.nodes if node in read]


def rest_of(
    program: ExportedProgram,
    lookups: Sequence[LookupNode],
    inputs: Sequence[Node],
    output: Node,
    weights: Mapping[str, Any],
) -> GraphModule:
    """The graph behind the lookups: a function of their vectors and then of `inputs`."""
    graph, copies = Graph(), {}
    for number, lookup in enumerate(lookups):
        copies[lookup.vectors] = graph.placeholder(f"vectors_{number}")
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    known = list(copies)
    needed = _behind(lookups, output)
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants
    held: dict[str, Any] = {}
    for node in program.graph.nodes:
        if node not in needed or node in copies:
            continue
        if node.op == "placeholder":
            if node.name not in names:
                raise OptionError(f"the model reads {node.name!r}, which is not a tensor; pass tensors alone")
            held[names[node.name]] = weights[names[node.name]]
            copies[node] = graph.get_attr(names[node.name])
        elif node.target is _SIZE and not all(n in copies for n in node.all_input_nodes):
            found = _find_size(node, [shape_of(one) for one in known])
            if found is None:
                raise OptionError(
                    f"the model cannot be cut at {source_line(node)}: it reads a size that neither the vectors of its "
                    "lookups nor its other inputs have; take the size from one of these"
                )
            copies[node] = graph.call_function(_SIZE, (copies[known[found[0]]], found[1]))
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output((copies[output],))
    return GraphModule(held, graph)


def _behind(lookups: Sequence[LookupNode], output: Node) -> set[Node]:
    """The nodes between the lookups' vectors and the output. What a size is read of is not among them."""
    ends = {lookup.vectors for lookup in lookups}
    needed: set[Node] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node in needed or node in ends:
            continue
        needed.add(node)
        if node.target is not _SIZE:
            waiting += node.all_input_nodes
    return needed


def _find_size(node: Node, shapes: Sequence[Sequence[Any]]) -> tuple[int, int] | None:
    """Which of these tensors has the size that a node reads, and in which dimension."""
    wanted = str(node.meta["val"])
    for number, shape in enumerate(shapes):
        for dimension, size in enumerate(shape):
            if str(size) == wanted:
                return number, dimension
    return None


def _passed_value(one: Passed, vectors: Mapping[str, Tensor], dense: Tensor | None) -> Tensor:
    """An input of the model, of its shape and type."""
    if one.begin is not None:
        assert dense is not None
        columns = dense[:, one.begin : one.begin + one.width]
        return columns.to(one.dtype) if one.shape else columns[:, 0].to(one.dtype)
    value = vectors[one.name].to(one.dtype)
    if not one.shape:
        return value.squeeze(1)
    if len(one.shape) == 1:
        return value
    return value.reshape(value.shape[0], *(-1 if size is None else size for size in one.shape))
