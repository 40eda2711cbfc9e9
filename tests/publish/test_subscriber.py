"""A bus that duplicates, reorders, truncates and corrupts messages: each is detected and counted; rows stay right."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from readers import Reader, assert_same, publishing
from runs import clicks

import hotrow as hr
from hotrow.publish.apply import apply
from hotrow.publish.bus import open_bus
from hotrow.publish.publication import DELTA
from hotrow.publish.subscriber import QUARANTINED, Behind, Subscriber

STEPS = 6


@pytest.fixture
def sent(tmp_path: Path) -> tuple[hr.Trainer, list[bytes]]:
    """A trainer after its run, and all it said: six publications in chunks of 1 KiB, the last ones' snapshot at 4."""
    address = f"dir:{tmp_path / 'origin'}?max_message=1KiB"
    trainer = publishing(
        address, every=1, publish_snapshot=lambda number: f"/exports/{number}", publish_snapshot_every=2
    )
    trainer.fit(clicks(), steps=STEPS, progress=False)
    assert trainer.publisher is not None and trainer.publisher.delivery.flush(20)
    trainer.publisher.close()
    return trainer, [entry.data for entry in open_bus(address).read(0, most_bytes=1 << 30)]


def bus_with(folder: Path, messages: list[bytes]) -> str:
    bus = open_bus(f"dir:{folder}")
    for data in messages:
        bus.append(data)
    return f"dir:{folder}"


def test_publications_in_chunks_are_put_together(sent: tuple[hr.Trainer, list[bytes]], tmp_path: Path) -> None:
    trainer, messages = sent
    assert len(messages) > 4 * STEPS
    reader = Reader(bus_with(tmp_path / "bus", messages))
    reader.catch_up(STEPS)
    assert reader.numbers == list(range(1, STEPS + 1))
    assert_same(reader, trainer)


def test_duplicated_messages_change_nothing(sent: tuple[hr.Trainer, list[bytes]], tmp_path: Path) -> None:
    trainer, messages = sent
    doubled = [copy for data in messages for copy in (data, data)] + messages
    reader = Reader(bus_with(tmp_path / "bus", doubled))
    reader.catch_up(STEPS)
    reader.take()
    assert reader.numbers == list(range(1, STEPS + 1))
    assert reader.subscriber.counters.duplicates > len(messages)
    assert_same(reader, trainer)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_messages_does_not_matter(sent: tuple[hr.Trainer, list[bytes]], tmp_path: Path, seed: int) -> None:
    trainer, messages = sent
    mixed = list(messages)
    random.Random(seed).shuffle(mixed)
    reader = Reader(bus_with(tmp_path / "bus", mixed), patience=30)
    reader.catch_up(STEPS)
    assert reader.numbers == list(range(1, STEPS + 1))
    assert reader.subscriber.counters.reordered > 0
    assert_same(reader, trainer)


def test_corrupt_messages_are_quarantined_and_the_good_copy_is_used(
    sent: tuple[hr.Trainer, list[bytes]], tmp_path: Path
) -> None:
    trainer, messages = sent
    draw = random.Random(1)
    stream = []
    for data in messages:
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        stream += [data[: draw.randrange(len(data))], bytes(flipped), data]
    reader = Reader(bus_with(tmp_path / "bus", stream), quarantine=tmp_path / "bad")
    reader.catch_up(STEPS)
    assert reader.subscriber.counters.corrupt == 2 * len(messages)
    assert len(list((tmp_path / "bad").glob("*.bad"))) == min(QUARANTINED, 2 * len(messages))
    assert "truncated" in "".join(path.read_text() for path in (tmp_path / "bad").glob("*.txt"))
    assert_same(reader, trainer)


@pytest.mark.parametrize("what", ["lost", "corrupt"])
def test_a_missing_publication_is_an_error_that_names_the_snapshot(
    sent: tuple[hr.Trainer, list[bytes]], tmp_path: Path, what: str
) -> None:
    _, messages = sent
    whole = Subscriber(bus_with(tmp_path / "whole", messages))
    third = next(one for one in _one_by_one(whole) if one.number == 3)
    at = third.resume[1]  # the first message of the fourth
    hurt = list(messages)
    hurt[at + 1] = b"" if what == "lost" else hurt[at + 1][:-1] + b"?"
    reader = Reader(bus_with(tmp_path / "bus", [data for data in hurt if data]), patience=0.2)
    with pytest.raises(Behind, match=r"publication 4 cannot be read: .*/exports/") as told:
        reader.catch_up(STEPS)
    assert reader.numbers == [1, 2, 3] and told.value.snapshot is not None
    assert told.value.snapshot.path in ("/exports/4", "/exports/6")


def test_a_reader_that_fell_behind_retention_gets_an_error(
    sent: tuple[hr.Trainer, list[bytes]], tmp_path: Path
) -> None:
    _, messages = sent
    address = bus_with(tmp_path / "bus", messages)
    reader = Reader(address, patience=0.2)
    for path in sorted((tmp_path / "bus").glob("*.msg"))[: len(messages) // 2]:
        path.unlink()
    with pytest.raises(Behind) as told:
        reader.catch_up(STEPS)
    assert told.value.after == 0 and told.value.oldest is not None and told.value.oldest > 1
    assert told.value.snapshot is not None
    late = Subscriber(address, after=told.value.snapshot.number)
    assert [one.number for one in late.poll(1) if one.kind == "delta"] == list(
        range(told.value.snapshot.number + 1, STEPS + 1)
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_reader_that_is_killed_goes_on_where_it_was(
    sent: tuple[hr.Trainer, list[bytes]], tmp_path: Path, seed: int
) -> None:
    trainer, messages = sent
    mixed = [messages[i] for i in sorted(range(len(messages)), key=lambda i: i + random.Random(seed + i).random() * 6)]
    address = bus_with(tmp_path / "bus", mixed)
    reader, seen, position = Reader(address, patience=30), [], (0, 0)
    while position[0] < STEPS:
        # Each time a new subscriber reads from the remembered place, and dies after one publication.
        subscriber = Subscriber(address, position=position, patience=30)
        one = next(one for one in _one_by_one(subscriber) if one.kind == DELTA)
        apply(one, reader.trainer.model.embeddings, reader.trainer.model.tower)
        seen.append(one.number)
        position = one.resume
    assert seen == list(range(1, STEPS + 1))
    assert_same(reader, trainer)


def _one_by_one(subscriber: Subscriber):  # type: ignore[no-untyped-def]
    while True:
        publications = subscriber.poll(2)
        if not publications:
            return
        yield from publications
