"""Sources on a real Ray cluster of several nodes: the same batches, cursors and bits as here, whatever dies."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hotrow as hr
from hotrow import child_process, data
from hotrow.batch import Jagged, KeyedBatch
from hotrow.data import Cursor, Source
from hotrow.data.cluster import connect
from hotrow.data.split import DecodedUnit, DecodedUnits, Unit, finished_batches
from hotrow.errors import ClusterError, DataError, OptionError
from hotrow.features import Dense, FeatureSpec, Key, Sequence
from hotrow.job import load_job

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402
from ray_cluster import eventually, start_cluster  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

Stream = list[tuple[KeyedBatch, Cursor]]
ROWS = 3000
SPEC = FeatureSpec([Key("user"), Key("item"), Sequence("seen"), Dense("price")], label="click", time="when")
LAYOUT = data.TextLayout({"click": "number", "user": "string", "age": "number"}, delimiter=";", header=False)
TEXT_SPEC = FeatureSpec([Key("user"), Dense("age")], label="click")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs and two nodes, with three CPUs in all; this process joins as a trainer would."""
    made = start_cluster([{"num_cpus": cpus} for cpus in (0, 1, 2)])
    data.on_ray(data.synthetic(examples=1), made.address)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Parquet files with several row groups, two text files with a few bad lines, one of them also as gzip."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(2):
        rows = range(number * ROWS, (number + 1) * ROWS)
        table = {
            "user": [f"user-{i % 77}" if i % 5 else None for i in rows],
            "item": list(rows),
            "seen": [list(range(i % 4)) if i % 6 else None for i in rows],
            "price": [i / 4 if i % 3 else None for i in rows],
            "click": [i % 2 for i in rows],
            "when": [1000 * i for i in rows],
        }
        pq.write_table(pa.table(table), folder / f"{number}.parquet", row_group_size=700)
        pad = "x" * 3000 * (1 - number)  # two spans in the first file
        lines = [f"{i % 2};user-{i % 91}{pad};{i % 60}" if i % 500 != 123 else "what is this" for i in rows]
        text = ("\n".join(lines) + "\n").encode()
        (folder / f"{number}.csv").write_bytes(text)
        (folder / f"{number}.csv.gz").write_bytes(gzip.compress(text))
    return folder


class Counting:
    """A source that cannot be split: numbers that it counts up."""

    examples = None

    def __init__(self, batches: int) -> None:
        self.count = batches

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        for at in range(int(cursor["at"]) if cursor else 0, self.count):
            yield KeyedBatch({"n": Jagged(torch.full((100,), at))}), {"at": at + 1}

    def describe(self) -> str:
        return f"numbers to {self.count}"


class Slow:
    """A source that can be split, slowly; every decoding leaves a file that tells the unit and the process."""

    examples = None

    def __init__(self, folder: Path, units: int, seconds: float = 0.2, ids: int = 100, fatal: int = -1) -> None:
        self.folder, self.count, self.seconds, self.ids, self.fatal = folder, units, seconds, ids, fatal

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        for unit in self.units(cursor):
            yield self._batch(unit["at"]), {"at": unit["at"] + 1}

    def describe(self) -> str:
        return "slow"

    def units(self, cursor: Cursor | None = None) -> Iterator[Unit]:
        return ({"at": at} for at in range(int(cursor["at"]) if cursor else 0, self.count))

    def decoder(self) -> Slow:
        return self

    def decode(self, unit: Unit) -> DecodedUnit:
        started = self.folder / f"{unit['at']}-{os.getpid()}-{time.monotonic_ns()}"
        started.touch()
        time.sleep(self.seconds)
        started.write_text(str(time.monotonic_ns()))
        if unit["at"] == self.fatal:
            os._exit(1)
        return DecodedUnit([self._batch(unit["at"])], notes={"cursors": [{"at": unit["at"] + 1}]})

    def assemble(
        self, cursor: Cursor | None, parts: DecodedUnits, decode_now: Callable[[Unit], DecodedUnit]
    ) -> Iterator[tuple[KeyedBatch, Cursor]]:
        return finished_batches(parts)

    def _batch(self, at: int) -> KeyedBatch:
        return KeyedBatch({"n": Jagged(torch.arange(at, at + self.ids))})

    def started(self) -> list[tuple[int, int]]:
        """Unit and process of every decoding so far."""
        names = [path.name.split("-") for path in self.folder.iterdir()]
        return sorted((int(unit), int(pid)) for unit, pid, _ in names)

    def unfinished(self) -> list[tuple[int, int]]:
        """Units that were begun and not finished, and their processes."""
        names = [path.name.split("-") for path in self.folder.iterdir() if not path.read_text()]
        return [(int(unit), int(pid)) for unit, pid, _ in names]

    def running(self) -> list[int]:
        """Processes that have begun a unit and not finished it."""
        return [pid for _, pid in self.unfinished()]


