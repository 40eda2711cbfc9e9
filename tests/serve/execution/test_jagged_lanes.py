"""Lanes on a GPU take multi-hot features and histories: the answers of an engine on the CPU, on captured buckets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from serve.execution.jagged_models import FORMS, export, make_batch, other_keys, publication

import hotrow as hr
from hotrow.serve.execution.answer import Answer

pytestmark = pytest.mark.gpu

LADDER = (8, 32)


@pytest.fixture(autouse=True)
def on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, or a simulated one (tests/simulated_gpu/plugin.py)")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: export(form, tmp_path_factory.mktemp(form)) for form in FORMS}


@pytest.fixture
def path(form: str, exported: dict[str, Path]) -> Path:
    return exported[form]


@pytest.fixture
def plain(path: Path) -> Iterator[hr.Engine]:
    with hr.Engine(path) as engine:
        yield engine


def open_engine(path: Path, **options: object) -> hr.Engine:
    options = {"memory": hr.Memory(hbm="32KiB"), "ladder": LADDER, **options}
    return hr.Engine(path, **options)  # type: ignore[arg-type]


def answered_by_buckets(engine: hr.Engine, batches: list[hr.KeyedBatch]) -> list[Answer]:
    """Answers of captured buckets. Batches go the plain way while a bucket is captured, so that a few rounds are needed
    until all buckets are there."""
    for _ in range(8):
        answers = [engine.answer(batch) for batch in batches]
        assert engine._lanes.jagged.wait()  # type: ignore[union-attr]
        if all(answer.compiled for answer in answers):
            return answers
    raise AssertionError([answer.compiled for answer in answers])


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_batches_of_all_sizes_are_answered_by_captured_buckets(form: str, path: Path, plain: hr.Engine) -> None:
    with open_engine(path) as engine:
        jagged = engine._lanes.jagged  # type: ignore[union-attr]
        batches = [make_batch(form, *size) for size in ((1, 1, 0), (3, 2, 3), (8, 3), (20, 4, 5), (32, 5), (7, 6, 1))]
        expected = [plain.logits(batch) for batch in batches]
        first = [engine.logits(batch) for batch in batches]  # some of them without a lane
        assert all(close(got, logits) for got, logits in zip(first, expected, strict=True))
        assert jagged.wait() and jagged.captured and not jagged.refused and not jagged.refusal
        for _ in range(2):  # misses, then rows that the filler has inserted
            answers = answered_by_buckets(engine, batches)
            for answered, logits, before in zip(answers, expected, first, strict=True):
                assert close(answered.logits, logits)
                assert torch.allclose(answered.logits, before, rtol=1e-5, atol=1e-5)
        assert engine._lanes.reader.filler.error is None  # type: ignore[union-attr]


def test_lanes_answer_side_by_side_while_buckets_are_captured(form: str, path: Path, plain: hr.Engine) -> None:
    batches = [make_batch(form, 1 + n % 30, n % 10) for n in range(60)]
    expected = [plain.logits(batch) for batch in batches]
    with open_engine(path, lanes=2) as engine, ThreadPoolExecutor(3) as threads:
        for _ in range(2):
            got = list(threads.map(engine.answer, batches))
            assert all(close(one.logits, logits) for one, logits in zip(got, expected, strict=True))
            assert engine._lanes.jagged.wait()  # type: ignore[union-attr]
        assert all(one.compiled for one in threads.map(engine.answer, batches))


def test_new_rows_and_weights_are_answered_with_from_the_next_batch_on(form: str, path: Path, plain: hr.Engine) -> None:
    with open_engine(path) as engine:
        batches = [make_batch(form, rows, rows) for rows in (5, 30)]
        before = answered_by_buckets(engine, batches)
        update = publication(plain)
        for each in (plain, engine):
            each.apply(update)
        for batch, old in zip(batches, before, strict=True):
            answered = engine.answer(batch)
            assert answered.compiled and answered.fresh.publication == 1
            assert close(answered.logits, plain.logits(batch)) and not close(answered.logits, old.logits.cpu())


def test_rows_on_ssd_alone_are_waited_for_or_answered_by_policy(
    form: str, path: Path, plain: hr.Engine, tmp_path: Path
) -> None:
    with open_engine(path, memory=hr.Memory(hbm="32KiB", dram="8MiB", ssd=str(tmp_path / "rows"))) as engine:
        batch = make_batch(form, 30, 4)
        engine.answer(other_keys(batch))
        assert engine._lanes.jagged.wait()  # type: ignore[union-attr]
        for rows in engine.embeddings.tables:
            rows.store.core.evict(1000)
        cold = engine.cold(batch)
        answered = engine.answer(batch, "initial")
        assert answered.compiled and 0 < answered.late.ids <= cold
        if form != "two_parts":
            assert answered.late.by_row is not None and int(answered.late.by_row.sum()) == answered.late.ids
        assert close(engine.answer(batch).logits, plain.logits(batch))
