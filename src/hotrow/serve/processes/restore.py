"""Restore: an engine that is started again serves what it served when it died.

While it lives, an engine tells its supervisor which versions of which models are loaded (`in_service`); the supervisor
gives that to its next life, which loads the same: not what was unloaded, and the version that was in service, with the
one that was kept for going back. A model that was in service and does not load now, because the store of its rows is
away perhaps, is tried again as long as it takes.

Threads: `begin` first; then `retry` by one thread, the others from any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hotrow.backoff import Backoff
from hotrow.serve.batching.versions import Models
from hotrow.serve.protocol.request import RefusedError

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between tries

InService = dict[str, list[str]]  # each model's versions, the current one last


class Restore:
    """Brings models into service at an engine's start, and again if they were lost."""

    def __init__(self, models: Models, tell: Callable[..., None]) -> None:
        self._models, self._tell = models, tell
        self._lost: InService = {}  # were in service, and do not load
        self._backoff, self._again = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0.0

    def begin(self, before: Mapping[str, list[str]] | None, names: Sequence[str]) -> None:
        """Load what there was before; in a first life the newest versions of the models named."""
        wanted: Mapping[str, list[str]] = {name: [] for name in names} if before is None else before
        for name, versions in wanted.items():
            if (why := self._load(name, versions)) is not None:
                self._tell("refused", model=name, why=why)
                if versions:
                    self._lost[name] = versions
        self._again = time.monotonic() + self._backoff.next()

    def retry(self) -> None:
        """Load what was lost, if it is time."""
        if not self._lost or time.monotonic() < self._again:
            return
        for name, versions in list(self._lost.items()):
            if self._current(name) or self._load(name, versions) is None:
                self.forget(name)
        self._again = time.monotonic() + self._backoff.next()

    def forget(self, name: str) -> None:
        """A model need not come back."""
        self._lost.pop(name, None)

    def in_service(self) -> InService:
        """What the next life should have: what is loaded, and what was lost."""
        found = dict(self._lost)
        for name, model in self._models.by_name.items():
            current, versions = model.current, list(model.versions)
            if current is not None or name not in found:
                last = [] if current is None else [current.name]
                found[name] = [version for version in versions if version not in last] + last
        return found

    def _load(self, name: str, versions: Sequence[str]) -> str | None:
        """Load versions in order, or the newest if none of them loads; why the model is not in service, if it isn't."""
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
            self._tell("loaded", model=name, version=current)
        return None if current else why

    def _current(self, name: str) -> str:
        model = self._models.by_name.get(name)
        return "" if model is None or model.current is None else model.current.name
