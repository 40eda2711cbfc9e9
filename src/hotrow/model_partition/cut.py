"""Cut: the lookups of an exported graph that become features, and the reasons why others cannot.

A lookup is a call of aten.embedding or aten.embedding_bag on a parameter. It becomes a feature if its ids are computed
from the values of the model's inputs and from no parameter. A lookup whose ids depend on sizes alone, such as that of
learned positions, stays in the tower. The parameter of a feature must have no other reader: its rows leave torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hotrow.errors import OptionError, choices

_EMBEDDING = torch.ops.aten.embedding.default
_BAG = torch.ops.aten.embedding_bag.padding_idx
_RENORM = torch.ops.aten.embedding_renorm_.default
_MODES = {0: "sum", 1: "mean"}


@dataclass(frozen=True)
class LookupNode:
    """One lookup: its table's parameter, the nodes that it reads, and the node of its vectors."""

    weight: str  # the parameter's name in the model
    node: Node
    vectors: Node
    ids: Node
    offsets: Node | None = None  # of a bag over flat ids
    scales: Node | None = None  # per-sample weights
    pooling: str = "none"
    padding: int | None = None
    last_offset: bool = False  # whether offsets has the end of the last bag

    @property
    def table(self) -> str:
        """The name of its table: the module's, with underscores for dots."""
        return re.sub(r"\W", "_", self.weight.removesuffix(".weight")) or "embedding"


def find_lookups(program: ExportedProgram, keep: Collection[str]) -> list[LookupNode]:
    """The lookups that become features. Parameters in `keep` (names of modules) stay in the tower."""
    parameters = program.graph_signature.inputs_to_parameters
    from_parameters = _descendants(program, lambda node: node.name in parameters)
    from_inputs = _descendants(program, lambda node: node.name in program.graph_signature.user_inputs)
    found: list[LookupNode] = []
    modules = {name.removesuffix(".weight") for name in parameters.values()}
    for name in keep:
        if name not in modules:
            raise OptionError(f"keep={name!r}: the model has no such module; {choices(name, modules)}")
    for node in program.graph.nodes:
        if node.target is _RENORM:
            raise _uncut(node, "max_norm changes rows when they are read", "leave max_norm out")
        if node.target not in (_EMBEDDING, _BAG):
            continue
        lookup = _lookup_of(node, parameters)
        if lookup is None or lookup.weight.removesuffix(".weight") in keep or lookup.ids not in from_inputs:
            continue
        for read in (lookup.ids, lookup.offsets, lookup.scales):
            if read is not None and read in from_parameters:
                raise _uncut(
                    node,
                    f"the ids of {lookup.weight!r} depend on a weight of the model, so they are not known before it "
                    "runs",
                    f"leave the lookup in the tower: keep=[{lookup.weight.removesuffix('.weight')!r}]",
                )
        found.append(lookup)
    _check_readers(program, found)
    if not found:
        raise OptionError(
            "the model has no nn.Embedding or nn.EmbeddingBag whose ids come from its inputs; there is nothing to cut"
        )
    return found


def source_line(node: Node) -> str:
    """Where the user's code computes a node, such as "model.py, line 12: x = self.item(ids)"."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in \S+\n\s*([^\n]*)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0] and "\\torch\\" not in frame[0]]
    if not own:
        return f"the operation {node.target}"
    file, line, code = own[-1]
    return f"{file}, line {line}: {code.strip()}"


def shape_of(node: Node) -> Sequence[Any]:
    """The sizes of a node's tensor: numbers, or symbols."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value.shape


def fixed(size: Any) -> int | None:
    """A size as a number; None if it is free. A graph may hold a fixed size as a symbol with a known value."""
    return int(str(size)) if str(size).isdigit() else None


def _lookup_of(node: Node, parameters: dict[str, str]) -> LookupNode | None:
    weight = node.args[0]
    if not isinstance(weight, Node) or weight.name not in parameters:
        return None
    name = parameters[weight.name]
    rest = dict(enumerate(node.args))
    ids = rest[1]
    assert isinstance(ids, Node)
    if node.target is _EMBEDDING:
        padding = rest.get(2, -1)
        return LookupNode(name, node, node, ids, padding=None if padding == -1 else _number(padding))
    mode, offsets, scales = _number(rest.get(4, 0)), rest[2], rest.get(6)
    if mode not in _MODES:
        raise _uncut(node, "an nn.EmbeddingBag with mode='max' is not supported", "use 'sum' or 'mean', or keep= it")
    vectors = next(user for user in node.users if user.args[1] == 0)
    padding = rest.get(8)
    assert isinstance(offsets, Node)
    return LookupNode(
        name,
        node,
        vectors,
        ids,
        offsets,
        scales if isinstance(scales, Node) else None,
        _MODES[mode],
        None if padding is None else _number(padding),
        bool(rest.get(7, False)),
    )


def _number(value: Any) -> int:
    assert isinstance(value, int)
    return value


def _descendants(program: ExportedProgram, is_root: Any) -> set[Node]:
    """The roots and all nodes computed from their values. A size is not computed from values."""
    found: set[Node] = set()
    for node in program.graph.nodes:
        if is_root(node) or (
            isinstance(node.meta.get("val"), (Tensor, tuple, list)) and any(n in found for n in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _check_readers(program: ExportedProgram, lookups: Sequence[LookupNode]) -> None:
    cut, weights = {lookup.node for lookup in lookups}, {lookup.weight for lookup in lookups}
    names = program.graph_signature.inputs_to_parameters
    for node in program.graph.nodes:
        if node.op == "placeholder" and names.get(node.name) in weights:
            for reader in _readers(node, cut):
                name = names[node.name]
                raise _uncut(
                    reader,
                    f"{name!r} is read by something else than lookups by the model's ids",
                    f"untie the weight, or leave it in the tower: keep=[{name.removesuffix('.weight')!r}]",
                )


def _readers(weight: Node, cut: set[Node]) -> Iterator[Node]:
    return (user for user in weight.users if user not in cut)


def _uncut(node: Node, fact: str, cure: str) -> OptionError:
    return OptionError(f"the model cannot be cut at {source_line(node)}: {fact}; {cure}")
