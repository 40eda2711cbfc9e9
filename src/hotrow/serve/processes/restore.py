"""Restore: makes a restarted engine serve the same models and versions as before.

An engine reports to its supervisor which versions of which models are loaded (`in_service`). The supervisor passes this
to the restarted engine, which loads the same: the current version, the version kept for rollback, and nothing that was
unloaded. A model that was in service and fails to load, for example because its row store is down, is retried for ever,
and so is a canary or another version beside it. The release of each model (aliases, canary, shadow) is passed on too: a
restarted engine must not follow a newer release file before the other engines do.

Threads: `begin` first. Then one thread calls `retry`, and any thread the other methods.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hotrow.backoff import Backoff
from hotrow.serve.batching.versions import Models
from hotrow.serve.protocol.request import RefusedError
from hotrow.serve.repository.releases import Release

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between retries

InService = dict[str, list[str]]  # each model's versions, the current one last


class Restore:
    """Loads models at an engine's start, and retries those that were in service before."""

    def __init__(self, models: Models, report_event: Callable[..., None]) -> None:
        self._models, self._report_event = models, report_event
        self._lost: InService = {}  # models that have lost versions, with all their versions
        self._backoff, self._retry_at = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0.0

    def begin(
        self,
        before: Mapping[str, list[str]] | None,
        names: Sequence[str],
        releases: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Load what was in service `before` with its `releases`, or at a first start what the repository releases of
        the models `names`."""
        wanted: Mapping[str, list[str]] = {name: [] for name in names} if before is None else before
        for name, versions in wanted.items():
            if name in (releases or {}):
                self._models.restore_release(name, Release.from_json((releases or {})[name]))
            if not (why := self._load(name, versions)):
                continue
            self._report_event("refused", model=name, why=why)
            if versions:
                self._lost[name] = versions
        self._retry_at = time.monotonic() + self._backoff.next()

    def retry(self) -> None:
        """Load what is lost again, if the backoff is over."""
        if not self._lost or time.monotonic() < self._retry_at:
            return
        for name, versions in list(self._lost.items()):
            problems = self._models.load_missing(name, versions) if self._current(name) else self._load(name, versions)
            if not problems:
                self.forget(name)
        self._retry_at = time.monotonic() + self._backoff.next()

    def forget(self, name: str) -> None:
        """Stop retrying a model."""
        self._lost.pop(name, None)

    def releases(self) -> dict[str, dict[str, Any]]:
        """The release of each loaded model."""
        return {name: model.release.to_json() for name, model in self._models.by_name.items()}

    def in_service(self) -> InService:
        """What a restarted engine should load: the loaded versions, and the lost models."""
        found = dict(self._lost)
        for name, model in self._models.by_name.items():
            current, versions = model.current, list(model.versions)
            if current is not None or name not in found:
                last = [] if current is None else [current.name]
                lost = [version for version in self._lost.get(name, ()) if version not in versions]
                found[name] = lost + [version for version in versions if version not in last] + last
        return found

    def _load(self, name: str, versions: Sequence[str]) -> str:
        """Load these versions, the last one for service; what the repository releases if none is in service then and
        none was stable before. Returns why something is not loaded, or ""."""
        model = self._models.by_name.get(name)
        named = set() if model is None else set(model.release.named().values()) - set(versions[-1:])
        problems = []
        for version in (*[version for version in versions if version not in named], None):
            if version is None and (self._current(name) or (model is not None and model.release.stable)):
                break
            try:
                self._models.load(name, version)
            except RefusedError as error:
                problems.append(str(error))
        problems += self._models.load_missing(name, versions)
        if current := self._current(name):
            self._report_event("loaded", model=name, version=current)
        return "; ".join(problems)

    def _current(self, name: str) -> str:
        model = self._models.by_name.get(name)
        return "" if model is None or model.current is None else model.current.name