def killed(source: Slow, pids: set[int]) -> set[int]:
    """Kill the processes that decode a unit; returns the units. Each is stopped first, so that it cannot finish."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    lost = {unit: pid for unit, pid in source.unfinished() if pid in pids}
    for pid in pids:
        os.kill(pid, signal.SIGKILL if pid in lost.values() else signal.SIGCONT)
    return set(lost)


def most_at_once(source: Slow) -> int:
    """How many units were being decoded at the same moment, at most."""
    spans = [(int(path.name.split("-")[2]), int(path.read_text() or 0)) for path in source.folder.iterdir()]
    return max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)


def sources(files: Path) -> dict[str, Source]:
    return {
        "parquet": data.parquet(str(files / "*.parquet"), features=SPEC, batch_size=256),
        "text": data.text(str(files / "*.csv"), LAYOUT, features=TEXT_SPEC, batch_size=300, on_error="skip"),
        "gzip": data.text(str(files / "*.gz"), LAYOUT, features=TEXT_SPEC, batch_size=700, on_error="skip"),
        "synthetic": data.synthetic(examples=40_000, batch_size=3000, offset=5, keys=100_000),
        "own": Counting(150),
    }


SPLIT = ["parquet", "text", "synthetic"]
SERIAL = ["gzip", "own"]  # one worker reads them, and every pass starts it: a few seconds each
KINDS = [*SPLIT, *SERIAL]


@pytest.fixture
def same(same_batch: Callable[..., bool]) -> Callable[[Stream, Stream], bool]:
    def same(a: Stream, b: Stream) -> bool:
        return [cursor for _, cursor in a] == [cursor for _, cursor in b] and all(
            same_batch(x, y) for (x, _), (y, _) in zip(a, b, strict=True)
        )

    return same


# The same stream.


@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, n) for kind in SPLIT for n in (1, 3)), ("gzip", 3)],  # a whole pass of "own" is below, with a kill in it
)
def test_batches_and_cursors_are_those_of_reading_here(
    cluster: Cluster, files: Path, same: Callable[..., bool], kind: str, workers: int
) -> None:
    source = sources(files)[kind]
    here = list(source.batches())
    there = data.on_ray(source, cluster.address, workers=workers)
    assert same(list(there.batches()), here) and len(here) > 8
    assert there.examples == source.examples and source.describe() in there.describe()
    assert there.features is getattr(source, "features", None)
    assert os.getpid() not in {pid for _, pid in there.decoded_by} and there.worker_seconds > 0
    assert sum(there.decoded_by.values()) == {"parquet": 10, "text": 3, "synthetic": 3, "gzip": 1}[kind]
    if kind == "text":
        assert there.skipped == 12


@pytest.mark.parametrize("kind", [*SPLIT, "own"])  # gzip is resumed by the same worker as "own"
def test_every_cut_resumes_there_and_here(cluster: Cluster, files: Path, same: Callable[..., bool], kind: str) -> None:
    source = sources(files)[kind]
    there = data.on_ray(source, workers=2)
    whole = list(source.batches())
    for cut in [len(whole) // 2] if kind in SERIAL else range(len(whole)):  # test_split.py has all cuts of all
        assert same(list(there.batches(whole[cut][1])), whole[cut + 1 :])


# Shares of ranks.


def steps_of_all(whole: Stream, number: int, of: int) -> list[tuple[KeyedBatch | None, Cursor]]:
    steps = [whole[at : at + of] for at in range(0, len(whole), of)]
    return [(step[number][0] if number < len(step) else None, step[-1][1]) for step in steps]


def read_in_shares(files: Path) -> dict[str, Source]:
    """The sources above, of which text has good lines here, and as it is, with rows that are skipped."""
    made = sources(files)
    for number in range(2):
        good = [line for line in (files / f"{number}.csv").read_text().splitlines() if ";" in line]
        (files / f"{number}.good").write_text("\n".join(good))
    good = data.text(str(files / "*.good"), LAYOUT, features=TEXT_SPEC, batch_size=300)
    return {**made, "text": good, "skipping": made["text"], "own": Counting(149)}


@pytest.mark.parametrize("kind", ["parquet", "text", "skipping", "synthetic", "own"])  # gzip is read as "own" is
def test_a_rank_gets_its_batches_and_the_cursors_of_all(
    cluster: Cluster, files: Path, same_batch: Callable[..., bool], kind: str
) -> None:
    source = read_in_shares(files)[kind]
    whole = list(source.batches())
    of, cut = 3, len(whole) // 2
    there = data.on_ray(source, workers=2)
    passes = [(of - 1, whole[cut][1], whole[cut + 1 :]), (0, None, whole)]
    for number, cursor, rest in passes[: 1 if kind in SERIAL else 2]:
        found, expected = list(there.every(number, of, cursor)), steps_of_all(rest, number, of)
        assert [after for _, after in found] == [after for _, after in expected] and len(found) > 1
        for (batch, _), (wanted, _) in zip(found, expected, strict=True):
            assert (batch is None) == (wanted is None)
            assert batch is None or wanted is None or same_batch(batch, wanted)


@dataclass(frozen=True)
class Counted(FeatureSpec):
    """Leaves a file for every table that features are made of, with the number of its rows in its name."""

    folder: str = ""

    def apply(self, columns: pa.Table, labels: bool = True) -> KeyedBatch:
        (Path(self.folder) / f"{columns.num_rows}-{os.getpid()}-{time.monotonic_ns()}").touch()
        return FeatureSpec.apply(self, columns, labels)


@pytest.mark.parametrize("kind", ["parquet", "text"])
def test_all_ranks_together_have_the_cluster_make_each_feature_once(
    cluster: Cluster, files: Path, tmp_path: Path, kind: str
) -> None:
    source = read_in_shares(files)[kind]
    source.features = Counted(**vars(source.features), folder=str(tmp_path))  # type: ignore[attr-defined]
    there = data.on_ray(source, workers=2)
    seen = 0
    for number in range(3):
        seen += sum(batch.size for batch, _ in there.every(number, 3) if batch is not None)
    assert sum(int(path.name.split("-")[0]) for path in tmp_path.iterdir()) == seen > 5900


def test_a_worker_that_dies_in_a_share_loses_and_repeats_nothing(
    cluster: Cluster, same_batch: Callable[..., bool]
) -> None:
    source = data.synthetic(examples=1_000_000, batch_size=1000, keys=100_000)
    there = data.on_ray(source, workers=2)
    stream = there.every(1, 3)
    found = [next(stream) for _ in range(20)]
    os.kill(next(pid for _, pid in there.decoded_by if psutil.pid_exists(pid)), signal.SIGKILL)
    found += list(stream)
    assert [after for _, after in found] == [after for _, after in source.every(1, 3)]
    for (batch, _), (wanted, _) in zip(found, source.every(1, 3), strict=True):
        assert (batch is None) == (wanted is None)
        assert batch is None or wanted is None or same_batch(batch, wanted)


def test_a_bad_line_is_an_error_of_the_rank_that_has_it(cluster: Cluster, files: Path) -> None:
    source = data.text(str(files / "*.csv"), LAYOUT, features=TEXT_SPEC, batch_size=100)
    steps: list[Cursor] = []
    with pytest.raises(DataError, match=r"0\.csv, line 124: it has 1 columns") as caught:
        for _, cursor in data.on_ray(source, workers=2).every(1, 6):  # batch 1; and 624 is in batch 6, rank 0's
            steps.append(cursor)
    assert not steps and "rejects.add" in str(caught.value.__cause__)
    with pytest.raises(DataError, match=r"0\.csv, line 624: it has 1 columns"):
        for _, cursor in data.on_ray(source, workers=2).every(0, 6):
            steps.append(cursor)
    assert [cursor["number"] for cursor in steps] == [600]


def test_a_tensor_is_a_view_of_the_object_store(cluster: Cluster) -> None:
    there = data.on_ray(data.synthetic(examples=16_384, batch_size=8192), workers=1)
    batch, _ = next(there.batches())
    values = batch.ids["user"].values
    with open("/proc/self/maps") as maps:
        spans = [line.split() for line in maps if "plasma" in line]
    ranges = [tuple(int(end, 16) for end in span[0].split("-")) for span in spans]
    assert any(low <= values.data_ptr() < high for low, high in ranges)


def test_training_gives_the_same_losses(cluster: Cluster) -> None:
    def losses(on: Callable[[Source], Source]) -> list[float]:
        clicks = data.synthetic.criteo_like(examples=1024, batch_size=128)
        embeddings = hr.EmbeddingCollection([hr.Table(name, dim=4) for name in clicks.shape.sparse])
        torch.manual_seed(0)
        tower = hr.models.DLRM(embeddings.features, dense_features=13, bottom=(8,), top=(8,))
        trainer = hr.Trainer(hr.Recommender(embeddings, tower))
        first = trainer.fit(on(clicks), steps=3, progress=False)
        second = trainer.fit(on(clicks), cursor=first.cursor, progress=False)
        return first.losses + second.losses

    assert losses(lambda source: data.on_ray(source, workers=2)) == losses(lambda source: source)


# Failures.


def next_batches(stream: Iterator[tuple[KeyedBatch, Cursor]], count: int) -> Stream:
    return [next(stream) for _ in range(count)]


def test_a_killed_worker_is_replaced_and_no_batch_is_lost_or_repeated(
    cluster: Cluster, tmp_path: Path, same: Callable[..., bool]
) -> None:
    source = Slow(tmp_path, units=20, seconds=0.3)
    there = data.on_ray(source, workers=3)
    stream = there.batches()
    found = next_batches(stream, 5)
    assert eventually(lambda: bool(source.running()))
    os.kill(source.running()[0], signal.SIGKILL)
    found += list(stream)
    assert same(found, list(source.batches()))
    units = [unit for unit, _ in source.started()]
    assert len(units) > len(set(units))  # another worker decoded that unit again


def test_a_killed_worker_of_a_serial_source_is_replaced(cluster: Cluster, same: Callable[..., bool]) -> None:
    source = Counting(1000)
    there = data.on_ray(source, ahead=2)
    stream = there.batches()
    found = next_batches(stream, 100)
    (pid,) = {pid for _, pid in there.decoded_by}
    os.kill(pid, signal.SIGKILL)
    found += list(stream)
    assert same(found, list(source.batches()))
    assert len({pid for _, pid in there.decoded_by}) == 2


def test_a_reader_that_ray_cannot_reach_is_asked_again(
    cluster: Cluster, same: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between an actor's death and Ray's notice of it, all of Ray's own tries may fail."""
    source, get = Counting(300), ray.get
    calls = itertools.count()

    def sometimes(ref: Any, **options: Any) -> Any:
        if next(calls) % 3:
            raise ray.exceptions.ActorUnavailableError("made up", None)
        return get(ref, **options)

    monkeypatch.setattr("hotrow.data.cluster.window._UNREACHED_SECONDS", 0.01)
    monkeypatch.setattr(ray, "get", sometimes)
    assert same(list(data.on_ray(source, ahead=2).batches()), list(source.batches()))
    assert next(calls) > 10

    def never(ref: Any, **options: Any) -> Any:
        raise ray.exceptions.ActorUnavailableError("made up", None)

    monkeypatch.setattr(ray, "get", never)
    with pytest.raises(ClusterError, match=r"ActorUnavailableError: .*made up.* replaced 5 times"):
        list(data.on_ray(source, ahead=2).batches())


