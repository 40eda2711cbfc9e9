"""Graph rewrites: the same tower with fewer and faster calls. They are applied on loading; nothing is compiled.

    on a CPU   stack → bmm with its transpose → select the triangle → cat   one call (core/serve/dot_interaction.h)
    on a GPU   linear → relu                                               one cuBLAS launch, the same bits

A pattern that differs in any way is not rewritten. Dot products are summed in another order, so logits differ from the
original operators' in the last bits of a float32.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from hotrow import _core
from hotrow.undocumented import find

ATEN = torch.ops.aten
ASSERTS_METADATA = "aten._assert_tensor_metadata.default"  # torch.export inserts it before casts


def pair_dots(lead: Tensor | None, vectors: Sequence[Tensor]) -> Tensor:
    """The columns of `lead`, then the dot products of all pairs of vectors [rows, dim]: (1,0), (2,0), (2,1), ...

    >>> pair_dots(torch.tensor([[7.0]]), [torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 3.0]])])
    tensor([[7., 2.]])
    """
    rows, dim = vectors[0].shape
    count, lead_width = len(vectors), 0 if lead is None else lead.shape[1]
    out = torch.empty(rows, lead_width + count * (count - 1) // 2)
    held, leads = (
        _as_float32(vectors),
        _as_float32([] if lead is None else [lead]),
    )  # kept alive until the core has read them
    addresses = [(vector.data_ptr(), vector.stride(0)) for vector in held]
    at, stride = (leads[0].data_ptr(), leads[0].stride(0)) if leads else (0, 0)
    _core.pair_dots(addresses, dim, at, stride, lead_width, rows, out.data_ptr())
    return out


def _as_float32(vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors in the layout that the core reads: float32 with contiguous rows."""
    if all(vector.dtype is torch.float32 and vector.stride(1) == 1 for vector in vectors):
        return vectors
    return [vector.float().contiguous() for vector in vectors]


def copy_of(program: ExportedProgram) -> fx.GraphModule:
    """A copy of the graph that may be changed, with the same arguments in the same order."""
    graph = copy.deepcopy(program.graph)
    graph.set_codegen(fx.graph.CodeGen())
    return fx.GraphModule(program.graph_module, graph)


def join_pairs(module: fx.GraphModule, program: ExportedProgram) -> int:
    """Replace the dot products of pairs by calls of the core, for a CPU; returns how many were replaced."""
    joined = 0
    for node in list(module.graph.nodes):
        found = _pairs(node, program)
        if found is None:
            continue
        lead, last = _lead(node)
        with module.graph.inserting_before(last):
            call = module.graph.call_function(pair_dots, (lead, found))
        call.meta = dict(last.meta)
        last.replace_all_uses_with(call)
        joined += 1
    return _done(module, joined)


def _pairs(pick: fx.Node, program: ExportedProgram) -> Sequence[fx.Node] | None:
    """The vectors whose pairs this node selects from their Gram matrix; None for other nodes."""
    flat = _of(pick, ATEN.index_select.default)
    product = _of(flat, ATEN.flatten.using_ints)
    stacked = _of(product, ATEN.bmm.default)
    vectors = _of(stacked, ATEN.stack.default)
    if vectors is None or pick.args[1] != 1 or flat.args[1:] != (1,) or stacked.args[1:] != (1,):
        return None
    transposed = product.args[1]
    if transposed.target is not ATEN.transpose.int or transposed.args != (stacked, 1, 2):
        return None
    values = [vector.meta["val"] for vector in vectors]
    if any(value.dim() != 2 or value.dtype is not torch.float32 for value in values):
        return None
    count, dim = len(vectors), int(values[0].shape[1])
    row, column = torch.tril_indices(count, count, offset=-1)
    picked = _constant(pick.args[2], program)
    if picked is None or not torch.equal(picked.cpu(), row * count + column) or not _core.can_pair(count, dim):
        return None
    return vectors  # type: ignore[no-any-return]


def _of(node: Any, target: Any) -> Any:
    """The first argument of a call of `target`; None for other nodes, so that a chain of calls ends there."""
    return node.args[0] if isinstance(node, fx.Node) and node.target is target else None


def _lead(pick: fx.Node) -> tuple[fx.Node | None, fx.Node]:
    """The tensor that the pairs are appended to, if that is their only use, and the last node of the pattern."""
    users = list(pick.users)
    user = users[0] if len(users) == 1 else pick
    if user.target is not ATEN.cat.default or user.args[1:] != (1,):
        return None, pick
    parts = user.args[0]
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or parts[1] is not pick:
        return None, pick
    lead = parts[0]
    usable = isinstance(lead, fx.Node) and lead.meta["val"].dim() == 2 and lead.meta["val"].dtype is torch.float32
    return (lead, user) if usable else (None, pick)  # type: ignore[return-value]


def _constant(node: Any, program: ExportedProgram) -> Tensor | None:
    for spec in program.graph_signature.input_specs:
        if isinstance(node, fx.Node) and getattr(spec.arg, "name", None) == node.name:
            value = program.constants.get(str(spec.target))
            return value if isinstance(value, Tensor) else None
    return None


def join_activations(module: fx.GraphModule) -> int:
    """Fuse linear layers with the ReLU after them, for a GPU; returns how many."""
    graph, joined = module.graph, 0
    fused = find("torch:ops.aten._addmm_activation.default", "A layer and its ReLU are two launches on a GPU")
    if fused is None:
        return 0
    for relu in list(graph.nodes):
        layer = relu.args[0] if relu.target is ATEN.relu.default else None
        if layer is None or layer.target is not ATEN.linear.default or len(layer.users) > 1:
            continue
        if len(layer.args) < 3 or layer.args[2] is None or layer.args[0].meta["val"].dim() != 2:
            continue
        rows, weight, bias = layer.args
        with graph.inserting_before(relu):
            transposed = graph.call_function(ATEN.t.default, (weight,))
            call = graph.call_function(fused, (bias, rows, transposed))
        call.meta = dict(relu.meta)
        relu.replace_all_uses_with(call)
        joined += 1
    return _done(module, joined)


def _done(module: fx.GraphModule, joined: int) -> int:
    if joined:
        module.graph.eliminate_dead_code()
        module.recompile()
    return joined
