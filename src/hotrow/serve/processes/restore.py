"""Restore: makes a restarted engine serve the same models and versions as before.

An engine reports to its supervisor which versions of which models are loaded (`in_service`). The supervisor passes this
to the restarted engine, which loads the same: the current version, the version kept for rollback, and nothing that was
unloaded. A model that was in service and fails to load, for example because its row store is down, is retried for ever.

Threads: `begin` first. Then one thread calls `retry`, and any thread the other methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hotrow.backoff import Backoff
from hotrow.serve.batching.versions import Models
from hotrow.serve.protocol.request import RefusedError

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between retries

InService = dict[str, list[str]]  # each model's versions, the current one last


class Restore:
    """Loads models at an engine's start, and retries those that were in service before."""

    def __init__(self, models: Models, report_event: Callable[..., None]) -> None:
        self._models, self._report_event = models, report_event
        self._lost: InService = {}  # versions that were in service and fail to load
        self._backoff, self._retry_at = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0.0

    def begin(self, before: Mapping[str, list[str]] | None, names: Sequence[str]) -> None:
        """Load what was in service `before`, or at a first start the newest versions of the models `names`."""
        wanted: Mapping[str, list[str]] = {name: [] for name in names} if before is None else before
        for name, versions in wanted.items():
            if (why := self._load(name, versions)) is not None:
                self._report_event("refused", model=name, why=why)
                if versions:
                    self._lost[name] = versions
        self._retry_at = time.monotonic() + self._backoff.next()

    def retry(self) -> None:
        """Load the lost models again, if the backoff is over."""
        if not self._lost or time.monotonic() < self._retry_at:
            return
        for name, versions in list(self._lost.items()):
            if self._current(name) or self._load(name, versions) is None:
                self.forget(name)
        self._retry_at = time.monotonic() + self._backoff.next()

    def forget(self, name: str) -> None:
        """Stop retrying a model."""
        self._lost.pop(name, None)

    def in_service(self) -> InService:
        """What a restarted engine should load: the loaded versions, and the lost models."""
        found = dict(self._lost)
        for name, model in self._models.by_name.items():
            current, versions = model.current, list(model.versions)
            if current is not None or name not in found:
                last = [] if current is None else [current.name]
                found[name] = [version for version in versions if version not in last] + last
        return found

    def _load(self, name: str, versions: Sequence[str]) -> str | None:
        """Load these versions in order, or the newest if none of them loads. Returns None, or why the model is not in
        service."""
        why = ""
        for version in (*versions, None):
            if version is None and self._current(name):
                break
            try:
                self._models.load(name, version)
            except RefusedError as error:
                why = str(error)
        current = self._current(name)
        if current:
            self._report_event("loaded", model=name, version=current)
        return None if current else why

    def _current(self, name: str) -> str:
        model = self._models.by_name.get(name)
        return "" if model is None or model.current is None else model.current.name
