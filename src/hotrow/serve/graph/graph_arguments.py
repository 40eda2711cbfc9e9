"""The arguments and outputs of an exported tower's graph, by name."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram


def arguments_of(program: ExportedProgram) -> dict[str, Any]:
    """Positions of the user inputs by argument: weights (if they are an argument), vectors and dense."""
    spec = program.call_spec.in_spec
    args, kwargs = spec.unflatten(range(spec.num_leaves))
    both = len(args) > 1 and isinstance(args[0], dict) and isinstance(args[1], dict)
    return {**dict(zip(("weights", "vectors", "dense")[not both :], args, strict=False)), **kwargs}


def output_names(program: ExportedProgram) -> tuple[str, ...]:
    """The names of a graph's outputs: of a user part, the tensors of its encoding; otherwise one, "logits"."""
    spec = program.call_spec.out_spec
    names = spec.unflatten(range(spec.num_leaves))
    return tuple(sorted(names, key=names.__getitem__)) if isinstance(names, dict) else ("logits",)
