"""Encodings of users over row servers: none is used at another publication than that of the rows beside it."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from row_servers import Rows, over, port_of, servers_of, until, where
from test_publications import OwnBus, Story
from user_models import Asks, ask, batch_of, exported, user_model

import hotrow as hr
from hotrow.errors import LateError
from hotrow.publish.publication import DELTA
from hotrow.serve.execution.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 6
ASKS = [[ask(seed, rows=3), ask(seed + 1, rows=1)] for seed in range(4)]


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= 1e-6


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """An export of a two-part tower, the publications after it, and a plain engine's answers at each of them."""
    folder = tmp_path_factory.mktemp("story")
    model = user_model()
    publish = hr.Publish(f"dir:{folder / 'bus'}", heartbeat=60.0, every_steps=1, values="fp32")
    trainer = hr.Trainer(model, torch.optim.SGD(model.tower.parameters(), lr=0.1), publish=publish)
    exported(folder / "repository", model)
    trainer.fit(Asks(STEPS), progress=False)
    trainer.publisher.close()  # type: ignore[union-attr]
    found, subscriber = [], hr.Subscriber(f"dir:{folder / 'bus'}")
    with hr.Engine(folder / "repository" / "ctr") as plain:
        expected = [[plain.logits(batch_of(asks)) for asks in ASKS]]
        while len(found) < STEPS:
            for one in subscriber.poll(5.0):
                if one.kind == DELTA:
                    plain.apply(one)
                    found.append(one)
                    expected.append([plain.logits(batch_of(asks)) for asks in ASKS])
    assert all(not close(a[0], b[0]) for a, b in itertools.pairwise(expected))  # or the tests could not fail
    return Story(folder / "repository", folder / "bus", found, expected, folder)


def check(engine: Engine, story: Story, which: int) -> None:
    answer = engine.answer(batch_of(ASKS[which]))
    assert answer.fresh.publication == engine.publication
    assert close(answer.logits, story.expected[answer.fresh.publication][which])


def test_answers_are_of_one_publication_while_row_servers_lead(story: Story, rows: Rows, tmp_path: Path) -> None:
    """The row servers have all publications long before the tower server applies them."""
    bus = OwnBus(story, tmp_path / "bus")
    server = rows.start(story.repository, bus=(bus.address,))
    draw = random.Random(5)
    with hr.Engine(story.repository / "ctr", memory=hr.Memory(rows=where(server)), user_cache="1MiB") as engine:
        assert engine.users is not None and engine.users.cache is not None
        for which in (0, 1, 2, 3, 0, 1):
            check(engine, story, which)
        bus.publish(server, STEPS)
        for one in story.publications:
            for _ in range(3):
                check(engine, story, draw.randrange(4))
            engine.apply(one)
            for _ in range(3):
                check(engine, story, draw.randrange(4))
        figures = engine.users.cache.figures()
        assert engine.publication == STEPS and figures["hits"] > 0 and figures["outdated"] > 0


def test_encodings_of_rows_that_a_policy_answered_are_not_kept(story: Story, rows: Rows) -> None:
    server = rows.start(story.repository)
    port = port_of(server)
    with hr.Engine(story.repository / "ctr", memory=hr.Memory(rows=where(server)), user_cache="1MiB") as engine:
        assert engine.users is not None and engine.users.cache is not None
        check(engine, story, 0)
        known = engine.users.cache.figures()["users"]
        rows.end(server)
        late = engine.answer(batch_of(ASKS[2]), "initial", until=0.0)
        assert late.late.ids > 0 and engine.users.cache.figures()["users"] == known
        with pytest.raises(LateError):
            engine.answer(batch_of(ASKS[2]), "wait", until=0.0)
        rows.start(story.repository, port=port)
        until(lambda: servers_of(engine).can_read(0), "the row server")
        check(engine, story, 2)
        check(engine, story, 0)


def test_a_tower_server_without_a_cache_reads_each_history_once(story: Story, rows: Rows) -> None:
    server = rows.start(story.repository)
    with over(story.repository / "ctr", where(server)) as engine:
        for which in range(4):
            check(engine, story, which)
        assert engine.users is not None and engine.users.users == len(ASKS) * 2
