"""Graph partition: a tower that cannot be compiled as a whole is partitioned into compiled pieces and eager ops.

`cut(graph, shape, excluded)` turns the graph at one bucket's shape into a module that calls its parts in order. Sizes
that are fixed by the bucket become constants first, so only tensors pass between parts. These nodes run eagerly: those
named in `excluded`, those whose sizes depend on data, and those that call other graphs. A node goes into the first part
of its kind after all parts that it reads, so branches share parts:

    0 eager (reads inputs only) → 1 compiled → 2 eager → 3 compiled → ...

The server and the compile process read the graph from one file and partition it with this function, so a list of names
is enough to describe a partition. The job has this list (as `aside`), the artifact's description stores it, and the
server inserts the artifacts into the same module. All pieces of a bucket are in one package under the bucket's key;
weights are inputs of the pieces that read them.

`search` finds the names. It runs in the manager's thread; each `attempt` is a job of the compile process. It tries the
whole graph first. Then, until all pieces compile, nothing is left, or MOST_ATTEMPTS are used, it excludes
    all nodes of the ops that the compiler named in its refusal, or
    if it named none, the last node of the shortest prefix of the refused piece that is refused too, found by bisection.
The result is reused for the graph's other buckets.

An input from another part is checked and made contiguous before machine code reads it, because an op may return other
sizes than its declaration says. A graph that writes into tensors in place is not partitioned, since parts may run in
another order. `assemble` takes ownership of a Cut; then any thread may call the runner. Rejected: torch's
CapabilityBasedPartitioner made no fewer pieces over random cuts of four towers, and it leaves the order of eager nodes
to its caller.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from hotrow.errors import HotRowError
from hotrow.serve.compile.compiled_tower import ArtifactError, PieceRunner, Runner
from hotrow.serve.graph.graph_rewrite import ASSERTS_METADATA
from hotrow.serve.graph.tower_graph import Operator, Shape, TowerGraph, schema_of
from hotrow.undocumented import ChangedError, describe

MOST_ATTEMPTS = 20  # compilations of one search: enough to find two refused nodes among 60 by bisection
ALIGNED = 16  # bytes; generated code may assume this alignment of its inputs
Sizes = tuple[int, ...]
_SIZE_CHECKS = ("aten._assert_scalar.default", "aten.sym_constrain_range")


class CannotCutError(HotRowError, RuntimeError):
    """No part of a tower can be compiled; the message says why."""


@dataclass(frozen=True)
class Piece:
    """A part of the graph to compile: sizes and types of its inputs, and which of them another piece computes."""

    name: str
    module: fx.GraphModule
    nodes: tuple[str, ...]
    reads: tuple[tuple[Sizes, torch.dtype], ...]
    computed: tuple[bool, ...]

    def as_tuple(self) -> fx.GraphModule:
        """The module in the form that the compiler requires: it returns a tuple, even of one tensor."""
        module = fx.GraphModule(self.module, copy.deepcopy(self.module.graph))
        output = _output(module)
        if not isinstance(output.args[0], tuple):
            output.args = ((output.args[0],),)
            module.recompile()
        return module


@dataclass(frozen=True)
class Cut:
    """The partitioned graph at one shape: `module` calls the eager parts and `pieces` in order."""

    module: fx.GraphModule
    pieces: tuple[Piece, ...]
    ops: tuple[str, ...]  # run eagerly
    uncapturable: str  # why it cannot be captured as a CUDA graph, or empty


@dataclass(frozen=True)
class Refusal:
    """A refusal of the compiler: the `ops` that it named, and the refused piece's `nodes` (none: the whole graph)."""

    why: str
    ops: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def cut(graph: TowerGraph, shape: Shape, excluded: Collection[str] = ()) -> Cut:
    """Partition the graph at `shape` around the nodes named in `excluded` and those that must stay eager."""
    fixed, known = _fix_sizes(graph, shape)
    calls = [node for node in fixed.nodes if node.op == "call_function"]
    _refuse_writes(calls)
    eager = {node for node in calls if node.name in excluded or not _compilable(node, known)}
    parts, why = _number_parts(calls, eager), uncapturable(eager, known)
    tensors = {node for node in calls if _is_op(node) and isinstance(node.meta.get("val"), (Tensor, tuple, list))}
    for node in fixed.nodes:
        node.meta = {}  # symbolic sizes, which split_module would pass between pieces
    split = split_module(
        fx.GraphModule(graph.module, fixed),
        nn.Module(),
        lambda node: parts[node],
        keep_original_node_name=True,
    )
    pieces = []
    for call in split.graph.nodes:
        if call.op == "call_module" and int(call.target.rpartition("_")[2]) % 2:
            piece = _piece(call, split.get_submodule(call.target), known)
            if piece is not None:
                pieces.append(piece)
    ops = tuple(sorted({_op(node) for node in eager if node in tensors}))
    return Cut(split, tuple(pieces), ops, why)


