"""Backend: the interface between a front end (bytes, JSON, gRPC) and the models.

In a server it is EngineClient, a Unix socket to each engine process. In the tests it is a small model in the same
process. All methods are called from the front end's event loop; `models` and `figures` are not coroutines and must not
block.

Invariant: `models()` returns the *same* ModelInfo object until something about that model changes. The front end caches
data derived from a ModelInfo (names, shapes, a parsed feature spec) as long as the object is the same.
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
    """A model. `version` answers requests that name none; it is empty if no version has ever loaded. A request can name
    any of `versions`. If `state` is not READY, no engine answers now, and `reason` says why.

    A version with another input layout has its own ModelInfo in `others`. The versions of `aliases` and `canary` need
    not be loaded: then they are not among `versions`.
    """

    name: str
    version: str
    signature: Signature
    versions: tuple[str, ...] = ()
    features: str | None = None  # the saved FeatureSpec as JSON; raw columns need it
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str = READY
    reason: str = ""
    others: Mapping[str, ModelInfo] = field(default_factory=dict)
    widths: tuple[int, ...] = ()  # of the features' vectors, in the signature's order; empty: it answers no lookups
    aliases: Mapping[str, str] = field(default_factory=dict)  # alias → version
    canary: tuple[str, float] | None = None  # the version that takes a share (0 to 1) of requests that name none


@dataclass(frozen=True)
class IndexEntry:
    """A version in the repository, in service or not; `reason` says why it is not."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Backend(Protocol):
    """The interface. Methods raise RefusedError with an HTTP status for requests that they refuse."""

    def models(self) -> Mapping[str, ModelInfo]:
        """The models in service, and those whose engine is restarting. Raises RefusedError while none is known."""
        ...

    def figures(self) -> Figures:
        """Recent figures of the engines; metrics.TABLE describes each."""
        ...

    async def infer(self, request: Request) -> Answer:
        """The answer, or RefusedError."""
        ...

    async def index(self) -> Sequence[IndexEntry]:
        """Every model and version in the repository."""
        ...

    async def load(self, name: str) -> None:
        """Load a model's newest version; returns when it is in service."""
        ...

    async def unload(self, name: str) -> None:
        """Take a model out of service; returns when its last answer has been sent."""
        ...

    async def statistics(self, name: str, version: str) -> Sequence[Mapping[str, Any]]:
        """Triton's model_stats, one entry a version (`name` and `version` may be empty: all); absent fields are 0."""
        ...

    async def ready(self) -> bool:
        """Whether requests would be answered now."""
        ...

    async def live(self) -> bool:
        """Whether the server is alive."""
        ...