def test_a_removed_node_loses_nothing_and_an_added_one_helps(
    cluster: Cluster, tmp_path: Path, same: Callable[..., bool]
) -> None:
    source = Slow(tmp_path, units=10_000, seconds=0.3, ids=20_000)  # large enough for the node's own object store
    there = data.on_ray(source, ahead=100)  # as many workers as there are CPUs
    stream = there.batches()
    found = next_batches(stream, 10)
    before = {node for node, _ in there.decoded_by}
    extra = cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    deadline = time.monotonic() + 60
    lost: set[int] = set()
    while not lost and time.monotonic() < deadline:
        found += next_batches(stream, 1)
        lost = killed(source, {pid for node, pid in there.decoded_by if node not in before})
    assert lost  # the new node helps
    cluster.remove_node(extra, allow_graceful=False)
    found += next_batches(stream, 40)
    while len(found) <= max(lost):
        found += next_batches(stream, 1)
    assert same(found, list(itertools.islice(source.batches(), len(found))))
    units = [unit for unit, _ in source.started()]
    assert all(units.count(unit) > 1 for unit in lost)  # what died with the node was decoded again


def test_scale_adds_workers_to_a_pass_under_way(cluster: Cluster, tmp_path: Path, same: Callable[..., bool]) -> None:
    source = Slow(tmp_path, units=10_000, seconds=0.1)
    there = data.on_ray(source, workers=1)
    stream = there.batches()
    found = next_batches(stream, 5)
    assert most_at_once(source) == 1
    there.scale(3)
    deadline = time.monotonic() + 60
    while most_at_once(source) < 3 and time.monotonic() < deadline:
        found += next_batches(stream, 5)
    assert most_at_once(source) == 3
    assert same(found, list(itertools.islice(source.batches(), len(found))))
    with pytest.raises(OptionError, match="workers=0; give a whole number"):
        there.scale(0)


