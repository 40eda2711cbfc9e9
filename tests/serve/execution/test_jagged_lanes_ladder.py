"""Which buckets of histories are captured: sizes that traffic needs, few of them. No lane and no GPU is needed."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from serve.execution.jagged_models import DENSE, DIM, JaggedTower, PaddedTower, make_batch

import hotrow as hr
from hotrow.serve.execution import jagged_lanes
from hotrow.serve.execution.jagged_lanes import JaggedLanes
from hotrow.serve.graph.tower_graph import Shape
from hotrow.serve.graph.tower_inputs import TowerInputs
from hotrow.tiers.hbm.serving_reader import ServingReader

if torch.cuda.is_available():
    pytest.skip("readers of this test are over Triton's interpreter", allow_module_level=True)


def lanes(jagged: bool, most_rows: int = 32) -> JaggedLanes:
    tables = [
        hr.Table("item", dim=DIM, features={"item": "sum", "seen": "none"}, values="fp32"),
        hr.Table("tags", dim=DIM, features={"tags": "mean"}, values="fp32"),
    ]
    embeddings = hr.EmbeddingCollection(tables, memory=hr.Memory(hbm="16KiB"), device="cpu")
    assert embeddings.hbm_cache is not None
    inputs = TowerInputs(
        {"item": DIM, "seen": DIM, "tags": DIM}, frozenset({"seen"}), DENSE, ("when",) if jagged else (), jagged,
        aligned=(("seen", "when"),) if jagged else (), max_lengths={"seen": 12},
    )  # fmt: skip
    tower = (JaggedTower() if jagged else PaddedTower()).eval()
    original = SimpleNamespace(inputs=inputs, run=tower)
    reader = ServingReader(embeddings.layout, embeddings.hbm_cache)
    return JaggedLanes(reader, original, [], queue.SimpleQueue(), (8, most_rows))  # type: ignore[arg-type]


@pytest.fixture
def jagged(monkeypatch: pytest.MonkeyPatch) -> Iterator[JaggedLanes]:
    monkeypatch.setattr(JaggedLanes, "_check", lambda self: None)  # it waits for a GPU
    made = lanes(jagged=True)
    yield made
    made.close()
    made.reader.base.close()


def test_a_size_is_rounded_up_its_ladder_and_never_above_max_length(jagged: JaggedLanes) -> None:
    assert jagged._cover(Shape(5, (0, 100))) == Shape(8, (16, 128))
    assert jagged._cover(Shape(33, (0, 100))) is None
    padded = lanes(jagged=False)
    assert padded._cover(Shape(8, (17, 20, 12))) == Shape(8, (32, 32, 12))
    padded.reader.base.close()


def test_a_bucket_is_captured_when_traffic_asks_for_it(jagged: JaggedLanes) -> None:
    batch = make_batch("jagged", 6, 1)
    assert jagged.plan(batch) is None and jagged.wait(30)
    assert jagged.plan(batch) is not None and len(jagged.captured) == 1
    (bucket,) = jagged.captured
    assert bucket.takes(Shape(batch.size, jagged.reader.lengths_of(batch)), True)
    assert jagged.plan(make_batch("jagged", 40, 1)) is None  # more rows than the ladder


def test_the_ladder_follows_the_traffic(jagged: JaggedLanes) -> None:
    batches = [make_batch("jagged", rows, rows) for rows in (5, 20)]
    for number in range(300):
        jagged.plan(batches[number % 2])
    assert jagged.wait(30)
    shapes = [Shape(batch.size, jagged.reader.lengths_of(batch)) for batch in batches]

    def work() -> int:
        covers = [jagged._cover(shape) for shape in shapes]
        assert all(cover is not None and cover.covers(shape) for cover, shape in zip(covers, shapes, strict=True))
        return sum([jagged._work(cover) for cover in covers if cover is not None])

    before, most = work(), jagged._cover(Shape(30, (1, 5000)))
    jagged.relearn_ladder()
    assert work() < 0.9 * before and work() < 1.15 * sum([jagged._work(shape) for shape in shapes])
    larger = jagged._cover(Shape(30, (1, 5000)))  # than any batch so far
    assert most is not None and larger is not None and larger.lengths[1] == most.lengths[1] == 8192


def test_the_least_recently_used_bucket_makes_room(jagged: JaggedLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jagged_lanes, "MOST_BUCKETS", 2)
    monkeypatch.setattr(jagged_lanes, "MOST_WASTE", 1.0)
    draw = np.random.default_rng(0)
    small, middle, large = (make_batch("jagged", rows, int(draw.integers(100))) for rows in (1, 8, 32))
    for batch in (small, middle, small, large):
        jagged.plan(batch)
        assert jagged.wait(30)
    assert len(jagged.captured) == 2
    assert jagged.plan(small) is not None and jagged.plan(large) is not None and jagged.plan(middle) is None
