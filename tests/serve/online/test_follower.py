"""A version that follows a bus: it catches up, survives a bus that is away, and reloads when it fell behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import Batches, make_batch, rows_of
from test_fresh_engine import at_wire, change, publishing

import hotrow as hr
from hotrow.bench.serving import fleet_history
from hotrow.publish.bus import open_bus
from hotrow.publish.message import checksum, note, parts
from hotrow.publish.publication import DELTA, Publication, content_checksum, encode_body
from hotrow.publish.rollback import rollback
from hotrow.serve.execution.servable import ServedVersion, open_version
from hotrow.serve.updates.follower import AWAY, CLOSE, FOLLOWING, STUCK, Follower
from hotrow.serve.updates.freshness import SPAN, AnswerAges, Freshness


def follow(tmp_path: Path, version: int = 1, **options: Any) -> ServedVersion:
    plain = {"compile": False, "artifacts": str(tmp_path / "artifacts"), "max_rows": 64}
    return open_version(
        tmp_path / "ctr" / str(version), {**plain, "bus": {"ctr": f"dir:{tmp_path / 'bus'}"}, **options}
    )


def until(what: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def fit(trainer: hr.Trainer, steps: int, first: int = 0) -> int:
    """Train, and wait until all of it is on the bus; the newest publication's number."""
    trainer.fit(Batches(steps, first=first), progress=False)
    assert trainer.publisher is not None
    return int(trainer.publisher.counters.committed)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_version_catches_up_before_it_serves_and_follows_then(tmp_path: Path) -> None:
    trainer = publishing(tmp_path / "bus", every_steps=2, values="fp32")
    hr.export(trainer.model, tmp_path / "ctr")
    number = fit(trainer, 4)
    served = follow(tmp_path)
    assert served.publication == number == 2 and served.follower is not None
    until(lambda: served.follower.state == FOLLOWING)  # type: ignore[union-attr]
    number = fit(trainer, 4, first=4)
    until(lambda: served.publication == number)
    assert rows_of(served.engine.embeddings) == at_wire(trainer, "fp32")
    logits, _, _, fresh = served.run(make_batch(8), "wait")
    assert fresh.publication == number and logits.shape[0] == 8
    assert served.follower.counts.publications == number
    served.close()
    again = follow(tmp_path)  # a server that comes back begins at its export
    assert again.publication == number and rows_of(again.engine.embeddings) == at_wire(trainer, "fp32")
    again.close()


def test_an_export_says_which_publication_it_is(tmp_path: Path) -> None:
    trainer = publishing(tmp_path / "bus", every_steps=2)
    number = fit(trainer, 4)
    hr.export(trainer.model, tmp_path / "ctr", publication=number)
    served = follow(tmp_path)
    assert served.publication == number and served.follower is not None and not served.follower.counts.publications
    served.close()
    with pytest.raises(hr.errors.OptionError, match="publication=-1"):
        hr.export(trainer.model, tmp_path / "ctr", publication=-1)


@pytest.mark.parametrize("source", ["by the bus", "by the repository"])
def test_follower_behind_retention_starts_at_a_snapshot(tmp_path: Path, source: str) -> None:
    trainer = publishing(tmp_path / "bus", every_steps=1)
    hr.export(trainer.model, tmp_path / "ctr")
    served = follow(tmp_path)
    served.follower.close()  # type: ignore[union-attr]  # it sleeps
    number = fit(trainer, 4)
    folder = "snapshots" if source == "by the bus" else "ctr"
    place = hr.export(trainer.model, tmp_path / folder, publication=number).path
    if source == "by the bus":
        assert trainer.publisher is not None
        from hotrow.publish.publication import SnapshotPlace

        trainer.publisher.delivery.announce_snapshot(SnapshotPlace(number, str(place)))
    number = fit(trainer, 2, first=4)
    files = sorted((tmp_path / "bus").glob("*.msg"))
    for file in files[:4]:
        file.unlink()  # retention
    served = follow(tmp_path)
    until(lambda: served.publication == number)
    assert served.follower is not None and served.follower.counts.reloads == 1
    until(lambda: served.follower.state == FOLLOWING)  # type: ignore[union-attr]
    rows = rows_of(served.engine.embeddings)
    for name, expected in at_wire(trainer, "fp32").items():
        assert rows[name].keys() == expected.keys()
    served.run(make_batch(8), "wait")
    served.close()