def test_a_unit_that_kills_every_worker_is_an_error_that_names_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["hotrow.data.cluster.submit"], "RETRIES", 1)
    source = Slow(tmp_path, units=6, seconds=0.01, fatal=3)
    stream = data.on_ray(source, workers=1).batches()
    next_batches(stream, 3)
    with pytest.raises(
        ClusterError, match=r"unit \{'at': 3\} cannot be decoded on the Ray cluster: WorkerCrashedError"
    ):
        next(stream)
    assert [unit for unit, _ in source.started()].count(3) == 2


# Errors.


def test_an_error_in_a_worker_has_its_message_its_traceback_and_its_place(cluster: Cluster, files: Path) -> None:
    source = data.text(str(files / "*.csv"), LAYOUT, features=TEXT_SPEC, batch_size=10)
    here: Stream = []
    with pytest.raises(DataError) as expected:
        for entry in source.batches():
            here.append(entry)
    there: Stream = []
    with pytest.raises(DataError) as caught:
        for entry in data.on_ray(source, workers=2).batches():
            there.append(entry)
    assert str(caught.value) == str(expected.value) and "line 124" in str(caught.value)
    assert [cursor for _, cursor in there] == [cursor for _, cursor in here] and len(there) == 12
    trace = str(caught.value.__cause__)
    assert "in process" in trace and "rejects.add" in trace


