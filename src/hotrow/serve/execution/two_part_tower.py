"""TwoPartTower: a tower with a user part, served as two graphs with one set of weights.

    encode(vectors of the users) → encoding        [users, ...], or [events, ...] where x_lengths is in it
    score(vectors of the rows, encoding, dense) → logits

`vectors` of `encode` are those of the user features, one entry per user. Those of `score` are the other features, one
entry per row, and `user_of` (int64 [rows], from 0 to users - 1, sorted as a server's is). An encoding may be cut into
users, kept, and joined with others' before `score`. More names than a part reads are ignored.

Each part is an OriginalTower or, with buckets of its own, a Towers. `weights` is one value for both parts: a batch that
takes it once and passes it to `encode` and `score` computes both with the same weights. On a GPU weights are replaced
in place, so there the caller keeps batches and `set_weights` apart.

Any thread may call any method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hotrow.errors import OptionError, choices
from hotrow.nn import EmbeddingCollection
from hotrow.serve.execution.towers import Towers
from hotrow.serve.graph import graph_archive
from hotrow.serve.graph.tower import OriginalTower
from hotrow.serve.graph.tower_inputs import CANDIDATES, ENCODING, LENGTHS, USER, TowerInputs
from hotrow.serve.repository.manifest import TOWER, Version
from hotrow.serve.repository.manifest import USER as USER_GRAPH

Vectors = Mapping[str, Tensor]


class PartWeights(NamedTuple):
    """The weights of both parts, as their towers take them."""

    user: Any
    candidates: Any


class TwoPartTower:
    """Both parts of a tower. `user` and `candidates` run one part each; `names` are all weights of the tower."""

    def __init__(
        self,
        user: OriginalTower | Towers,
        candidates: OriginalTower | Towers,
        inputs: TowerInputs,
        names: Mapping[str, Any],
        tied: Mapping[str, str] | None = None,
    ) -> None:
        self.user, self.candidates, self.inputs = user, candidates, inputs
        self.tied = dict(tied or {})
        self._names = tuple(names)
        self._weights = PartWeights(user.weights, candidates.weights)

    @staticmethod
    def of(
        user: ExportedProgram,
        candidates: ExportedProgram,
        inputs: TowerInputs,
        weights: Mapping[str, Tensor],
        tied: Mapping[str, str] | None = None,
        device: torch.device | None = None,
    ) -> TwoPartTower:
        """Both parts as their original graphs."""
        user_part = OriginalTower(user, inputs, weights, tied, device, USER)
        return TwoPartTower(
            user_part, OriginalTower(candidates, inputs, weights, tied, device, CANDIDATES), inputs, weights, tied
        )

    def with_parts(self, make: Callable[[OriginalTower, str], OriginalTower | Towers]) -> TwoPartTower:
        """The same tower over other runners of its parts, such as a Towers for each. `make` gets the part's graph and
        "user" or "candidates"."""
        assert isinstance(self.user, OriginalTower) and isinstance(self.candidates, OriginalTower)
        return TwoPartTower(
            make(self.user, USER), make(self.candidates, CANDIDATES), self.inputs, dict.fromkeys(self._names), self.tied
        )

    @property
    def device(self) -> torch.device:
        """Where both parts run."""
        return self.candidates.device

    def encode(self, vectors: Vectors, weights: PartWeights | None = None) -> dict[str, Tensor]:
        """The encoding of the users whose vectors these are."""
        part, chosen = self.user, (weights or self._weights).user
        if isinstance(part, Towers):
            return part.encode(vectors, chosen)
        return dict(zip(part.outputs, part.run_part(vectors, None, chosen), strict=True))

    def score(
        self, vectors: Vectors, encoding: Vectors, dense: Tensor | None = None, weights: PartWeights | None = None
    ) -> Tensor:
        """Logits of the rows, [rows] or [rows, tasks]."""
        return self.answer(vectors, encoding, dense, weights)[0]

    def answer(
        self, vectors: Vectors, encoding: Vectors, dense: Tensor | None = None, weights: PartWeights | None = None
    ) -> tuple[Tensor, bool]:
        """As `score`, and whether compiled buckets computed all logits."""
        chosen = (weights or self._weights).candidates
        given = {**vectors, **{f"{ENCODING}{name}": value for name, value in encoding.items()}}
        if isinstance(self.candidates, Towers):
            return self.candidates.answer(given, dense, chosen)
        return self.candidates.run(given, dense, chosen), False

    def run(self, vectors: Vectors, dense: Tensor | None = None, weights: PartWeights | None = None) -> Tensor:
        """Both parts in turn, for vectors of users and rows together."""
        chosen = weights or self._weights
        return self.score(vectors, self.encode(vectors, chosen), dense, chosen)

    @property
    def weights(self) -> PartWeights:
        """The current weights of both parts. On a CPU the value never changes, it is replaced by another."""
        return self._weights

    def replace_weights(self, state: Mapping[str, Tensor]) -> None:
        """Use other weights from the next call on. If one of them is wrong, none is changed."""
        self.set_weights(self.prepare_weights(state))

    def prepare_weights(self, state: Mapping[str, Tensor]) -> PartWeights:
        """Convert a tower's state dict for both parts, or raise an error that names the first wrong weight."""
        for name in state:
            if name not in self._names and name not in self.tied:
                raise OptionError(f"the tower has no weight {name!r}; {choices(name, self._names)}")
        return PartWeights(*(_prepared(part, state) for part in (self.user, self.candidates)))

    def set_weights(self, weights: PartWeights) -> None:
        """Use what `prepare_weights` returned, in both parts at once."""
        self.user.set_weights(weights.user)
        self.candidates.set_weights(weights.candidates)
        self._weights = PartWeights(self.user.weights, self.candidates.weights)

    def metrics(self) -> dict[str, dict[str, float]]:
        """The numbers of the parts that have buckets, by part."""
        return {name: part.metrics() for name, part in self._parts() if isinstance(part, Towers)}

    def close(self) -> None:
        """End the threads of buckets."""
        for _, part in self._parts():
            if isinstance(part, Towers):
                part.close()

    def _parts(self) -> tuple[tuple[str, OriginalTower | Towers], ...]:
        return (USER, self.user), (CANDIDATES, self.candidates)


