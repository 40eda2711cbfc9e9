"""Encodings of users over a remote store, whose rows may be newer than the publication in service."""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import pytest
from test_remote_engine import filled, write
from user_models import KEYS, ask, batch_of, exported, items_set_to, user_trainer

import hotrow as hr
from hotrow.bench.servers.redis_cluster import RedisServers

pytestmark = pytest.mark.usefixtures("one_thread")

LAST = 4
ASKS = [[ask(seed, rows=2, events=5)] for seed in range(4)]


def test_an_answer_of_one_publication_is_that_publications(tmp_path: Path, redis: RedisServers) -> None:
    url = f"{redis.url}?namespace={uuid.uuid4().hex}&timeout=5"
    folder = exported(tmp_path, user_trainer().model) / "ctr"
    store = filled(url, folder)
    updates = [items_set_to(number / 3, list(range(KEYS)), number) for number in range(1, LAST + 1)]
    with hr.Engine(folder) as plain:
        expected = [[plain.logits(batch_of(asks)) for asks in ASKS]]
        for one in updates:
            plain.apply(one)
            expected.append([plain.logits(batch_of(asks)) for asks in ASKS])
    draw, of_one, mixed = random.Random(2), 0, 0
    with hr.Engine(folder, memory=hr.Memory(dram="3MiB", remote=url), user_cache="1MiB") as engine:
        assert engine.users is not None and engine.users.cache is not None
        for step in range(120):
            if step % 20 == 8 and store.lowest < LAST:
                write(store, updates[store.lowest])  # the store is ahead now
            if step % 20 == 16 and engine.publication < LAST:
                engine.apply(updates[engine.publication])
            which = draw.randrange(4)
            answer = engine.answer(batch_of(ASKS[which]))
            if answer.fresh.publication == answer.fresh.highest:
                of_one += 1
                wanted = expected[answer.fresh.publication][which]
                assert float((answer.logits - wanted).abs().max()) <= 1e-6
            else:
                mixed += 1
        figures = engine.users.cache.figures()
    store.close()
    assert of_one > 20 and figures["hits"] > 10, (of_one, mixed, figures)