def test_a_line_number_far_into_a_file_is_right(cluster: Cluster, tmp_path: Path) -> None:
    with open(tmp_path / "long.csv", "w") as file:
        file.writelines(f"1;{'u' * 1990};{i}\n" for i in range(9000))  # three spans
        file.write("what\n")
    source = data.text(tmp_path / "long.csv", LAYOUT, features=TEXT_SPEC, batch_size=1000)
    with pytest.raises(DataError, match=r"long\.csv, line 9001: it has 1 columns"):
        list(data.on_ray(source, workers=3).batches())


def test_a_file_that_breaks_off_is_named_after_the_batches_before_it(cluster: Cluster, tmp_path: Path) -> None:
    for name in "ab":
        pq.write_table(pa.table({"user": list(range(100))}), tmp_path / f"{name}.parquet")
    source = data.parquet(str(tmp_path / "*.parquet"), features=FeatureSpec([Key("user")]), batch_size=10)
    (tmp_path / "b.parquet").write_bytes(b"no Parquet")
    found = 0
    with pytest.raises(DataError, match=r"b\.parquet cannot be read as Parquet"):
        for _ in data.on_ray(source, workers=2).batches():
            found += 1
    assert found == 10


def test_a_cursor_of_another_source_is_refused_at_once(cluster: Cluster, files: Path) -> None:
    cursor = next(sources(files)["parquet"].batches())[1]
    with pytest.raises(DataError, match="resume with the kind of source that made the cursor"):
        data.on_ray(sources(files)["text"]).batches(cursor)