def test_a_rollback_is_a_publication_like_any_other(tmp_path: Path) -> None:
    trainer = publishing(tmp_path / "bus", every_steps=2, values="fp32")
    hr.export(trainer.model, tmp_path / "ctr")
    fit(trainer, 2)
    then = at_wire(trainer, "fp32")
    fit(trainer, 4, first=2)
    served = follow(tmp_path)
    assert served.publication == 3
    trainer.publisher.close()  # type: ignore[union-attr]
    done = rollback(f"dir:{tmp_path / 'bus'}", 1)
    until(lambda: served.publication == done.number)
    assert rows_of(served.engine.embeddings) == then
    served.close()


def test_a_bus_that_is_away_leaves_the_version_in_service(tmp_path: Path) -> None:
    trainer = publishing(tmp_path / "bus", every_steps=2, values="fp32")
    hr.export(trainer.model, tmp_path / "ctr")
    number = fit(trainer, 2)
    served = follow(tmp_path)
    (tmp_path / "bus").rename(tmp_path / "gone")
    until(lambda: served.follower.state == AWAY)  # type: ignore[union-attr]
    assert served.run(make_batch(8), "wait")[3].publication == number
    (tmp_path / "gone").rename(tmp_path / "bus")
    number = fit(trainer, 2, first=2)
    until(lambda: served.publication == number)
    assert rows_of(served.engine.embeddings) == at_wire(trainer, "fp32")
    assert served.follower is not None and served.follower.counts.bus_errors > 0
    served.close()


def test_bad_messages_are_counted_and_quarantined(tmp_path: Path) -> None:
    trainer = publishing(tmp_path / "bus", every_steps=2)
    hr.export(trainer.model, tmp_path / "ctr")
    fit(trainer, 2)
    open_bus(f"dir:{tmp_path / 'bus'}").append(b"nonsense")
    number = fit(trainer, 2, first=2)
    served = follow(tmp_path)
    until(lambda: served.publication == number)
    assert served.follower is not None
    until(lambda: served.follower.counts.corrupt == 1)  # type: ignore[union-attr]
    assert list((tmp_path / "cache" / "hotrow" / "quarantine").rglob("*.bad"))
    served.close()


def test_a_publication_of_another_model_is_not_applied(tmp_path: Path) -> None:
    trainer = publishing(tmp_path / "elsewhere", every_steps=2)
    hr.export(trainer.model, tmp_path / "ctr")
    bus = open_bus(f"dir:{tmp_path / 'bus'}")
    body = encode_body({"shop": change([1], 1.0)}, None, "fp32")
    header: dict[str, Any] = {"kind": DELTA, "previous": 0, "run": "r", "step": 1, "watermark": None, "cut": 0.0}
    header |= {"values": "fp32", "rows": 1, "parts": [checksum(body)]}
    header["checksum"] = content_checksum(1, header)
    for message in parts(1, 5, 0, 1, body, bus.limit):
        bus.append(message.encode())
    bus.append(note(1, 5, header).encode())
    served = follow(tmp_path)
    assert served.follower is not None and served.follower.state == STUCK and "'shop'" in served.follower.why
    assert served.publication == 0
    served.close()


def test_ages_forget_after_a_minute() -> None:
    now = [1000.0]
    ages = AnswerAges(lambda: now[0])
    ages.note(Freshness.of(1, 990_000), 5)
    assert 8 < ages.percentiles()["0.5"] < 13
    now[0] += SPAN + 1
    assert ages.percentiles()
    now[0] += SPAN + 1
    assert not ages.percentiles()


class SlowVersion:
    """A version that takes a while for each publication."""

    def __init__(self, served: ServedVersion, seconds: float) -> None:
        self.served, self.seconds = served, seconds

    @property
    def fresh(self) -> Freshness:
        return self.served.fresh

    def prepare_update(self, publication: Publication) -> Callable[[], None]:
        time.sleep(self.seconds)
        return self.served.prepare_update(publication)

    def reopen(self, path: Path) -> None:
        self.served.reopen(path)


def test_what_is_published_while_a_version_catches_up_is_applied_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval = 0.02
    monkeypatch.setattr(fleet_history, "INTERVAL", interval)
    monkeypatch.setattr(fleet_history, "ROWS", 2_000)
    monkeypatch.setattr(fleet_history, "CHANGED", 200)
    fleet_history.export(tmp_path)
    bus = f"dir:{tmp_path / 'bus'}"
    with fleet_history.History(bus, tmp_path / "spool") as history:
        until(lambda: history.newest >= 150)
        served = open_version(tmp_path / "ctr" / "1", {"compile": False, "artifacts": str(tmp_path / "artifacts")})
        follower = Follower(SlowVersion(served, interval / 4), bus, None)
        assert follower.start(60.0)
        behind = history.newest - served.publication  # one round of catching up leaves about 75
        follower.close()
    assert behind <= CLOSE / interval + 10
    served.close()