def assemble(cut: Cut, runners: Mapping[str, PieceRunner]) -> Runner:
    """A function of weights and inputs that runs pieces by `runners` and the rest eagerly. Takes ownership of `cut`."""
    for piece in cut.pieces:
        setattr(cut.module, piece.name, _Compiled(piece, runners[piece.name]))
    run = cut.module.forward
    return lambda tensors: run(*tensors)


def search(
    graph: Callable[[], TowerGraph],
    shape: Shape,
    attempt: Callable[[tuple[str, ...] | None], Refusal | None],
    known: tuple[str, ...] | None = None,
    attempts: int = MOST_ATTEMPTS,
) -> tuple[str, ...] | None:
    """The names of nodes to exclude so that the rest compiles, or None if the whole graph does.

    `attempt` compiles without the given nodes (None: the whole graph) and returns what was refused; the last attempt
    was made with the result. The search starts from `known`, the result for another shape. Raises CannotCutError.
    """
    refusal = attempt(known)
    if refusal is None:
        return known
    first, attempts_left = refusal.why, [attempts - 1]
    nodes = {node.name: _op(node) for node in graph().module.graph.nodes if _is_op(node)}
    excluded = set(known or ())

    def again(names: Collection[str]) -> Refusal | None:
        if not attempts_left[0]:
            raise CannotCutError(f"given up after {attempts} compilations: {first}")
        attempts_left[0] -= 1
        return attempt(tuple(name for name in nodes if name in names))

    try:
        partition = cut(graph(), shape, excluded)
    except CannotCutError as error:
        raise CannotCutError(f"{first}; {error}") from None
    whole = known is None and bool(partition.ops)  # the whole was tried; a partition around its eager ops was not yet
    while refusal is not None:
        found = {name for name, op in nodes.items() if op in refusal.ops} - excluded
        if not found and not whole:
            tried = refusal.nodes or [name for piece in partition.pieces for name in piece.nodes]
            found = _refused_nodes([name for name in nodes if name in tried], nodes, again)
        whole = False
        excluded |= found
        partition = cut(graph(), shape, excluded)
        if not partition.pieces:
            raise CannotCutError(f"no part of the tower can be compiled: {first}")
        refusal = again(excluded)
    return tuple(name for name in nodes if name in excluded)


def _refused_nodes(
    refused: list[str], nodes: Mapping[str, str], again: Callable[[Collection[str]], Refusal | None]
) -> set[str]:
    """The nodes to exclude from a refused piece for which the compiler named no op, found by bisection."""
    good, bad = 0, len(refused)
    while bad - good > 1:
        middle = (good + bad) // 2
        refusal = again(set(nodes) - set(refused[:middle]))
        if refusal is None:
            good = middle
            continue
        named = {name for name in refused[:middle] if nodes[name] in refusal.ops}
        if named:
            return named
        bad = middle
    return {refused[bad - 1]}


def uncapturable(nodes: Iterable[fx.Node], known: Mapping[str, Any] | None = None) -> str:
    """Why these nodes cannot be captured as a CUDA graph by their declarations; empty if nothing is against it."""
    unsafe = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.cudagraph_unsafe)
    for node in sorted(nodes, key=lambda node: node.name):
        if any(tag in getattr(node.target, "tags", ()) for tag in unsafe):
            return f"{_op(node)} needs the host, so it cannot be in a CUDA graph"
        if known is not None and isinstance(node.meta.get("val"), Tensor) and known.get(node.name) is None:
            return f"the sizes of {_op(node)} depend on data, so it cannot be in a CUDA graph"
    return ""


class _Compiled(nn.Module):
    """Calls a piece's artifact in place of its graph."""

    def __init__(self, piece: Piece, run: PieceRunner) -> None:
        super().__init__()
        self._run, self._name = run, piece.name
        self._made = [
            (at, *read) for at, (read, computed) in enumerate(zip(piece.reads, piece.computed, strict=True)) if computed
        ]
        self._one = not isinstance(_output(piece.module).args[0], tuple)

    def forward(self, *tensors: Tensor) -> Tensor | Sequence[Tensor]:
        given = list(tensors)
        for at, sizes, dtype in self._made:
            tensor = given[at]
            if tensor.shape != sizes or tensor.dtype != dtype:
                raise ArtifactError(
                    f"{self._name} was compiled for {dtype} {list(sizes)}, but an eager op gave {tensor.dtype} "
                    f"{list(tensor.shape)}, which its declaration does not say"
                )
            if not tensor.is_contiguous() or tensor.data_ptr() % ALIGNED:
                given[at] = tensor.clone(memory_format=torch.contiguous_format)
        given = self._run(given)  # type: ignore[assignment]
        return given[0] if self._one else given