def is_jagged(name: str, encoding: Vectors) -> bool:
    """Whether a tensor of an encoding has one row for each event, rather than one for each user."""
    return f"{name}{LENGTHS}" in encoding


def _prepared(part: OriginalTower | Towers, state: Mapping[str, Tensor]) -> Any:
    if isinstance(part, Towers):
        return part.order_weights({name: state[name] for name in part.graph.names if name in state})
    return part.prepare_weights({name: state[name] for name in part.weights if name in state})


def inputs_of(version: Version, embeddings: EmbeddingCollection) -> TowerInputs:
    """What the tower of an exported version reads."""
    found = version.signature
    return TowerInputs.of(
        embeddings,
        found.dense,
        numbers=found.numbers,
        jagged=found.jagged,
        user=tuple(sorted(found.user)),
        aligned=found.aligned,
        max_lengths=found.max_lengths,
    )


def open_tower(
    version: Version, embeddings: EmbeddingCollection, device: torch.device | None = None
) -> OriginalTower | TwoPartTower:
    """The original graphs of an exported version with the saved weights; an OriginalTower if it has no user part."""
    inputs, weights, tied = inputs_of(version, embeddings), version.weights(), version.manifest["tower"]["tied"]
    program = graph_archive.unpack(version.read(TOWER), version.path / TOWER)
    if not inputs.user:
        return OriginalTower(program, inputs, weights, tied, device)
    user = graph_archive.unpack(version.read(USER_GRAPH), version.path / USER_GRAPH)
    return TwoPartTower.of(user, program, inputs, weights, tied, device)
