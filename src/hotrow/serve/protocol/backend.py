"""Backend: what a front end asks of whoever holds the models, and nothing else.

The front end knows bytes, JSON and gRPC; a backend knows models. In a server it is a Unix socket to engine processes;
in the tests it is a small model in the same process. All methods are called from the front end's event loop; `models`
and `figures` are plain calls and must not block.

Invariant: `models()` gives the *same* ModelInfo object until something about that model changed. The front end keeps
what it derived from one (names, shapes, a parsed feature spec) for as long as it sees the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotrow.serve.protocol.request import Answer, Request, Signature

READY, UNAVAILABLE = "READY", "UNAVAILABLE"

Figures = Mapping[tuple[str, ...], float]  # (metric, label values in metrics.TABLE's order) → value


@dataclass(frozen=True)
class ModelInfo:
    """A model. `version` answers when a client names none, empty if none has ever loaded; `versions` are all that can
    be named. Unless its `state` is READY, nobody answers now, and `reason` says why.

    Another version whose layout differs has its own ModelInfo in `others`.
    """

    name: str
    version: str
    signature: Signature
    versions: tuple[str, ...] = ()
    features: str | None = None  # the saved FeatureSpec's JSON: raw columns can be sent
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str = READY
    reason: str = ""
    others: Mapping[str, ModelInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class IndexEntry:
    """A version in the repository, in service or not; `reason` says why it is not."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Backend(Protocol):
    """What a front end asks. Methods raise RefusedError with HTTP's status for what they refuse."""

    def models(self) -> Mapping[str, ModelInfo]:
        """The models in service, and those that are about to be again. Raises RefusedError while none is known."""
        ...

    def figures(self) -> Figures:
        """What the engines have counted (metrics.TABLE names and explains each), as of a moment ago."""
        ...

    async def infer(self, request: Request) -> Answer:
        """The answer, or RefusedError."""
        ...

    async def index(self) -> Sequence[IndexEntry]:
        """Every model and version in the repository."""
        ...

    async def load(self, name: str) -> None:
        """Load a model, or its newest version; returns when it is in service."""
        ...

    async def unload(self, name: str) -> None:
        """Take a model out of service; returns when its last answer has left."""
        ...

    async def statistics(self, name: str, version: str) -> Sequence[Mapping[str, Any]]:
        """Triton's model_stats, one entry a version (`name` and `version` may be empty: all); absent fields are 0."""
        ...

    async def ready(self) -> bool:
        """Whether requests would be answered now."""
        ...

    async def live(self) -> bool:
        """Whether the server works at all."""
        ...
