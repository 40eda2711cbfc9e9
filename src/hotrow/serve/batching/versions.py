"""Versions: the models of an engine by name and by number. A version is loaded while another serves, then replaces it.

A model has a number, and so has each of its loaded versions. A request names either, so connection readers handle "the
version in service" and "that version" alike. Numbers are never reused.

A new version is loaded and warmed up (a few batches of several sizes) on the thread that called `load`, while the old
one serves. Then one assignment puts it in service. A batch looks up its version once, when a lane takes it, so one
version answers the whole batch. No request fails because of a change of versions: the old version stays loaded (`keep`)
and still answers frames that were built for its signature; a rollback to it needs no load. If a version does not load,
the error names it and the reason, and nothing changes.

Threads: `load` and `unload` take a lock. Any thread may call `resolve` and `version_for`, which take none: they read
dictionaries that are replaced whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import HotRowError, OptionError, choices
from hotrow.serve.batching.tensorbatch import Group
from hotrow.serve.protocol.request import Array, RefusedError, Signature
from hotrow.serve.updates.freshness import AnswerAges, Freshness

WARM_SIZES = (1, 8, 64, 512)


class Servable(Protocol):
    """One loaded version, which computes the logits of a joined batch. Several lanes call it at the same time."""

    signature: Signature

    def run(self, batch: KeyedBatch, policy: str) -> Any:
        """(logits, late), optionally followed by `compiled` and a Freshness. The logits are [rows] or [rows, tasks];
        `late` is how many ids the policy answered, one number or one per row."""
        ...


class LookupReader(Protocol):
    """The further members of a Servable that answers lookups."""

    widths: Sequence[int]  # of each feature's vectors, in the signature's order

    def lookup(self, batch: KeyedBatch, policy: str, tower: bool, until: float | None = None) -> Any:
        """(vectors, logits, late, compiled, Freshness), all of one publication. The vectors are on the CPU and named as
        by Engine.lookup; the logits are None without `tower`, and then the batch may have no dense features. `until` as
        in Version.run."""
        ...


class ColdRowReader(Protocol):
    """The further methods of a Servable whose rows may be on SSD only, or in a remote store."""

    def cold(self, batch: KeyedBatch) -> Array | None:
        """Which rows of the batch have keys that are not in memory, bool [rows]; None if none has."""
        ...

    def prefetch(self, batch: KeyedBatch, patient: bool = False) -> None:
        """Load the batch's rows into memory; returns when they are loaded or the store has failed. With `patient`, it
        waits without a limit."""
        ...


Loader = Callable[[Path, Mapping[str, Any]], Servable]  # takes a version's folder and the engine's options


@dataclass
class VersionCounts:
    """Totals of a version. Seconds are summed over requests, each of which waits for its whole batch."""

    requests: int = 0
    failed: int = 0
    rows: int = 0
    executions: int = 0
    late_by_policy: dict[str, int] = field(default_factory=dict)  # ids
    compiled: int = 0  # executions
    without_tower: int = 0  # executions
    lookups: int = 0  # requests that wanted embedding outputs
    lookup_rows: int = 0
    lookup_bytes: int = 0  # of the vectors in their answers
    queue_seconds: float = 0.0
    join_seconds: float = 0.0
    run_seconds: float = 0.0
    answer_seconds: float = 0.0
    last: float = 0.0  # time.time of the last answer


@dataclass(eq=False)
class Version:
    """A loaded version."""

    number: int
    name: str
    servable: Any
    counts: VersionCounts = field(default_factory=VersionCounts)
    ages: AnswerAges = field(default_factory=AnswerAges)  # of the data that it answered from
    sizes: dict[int, list[float]] = field(default_factory=dict)  # power of two of the rows → executions, seconds

    def __post_init__(self) -> None:
        self.signature: Signature = self.servable.signature
        self.fingerprint = self.signature.fingerprint
        self.can_be_cold = getattr(self.servable, "cold", None) is not None and getattr(
            self.servable, "can_be_cold", True
        )

    @property
    def answers_lookups(self) -> bool:
        """Whether its servable is a LookupReader."""
        return bool(getattr(self.servable, "widths", ()))

    @property
    def publication(self) -> int:
        """The newest publication that it has applied."""
        return int(getattr(self.servable, "publication", 0))

    @property
    def waits_for_rows(self) -> bool:
        """Whether `run` reads rows from other machines, by a deadline."""
        return bool(getattr(self.servable, "waits_for_rows", False))

    def run(
        self, batch: KeyedBatch, policy: str, until: float | None = None
    ) -> tuple[Tensor, int | Any, bool, Freshness]:
        """Logits, late ids (one number or one per row), whether compiled buckets answered, and the data's freshness.
        `until` (time.monotonic()) is when rows on other machines are late, for a version that `waits_for_rows`."""
        run: Any = self.servable.run
        result = run(batch, policy, until) if self.waits_for_rows else run(batch, policy)
        fresh = result[3] if len(result) > 3 else Freshness.of(self.publication, None)
        return result[0], result[1], bool(result[2]) if len(result) > 2 else False, fresh


class Model:
    """A model's versions. `current` answers the requests that name no version."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.group = Group(name)
        self.lookups = Group(name)  # requests for embedding outputs
        self.versions: dict[str, Version] = {}  # newest use last
        self.current: Version | None = None
        self.refused: dict[str, str] = {}  # version → why it did not load

    def version_for(self, fingerprint: int, pinned: Version | None = None) -> Version | None:
        """The version that answers a frame with this signature now."""
        if pinned is not None:
            return pinned if pinned.fingerprint == fingerprint else None
        current = self.current
        if current is None or current.fingerprint == fingerprint:
            return current
        return next((v for v in reversed(self.versions.values()) if v.fingerprint == fingerprint), None)


