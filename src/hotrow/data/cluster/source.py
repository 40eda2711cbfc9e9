"""OnRay: a source whose decoding and feature work run on a Ray cluster.

It wraps any source and streams the same batches with the same cursors, in order. A checkpoint written with it resumes
without it, and vice versa. Many workers decode a source that can be split (split.py); one worker reads any other.
Every pass has its own window (window.py), which is closed when the iterator is closed, exhausted or raises. Each rank
is a process and joins the cluster by itself.

A rank reads its own batches with `every`. Where the source has a strided view (strided.py), workers decode no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing

from hotrow.batch import KeyedBatch
from hotrow.data.cluster.connect import connect
from hotrow.data.cluster.submit import Decodable, Submitter
from hotrow.data.cluster.window import Limits, Window, WorkerStats, describe_limits
from hotrow.data.source import Cursor, Source
from hotrow.data.split import Splittable, Unit, finished_batches
from hotrow.data.strided import Steps, Strided, StridedStream, SupportsStride, finished_steps, stride_batches
from hotrow.errors import OptionError
from hotrow.features import FeatureSpec
from hotrow.units import parse_size


def on_ray(
    source: Source,
    address: str | None = None,
    *,
    workers: int | None = None,
    ahead: int | None = None,
    memory: str | int = "1GiB",
    cpus: float = 1.0,
    resources: Mapping[str, float] | None = None,
    timeout: float = 300.0,
) -> OnRay:
    """The same source, decoded on a Ray cluster: the same batches, cursors and bits.

    address: "HOST:PORT" of the head, "auto" for the cluster that this machine has joined, "local" for a Ray that this
    process starts; default: the cluster that the process has joined, else RAY_ADDRESS, else "local". workers: how many
    units are decoded at once; default: one for each CPU that the cluster has now. ahead: how many units may be in
    flight at once, decoded ones included; default: 2 for each worker. memory: how many bytes they may take in Ray's
    object store. cpus, resources: what Ray reserves for each worker. timeout: seconds without a decoded unit before an
    error.

    >>> clicks = on_ray(hr.data.synthetic(examples=100_000), "10.0.0.5:6379", workers=16)  # doctest: +SKIP
    >>> trainer.fit(clicks)  # doctest: +SKIP
    """
    _check_count("workers", workers)
    _check_count("ahead", ahead)
    for name, number in (("cpus", cpus), ("timeout", timeout)):
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not number > 0:
            raise OptionError(f"{name}={number!r}; give a number above 0")
    if not callable(getattr(source, "batches", None)) or isinstance(source, OnRay):
        raise OptionError(f"source={source!r}; pass a source such as hr.data.parquet(...), once")
    if getattr(source, "histories", None) is not None:
        raise OptionError(
            "histories= needs every row of the log in order, in one process: read this source without on_ray, or write "
            "the histories into the files as list columns first"
        )
    limits = Limits(workers, ahead, parse_size(memory, "memory"), float(timeout), float(cpus))
    return OnRay(source, address, limits, dict(resources or {}))


class OnRay:
    """A source on a cluster. Made by `hotrow.data.on_ray`."""

    def __init__(self, source: Source, address: str | None, limits: Limits, resources: dict[str, float]) -> None:
        self.source = source
        self._stats = WorkerStats()
        self._limits = limits
        store = 2 * limits.memory + (100 << 20)
        self.address = connect(address, limits.workers and max(1, round(limits.workers * limits.cpus)), store)
        self._resources = resources

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        """The source's batches from the start, or after the batch that came with `cursor`."""
        units = self.source.units(cursor) if isinstance(self.source, Splittable) else None
        return self._stream(cursor, units)

    def every(self, number: int, of: int, cursor: Cursor | None = None) -> Steps:
        """Batch `number` of every `of` batches, None where the source has ended before it, with the cursor after all.

        Workers make no features for other ranks' batches, unless the source cannot tell where those are.
        """
        source = self.source
        strided = source.strided(number, of) if of > 1 and isinstance(source, SupportsStride) else None
        units = strided.units(cursor) if strided is not None else None
        if strided is not None and units is not None:
            return self._stream_strided(cursor, strided, units)
        if of > 1 and (not isinstance(source, Splittable) or source.units(cursor) is None):
            return self._stream_serial(cursor, StridedStream(source, number, of))
        return stride_batches(self.batches(cursor), number, of)

    def scale(self, workers: int | None) -> None:
        """Set how many workers decode from now on, also in running passes; None for all the cluster has.

        A worker that is no longer needed finishes its current unit.
        """
        _check_count("workers", workers)
        self._limits.workers = workers

    def describe(self) -> str:
        """One line for a log."""
        return f"{self.source.describe()}; on Ray at {self.address}, {describe_limits(self._limits)}"

    @property
    def decoded_by(self) -> Counter[tuple[str, int]]:
        """How many units each worker has decoded in all passes, by Ray's node id and the process id there."""
        return self._stats.units

    @property
    def worker_seconds(self) -> float:
        """CPU seconds that workers have spent decoding, in all passes."""
        return self._stats.seconds

    @property
    def examples(self) -> int | None:
        """How many examples a whole pass has, if the source knows."""
        return self.source.examples

    @property
    def features(self) -> FeatureSpec | None:
        """The source's feature spec, if it has one."""
        found = getattr(self.source, "features", None)
        return found if isinstance(found, FeatureSpec) else None

    @property
    def skipped(self) -> int:
        """How many rows the latest pass has skipped so far; 0 for a source that is read by one worker."""
        return int(getattr(self.source, "skipped", 0))

    def _stream_strided(self, cursor: Cursor | None, strided: Strided, units: Iterator[Unit]) -> Steps:
        with self._window(strided, units, cursor) as window:
            yield from strided.assemble(cursor, window.parts(), window.decode_now)

    def _stream_serial(self, cursor: Cursor | None, stream: StridedStream) -> Steps:
        with self._window(stream, None, cursor) as window:
            yield from finished_steps(window.parts())

    def _stream(self, cursor: Cursor | None, units: Iterator[Unit] | None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        with self._window(self.source, units, cursor) as window:
            if units is None:
                yield from finished_batches(window.parts())
            else:
                assert isinstance(self.source, Splittable)
                yield from self.source.assemble(cursor, window.parts(), window.decode_now)

    def _window(self, source: Decodable, units: Iterator[Unit] | None, cursor: Cursor | None) -> closing[Window]:
        submit = Submitter(source, units is None, self._limits.cpus, self._resources)
        return closing(Window(submit, units, {"cursor": cursor}, self._limits, self._stats))


def _check_count(option: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise OptionError(f"{option}={value!r}; give a whole number, 1 or more, or leave it out")