def test_a_cluster_that_has_nothing_free_says_so(cluster: Cluster, tmp_path: Path) -> None:
    there = data.on_ray(Slow(tmp_path, 3), resources={"nowhere": 1}, timeout=1.5)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"finished nothing in 1\.5 s: it has \d+ CPUs.*Add nodes with `ray start"):
        next(there.batches())
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers=0; give a whole number"),
        ({"ahead": 1.5}, "ahead=1.5; give a whole number"),
        ({"memory": "much"}, "memory='much' is not a size"),
        ({"cpus": 0}, "cpus=0; give a number above 0"),
        ({"timeout": -1}, "timeout=-1; give a number above 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        data.on_ray(data.synthetic(examples=1), **options)  # type: ignore[arg-type]


def test_one_process_is_on_one_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_names", {"localhost:6379"})  # as it was called when the process joined
    assert data.on_ray(data.synthetic(examples=1), "localhost:6379").address == cluster.address
    with pytest.raises(OptionError, match=r"this process has joined the cluster at .*; name that one"):
        data.on_ray(data.synthetic(examples=1), "10.1.2.3:6379")
    with pytest.raises(OptionError, match="pass a source such as"):
        data.on_ray(data.on_ray(data.synthetic(examples=1)))


JOINS = """
import os, signal, sys
from hotrow import data
data.on_ray(data.synthetic(examples=1), sys.argv[1])
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
"""


def test_joining_a_cluster_leaves_sigterm_to_the_trainer(cluster: Cluster, tmp_path: Path) -> None:
    """Ray's own handler exits at once, so `fit` would lose the training since the last checkpoint."""
    process = forked.python(JOINS, cluster.address, log=tmp_path / "log")
    assert process.wait(120) == 0, process.text()
    assert process.text().split()[-1] == "True"


def test_without_ray_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'hotrow\[ray\]'"):
        data.on_ray(data.synthetic(examples=1))


def test_an_address_where_nobody_answers_is_an_error_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(ClusterError, match=rf"nobody answers at .*127\.0\.0\.1:{port}.*ray start --head --port={port}"):
        connect._trial_join(f"127.0.0.1:{port}")
    assert time.monotonic() - began < 6
    for wrong in ("nonsense", "host:port"):
        with pytest.raises(OptionError, match=f"ray address='{wrong}'; give HOST:PORT, 'auto' or 'local'"):
            connect._trial_join(wrong)


def test_an_address_of_something_else_is_an_error_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "TRIAL_SECONDS", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"does not answer within 4 s; is that the head's address"):
            connect._trial_join(address)
    assert time.monotonic() - began < 15


