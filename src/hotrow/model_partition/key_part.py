"""KeyPart: from a model's inputs to a KeyedBatch. It runs the operations between the inputs and the lookups' ids.

    ids of shape [batch]             one id per example, pooled
    ids [batch, n] or [batch, n, m]  a sequence of n or n * m ids, not pooled
    a bag                            pooled by sum or mean, without the padding id

Inputs that the tower reads go beside them: floats of shape [batch] or [batch, n] are columns of `dense`, whole numbers
and truth values are `numbers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import BatchError
from hotrow.model_partition.cut import LookupNode

IDS = "_ids"  # ends the name of the number feature with a feature's ids, where one of them is for padding


@dataclass(frozen=True)
class Passed:
    """An input that the tower reads: columns from `begin` of dense, or a number feature with this name."""

    input: int  # among the model's flat inputs
    name: str
    shape: tuple[int | None, ...]  # without the batch; None: any size
    dtype: torch.dtype
    begin: int | None = None

    @property
    def width(self) -> int:
        """Its columns of dense."""
        return int(self.shape[0] or 0) if self.shape else 1


class KeyPart:
    """Makes a KeyedBatch of the model's flat inputs."""

    def __init__(
        self, graph: Graph, lookups: Sequence[LookupNode], features: Sequence[str], inputs: Sequence[Node],
        constants: dict[str, Any], passed: Sequence[Passed],
    ) -> None:  # fmt: skip
        self.lookups, self.features, self.passed = list(lookups), list(features), list(passed)
        wanted = [node for lookup in lookups for node in (lookup.ids, lookup.offsets, lookup.scales)]
        self._module = subgraph(graph, [node for node in wanted if node is not None], inputs, constants)

    def batch(self, inputs: Sequence[Tensor], labels: Tensor | None = None, time: Tensor | None = None) -> KeyedBatch:
        """The batch of these inputs. They stay unchanged, and are copied where a lookup computes its ids."""
        with torch.no_grad():
            values = iter(self._module(*inputs))
        ids, numbers = {}, {}
        for feature, lookup in zip(self.features, self.lookups, strict=True):
            found = next(values)
            offsets = None if lookup.offsets is None else next(values)
            scales = None if lookup.scales is None else next(values)
            ids[feature] = _jagged(lookup, found, offsets, scales)
            if lookup.padding is not None and offsets is None:
                numbers[feature + IDS] = Jagged(ids[feature].values, ids[feature].offsets)
        dense = [inputs[one.input].float().reshape(-1, one.width) for one in self.passed if one.begin is not None]
        numbers |= {one.name: _numbers(inputs[one.input]) for one in self.passed if one.begin is None}
        return KeyedBatch(ids, torch.cat(dense, dim=1) if dense else None, labels, time, numbers)


def subgraph(graph: Graph, outputs: Sequence[Node], inputs: Sequence[Node], constants: dict[str, Any]) -> GraphModule:
    """The part of a graph that computes `outputs` from `inputs`. Placeholders that are no inputs are read from
    `constants`, by name."""
    new, copies = Graph(), {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed, waiting = set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in copies:
            needed.add(node)
            waiting += node.all_input_nodes
    held: dict[str, Any] = {}
    for node in graph.nodes:
        if node not in needed:
            continue
        if node.op == "placeholder":
            copies[node] = new.get_attr(node.name)
            held[node.name] = constants[node.name]
        else:
            copies[node] = new.node_copy(node, lambda n: copies[n])
    new.output(tuple(copies[node] for node in outputs))
    return GraphModule(held, new)


def _jagged(lookup: LookupNode, ids: Tensor, offsets: Tensor | None, scales: Tensor | None) -> Jagged:
    """A lookup's ids as a feature has them."""
    values = ids.to(torch.int64).reshape(-1).contiguous()
    if offsets is None:
        if ids.dim() == 1:
            return Jagged(values)
        each = ids[0].numel() if ids.shape[0] else 0
        return Jagged(values, torch.arange(ids.shape[0] + 1) * each)
    ends = offsets.to(torch.int64)
    if not lookup.last_offset:
        ends = torch.cat([ends, torch.tensor([values.numel()])])
    weights = None if scales is None else scales.float().reshape(-1).contiguous()
    if lookup.padding is not None:
        kept = values != lookup.padding
        sums = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
        values, ends = values[kept], sums[ends]
        weights = None if weights is None else weights[kept]
    return Jagged(values, ends.contiguous(), weights)


def _numbers(tensor: Tensor) -> Jagged:
    if tensor.is_floating_point():
        raise BatchError(f"an input is {tensor.dtype} and was a whole number in the example; pass the same types")
    values = tensor.to(torch.int64).reshape(-1).contiguous()
    if tensor.dim() == 1:
        return Jagged(values)
    return Jagged(values, torch.arange(tensor.shape[0] + 1) * (tensor[0].numel() if tensor.shape[0] else 0))
