"""partition: a plain torch model, cut into the rows of its lookups and a tower.

    export the model with free sizes → find its lookups (cut.py) → the way from inputs to keys (key_part.py)
    → the rest as a tower (tower_part.py) → copy the embeddings' rows into tables → compare the outputs

The model stays as it is: weights and rows are copied.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from hotrow.batch import KeyedBatch
from hotrow.config import Memory
from hotrow.errors import BatchError, OptionError, choices
from hotrow.model_partition.cut import LookupNode, find_lookups, fixed, shape_of, source_line
from hotrow.model_partition.key_part import KeyPart, Passed
from hotrow.model_partition.nested import leaves, map_leaves, structure
from hotrow.model_partition.tower_part import TowerPart, Vectors, rest_of, tower_inputs
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.optim import Optimizer
from hotrow.table import Table

TOLERANCE = 1e-6  # between the model and its parts, relative to the largest output


class PartitionedRecommender(Recommender):
    """What `partition` returns: a Recommender that also makes batches of the model's own inputs."""

    def __init__(self, embeddings: EmbeddingCollection, tower: nn.Module, keys: KeyPart, nesting: str) -> None:
        super().__init__(embeddings, tower)
        self.keys, self._structure = keys, nesting

    def batch(self, *args: Any, labels: Tensor | None = None, time: Tensor | None = None, **kwargs: Any) -> KeyedBatch:
        """The batch of inputs that the model would be called with."""
        found = structure((args, kwargs))
        if found != self._structure:
            raise BatchError(f"the inputs are nested as {found}, the example was {self._structure}; pass the same form")
        return self.keys.batch(leaves((args, kwargs)), labels, time)


def partition(
    module: nn.Module,
    example: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    keep: Collection[str] = (),
    tables: Mapping[str, Mapping[str, Any]] | None = None,
    optimizer: Optimizer | None = None,
    memory: Memory | None = None,
    seed: int = 0,
) -> PartitionedRecommender:
    """Cut a torch model with nn.Embedding or nn.EmbeddingBag inside into an EmbeddingCollection and a tower.

    `example` are the arguments of one call (and `kwargs`), of two examples or more. Each embedding whose ids come from
    them becomes a table with its rows; several lookups of one embedding are features of one table. Names of modules in
    `keep` stay in the tower. `tables` has further options of hr.Table by name, such as an admission or `dtype`.

    The result has the model's outputs to 1e-6, else an error says so. `result.batch(*inputs, labels=...)` makes
    batches.
    A model that ends in a sigmoid gives probabilities: train it with `loss=torch.nn.functional.binary_cross_entropy`.

    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 1))
    >>> ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    >>> cut = partition(model, (ids,))
    >>> torch.allclose(cut.eval()(cut.batch(ids)), model(ids).squeeze(1))
    True
    """
    arguments = tuple(example), dict(kwargs or {})
    inputs = leaves(arguments)
    _check_inputs(inputs)
    was_training = module.training
    try:
        programs = {training: _export(module.train(training), example, kwargs) for training in (True, False)}
        with torch.no_grad():
            expected = _tensor_of(module.eval()(*example, **dict(kwargs or {})))
    finally:
        module.train(was_training)
    program, training_program = programs[False], programs[True]
    weights = _weights(program)
    lookups, output = find_lookups(program, keep), _output(program)
    _check_batch(lookups, output)
    features = _feature_names(lookups)
    read = tower_inputs(program, lookups, output)
    passed = _passed(program, read, features)
    rests = {False: rest_of(program, lookups, read, output, weights)}
    same_inputs = [_named(training_program, node.name) for node in read]
    found = find_lookups(training_program, keep)
    in_training = rest_of(training_program, found, same_inputs, _output(training_program), weights)
    if in_training.code != rests[False].code:
        rests[True] = in_training
    keys = KeyPart(program.graph, lookups, features, _user_inputs(program), _weights_by_input(program, weights), passed)
    vectors = [_vectors(feature, lookup) for feature, lookup in zip(features, lookups, strict=True)]
    dense = sum(one.width for one in passed if one.begin is not None)
    tower = TowerPart(rests, vectors, passed, dense, squeezes=[fixed(size) for size in shape_of(output)[1:]] == [1])
    embeddings = EmbeddingCollection(_tables(lookups, features, weights, tables or {}), optimizer, memory, seed)
    for lookup in lookups:
        rows = weights[lookup.weight].detach().float().cpu()
        embeddings.table(lookup.table).assign(torch.arange(rows.shape[0]), rows)
    result = PartitionedRecommender(embeddings, tower, keys, structure(arguments))
    _compare(result, inputs, expected)
    return result


def _check_inputs(inputs: Sequence[Any]) -> None:
    for number, one in enumerate(inputs):
        if not isinstance(one, Tensor) or one.dim() == 0:
            kind = (
                f"a tensor without dimensions ({one})" if isinstance(one, Tensor) else f"{type(one).__name__} {one!r}"
            )
            raise OptionError(f"input {number} of the example is {kind}; give tensors of two examples or more")


def _export(module: nn.Module, example: Sequence[Any], kwargs: Mapping[str, Any] | None) -> ExportedProgram:
    """The model's graph, with every size free that the model leaves free."""
    arguments, named = tuple(example), dict(kwargs or {})
    free = map_leaves(lambda tensor: dict.fromkeys(range(tensor.dim()), Dim.AUTO), (arguments, named))
    names = list(inspect.signature(module.forward).parameters)
    sizes = {**dict(zip(names, free[0], strict=False)), **free[1]}
    try:
        return torch.export.export(module, arguments, named, dynamic_shapes=sizes if named else free[0])
    except Exception as error:
        raise OptionError(
            f"torch.export cannot take {type(module).__name__}: {str(error).strip()[:1500]}. The model must not branch "
            "on the values of tensors; move such code out of forward()"
        ) from error