def test_a_cluster_that_wants_a_token_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing or incorrect"
    monkeypatch.setattr(connect, "_TRIAL", f"import sys; sys.exit({refusal!r})")
    with pytest.raises(ClusterError, match="wants a token; set RAY_AUTH_MODE=token"):
        connect._trial_join("auto")


# Back-pressure and shutting down.


def test_no_more_units_than_allowed_are_ahead(cluster: Cluster, tmp_path: Path) -> None:
    source = Slow(tmp_path, units=40, seconds=0.01)
    stream = data.on_ray(source, workers=2, ahead=5).batches()
    next_batches(stream, 2)
    assert settles(source, 6)  # the second, which the trainer has, and four more
    next_batches(stream, 1)
    assert settles(source, 7)


def test_no_more_bytes_than_allowed_are_ahead(cluster: Cluster, tmp_path: Path) -> None:
    source = Slow(tmp_path, units=40, seconds=0.01, ids=1 << 17)  # a MiB each
    stream = data.on_ray(source, workers=2, ahead=30, memory="3.5MiB").batches()
    next_batches(stream, 2)
    assert settles(source, 4)


def settles(source: Slow, units: int) -> bool:
    """Whether so many units are decoded, and no more."""

    def started() -> set[int]:
        return {unit for unit, _ in source.started()}

    reached = eventually(lambda: started() >= set(range(units)))
    time.sleep(0.5)
    return reached and started() == set(range(units))


def window_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hotrow-ray-window"]


