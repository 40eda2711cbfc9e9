"""Lanes on a GPU give the same answers as an engine on the CPU, for any HBM contents and batch size."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import hotrow as hr
from hotrow.publish.publication import DELTA, Publication, TableChange
from hotrow.serve.execution.device_lane import RUNNERS_IN_FLIGHT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

KEYS, DENSE = 3000, 3
LADDER = (8, 32)  # larger ones are cut


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tables have two widths, so that they are in two groups."""
    tables = [hr.Table("user", dim=4), hr.Table("item", dim=4), hr.Table("place", dim=8)]
    embeddings = hr.EmbeddingCollection(tables, seed=3)
    draw = torch.Generator().manual_seed(0)
    for rows in embeddings.tables:
        rows.assign(torch.arange(KEYS), torch.randn(KEYS, rows.table.dim, generator=draw))
    torch.manual_seed(0)
    tower = hr.models.build_tower(
        "dcn_v2",
        features=embeddings.features,
        sequences=embeddings.sequences,
        dense_features=DENSE,
        layers=2,
        deep=(8,),
    )
    path = tmp_path_factory.mktemp("repository") / "ctr"
    hr.export(hr.Recommender(embeddings, tower), path)
    return path


@pytest.fixture
def plain(repository: Path) -> Iterator[hr.Engine]:
    with hr.Engine(repository) as engine:
        yield engine


def make_batch(rows: int, seed: int) -> hr.KeyedBatch:
    draw = torch.Generator().manual_seed(seed)
    hot = (torch.rand(3, rows, generator=draw) ** 3 * (KEYS + 50)).long()  # some have no row
    ids = {name: hr.Jagged(hot[n]) for n, name in enumerate(("user", "item", "place"))}
    return hr.KeyedBatch(ids, torch.randn(rows, DENSE, generator=draw))


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_answers_are_those_of_the_cpu_for_every_size(repository: Path, plain: hr.Engine) -> None:
    piece = LADDER[-1]
    sizes = [
        1,
        8,
        9,
        piece,
        piece + 1,
        2 * piece,
        RUNNERS_IN_FLIGHT * piece - 1,
        RUNNERS_IN_FLIGHT * piece + 1,
        9 * piece + 5,
    ]
    with hr.Engine(repository, memory=hr.Memory(hbm="32KiB"), ladder=LADDER) as engine:
        assert engine._lanes is not None
        for number, rows in enumerate(sizes * 3):
            batch = make_batch(rows, number)
            answered = engine.answer(batch)
            assert close(answered.logits, plain.logits(batch)), rows
            assert answered.late.ids == 0 and answered.late.by_row is None and answered.compiled
        assert engine._lanes.reader.filler.error is None


def test_lanes_answer_side_by_side_while_rows_come_up(repository: Path, plain: hr.Engine) -> None:
    batches = [make_batch(1 + n % 100, n) for n in range(400)]
    expected = [plain.logits(batch) for batch in batches]
    with hr.Engine(repository, memory=hr.Memory(hbm="32KiB"), ladder=LADDER, lanes=3) as engine:
        with ThreadPoolExecutor(4) as threads:
            got = list(threads.map(lambda batch: engine.answer(batch).logits, batches))
        assert all(close(a, b) for a, b in zip(got, expected, strict=True))
        filler = engine._lanes.reader.filler  # type: ignore[union-attr]
        assert filler.rows_inserted > 0 and filler.error is None


def test_rows_on_ssd_alone_are_waited_for_or_answered_by_policy(
    repository: Path, plain: hr.Engine, tmp_path: Path
) -> None:
    memory = hr.Memory(hbm="32KiB", dram="4MiB", ssd=str(tmp_path))
    with hr.Engine(repository, memory=memory, ladder=LADDER) as engine:
        batch = make_batch(70, 1)
        for rows in engine.embeddings.tables:
            rows.store.core.evict(KEYS)
        cold = engine.cold(batch)
        late = engine.answer(batch, "initial").late
        assert cold > 0 and late.ids == cold and late.by_row is not None and int(late.by_row.sum()) == cold
        assert close(engine.answer(batch).logits, plain.logits(batch))


def test_new_weights_and_rows_are_answered_with_from_the_next_batch_on(repository: Path) -> None:
    with hr.Engine(repository) as plain, hr.Engine(repository, memory=hr.Memory(hbm="32KiB"), ladder=LADDER) as engine:
        batches = [make_batch(rows, rows) for rows in (5, 30, 100)]
        for batch in batches * 3:
            engine.answer(batch)
        weights = {name: value.cpu() * 1.5 for name, value in plain.original.weights.items()}
        changed = torch.arange(0, KEYS, 3)
        tables = {
            name: TableChange(changed, torch.full((changed.numel(), dim), 0.25), torch.arange(1, 40, 3))
            for name, dim in (("user", 4), ("place", 8))
        }
        said = {"kind": DELTA, "previous": 0, "run": "r", "step": 1, "watermark": None, "cut": 0.0}
        publication = Publication(number=1, tables=tables, dense=weights, **said)
        before = engine.logits(batches[2])
        for each in (plain, engine):
            each.apply(publication)
        assert engine.publication == 1 and not close(engine.logits(batches[2]), before)
        for batch in batches:
            assert close(engine.logits(batch), plain.logits(batch))
