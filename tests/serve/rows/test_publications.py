"""One publication per answer, over row servers that lag, lead, restart, and forget.

A bus with real publications is copied message by message to the buses of the row servers and of the tower server, so a
test decides who has which publication. The expected answers are those of a plain engine at each publication.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from row_servers import Rows, over, same_bits, servers_of, until, where
from small_models import Batches, make_batch
from test_fresh_engine import publishing

import hotrow as hr
from hotrow.errors import LateError
from hotrow.publish.publication import DELTA, Publication
from hotrow.serve.execution import engine as engine_module
from hotrow.serve.execution.engine import Engine
from hotrow.serve.execution.servable import open_version
from hotrow.serve.rows import row_server_options
from hotrow.serve.rows.row_server_process import RowServerProcess
from hotrow.tiers.remote.tables import RemoteTables

STEPS = 12
BATCHES = [make_batch(40, seed) for seed in (1001, 1002)]


class Story(NamedTuple):
    """An export, the publications after it, and the answers of a plain engine at each of them."""

    repository: Path
    bus: Path
    publications: list[Publication]  # number n at n - 1
    expected: list[list[torch.Tensor]]  # by publication and batch
    newest: Path  # an export at the last one, version 2

    @property
    def last(self) -> int:
        return len(self.publications)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    trainer = publishing(folder / "bus", every_steps=1, values="fp32")
    hr.export(trainer.model, folder / "repository" / "ctr", policy="wait")
    trainer.fit(Batches(STEPS), progress=False)
    for _ in range(2):
        newest = hr.export(trainer.model, folder / "newest" / "ctr", publication=STEPS, policy="wait").path
    trainer.publisher.close()  # type: ignore[union-attr]
    found: list[Publication] = []
    subscriber = hr.Subscriber(f"dir:{folder / 'bus'}")
    with hr.Engine(folder / "repository" / "ctr") as plain:
        expected = [[plain.logits(batch) for batch in BATCHES]]
        while len(found) < STEPS:
            for one in subscriber.poll(5.0):
                if one.kind == DELTA:
                    plain.apply(one)
                    found.append(one)
                    expected.append([plain.logits(batch) for batch in BATCHES])
    for before, after in pairwise(expected):  # or the tests could not fail
        assert not same_bits(before[0], after[0])
    return Story(folder / "repository", folder / "bus", found, expected, newest)


class OwnBus:
    """A bus with a part of the story's messages."""

    def __init__(self, story: Story, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for path in story.bus.iterdir():
            if path.is_file() and path.suffix != ".msg":
                shutil.copy(path, folder)
        self.left = sorted(story.bus.glob("*.msg"))

    @property
    def address(self) -> str:
        return f"dir:{self.folder}"

    def publish(self, server: RowServerProcess | None = None, number: int = STEPS) -> None:
        """Copy messages until a server has a publication."""
        while self.left and (server is None or server.versions["ctr", 1].fresh.publication < number):
            one = self.left.pop(0)
            shutil.copy(one, self.folder / f"{one.name}.part")
            (self.folder / f"{one.name}.part").rename(self.folder / one.name)
            if server is not None:
                time.sleep(0.03)
        if server is not None:
            until(lambda: server.versions["ctr", 1].fresh.publication >= number, f"publication {number}")


class Askers:
    """Threads that ask without a pause and compare each answer with that of its publication."""

    def __init__(self, story: Story, engine: Any, threads: int = 4) -> None:
        self.story, self.engine = story, engine
        self.wrong: list[Any] = []
        self.late: list[str] = []
        self.seen: set[int] = set()
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(threads)]
        for thread in self.threads:
            thread.start()

    def _ask(self, number: int) -> None:
        at = number % len(BATCHES)
        while not self.stop.is_set():
            try:
                answer = self.engine.answer(BATCHES[at], "wait", time.monotonic() + 1.0)
            except LateError as error:
                self.late.append(str(error))
                continue
            except Exception as error:
                self.wrong.append(error)
                return
            publication = answer.fresh.publication
            self.seen.add(publication)
            if not same_bits(answer.logits, self.story.expected[publication][at]):
                self.wrong.append(f"another answer than publication {publication}'s")

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(30)
        assert not self.wrong, self.wrong[:3]


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 12)]])
def test_every_answer_is_of_one_publication_whoever_lags_or_leads(
    tmp_path: Path, rows: Rows, story: Story, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SERVERS_CATCH_UP", 0.2)
    draw = random.Random(seed)
    buses = [OwnBus(story, tmp_path / f"bus-{number}") for number in range(4)]
    ssd = {"dram": "3MiB", "ssd": str(tmp_path / "ssd")} if seed % 2 else {}
    servers = [
        rows.start(story.repository, shards, bus=(bus.address,), **(ssd if number == 0 else {}))
        for number, (bus, shards) in enumerate(zip(buses, ["0:512", "512:1024", "0:512", "400:1024"], strict=True))
    ]
    local = draw.choice(["on", "off"])
    with over(story.repository / "ctr", where(*servers, local=local)) as engine:
        askers = Askers(story, engine)
        while engine.publication < STEPS or any(bus.left for bus in buses):
            one = draw.randrange(5)
            if one < 4 and buses[one].left:
                buses[one].left, rest = buses[one].left[1:], buses[one].left[:1]
                for path in rest:
                    shutil.copy(path, buses[one].folder / f"{path.name}.part")
                    (buses[one].folder / f"{path.name}.part").rename(buses[one].folder / path.name)
            elif one == 4 and engine.publication < STEPS and draw.random() < 0.3:
                engine.apply(story.publications[engine.publication])
            time.sleep(draw.choice([0, 0, 0.005, 0.02]))
        for server in servers:
            until(lambda: server.versions["ctr", 1].fresh.publication == STEPS, "the last publication")  # noqa: B023
        time.sleep(1.2)  # requests of before have ended
        late = askers.late[:]
        time.sleep(0.2)
        askers.end()
        assert STEPS in askers.seen and len(askers.late) == len(late)
        assert all("have not applied the publication yet" in why for why in late), late[:3]


def test_servers_that_lead_answer_at_every_publication_of_the_tower(tmp_path: Path, rows: Rows, story: Story) -> None:
    servers = [rows.start(story.repository, shards, bus=(f"dir:{story.bus}",)) for shards in ("0:512", "512:1024")]
    for local in ("on", "off"):
        with over(story.repository / "ctr", where(*servers, local=local)) as engine:
            for number in range(STEPS + 1):
                if number:
                    engine.apply(story.publications[number - 1])
                for batch, expected in zip(BATCHES, story.expected[number], strict=True):
                    answer = engine.answer(batch)
                    assert answer.fresh.publication == number and same_bits(answer.logits, expected)
    assert all(server.figures()["versions"]["ctr/1"]["restored"] for server in servers)


def test_a_tower_waits_for_lagging_servers_before_it_puts_an_update_in_service(
    tmp_path: Path, rows: Rows, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SERVERS_CATCH_UP", 20.0)
    bus = OwnBus(story, tmp_path / "bus")
    server = rows.start(story.repository, bus=(bus.address,))
    with over(story.repository / "ctr", where(server)) as engine:
        askers = Askers(story, engine, 2)
        applying = threading.Thread(target=engine.apply, args=(story.publications[0],))
        applying.start()
        time.sleep(0.3)
        assert engine.publication == 0
        bus.publish(server, 1)
        applying.join(20)
        assert engine.publication == 1
        until(lambda: 1 in askers.seen, "answers of the update")
        askers.end()
        assert not askers.late


def test_a_server_that_restarted_at_its_export_is_not_asked_before_it_caught_up(
    tmp_path: Path, rows: Rows, story: Story
) -> None:
    current = rows.start(story.repository, bus=(f"dir:{story.bus}",))
    with over(story.repository / "ctr", where(current, current)) as engine:
        for one in story.publications:
            engine.apply(one)
    bus = OwnBus(story, tmp_path / "bus")
    behind = rows.start(story.repository, bus=(bus.address,))
    for local in ("on", "off"):
        with over(story.repository / "ctr", where(behind, current, local=local)) as engine:
            until(lambda: len(servers_of(engine).topology.servers[0]) == 2, "both servers")
            for one in story.publications:
                engine.apply(one)
            askers = Askers(story, engine)
            until(lambda: len(askers.seen) == 1, "answers")  # noqa: B023
            time.sleep(0.3)
            if local == "off":
                bus.publish(behind)
                time.sleep(0.2)
            askers.end()
            assert not askers.late and askers.seen == {STEPS}
    assert behind.figures()["versions"]["ctr/1"]["lookups"] > 0  # once it had caught up


def test_a_server_behind_alone_is_waited_for_until_the_deadline(
    tmp_path: Path, rows: Rows, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "SERVERS_CATCH_UP", 0.05)
    bus = OwnBus(story, tmp_path / "bus")
    server = rows.start(story.repository, bus=(bus.address,))
    for local in ("on", "off"):
        with over(story.repository / "ctr", where(server, local=local)) as engine:
            for one in story.publications[: 1 if local == "on" else 2]:
                engine.apply(one)
            number = engine.publication
            with pytest.raises(LateError, match=r"\(the servers have not applied the publication yet\)"):
                engine.answer(BATCHES[0], "wait", time.monotonic() + 0.2)
            assert engine.answer(BATCHES[0], "initial", time.monotonic() + 0.2).late.ids > 0
            answers: list[Any] = []

            def ask(engine: Engine = engine, answers: list[Any] = answers) -> None:
                answers.append(engine.answer(BATCHES[0], "wait", time.monotonic() + 20))

            waiting = threading.Thread(target=ask)
            waiting.start()
            time.sleep(0.05)
            bus.publish(server, number)
            waiting.join(20)
            assert same_bits(answers[0].logits, story.expected[number][0])


def test_a_tower_behind_the_history_is_told_so_and_answers_again_once_it_has_caught_up(
    rows: Rows, story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_server_options, "LEAST_HISTORY", 1)
    server = rows.start(story.repository, bus=(f"dir:{story.bus}",), history="1KiB")
    until(lambda: server.versions["ctr", 1].fresh.publication == STEPS, "the last publication")
    assert server.versions["ctr", 1].service.oldest == STEPS - 1  # the newest is always kept
    for local in ("on", "off"):
        with over(story.repository / "ctr", where(server, local=local)) as engine:
            began = time.monotonic()
            with pytest.raises(LateError, match=r"\(this server is too far behind the row servers\)"):
                engine.answer(BATCHES[0], "wait", began + 20)
            assert time.monotonic() - began < 10  # no server will have it again, so it does not wait
            assert engine.answer(BATCHES[0], "initial").late.ids > 0
            for number, one in enumerate(story.publications, 1):
                engine.apply(one)
                if number >= STEPS - 1:
                    assert same_bits(engine.logits(BATCHES[0]), story.expected[number][0])


def test_a_server_behind_retention_starts_again_from_a_newer_export(tmp_path: Path, rows: Rows, story: Story) -> None:
    """So does the tower server; between the two its requests are late, and then all of them are right."""
    repository = tmp_path / "repository"
    shutil.copytree(story.repository, repository)
    bus, other = OwnBus(story, tmp_path / "bus"), OwnBus(story, tmp_path / "other")
    servers = [
        rows.start(repository, "0:512", bus=(bus.address,), dram="3MiB", ssd=str(tmp_path / "ssd")),
        rows.start(repository, "512:1024", bus=(bus.address,)),
    ]
    options = {"compile": False, "artifacts": str(tmp_path / "artifacts"), "max_rows": 64}
    options |= {"bus": {"ctr": other.address}, "rows": {"ctr": where(*servers)}}
    served = open_version(repository / "ctr" / "1", options)
    try:
        shutil.copytree(story.newest, repository / "ctr" / "2.part")
        (repository / "ctr" / "2.part").rename(repository / "ctr" / "2")
        for one in (bus, other):
            one.left = one.left[-2:]  # retention has removed what is between
            one.publish()
        for server in servers:
            until(lambda: server.versions["ctr", 1].fresh.publication == STEPS, "the export's publication")  # noqa: B023
        until(lambda: served.publication == STEPS, "the tower's")
        for batch, expected in zip(BATCHES, story.expected[STEPS], strict=True):
            assert same_bits(served.run(batch, "wait")[0], expected)
    finally:
        served.close()


CACHES: dict[str, dict[str, Any]] = {
    "dram": {"dram": "32MiB"},
    "little dram": {"dram": "3MiB"},
    "dram over ssd": {"dram": "8MiB", "ssd": "ssd"},
}


@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_over_row_servers_answers_one_publication_too(
    tmp_path: Path, rows: Rows, story: Story, cache: str
) -> None:
    """Rows in the cache, rows that are being read, and rows that a publication changes meanwhile."""
    servers = [rows.start(story.repository, shards, bus=(f"dir:{story.bus}",)) for shards in ("0:512", "512:1024")]
    tiers = {name: str(tmp_path / value) if name == "ssd" else value for name, value in CACHES[cache].items()}
    memory = hr.Memory(rows=where(*servers), **tiers)
    with hr.Engine(story.repository / "ctr", memory=memory) as engine:
        askers = Askers(story, engine)
        for one in story.publications:
            until(lambda: engine.publication in askers.seen, "answers of the publication")
            engine.apply(one)
        until(lambda: STEPS in askers.seen, "answers of the last publication")
        askers.end()
        assert not askers.late and askers.seen == set(range(STEPS + 1))
        figures = engine.embeddings.remote.figures()  # type: ignore[union-attr]
        assert figures["hits"] > 0 and figures["misses"] > 0


def test_rows_fall_through_to_the_export_when_all_row_servers_are_gone(rows: Rows, story: Story) -> None:
    server = rows.start(story.repository)
    memory = hr.Memory(rows=where(server), dram="32MiB", remote="export:")
    with hr.Engine(story.repository / "ctr", memory=memory) as engine:
        rows.end(server)
        for batch, expected in zip(BATCHES, story.expected[0], strict=True):
            assert same_bits(engine.answer(batch).logits, expected)


def test_a_batch_that_the_export_answers_is_read_once(rows: Rows, story: Story) -> None:
    """The export is older than what is in service, and reading again would not make it newer."""
    server = rows.start(story.repository, bus=(f"dir:{story.bus}",))
    memory = hr.Memory(rows=where(server), dram="32MiB", remote="export:")
    with hr.Engine(story.repository / "ctr", memory=memory) as engine:
        for one in story.publications:
            engine.apply(one)
        rows.end(server)
        remote = engine.embeddings.remote
        assert isinstance(remote, RemoteTables)

        def keys_read() -> int:
            counts = remote.metrics()
            return counts["hits"] + counts["misses"]

        for batch in BATCHES:
            before = keys_read()
            answer = engine.answer(batch)
            assert answer.fresh.publication == 0 and answer.late.ids == 0
            assert 0 < keys_read() - before <= sum(ids.values.numel() for ids in batch.ids.values())