def idle_cpus() -> bool:
    return bool(ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"])


@pytest.mark.parametrize("end", ["close", "drop", "error"])
def test_a_pass_that_ends_early_leaves_nothing_running(cluster: Cluster, tmp_path: Path, end: str) -> None:
    source = Slow(tmp_path, units=100, seconds=0.3)
    before = len(window_threads())
    stream = data.on_ray(source, workers=3).batches()
    next(stream)
    assert len(window_threads()) == before + 1
    if end == "close":
        stream.close()  # type: ignore[attr-defined]
    elif end == "error":
        with pytest.raises(ZeroDivisionError):
            for _ in stream:
                _ = 1 / 0
    del stream
    assert eventually(lambda: len(window_threads()) == before) and eventually(idle_cpus)
    seen = source.started()
    time.sleep(0.5)
    assert source.started() == seen


def test_a_serial_pass_that_ends_early_takes_its_actor_along(cluster: Cluster) -> None:
    there = data.on_ray(Counting(10**9), ahead=2)
    stream = there.batches()
    next(stream)
    (pid,) = {pid for _, pid in there.decoded_by}
    del stream
    assert eventually(lambda: not psutil.pid_exists(pid)) and eventually(idle_cpus)


RANK = """
import hashlib, sys, time, hotrow as hr
rank = int(sys.argv[2])
clicks = hr.data.synthetic(examples=10**9, offset=30000 * rank, batch_size=1000, keys=10000)
there = hr.data.on_ray(clicks, sys.argv[1], workers=1)
digest = hashlib.sha256()
for number, (batch, cursor) in enumerate(there.batches(), 1):
    digest.update(batch.ids["user"].values.numpy().tobytes() + str(cursor).encode())
    if number == 30:
        print(digest.hexdigest(), *{pid for _, pid in there.decoded_by}, flush=True)
    time.sleep(0.01)
"""


def test_ranks_have_streams_of_their_own_and_take_their_workers_along(cluster: Cluster) -> None:
    ranks = [
        child_process.start(
            [sys.executable, "-c", RANK, cluster.address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    workers: list[int] = []
    for rank, child in enumerate(ranks):
        assert child.stdout is not None
        found, *pids = child.stdout.readline().split()
        clicks = data.synthetic(examples=10**9, offset=30000 * rank, batch_size=1000, keys=10_000)
        digest = hashlib.sha256()
        for batch, cursor in itertools.islice(clicks.batches(), 30):
            digest.update(batch.ids["user"].values.numpy().tobytes() + str(cursor).encode())
        assert found == digest.hexdigest() and pids
        workers += [int(pid) for pid in pids]
    assert any(psutil.pid_exists(pid) for pid in workers)
    ranks[0].send_signal(signal.SIGKILL)
    ranks[1].send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in ranks[1].communicate(timeout=30)[1]
    assert ranks[0].communicate(timeout=30)[1] == ""
    assert eventually(lambda: not any(psutil.pid_exists(pid) for pid in workers), 30)


# From a job file.

JOB = """
[data]
source = "synthetic"
examples = 4096
test_examples = 1024
batch_size = 512
keys = 600_000
{ray}
[embeddings]
dim = 4
[tower]
kind = "dlrm"
bottom = [8]
top = [8]
"""


def write_job(folder: Path, ray: str = "") -> Path:
    (folder / "job.toml").write_text(JOB.format(ray=ray))
    return folder / "job.toml"


def test_a_job_on_a_cluster_gives_the_same_losses_and_test_metrics(cluster: Cluster, tmp_path: Path) -> None:
    here, tested_here = load_job(write_job(tmp_path)).run(progress=False)
    job = load_job(write_job(tmp_path, ray='ray = { address = "auto", workers = 2, memory = "64MiB" }'))
    assert isinstance(job.source, data.OnRay) and isinstance(job.test, data.OnRay)
    there, tested_there = job.run(progress=False)
    assert there.losses == here.losses and tested_there == tested_here
    assert sum(job.source.decoded_by.values()) == 1 and sum(job.test.decoded_by.values()) == 1


def test_the_command_lines_address_comes_before_the_jobs(cluster: Cluster, tmp_path: Path) -> None:
    for ray in ("", 'ray = "10.1.2.3:6379"', "ray = { workers = 2 }"):
        job = load_job(write_job(tmp_path, ray), ray=cluster.address)
        assert isinstance(job.source, data.OnRay) and job.source.address == cluster.address
        assert ("2 workers" in job.source.describe()) == ("workers" in ray)


def test_wrong_ray_options_in_a_job_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"\[data\] ray has no option 'worker'; did you mean 'workers'"):
        load_job(write_job(tmp_path, "ray = { worker = 2 }"))
    with pytest.raises(OptionError, match=r"\[data\] ray=5: give an address"):
        load_job(write_job(tmp_path, "ray = 5"))


def test_the_command_line_says_in_one_line_that_nobody_answers(tmp_path: Path) -> None:
    """In another process: this one may have joined a cluster."""
    done = forked.hotrow("train", str(write_job(tmp_path)), "--ray", "127.0.0.1:9", log=tmp_path / "log")
    assert done.wait(60) == 2 and "Traceback" not in done.text()
    assert "nobody answers at the Ray cluster's address '127.0.0.1:9'" in " ".join(done.text().split())


@pytest.mark.soak
def test_two_minutes_of_killing_change_nothing(cluster: Cluster, files: Path, same: Callable[..., bool]) -> None:
    """About every second a worker process dies, and sometimes a node, while passes of all kinds run."""
    draw = random.Random(0)
    expected = {kind: list(source.batches()) for kind, source in sources(files).items()}
    passes, deadline = 0, time.monotonic() + 120
    extra = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    while time.monotonic() < deadline:
        kind = draw.choice(KINDS)
        there = data.on_ray(sources(files)[kind])
        found: Stream = []
        for entry in there.batches():
            found.append(entry)
            alive = [pid for _, pid in there.decoded_by if psutil.pid_exists(pid)]
            if alive and draw.random() < 0.1:
                os.kill(draw.choice(alive), signal.SIGKILL)
            if draw.random() < 0.003:
                cluster.remove_node(extra, allow_graceful=False)
                extra = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        assert same(found, expected[kind])
        passes += 1
    cluster.remove_node(extra, allow_graceful=False)
    assert passes >= 5