def _fix_sizes(graph: TowerGraph, shape: Shape) -> tuple[fx.Graph, dict[str, Any]]:
    """A copy of the graph in which all sizes that `shape` fixes are constants; and each node's output: sizes and type,
    a list of them, or None if they are unknown."""
    fixed = copy.deepcopy(graph.module.graph)
    placeholders = [node for node in fixed.nodes if node.op == "placeholder"]
    symbols: dict[Any, int] = {}
    for node, given in zip(placeholders[len(graph.weights) :], graph.inputs, strict=True):
        for size, value in zip(node.meta["val"].shape, given.sizes(shape), strict=True):
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = value
    known: dict[str, Any] = {}
    for node in list(fixed.nodes):
        number = _number(node.meta.get("val"), symbols)
        if node.op == "call_function" and number is not None:
            _put_number(node, number)
            fixed.erase_node(node)
        elif _is_met(node):
            fixed.erase_node(node)
        else:
            known[node.name] = _given(node.meta.get("val"), symbols)
    return fixed, known


def _is_met(node: fx.Node) -> bool:
    """Whether the node only asserts known facts: types, which the engine has checked, or sizes that are constants
    now."""
    if str(node.target) == ASSERTS_METADATA:
        return True
    return str(node.target).startswith(_SIZE_CHECKS) and not node.all_input_nodes


def _put_number(node: fx.Node, number: float) -> None:
    """Replace `node` by a number wherever it is read."""

    def put(seen: fx.Node) -> Any:
        return number if seen is node else seen

    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(user.args, put), fx.map_arg(user.kwargs, put)


def _number(value: Any, symbols: Mapping[Any, int]) -> int | float | bool | None:
    if isinstance(value, (bool, int, float)):
        return value
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return None
    formula = getattr(getattr(value, "node", None), "expr", None)
    if formula is None:
        raise ChangedError(describe("torch", f"has a {type(value).__name__} without node.expr"))
    found = formula.subs(symbols)
    if found.free_symbols:
        return None
    kind = int if isinstance(value, torch.SymInt) else float if isinstance(value, torch.SymFloat) else bool
    return kind(found)


def _given(value: Any, symbols: Mapping[Any, int]) -> Any:
    if isinstance(value, (tuple, list)):
        parts = [_given(part, symbols) for part in value]
        return None if any(part is None for part in parts) else parts
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    sizes = tuple(_number(size, symbols) for size in value.shape)
    return None if None in sizes else (sizes, value.dtype)


def _refuse_writes(calls: Sequence[fx.Node]) -> None:
    for node in calls:
        if isinstance(node.target, Operator) and schema_of(node.target).is_mutable:
            raise CannotCutError(f"the tower calls {_op(node)}, which writes in place, so it is not partitioned")


def _compilable(node: fx.Node, known: Mapping[str, Any]) -> bool:
    """Whether a compiler could take the node: its inputs and outputs are tensors of known sizes."""
    if node.target is operator.getitem:
        return True  # it stays with the node that it reads
    return isinstance(node.target, Operator) and all(
        known.get(seen.name) is not None and seen.op != "get_attr" for seen in (node, *node.all_input_nodes)
    )


def _number_parts(calls: Sequence[fx.Node], eager: Collection[fx.Node]) -> dict[fx.Node, int]:
    """The number of each node's part. Even parts are eager, odd parts are compiled; no part reads from a later one."""
    parts: dict[fx.Node, int] = {}
    for node in calls:
        first = max((parts[seen] for seen in node.all_input_nodes if seen in parts), default=0)
        if node.target is operator.getitem:
            parts[node] = first
        else:
            parts[node] = first + (first % 2 == (node in eager))
    return parts


def _piece(call: fx.Node, module: nn.Module, known: Mapping[str, Any]) -> Piece | None:
    """A part as a piece to compile; None if it computes nothing or reads nothing, so that it stays eager."""
    assert isinstance(module, fx.GraphModule)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    computes = any(isinstance(node.target, Operator) and not getattr(node.target, "is_view", False) for node in calls)
    if not computes or not call.args:
        return None
    reads = tuple(known[node.name] for node in module.graph.nodes if node.op == "placeholder")
    computed = tuple(isinstance(seen, fx.Node) and seen.op != "placeholder" for seen in call.args)
    return Piece(str(call.target), module, tuple(node.name for node in calls), reads, computed)


def _output(module: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(node for node in module.graph.nodes if node.op == "output")
    return found


def _op(node: fx.Node) -> str:
    return str(node.target)


def _is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem
