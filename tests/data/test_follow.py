"""Sources that never end: every event once, in order, across any cut, crash and quiet spell."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotrow import data
from hotrow.batch import KeyedBatch
from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.data.streams.follow import FollowSource, Journal
from hotrow.errors import DataError, OptionError
from hotrow.features import FeatureSpec, Key

SPEC = FeatureSpec([Key("user", hash="none")], label="click", time="at")
_names = itertools.count()


def events(start: int, count: int) -> list[dict[str, int]]:
    return [{"user": i, "click": i % 2, "at": 1_700_000_000_000 + i} for i in range(start, start + count)]


def arrow(rows: list[dict[str, int]]) -> bytes:
    table = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


class Stream:
    """A stream to follow, and a function that appends events to it."""

    def __init__(self, address: str, put: Callable[[list[dict[str, int]]], None]) -> None:
        self.address, self.put = address, put

    def source(self, **options: object) -> FollowSource:
        return data.follow(self.address, SPEC, **{"batch_size": 10, "flush": 0.3, **options})  # type: ignore[arg-type]


def client_of(servers: RedisServers) -> Any:
    """redis-py's client."""
    client = pytest.importorskip("redis", reason="pip install hotrow[redis]")
    return client.Redis(port=servers.servers[0].port)


@pytest.fixture(params=["folder", "redis json", "redis arrow", "kafka json", "kafka arrow"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> Stream:
    kind, _, form = request.param.partition(" ")
    name = f"events{next(_names)}"
    encode = arrow if form == "arrow" else lambda rows: json.dumps(rows if len(rows) > 1 else rows[0]).encode()
    if kind == "folder":
        numbers = itertools.count()

        def to_folder(rows: list[dict[str, int]]) -> None:
            file = tmp_path / f"{next(numbers):06d}.parquet"
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / ".part", row_group_size=4)
            (tmp_path / ".part").rename(file)

        return Stream(str(tmp_path), to_folder)
    if kind == "redis":
        server: RedisServers = request.getfixturevalue("redis")
        client = client_of(server)
        return Stream(f"{server.url}/0?stream={name}", lambda r: client.xadd(name, {"value": encode(r)}))
    brokers = request.getfixturevalue("kafka_brokers")
    import confluent_kafka

    producer = confluent_kafka.Producer({"bootstrap.servers": brokers, "log_level": 0})

    def to_kafka(rows: list[dict[str, int]]) -> None:
        producer.produce(name, encode(rows), partition=0)
        assert producer.flush(20) == 0

    return Stream(f"kafka://{brokers}/{name}", to_kafka)


def users(batch: KeyedBatch) -> list[int]:
    return batch.ids["user"].values.tolist()


def take(source: FollowSource, count: int, cursor: data.Cursor | None = None) -> list[tuple[list[int], data.Cursor]]:
    passing: Iterator[tuple[KeyedBatch, data.Cursor]] = source.batches(cursor)
    taken = [(users(batch), after) for batch, after in itertools.islice(passing, count)]
    passing.close()  # type: ignore[attr-defined]
    return taken


def test_any_cut_resumes_with_the_next_event(stream: Stream) -> None:
    sizes = [1, 7, 12, 3, 30, 1, 6]
    at = 0
    for size in sizes:
        stream.put(events(at, size))
        at += size
    whole = take(stream.source(), at // 10)
    assert [user for batch, _ in whole for user in batch] == list(range(at))
    for number, (_, cursor) in enumerate(whole[:-1]):
        cursor = json.loads(json.dumps(cursor))
        assert take(stream.source(), 1, cursor)[0] == whole[number + 1]


def test_a_short_batch_is_given_after_a_while_and_cut_the_same_again(stream: Stream, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    source = stream.source(journal=journal)
    stream.put(events(0, 13))
    passing = source.batches()
    head = [next(passing) for _ in range(2)]
    assert [users(batch) for batch, _ in head] == [list(range(10)), [10, 11, 12]]
    stream.put(events(13, 25))
    head += [next(passing) for _ in range(2)]
    stream.put(events(38, 10))
    # A new process, after a crash: all events are there at once, and batches are the same as before.
    for begin in (None, head[0][1]):
        again = take(stream.source(journal=journal), 4 if begin is None else 3, begin)
        assert again == [(users(batch), after) for batch, after in head[-len(again) :]]


def test_a_quiet_stream_is_waited_for_and_can_be_ended(stream: Stream) -> None:
    stream.put(events(0, 10))
    source = stream.source()
    found: list[list[int]] = []
    thread = threading.Thread(target=lambda: found.extend(users(batch) for batch, _ in source.batches()))
    thread.start()
    end = time.monotonic() + 20
    while not found and time.monotonic() < end:
        time.sleep(0.02)
    stream.put(events(10, 10))
    while len(found) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert thread.is_alive()
    source.end()
    thread.join(5)
    assert not thread.is_alive()
    assert found == [list(range(10)), list(range(10, 20))]


def test_an_event_that_the_features_refuse_stops_or_is_skipped(stream: Stream) -> None:
    stream.put(events(0, 4))
    stream.put([{"user": 4, "click": 7, "at": 1}])
    stream.put(events(5, 6))
    with pytest.raises(DataError, match="column 'click'"):
        take(stream.source(), 1)
    source = stream.source(on_error="skip", flush=10.0)
    assert take(source, 1)[0][0] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]
    assert source.skipped == 1


def test_a_cursor_of_another_stream_is_refused(stream: Stream, tmp_path: Path) -> None:
    stream.put(events(0, 10))
    [(_, cursor)] = take(stream.source(), 1)
    with pytest.raises(DataError, match="pass batch_size=10"):
        take(stream.source(batch_size=20), 1, cursor)
    with pytest.raises(DataError, match=r"follow .* again"):
        take(stream.source(), 1, {**cursor, "address": "elsewhere"})
    with pytest.raises(DataError, match="damaged"):
        take(stream.source(), 1, {**cursor, "place": "[1]"})


def test_a_file_that_sorts_before_one_that_was_read_is_an_error(tmp_path: Path) -> None:
    for name in ("b", "a"):
        table = pa.Table.from_pylist(events(0, 10))
        pq.write_table(table, tmp_path / f"{name}.parquet")
        if name == "b":
            passing = data.follow(str(tmp_path), SPEC, batch_size=10).batches()
            next(passing)
    with pytest.raises(DataError, match=r"a\.parquet appeared after b\.parquet was begun"):
        next(passing)


def test_files_that_were_read_may_go(tmp_path: Path) -> None:
    for number in range(2):
        pq.write_table(pa.Table.from_pylist(events(number * 10, 10)), tmp_path / f"{number}.parquet")
    source = data.follow(str(tmp_path), SPEC, batch_size=10)
    [(_, cursor)] = take(source, 1)
    (tmp_path / "0.parquet").unlink()
    assert take(source, 1, cursor)[0][0] == list(range(10, 20))


def test_trimmed_entries_are_an_error(redis: RedisServers) -> None:
    client, name = client_of(redis), f"events{next(_names)}"
    for event in events(0, 30):
        client.xadd(name, {"value": json.dumps(event)})
    source = data.follow(f"{redis.url}/0?stream={name}", SPEC, batch_size=10)
    [(_, cursor)] = take(source, 1)
    client.xtrim(name, maxlen=5, approximate=False)
    with pytest.raises(DataError, match="is gone, so later ones may be too"):
        take(source, 1, cursor)
    client.xadd(name, {"value": b"potatoes"})
    with pytest.raises(DataError, match="neither JSON nor an Arrow IPC stream"):
        take(source, 1)


def test_a_journal_with_a_torn_line_is_cut_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "a")
    for end in (3, 17):
        journal.add(end)
    with open(tmp_path / "j", "a") as file:
        file.write("2")
    assert Journal(tmp_path / "j", "a").after(3) == [17]
    Journal(tmp_path / "j", "a").add(29)
    assert Journal(tmp_path / "j", "a").after(0) == [3, 17, 29]
    with pytest.raises(DataError, match="journal of another stream"):
        Journal(tmp_path / "j", "b").after(0)


def test_wrong_addresses_name_the_cure(tmp_path: Path) -> None:
    for address, message in (
        ("redis://127.0.0.1/0", "write redis://host:6379/0\\?stream=name"),
        ("kafka://127.0.0.1", "write kafka://host:9092/topic"),
    ):
        with pytest.raises(OptionError, match=message):
            data.follow(address, SPEC)
    with pytest.raises(DataError, match="there is no folder"):
        data.follow(str(tmp_path / "none" / "*.parquet"), SPEC)
    with pytest.raises(OptionError, match="flush=0"):
        data.follow(str(tmp_path), SPEC, flush=0)
