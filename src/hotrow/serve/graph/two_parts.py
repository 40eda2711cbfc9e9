"""A tower with a user part as two graphs, so that a user is computed once and not once for each candidate.

    encode_user(vectors of user features) → encoding            user.pt2
    score(other vectors, encoding, dense) → logits              tower.pt2

`trace` exports both from the same tower, each with the weights that it reads, and compares them with the tower's own
`forward` over several numbers of users, rows and events. They are compared with padding too: users without events and
events that belong to no one, at the end, as a compiled bucket has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from hotrow.errors import OptionError
from hotrow.serve.graph import tower as towers
from hotrow.serve.graph.graph_arguments import arguments_of
from hotrow.serve.graph.tower_inputs import (
    CANDIDATES,
    ENCODING,
    LENGTHS,
    MASK,
    USER,
    USER_OF,
    TowerInputs,
    encoding_tensors,
)

CHECKED = ((1, 1, 1), (1, 5, 4), (3, 7, 3), (4, 9, 0), (2, 1, 2))  # users, rows, most events of a history
Vectors = Mapping[str, Tensor]


def trace(tower: nn.Module, inputs: TowerInputs, weights: dict[str, Tensor], tied: dict[str, str]) -> towers.Traced:
    """Export both parts. Requires: a tower in eval mode on the CPU, whose `user_features` are `inputs.user`."""
    _check_interface(tower)
    _check_names(inputs)
    examples = [inputs.example(5, 4, seed, users=3, least=1) for seed in range(3)]
    encodings = [_encode(tower, inputs, vectors) for vectors, _ in examples]
    fields = _check_encodings(encodings, 3)
    (vectors, dense), encoding = examples[0], encodings[0]
    tasks = towers.check_logits(_score(tower, inputs, vectors, encoding, dense), 5)
    user = _export(
        _UserPart, tower, weights, inputs.free_sizes(inputs.tensors(USER)), _cloned(_user_vectors(inputs, vectors))
    )
    candidates = _export(
        _CandidatePart,
        tower,
        weights,
        inputs.free_sizes([*inputs.tensors(CANDIDATES), *fields]),
        _cloned(candidate_vectors(inputs, vectors, encoding)),
        dense,
    )
    _compare(tower, inputs, *(_original(p, inputs, weights, n) for p, n in ((user, USER), (candidates, CANDIDATES))))
    for program in (user, candidates):
        towers.drop_size_assertions(program)
    return towers.Traced(candidates, weights, tied, tasks, user)


def candidate_vectors(inputs: TowerInputs, vectors: Vectors, encoding: Vectors) -> dict[str, Tensor]:
    """What the candidate part reads: the vectors of the candidates and the encoding under one name space."""
    own = {tensor.name: vectors[tensor.name] for tensor in inputs.tensors(CANDIDATES)}
    return {**own, **{f"{ENCODING}{name}": value for name, value in encoding.items()}}


def _user_vectors(inputs: TowerInputs, vectors: Vectors) -> dict[str, Tensor]:
    return {tensor.name: vectors[tensor.name] for tensor in inputs.tensors(USER)}


def _cloned(vectors: Vectors) -> dict[str, Tensor]:
    """Tensors without common storage, which a graph would take for one input."""
    return {name: value.clone() for name, value in vectors.items()}


def _export(
    part: type[_Part],
    tower: nn.Module,
    weights: dict[str, Tensor],
    free_sizes: dict[str, Any],
    vectors: dict[str, Tensor],
    dense: Tensor | None = None,
) -> ExportedProgram:
    """The graph of one part. It is exported twice: the first time shows which weights it reads."""
    program = towers.export_graph(part(tower), tower, weights, free_sizes, vectors, dense, limited=True)
    places = arguments_of(program)["weights"]
    names = list(program.graph_signature.user_inputs)
    used = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    read = {name: weights[name] for name, leaf in places.items() if names[leaf] in used}
    if len(read) == len(weights):
        return program
    return towers.export_graph(part(tower), tower, read, free_sizes, vectors, dense, limited=True)


def _original(program: ExportedProgram, inputs: TowerInputs, weights: Vectors, part: str) -> towers.OriginalTower:
    return towers.OriginalTower(program, inputs, weights, part=part)


class _Part(nn.Module):
    """One method of a tower with its weights as an argument."""

    tower: nn.Module

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "tower", tower)  # hidden from torch.export, which would save its weights


class _UserPart(_Part):
    def forward(self, weights: dict[str, Tensor], vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        encoding: dict[str, Tensor] = _call(self.tower, "encode_user", weights, vectors)
        return dict(encoding)


class _CandidatePart(_Part):
    def forward(self, weights: dict[str, Tensor], vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        encoding = {name.removeprefix(ENCODING): v for name, v in vectors.items() if name.startswith(ENCODING)}
        own = {name: value for name, value in vectors.items() if not name.startswith(ENCODING)}
        logits: Tensor = _call(self.tower, "score", weights, own, encoding, dense)
        return logits.float()


class _Method(nn.Module):
    """A module whose forward is another method of the tower."""

    def __init__(self, tower: nn.Module, method: str) -> None:
        super().__init__()
        self.tower, self.method = tower, method

    def forward(self, *arguments: Any) -> Any:
        return getattr(self.tower, self.method)(*arguments)


def _call(tower: nn.Module, method: str, weights: Vectors, *arguments: Any) -> Any:
    given = {f"tower.{name}": value for name, value in weights.items()}
    return torch.func.functional_call(_Method(tower, method), given, arguments)


class _PartVectors(dict[str, Tensor]):
    """The vectors of one part. A name of the other part is an error that says how to write the tower."""

    def __init__(self, vectors: Vectors, whole: Vectors, error: str) -> None:
        super().__init__(vectors)
        self._whole, self._error = whole, error

    def __missing__(self, name: str) -> Tensor:
        if name in self._whole:
            feature = name.removesuffix(LENGTHS).removesuffix(MASK)
            raise OptionError(self._error.format(feature=feature))
        raise KeyError(name)


def _encode(tower: nn.Module, inputs: TowerInputs, vectors: Vectors) -> dict[str, Tensor]:
    own = _PartVectors(
        _user_vectors(inputs, vectors),
        vectors,
        f"{type(tower).__name__}.encode_user reads {{feature!r}}, which is not among its user_features "
        f"({', '.join(inputs.user)}): an encoding must not depend on a candidate. Read it in score(), or add it to "
        "user_features if it is the user's",
    )
    encoding = tower.encode_user(own)  # type: ignore[operator]
    if not isinstance(encoding, dict) or not encoding or not all(isinstance(v, Tensor) for v in encoding.values()):
        raise OptionError(f"{type(tower).__name__}.encode_user gives {type(encoding).__name__}; give a dict of tensors")
    return encoding


def _score(tower: nn.Module, inputs: TowerInputs, vectors: Vectors, encoding: Vectors, dense: Tensor | None) -> Any:
    own = _PartVectors(
        {tensor.name: vectors[tensor.name] for tensor in inputs.tensors(CANDIDATES)},
        vectors,
        f"{type(tower).__name__}.score reads the user feature {{feature!r}}, which candidates do not have: put what it "
        "needs of it into the encoding that encode_user() returns, or leave it out of user_features",
    )
    return tower.score(own, dict(encoding), dense)  # type: ignore[operator]


def _check_interface(tower: nn.Module) -> None:
    missing = [name for name in ("encode_user", "score") if not callable(getattr(tower, name, None))]
    if missing:
        raise OptionError(
            f"{type(tower).__name__} has user_features but no {' and no '.join(missing)}(); write encode_user(vectors) "
            "-> encoding and score(vectors, encoding, dense) -> logits, or leave user_features out"
        )


def _check_names(inputs: TowerInputs) -> None:
    known = {*inputs.widths, *inputs.numbers}
    for feature in inputs.user:
        if feature not in known:
            raise OptionError(f"user_features names {feature!r}, which is no feature; there are: {', '.join(known)}")
    for feature in known:
        if feature == USER_OF or feature.startswith(ENCODING):
            raise OptionError(f"a feature is named {feature!r}, which a tower with user_features needs; rename it")
    for group in inputs.aligned:
        if len({feature in inputs.user for feature in group}) > 1:
            raise OptionError(f"aligned features {list(group)} must all be user features or none of them")


def _check_encodings(encodings: list[dict[str, Tensor]], users: int) -> list[Any]:
    """The candidate part's inputs for these encodings. The sizes besides users and events must be fixed."""
    for encoding in encodings:
        for name, value in encoding.items():
            if f"{name}{LENGTHS}" in encoding:
                lengths = encoding[f"{name}{LENGTHS}"]
                if lengths.dtype != torch.int64 or lengths.shape != (users,):
                    raise OptionError(
                        f"the encoding's {name}{LENGTHS} is {lengths.dtype} {list(lengths.shape)} for {users} users; "
                        "give int64 [users]"
                    )
            elif value.shape[:1] != (users,):
                raise OptionError(
                    f"the encoding's {name!r} is {list(value.shape)} for {users} users; give [users, ...], or "
                    f"[events, ...] with {name}{LENGTHS!r}"
                )
            if value.shape[1:] != encodings[0][name].shape[1:]:
                raise OptionError(
                    f"the encoding's {name!r} is {list(value.shape)} for one batch and "
                    f"{list(encodings[0][name].shape)} for another: only users and events may vary; make it jagged, "
                    f"with {name}{LENGTHS}"
                )
    return encoding_tensors(encodings)


