"""Versions: the models of an engine by name and by number. A version is loaded while another serves, then replaces it.

A model has a number, and so has each of its loaded versions. A request names either, so connection readers handle "the
version in service" and "that version" alike. Numbers are never reused.

A new version is loaded and warmed up (a few batches of several sizes) on the thread that called `load`, while the old
one serves. Then one assignment puts it in service. A batch looks up its version once, when a lane takes it, so one
version answers the whole batch. No request fails because of a change of versions: the old version stays loaded (`keep`)
and still answers frames that were built for its signature; a rollback to it needs no load. If a version does not load,
the error names it and the reason, and the others serve on.

A model's release (repository/releases.py) says which version is in service (`stable`, else the newest), and which
others are loaded beside it: canary, shadow, aliases. Front ends choose the requests of the canary (frontend/canary.py).
Lanes give copies of the requests that the version in service has answered to the shadow (shadow.py).

Threads: `load` and `unload` take a lock. Any thread may call `resolve` and `version_for`, which take none: they read
dictionaries that are replaced whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import HotRowError, OptionError, choices
from hotrow.serve.batching.shadow import ShadowCounts
from hotrow.serve.batching.tensorbatch import Group
from hotrow.serve.protocol.request import Array, RefusedError, Signature
from hotrow.serve.repository.releases import Release, read_release, split_alias
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
    shadow: ShadowCounts = field(default_factory=ShadowCounts)  # of its runs as a shadow

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
        self.release = Release()  # that these versions were loaded for
        self.missing: set[str] = set()  # refused versions that the repository does not have yet
        self.release_error = ""  # why the release file could not be read, at the last poll
        self.shadow: tuple[Version, float] | None = (
            None  # it and its share, while it is loaded and takes the same inputs
        )

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
        """Put a model's released version in service (the newest one without a release), and load those beside it; or
        put `version` in service. `name` may be `model@alias`: then that alias must be known.

        If the version for service does not load, RefusedError is raised and the one before it serves on. If another one
        does not load, the error is raised after all others are in place.
        """
        name, alias = split_alias(name)
        with self._load_lock:
            found = self.available(name)
            if not found:
                raise RefusedError(404, f"no model {name!r} in the repository; {choices(name, self.names())}")
            model = self.by_name.get(name) or Model(name, self._number())
            if version is not None:
                return self._load_for_service(model, version, found, model.release)
            release = self._read_release(name)
            if alias is not None and alias not in release.named():
                raise RefusedError(404, f"model {name!r} has no alias {alias!r}; {choices(alias, release.named())}")
            problems = []
            try:
                self._load_for_service(model, release.stable or found[-1], found, release)
            except RefusedError as error:
                problems.append(error)
            problems += self._load_beside(model, release)
            if problems:
                raise problems[0]
            named = release.named()
            return model.versions[named[alias] if alias is not None else release.stable or found[-1]]

    def restore_release(self, name: str, release: Release) -> None:
        """Before `load` of single versions after a restart: keep those that this release names."""
        with self._load_lock:
            if self.available(name):
                model = self.by_name.get(name) or Model(name, self._number())
                model.release = release
                self.by_name = {**self.by_name, name: model}

    def load_missing(self, name: str, only: Collection[str]) -> list[str]:
        """Load those of the versions `only` that the release names and that are not loaded; returns the errors."""
        with self._load_lock:
            model = self.by_name.get(name)
            if model is None or not set(only) & set(model.release.named().values()) - set(model.versions):
                return []
            return [str(error) for error in self._load_beside(model, model.release, only)]

    def unload(self, name: str) -> Model:
        """Take a model out of service: its requests are refused from now on. `model@alias` takes out that version."""
        name, alias = split_alias(name)
        with self._load_lock:
            if name not in self.by_name:
                raise RefusedError(404, f"model {name!r} is not loaded; {choices(name, self.by_name)}")
            model = self.by_name[name]
            if alias is not None:
                self._unload_version(model, alias)
                return model
            self.by_name = {key: value for key, value in self.by_name.items() if key != name}
            self._by_number = {key: value for key, value in self._by_number.items() if value[0] is not model}
        self.changed()
        close_in_background(list(model.versions.values()))
        return model

    def poll(self) -> list[str]:
        """Follow the repository: changed release files, and newer versions of models without a stable one. Returns the
        errors."""
        problems = []
        for name in self.names():
            try:
                if self._is_behind(name):
                    self.load(name)
            except RefusedError as error:
                problems.append(str(error))
        return problems

    def _is_behind(self, name: str) -> bool:
        """Whether the repository has something for this model that was not tried yet."""
        model = self.by_name.get(name)
        if model is None:
            return True
        error, model.release_error = model.release_error, ""
        try:
            release = self._read_release(name)
        except RefusedError as refused:
            model.release_error = str(refused)
            if model.release_error != error:  # report it once
                raise
            return False
        available = self.available(name)
        if release != model.release or model.missing & set(available):
            return True
        wanted, current = release.stable or available[-1], model.current
        if wanted in model.refused:
            return False
        return current is None or (current.name != wanted if release.stable else int(current.name) < int(wanted))

    def _read_release(self, name: str) -> Release:
        try:
            return read_release(self.repository / name)
        except HotRowError as error:
            raise RefusedError(400, str(error)) from error

    def _load_for_service(self, model: Model, wanted: str, found: list[str], release: Release) -> Version:
        """Load a version unless it is loaded, and put it in service."""
        ready = model.versions.get(wanted) or self._open(model, wanted, found)
        self._set_versions(model, {**model.versions, ready.name: ready}, ready, (model.release, release))
        return ready

    def _load_beside(self, model: Model, release: Release, only: Collection[str] | None = None) -> list[RefusedError]:
        """Load the versions that the release names (of `only`), and make it the model's. Returns the errors."""
        problems = []
        for wanted in dict.fromkeys(release.named().values()):
            if wanted in model.versions or wanted == release.stable or (only is not None and wanted not in only):
                continue
            try:
                ready = self._open(model, wanted, self.available(model.name))
            except RefusedError as error:
                problems.append(error)
                continue
            self._set_versions(model, {ready.name: ready, **model.versions}, model.current, (model.release, release))
        model.release = release
        self._set_versions(model, model.versions, model.current, (release,))
        shadow = release.shadow
        if shadow is not None and model.shadow is None and str(shadow.version) in model.versions and model.current:
            why = f"version {shadow.version} takes other inputs than version {model.current.name} of {model.name!r}"
            problems.append(RefusedError(400, f"{why}, so it cannot be its shadow; try it as a canary"))
        return problems

    def _open(self, model: Model, wanted: str, found: Collection[str]) -> Version:
        """Load a version. Raises RefusedError, also if it is not among the versions `found`."""
        if wanted not in found:
            why = f"model {model.name!r} has no version {wanted!r}; {choices(wanted, found)}"
            model.missing.add(wanted)
            self._note_refused(model, wanted, why)
            raise RefusedError(404, why)
        model.missing.discard(wanted)
        folder = self.repository / model.name / wanted
        try:
            version = Version(self._number(), wanted, self.loader(folder, self.options))
            warm_up(version, model.group, int(self.options.get("max_rows", WARM_SIZES[-1])))
        except Exception as error:  # a damaged version must not affect the one that serves
            kind = "" if isinstance(error, HotRowError) else f"{type(error).__name__}: "
            self._note_refused(model, wanted, f"{kind}{error}")
            raise RefusedError(400, f"version {wanted} of model {model.name!r} does not load: {kind}{error}") from error
        return version

    def _note_refused(self, model: Model, wanted: str, why: str) -> None:
        model.refused[wanted] = why
        self.by_name = {**self.by_name, model.name: model}
        self.changed()

    def _unload_version(self, model: Model, alias: str) -> None:
        named = model.release.named()
        if alias not in named:
            raise RefusedError(404, f"model {model.name!r} has no alias {alias!r}; {choices(alias, named)}")
        out = model.versions.get(named[alias])
        if out is None:
            raise RefusedError(404, f"version {named[alias]} of model {model.name!r} is not loaded")
        if out is model.current:
            raise RefusedError(
                400,
                f"{model.name}@{alias} is version {out.name}, which answers requests that name none; unload "
                f"{model.name!r}, or make another version stable",
            )
        self._replace(model, {name: version for name, version in model.versions.items() if version is not out})

    def _set_versions(
        self, model: Model, versions: dict[str, Version], current: Version | None, releases: tuple[Release, ...]
    ) -> None:
        """Put `current` in service with these versions, as far as they are to be kept: those that a release names, and
        the last `keep` others."""
        if current is not None:  # the newest use last
            before = {model.current.name: model.current} if model.current is not None else {}
            versions = {n: v for n, v in versions.items() if v is not current and n not in before} | before
            versions.pop(current.name, None)
        named = {version for release in releases for version in release.named().values()}
        others = [name for name in versions if name not in named]
        kept = named | set(others[-self.keep :] if self.keep else ())
        versions = {name: version for name, version in versions.items() if name in kept}
        self._replace(model, versions | ({} if current is None else {current.name: current}), current)

    def _replace(self, model: Model, versions: dict[str, Version], current: Version | None = None) -> None:
        """Make these the model's versions, and close those that it had besides."""
        retired = [version for version in model.versions.values() if version not in versions.values()]
        before = model.current
        model.versions = versions
        for name in versions:
            model.refused.pop(name, None)
        numbers = {key: value for key, value in self._by_number.items() if value[0] is not model}
        numbers[model.number] = (model, None)
        numbers.update({version.number: (model, version) for version in versions.values()})
        self._by_number = numbers
        self.by_name = {**self.by_name, model.name: model}
        self._set_shadow(model, before)
        self.changed()  # front ends get the version's number before an answer has it
        if current is not None and current is not before:
            model.current = current
            self._set_shadow(model, current)
            self.changed()
        close_in_background(retired)

    @staticmethod
    def _set_shadow(model: Model, current: Version | None) -> None:
        given = model.release.shadow
        found = None if given is None else model.versions.get(str(given.version))
        alike = found is not None and current is not None and found.fingerprint == current.fingerprint
        model.shadow = (found, given.share) if found is not None and given is not None and alike else None

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
    one = Jagged(keys[:1], every[:2])

    def column(name: str) -> Jagged:
        if name in signature.user:  # one user for all rows, as in a request
            return one if name in signature.sequences or name in signature.numbers else Jagged(keys[:1])
        return Jagged(keys, every if name in signature.sequences or name in signature.numbers else None)

    return KeyedBatch(
        {name: column(name) for name in signature.features},
        dense=torch.zeros(rows, signature.dense) if signature.dense else None,
        numbers={name: column(name) for name in signature.numbers},
        user_of=torch.zeros(rows, dtype=torch.int64) if signature.user else None,
        user_features=signature.user,
    )