class Models:
    """All models of an engine."""

    def __init__(
        self,
        repository: str | Path,
        loader: Loader,
        options: Mapping[str, Any] | None = None,
        changed: Callable[[], None] = lambda: None,
        keep: int = 1,
    ) -> None:
        self.repository, self.loader, self.options = Path(repository), loader, dict(options or {})
        self.keep = keep
        self.changed = changed
        self.by_name: dict[str, Model] = {}
        self._by_number: dict[int, tuple[Model, Version | None]] = {}
        self._next = 1
        self._load_lock = threading.Lock()

    def resolve(self, number: int) -> tuple[Model, Version | None]:
        """The model of a number, and the version if the number is a version's. Raises RefusedError."""
        found = self._by_number.get(number)
        if found is None:
            raise RefusedError(503, "the model was unloaded or its version retired; send the request again", 0.1)
        return found

    # --- the repository ---

    def names(self) -> list[str]:
        """The repository's models."""
        if not self.repository.is_dir():
            raise OptionError(f"there is no repository {self.repository}; hr.export(model, '{self.repository}/ctr')")
        return sorted(path.name for path in self.repository.iterdir() if path.is_dir() and self.available(path.name))

    def available(self, name: str) -> list[str]:
        """A model's versions in the repository, oldest first."""
        folder = self.repository / name
        if name.startswith(".") or "/" in name or not folder.is_dir():
            return []
        numbers = [int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        return [str(number) for number in sorted(numbers)]

    # --- loading and unloading ---

    def load(self, name: str, version: str | None = None) -> Version:
        """Put a model's newest version (or `version`) in service. If it raises RefusedError, nothing has changed."""
        with self._load_lock:
            found = self.available(name)
            if not found:
                raise RefusedError(404, f"no model {name!r} in the repository; {choices(name, self.names())}")
            wanted = version if version is not None else found[-1]
            model = self.by_name.get(name) or Model(name, self._number())
            ready = model.versions.get(wanted)
            if ready is None:
                if wanted not in found:
                    raise RefusedError(404, f"model {name!r} has no version {wanted!r}; {choices(wanted, found)}")
                ready = self._open(model, wanted)
            self._put_in_service(model, ready)
        return ready

    def unload(self, name: str) -> Model:
        """Take a model out of service: its requests are refused from now on."""
        with self._load_lock:
            if name not in self.by_name:
                raise RefusedError(404, f"model {name!r} is not loaded; {choices(name, self.by_name)}")
            model = self.by_name[name]
            self.by_name = {key: value for key, value in self.by_name.items() if key != name}
            self._by_number = {key: value for key, value in self._by_number.items() if value[0] is not model}
        self.changed()
        close_in_background(list(model.versions.values()))
        return model

    def poll(self) -> list[str]:
        """Load versions that are newer in the repository than in service; returns the errors."""
        problems = []
        for name in self.names():
            newest = self.available(name)[-1]
            model = self.by_name.get(name)
            if model is not None and (
                newest in model.refused or (model.current is not None and int(model.current.name) >= int(newest))
            ):
                continue
            try:
                self.load(name)
            except RefusedError as error:
                problems.append(str(error))
        return problems

    def _open(self, model: Model, wanted: str) -> Version:
        folder = self.repository / model.name / wanted
        try:
            version = Version(self._number(), wanted, self.loader(folder, self.options))
            warm_up(version, model.group, int(self.options.get("max_rows", WARM_SIZES[-1])))
        except Exception as error:  # a damaged version must not affect the one that serves
            kind = "" if isinstance(error, HotRowError) else f"{type(error).__name__}: "
            model.refused[wanted] = f"{kind}{error}"
            self.by_name = {**self.by_name, model.name: model}
            self.changed()
            raise RefusedError(400, f"version {wanted} of model {model.name!r} does not load: {kind}{error}") from error
        return version

    def _put_in_service(self, model: Model, ready: Version) -> None:
        versions = {name: v for name, v in model.versions.items() if v is not ready and v is not model.current}
        if model.current is not None and model.current is not ready:
            versions[model.current.name] = model.current
        kept = dict(list(versions.items())[-self.keep :]) if self.keep else {}
        model.versions = {**kept, ready.name: ready}
        model.refused.pop(ready.name, None)
        numbers = {key: value for key, value in self._by_number.items() if value[0] is not model}
        numbers[model.number] = (model, None)
        numbers.update({v.number: (model, v) for v in model.versions.values()})
        before = model.current
        retired = [v for v in versions.values() if v not in model.versions.values()]
        self._by_number = numbers
        self.by_name = {**self.by_name, model.name: model}
        if before is not ready:
            self.changed()  # front ends get the version's number before an answer has it
            model.current = ready
            self.changed()
        close_in_background(retired)

    def _number(self) -> int:
        self._next += 1
        return self._next - 1


def close_in_background(versions: list[Version]) -> None:
    """Close retired versions on a thread of their own. Batches that run already end normally."""
    ends = [v.servable.close for v in versions if hasattr(v.servable, "close")]
    if ends:
        threading.Thread(target=lambda: [end() for end in ends], name="hotrow-close-versions", daemon=True).start()


def warm_up(version: Version, group: Group, max_rows: int) -> None:
    """Run a few batches, so that everything is allocated before the first request, and measure how long they take."""
    first = not group.service_time.known
    for rows in sorted({min(rows, max_rows) for rows in (*WARM_SIZES, max_rows)}):
        batch = example_batch(version.signature, rows)
        for _ in range(3):
            begin = time.monotonic()
            with torch.inference_mode():
                logits = version.run(batch, "initial")[0]
            seconds = time.monotonic() - begin
        if logits.shape[0] != rows:
            raise OptionError(f"the tower gave {logits.shape[0]} logits for {rows} rows")
        if first:
            group.service_time.note(rows, seconds)


def example_batch(signature: Signature, rows: int) -> KeyedBatch:
    """A batch that every model with this signature can run."""
    keys = torch.arange(rows, dtype=torch.int64)
    every = torch.arange(rows + 1, dtype=torch.int64)
    ids = {name: Jagged(keys, every if name in signature.sequences else None) for name in signature.features}
    return KeyedBatch(ids, dense=torch.zeros(rows, signature.dense) if signature.dense else None)