def _compare(
    tower: nn.Module, inputs: TowerInputs, user: towers.OriginalTower, candidates: towers.OriginalTower
) -> None:
    """Compare both graphs with the tower's forward, with and without padding."""
    longest = max(inputs.max_lengths.values(), default=0)
    sizes = [*CHECKED, *([(1, 3, longest)] if 4 < longest <= towers.LONGEST_CHECKED else [])]
    for seed, (users, rows, length) in enumerate(sizes):
        vectors, dense = inputs.example(rows, length, seed, users)
        padded = pad(inputs, vectors)
        where = f"{users} users, {rows} rows and histories of {length}"
        with torch.inference_mode():
            expected = tower(dict(vectors), dense).float()
            towers.check_finite(expected, where)
            for given, padding in ((vectors, ""), (padded, " with padding at the end")):
                try:
                    encoding = dict(zip(user.outputs, user.run_part(given, None), strict=True))
                    got = candidates.run(candidate_vectors(inputs, given, encoding), dense)
                except Exception as error:
                    raise OptionError(
                        f"the exported parts fail for {where}{padding}: {error}. They have a size of the example in "
                        "them; take sizes from the inputs"
                    ) from error
                if not towers.is_close(got, expected):
                    raise OptionError(
                        f"encode_user and score, exported, give other logits than the tower's forward for {where}"
                        f"{padding}. forward must be score(vectors, encode_user(vectors), dense), and what lies behind "
                        "the events of the last user must not reach a logit"
                    )


def pad(inputs: TowerInputs, vectors: Vectors, users: int = 2, events: int = 3) -> dict[str, Tensor]:
    """The vectors of a batch with more users, who have no events, and more events, which belong to no one."""
    padded = dict(vectors)
    for tensor in inputs.tensors(USER):
        value = vectors[tensor.name]
        more = users if tensor.sizes[0] == "users" else events
        padded[tensor.name] = torch.cat([value, value.new_zeros(more, *value.shape[1:])])
    return padded