def _weights(program: ExportedProgram) -> dict[str, Any]:
    """Copies of the model's parameters, buffers and constants, by name."""
    signature, held = program.graph_signature, {**program.constants, **program.state_dict}
    names = [*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()]
    names += signature.inputs_to_lifted_tensor_constants.values()
    return {name: copy.deepcopy(held[name]) for name in names}


def _weights_by_input(program: ExportedProgram, weights: Mapping[str, Any]) -> dict[str, Any]:
    """The same by the names of the graph's inputs."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants
    return {node: weights[name] for node, name in names.items()}


def _output(program: ExportedProgram) -> Node:
    outputs = program.graph_signature.user_outputs
    node = _named(program, str(outputs[0]))
    if len(outputs) != 1 or not isinstance(node.meta.get("val"), Tensor) or node.meta["val"].dim() not in (1, 2):
        raise OptionError(
            f"the model returns {len(outputs)} values, or one that is no tensor [rows] or [rows, tasks]; wrap it in a "
            "module that returns its logits alone"
        )
    return node


def _tensor_of(output: Any) -> Tensor:
    (tensor,) = leaves(output)
    assert isinstance(tensor, Tensor)
    return tensor


def _named(program: ExportedProgram, name: str) -> Node:
    nodes: Iterable[Node] = program.graph.nodes
    return next(node for node in nodes if node.name == name)


def _user_inputs(program: ExportedProgram) -> list[Node]:
    return [_named(program, str(name)) for name in program.graph_signature.user_inputs]


def _check_batch(lookups: Sequence[LookupNode], output: Node) -> None:
    """Refuse lookups that have not one entry per example, in their first dimension."""
    rows = str(shape_of(output)[0])
    for lookup in lookups:
        if lookup.offsets is not None and lookup.last_offset:
            continue
        sizes = shape_of(lookup.ids if lookup.offsets is None else lookup.offsets)
        if str(sizes[0]) != rows:
            raise OptionError(
                f"the model cannot be cut at {source_line(lookup.node)}: the first size of these ids is {sizes[0]}, "
                f"and that of the output {rows}; examples must be the first dimension of both (transpose the input)"
            )


def _feature_names(lookups: Sequence[LookupNode]) -> list[str]:
    """A name for each lookup: its table's, or with several lookups of one table its table's and its ids'."""
    tables = [lookup.table for lookup in lookups]
    names = [
        lookup.table if tables.count(lookup.table) == 1 else f"{lookup.table}_{lookup.ids.name}" for lookup in lookups
    ]
    return [name if names.index(name) == at else f"{name}_{at}" for at, name in enumerate(names)]


def _passed(program: ExportedProgram, read: Sequence[Node], features: Sequence[str]) -> list[Passed]:
    """How the inputs that the tower reads travel in a batch."""
    places = {name: place for place, name in enumerate(program.graph_signature.user_inputs)}
    found, begin = [], 0
    for node in read:
        value = node.meta["val"]
        shape = tuple(fixed(size) for size in value.shape[1:])
        name = node.name if node.name not in features else f"{node.name}_number"
        if value.dtype.is_floating_point:
            if len(shape) > 1 or None in shape:
                raise OptionError(
                    f"the tower reads the input {node.name!r} of sizes {list(value.shape)}; floats must be [rows] or "
                    "[rows, columns] with a fixed number of columns"
                )
            one = Passed(places[node.name], name, shape, value.dtype, begin)
            begin += one.width
        else:
            one = Passed(places[node.name], name, shape, value.dtype)
        found.append(one)
    return found


def _vectors(feature: str, lookup: LookupNode) -> Vectors:
    if lookup.offsets is not None:
        return Vectors(feature, pooled=True)
    sizes = tuple(-1 if (known := fixed(size)) is None else known for size in shape_of(lookup.ids)[1:])
    if sizes.count(-1) > 1:
        raise OptionError(
            f"the model cannot be cut at {source_line(lookup.node)}: ids of {1 + len(sizes)} dimensions with several "
            "free sizes; fix all but one, or flatten them"
        )
    return Vectors(feature, not sizes, sizes, lookup.padding)


def _tables(
    lookups: Sequence[LookupNode],
    features: Sequence[str],
    weights: Mapping[str, Any],
    options: Mapping[str, Mapping[str, Any]],
) -> list[Table]:
    poolings: dict[str, dict[str, str]] = {}
    dims = {lookup.table: int(weights[lookup.weight].shape[1]) for lookup in lookups}
    for feature, lookup in zip(features, lookups, strict=True):
        one_id = lookup.offsets is None and len(shape_of(lookup.ids)) == 1
        poolings.setdefault(lookup.table, {})[feature] = "sum" if one_id else lookup.pooling
    for name in options:
        if name not in poolings:
            raise OptionError(f"tables= has {name!r}; {choices(name, poolings)}")
    return [Table(name, dims[name], of_table, **dict(options.get(name, {}))) for name, of_table in poolings.items()]


def _compare(model: PartitionedRecommender, inputs: Sequence[Tensor], expected: Tensor) -> None:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        found = model(model.keys.batch(inputs)).reshape(expected.shape)
    model.train(was_training)
    bound = TOLERANCE * max(1.0, float(expected.abs().max()))
    difference = float((found - expected.float()).abs().max())
    if not difference <= bound:
        raise OptionError(
            f"the parts give other outputs than the model, by {difference:.2g}; the model must be a function of its "
            "inputs and weights alone (no random numbers in eval mode, no state)"
        )
