"""The engine's first part of the path of a request: frame → route → admit → defer cold rows → enqueue.

The thread that reads a front end's connection runs these steps. A lane runs the later ones (serve/batching/lanes.py).
serve/__init__.py has the complete path. A Route is computed once for each version, signature and policy, and cached
until the loaded models change. All requests of one read that have the same route are admitted and enqueued together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hotrow.serve.batching.lanes import BatchKey, RequestFrame, refuse
from hotrow.serve.batching.miss_queue import MissQueue
from hotrow.serve.batching.tensorbatch import BatchQueue, Group, QueuedRequest, TensorBatch
from hotrow.serve.batching.versions import Model, Models, Version
from hotrow.serve.processes.engine_options import EngineOptions
from hotrow.serve.processes.engine_socket import FrontendConnection
from hotrow.serve.protocol import frames, lookup_frames
from hotrow.serve.protocol.embedding_outputs import known_outputs
from hotrow.serve.protocol.request import POLICIES, RefusedError, Wanted

DEFAULT_DEADLINE = 1.0  # seconds, if neither the request nor the options nor the version has one

MOST_ROUTES = 256  # that are cached; lookups have one, and a queue, for each set of outputs, which clients choose
Scanned = tuple[Any, ...]  # frames.ScannedRequest's fields; if malformed, the first four and the reason


class Route(NamedTuple):
    """The queue of a request, and settings from its version and policy."""

    model: Model
    group: Group
    queue: BatchQueue
    can_be_cold: bool
    patient: bool  # whether the policy is to wait for rows past the deadline
    default_deadline: float  # seconds
    has_users: bool  # whether shared features of a user are joined once, and not for each row


class RequestAdmission:
    """Passes requests from connection readers to their batch queues, or refuses them."""

    def __init__(self, options: EngineOptions, models: Models, tensorbatch: TensorBatch, misses: MissQueue) -> None:
        self.options, self.models, self.tensorbatch, self.misses = options, models, tensorbatch, misses
        self._routes: dict[tuple[int, int, int, Wanted | None], Route] = {}

    def receive(self, connection: FrontendConnection, chunk: bytearray, scanned: list[Scanned]) -> None:
        """Admit and enqueue the requests of one read."""
        self._admit(connection, self._by_route(connection, chunk, scanned))

    def receive_lookup(self, connection: FrontendConnection, chunk: bytearray, offset: int, length: int) -> None:
        """Admit and enqueue a request for embedding outputs."""
        wanted, request = lookup_frames.read_lookup(chunk, offset, length)
        self._admit(connection, self._by_route(connection, chunk, [request], wanted))

    def _admit(self, connection: FrontendConnection, routed: list[tuple[Route, list[QueuedRequest]]]) -> None:
        for route, requests in routed:
            refused = self.tensorbatch.admit(route.group, requests)
            if refused:
                connection.send(b"".join([frames.write_refusal(request.content.id, why) for request, why in refused]))
            if route.can_be_cold and requests:
                requests = self._defer_cold(route.queue, requests)
            if requests:
                self.tensorbatch.enqueue(route.queue, requests)

    def clear_routes(self) -> None:
        """Clear the cached routes, because the loaded models have changed."""
        self._routes = {}

    def _by_route(
        self, connection: FrontendConnection, chunk: bytearray, scanned: list[Scanned], wanted: Wanted | None = None
    ) -> list[tuple[Route, list[QueuedRequest]]]:
        """The requests of these frames, grouped by route. A frame that has no route is refused."""
        now = self.tensorbatch.clock()
        outputs = None if wanted is None else wanted._replace(half=False, bytes=0)  # what decides its queue
        by_route: dict[int, tuple[Route, list[QueuedRequest]]] = {}
        for frame in scanned:
            try:
                route = self._route(frame, outputs)
            except RefusedError as error:
                connection.send(frames.write_refusal(frame[1], error))
                continue
            _, number, offset, length, _, _, rows, left, _, _, _, _ = frame
            deadline = now + (left * 1e-6 if left >= 0 else route.default_deadline)
            if wanted is None:
                content = RequestFrame(connection, number, chunk, offset, length)
                request = QueuedRequest(content, rows, length, deadline, route.patient)
            else:
                content = RequestFrame(connection, number, chunk, offset, length, wanted.half)
                request = QueuedRequest(content, rows, length + wanted.bytes, deadline, route.patient, whole=True)
            by_route.setdefault(id(route), (route, []))[1].append(request)
        return list(by_route.values())

    def _route(self, frame: Scanned, wanted: Wanted | None) -> Route:
        """The route of a request. Raises RefusedError."""
        if len(frame) == 5:
            raise RefusedError(400, f"malformed frame: {frame[4]}")
        _, _, _, _, number, fingerprint, rows, _, policy, ids, _, _ = frame
        if rows > self.options.max_rows:  # several batches, which must all use one version
            model, pinned = self.models.resolve(number)
            if pinned is None and (current := model.version_for(fingerprint)) is not None:
                number = current.number
        route = self._routes.get((number, fingerprint, policy, wanted))
        if route is None:
            if len(self._routes) >= MOST_ROUTES:
                self._routes = {}
                self.tensorbatch.drop_empty_queues(lambda key: key.wanted is not None)
            route = self._find_route(number, fingerprint, policy, wanted)
            self._routes[number, fingerprint, policy, wanted] = route
        if ids > frames.MOST_IDS // 2 and not route.has_users:
            why = f"{ids} ids in one request, with shared ones counted for each row; send fewer rows per request"
            raise RefusedError(413, why)
        return route

    def _find_route(self, number: int, fingerprint: int, policy: int, wanted: Wanted | None) -> Route:
        model, pinned = self.models.resolve(number)
        if policy > len(POLICIES):
            raise RefusedError(400, f"policy number {policy}; there are {len(POLICIES)}")
        version = model.version_for(fingerprint, pinned)
        if version is None:
            raise RefusedError(503, f"model {model.name!r} takes other inputs now; send the request again", 0.1)
        default = self.options.policy or getattr(version.servable, "policy", None) or "initial"
        name = POLICIES[policy - 1] if policy else default
        group = model.group
        if wanted is not None:
            group = model.lookups
            if not version.answers_lookups:
                raise RefusedError(400, f"version {version.name} of model {model.name!r} answers no lookups")
            if not known_outputs(version.signature, wanted.outputs):
                raise RefusedError(400, f"outputs {wanted.outputs} are not of model {model.name!r}")
        queue = self.tensorbatch.queue_of(group, BatchKey(model, pinned, fingerprint, name, wanted))
        has_users = bool(version.signature.user)
        return Route(
            model, group, queue, version.can_be_cold, name == "wait", self._default_deadline(version), has_users
        )

    def _default_deadline(self, version: Version) -> float:
        for seconds in (self.options.deadline, getattr(version.servable, "deadline", None)):
            if seconds is not None:
                return float(seconds)
        return DEFAULT_DEADLINE

    def _defer_cold(self, queue: BatchQueue, requests: list[QueuedRequest]) -> list[QueuedRequest]:
        """Pass requests with cold rows to the miss queue; returns the others."""
        key: BatchKey = queue.key
        version = key.model.version_for(key.fingerprint, key.pinned)
        if version is None or not version.can_be_cold:
            return requests
        try:
            return self.misses.defer_cold(queue, requests, version)
        except frames.FrameError as error:
            for request in requests:
                refuse(self.tensorbatch, request, RefusedError(400, str(error)))
            return []
