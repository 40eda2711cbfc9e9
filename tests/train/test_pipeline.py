"""For every lookahead and memory budget, training gives the bits of one batch at a time."""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from runs import SHAPE, DropoutTower, all_rows, bits

import hotrow as hr
from hotrow.data import Cursor
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.train import fit, progress_view, stage_threads
from hotrow.train.checkpoint.manifest import list_checkpoints
from hotrow.train.lookahead import Lookahead, LookaheadOptions
from hotrow.train.stage_times import Stages

BATCH, STEPS, DIM = 1024, 24, 64
BUDGETS = {"dram": None, "small": "12MiB", "tiny": "9MiB"}  # rows of about 20 MB
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "policies": {
        "admission": hr.Admission(after=2, sketch="64KiB"),
        "expiry": hr.Expiry(steps=8, min_count=2, grace=3, every=4),
    },
    "accumulated": {"accumulate": 3, "admission": hr.Admission(probability=0.5, sketch="64KiB")},
    "fp16": {"precision": "fp16", "admission": hr.Admission(probability=0.5, sketch="64KiB")},
}


def clicks(steps: int = STEPS) -> SyntheticClicks:
    return SyntheticClicks(examples=steps * BATCH, batch_size=BATCH, keys=200_000, shape=SHAPE)


def make(
    lookahead: int, memory: hr.Memory | None = None, *, admission: Any = None, expiry: Any = None, **options: Any
) -> hr.Trainer:
    tables = [hr.Table(name, dim=DIM, admission=admission, expiry=expiry) for name in ("user", "item")]
    embeddings = hr.EmbeddingCollection(tables, optimizer=hr.optim.Adam(lr=0.01), memory=memory, seed=3)
    torch.manual_seed(0)
    tower = DropoutTower(16, DIM)
    optimizer = torch.optim.Adam(tower.parameters(), lr=0.01)
    trainer = hr.Trainer(hr.Recommender(embeddings, tower), optimizer, lookahead=lookahead, **options)
    if options.get("precision") == "fp16":  # some steps are skipped: later batches keep their order
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26, growth_interval=4)
    return trainer


def memory_of(budget: str, folder: Path) -> hr.Memory | None:
    dram = BUDGETS[budget]
    return None if dram is None else hr.Memory(dram=dram, ssd=folder)


_expected: dict[str, tuple[list[float], dict[str, Any]]] = {}


def expected(variant: str) -> tuple[list[float], dict[str, Any]]:
    """One batch at a time, all in DRAM."""
    if variant not in _expected:
        trainer = make(0, **VARIANTS[variant])
        _expected[variant] = trainer.fit(clicks(), progress=False).losses, bits(trainer)
    return _expected[variant]


@pytest.mark.filterwarnings("ignore:dram=:UserWarning")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_lookahead_and_budget_gives_the_same_bits(
    tmp_path: Path, variant: str, lookahead: int, budget: str
) -> None:
    trainer = make(lookahead, memory_of(budget, tmp_path), **VARIANTS[variant])
    report = trainer.fit(clicks(), progress=False)
    losses, everything = expected(variant)
    assert report.losses == losses
    assert bits(trainer) == everything
    assert not living_stage_threads()
    if variant == "fp16":
        assert 4 < report.steps < STEPS
    if budget != "dram" and variant == "plain":
        tiers = [rows.store.tier() for rows in trainer.model.embeddings.tables]
        assert sum(tier["evicted"] for tier in tiers) > 1000
        assert (sum(tier["prefetched"] for tier in tiers) > 100) == (lookahead > 0)


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
def test_a_checkpoint_is_the_same_whatever_runs_ahead_of_it(tmp_path: Path, lookahead: int) -> None:
    """Saved while batches are in flight, over a small DRAM; loaded into one without SSD."""
    options = VARIANTS["policies"]
    saving = make(
        lookahead,
        hr.Memory(dram="12MiB", ssd=tmp_path / "ssd"),
        checkpoints=tmp_path / "c",
        checkpoint_every=5,
        **options,
    )
    saving.fit(clicks(), progress=False)
    plain = make(0, **options)
    plain.fit(clicks(), steps=20, progress=False)
    loaded = make(2, **options)
    loaded.load(list_checkpoints(tmp_path / "c")[0])
    assert loaded.steps == 20
    assert bits(loaded)["rows"] == bits(plain)["rows"]
    loaded_report = loaded.fit(clicks(), cursor=loaded.cursor, progress=False)
    assert loaded_report.losses == expected("policies")[0][20:]


def test_evaluation_in_the_middle_sees_and_changes_nothing_of_what_is_ahead(tmp_path: Path) -> None:
    reports = []
    for lookahead in (0, 3):
        trainer = make(lookahead, hr.Memory(dram="12MiB", ssd=tmp_path / str(lookahead)))
        report = trainer.fit(clicks(), evaluate=clicks(2), evaluate_every=5, epochs=2, progress=False)
        reports.append((report.losses, report.evaluations, all_rows(trainer)))
    assert reports[0] == reports[1]


class Watched:
    """A source that records the calls made to it."""

    def __init__(self, source: SyntheticClicks) -> None:
        self.source, self.examples, self.made = source, source.examples, 0
        self.closed_by: list[str] = []

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        try:
            for item in self.source.batches(cursor):
                self.made += 1
                yield item
        finally:
            self.closed_by.append(threading.current_thread().name)

    def describe(self) -> str:
        return "watched"


def slow_down(trainer: hr.Trainer, seconds: float, after: Callable[[], None] = lambda: None) -> None:
    """Training is slow, so the stages before it are never the bottleneck."""
    real = trainer._forward_backward

    def compute(lookup: Any) -> Any:
        time.sleep(seconds)
        after()
        return real(lookup)

    trainer._forward_backward = compute  # type: ignore[method-assign]


@pytest.mark.parametrize("lookahead", [1, 2, 4])
def test_at_most_lookahead_batches_are_ahead_of_the_one_in_compute(lookahead: int) -> None:
    source, seen = Watched(clicks(12)), []
    trainer = make(lookahead)
    slow_down(trainer, 0.03, lambda: seen.append(source.made))
    trainer.fit(source, progress=False)
    assert [made - number for number, made in enumerate(seen, 1)] == [min(lookahead, 12 - n) for n in range(1, 13)]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("lookahead", [0, 1, 4])
def test_nothing_is_read_beyond_the_last_step_and_the_cursor_is_its_own(lookahead: int, accumulate: int) -> None:
    source, trainer = Watched(clicks()), make(lookahead, accumulate=accumulate)
    report = trainer.fit(source, steps=4, progress=False)
    assert source.made == 4 * accumulate
    cursors = [after for _, after in clicks().batches()]
    assert report.cursor == trainer.cursor == cursors[4 * accumulate - 1]
    assert source.closed_by and not living_stage_threads()


def living_stage_threads() -> list[str]:
    names = [f"hotrow {name}" for name in ("read", "route", "prefetch", "stage")]
    return [thread.name for thread in threading.enumerate() if thread.name in names]


class BadStage(Exception):  # noqa: N818
    """A stage failed."""


def break_at(trainer: hr.Trainer, stage: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call-th call of a stage raises, deep inside."""
    from hotrow.table import Lookup

    owner, name = {
        "route": (Lookup, "route"),
        "fetch": (Lookup, "prefetch"),
        "stage": (Lookup, "stage"),
        "compute": (Lookup, "gather"),
    }[stage]
    real, calls = getattr(owner, name), [0]

    def deep_inside(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise BadStage(stage)
        return real(*args)

    monkeypatch.setattr(owner, name, deep_inside)


@pytest.mark.parametrize("stage", ["read", "route", "fetch", "stage", "compute"])
def test_an_error_of_a_stage_ends_the_run_with_its_own_traceback(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(3, hr.Memory(dram="12MiB", ssd=tmp_path))
    source: Any = clicks()
    if stage == "read":

        class Broken(Watched):
            def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
                for i, item in enumerate(super().batches(cursor)):
                    if i == 6:
                        deep_inside()
                    yield item

        def deep_inside() -> None:
            raise BadStage("read")

        source = Broken(clicks())
    else:
        break_at(trainer, stage, 7, monkeypatch)
    with pytest.raises(BadStage, match=stage) as caught:
        trainer.fit(source, progress=False)
    assert caught.traceback[-1].name == "deep_inside"
    assert trainer.steps == 6  # what came before it was computed
    assert not living_stage_threads()
    monkeypatch.undo()
    trainer.forget()
    trainer.fit(clicks(), cursor=trainer.cursor, progress=False)  # dropped batches pin no row
    assert bits(trainer)["rows"] == expected("plain")[1]["rows"]


class Uniform:
    """Batches of keys that all have rows, all equally often: no row stays in a small DRAM by itself."""

    def __init__(self, steps: int, size: int, keys: int) -> None:
        self.steps, self.size, self.keys, self.examples = steps, size, keys, steps * size

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for step in range(int(cursor["step"]) if cursor else 0, self.steps):
            generator = torch.Generator().manual_seed(step)
            ids = {
                name: hr.Jagged(torch.randint(0, self.keys, (self.size,), generator=generator))
                for name in ("user", "item")
            }
            dense = torch.randn(self.size, 3, generator=generator)
            yield hr.KeyedBatch(ids, dense, labels=(dense[:, 0] > 0).float()), {"step": step + 1}

    def describe(self) -> str:
        return "uniform"


def with_rows(trainer: hr.Trainer, keys: int) -> hr.Trainer:
    for rows in trainer.model.embeddings.tables:
        rows.create(torch.arange(keys))
    return trainer


def test_a_budget_too_small_for_the_batches_in_flight_shrinks_the_lookahead_with_a_warning(tmp_path: Path) -> None:
    keys, source = 20_000, Uniform(14, 1500, 20_000)
    plain = with_rows(make(0), keys)
    losses = plain.fit(source, progress=False).losses
    trainer = with_rows(make(8, hr.Memory(dram="10MiB", ssd=tmp_path)), keys)
    slow_down(trainer, 0.15)
    with pytest.warns(UserWarning, match=r"dram=10\.0 MiB cannot hold .* lookahead goes down to [0-7];.* Raise dram="):
        report = trainer.fit(source, progress=False)
    assert report.losses == losses
    assert all_rows(trainer) == all_rows(plain)
    assert trainer.model.embeddings.budget.used <= trainer.model.embeddings.budget.limit


def test_with_enough_memory_rows_are_prefetched_before_their_batch(tmp_path: Path) -> None:
    """None has to be read twice, or on the training thread."""
    keys = 20_000
    trainer = with_rows(make(2, hr.Memory(dram="16MiB", ssd=tmp_path)), keys)
    before = [rows.store.tier() for rows in trainer.model.embeddings.tables]
    trainer.fit(Uniform(20, 400, keys), progress=False)
    after = [rows.store.tier() for rows in trainer.model.embeddings.tables]
    came = {
        name: sum(a[name] - b[name] for a, b in zip(after, before, strict=True)) for name in ("prefetched", "arrivals")
    }
    assert came["prefetched"] > 2000
    assert came["arrivals"] < came["prefetched"] // 100


@pytest.mark.parametrize("lookahead", [-1, 13, 1.5, "2", True])
def test_a_wrong_lookahead_is_refused(lookahead: Any) -> None:
    with pytest.raises(hr.OptionError, match="lookahead="):
        make(lookahead)


def test_the_report_says_what_each_stage_did(tmp_path: Path) -> None:
    trainer = make(2, hr.Memory(dram="12MiB", ssd=tmp_path))
    report = trainer.fit(clicks(), progress=False)
    stages = {stage.name: stage for stage in report.stages}
    assert list(stages) == ["read", "route", "fetch", "stage", "compute"]
    for stage in stages.values():
        assert 0 <= stage.busy <= report.seconds and 0 <= stage.share <= 1
    assert stages["compute"].busy + stages["compute"].waited_input <= report.seconds
    came = sum(rows.store.tier()["prefetched"] for rows in trainer.model.embeddings.tables)
    assert stages["fetch"].bytes == came * (16 + DIM * 3 * 4) > 0
    assert stages["route"].bytes == STEPS * BATCH * 2 * 8
    assert stages["compute"].busy > 0 and stages["read"].waited_room > 0


def test_the_progress_bar_shows_how_busy_stages_were_since_its_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=400)
    told: list[dict[str, float]] = []

    class Watching(progress_view.ProgressView):
        due = property(lambda view: True)  # type: ignore[assignment]

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, console=console, **options)

        def update(self, *args: Any) -> None:
            told.append(args[4])
            super().update(*args)

    monkeypatch.setattr(fit, "ProgressView", Watching)
    trainer = make(2)
    slow_down(trainer, 0.02)
    trainer.fit(clicks(8))
    assert len(told) == 9  # after each batch, and at the end
    for shares in told:
        assert list(shares) == ["read", "route", "fetch", "stage", "compute", "exchange"]
        assert all(0 <= share <= 1 for share in shares.values())
        assert shares["exchange"] == 0.0  # there are no other ranks
    assert sum(shares["compute"] for shares in told[1:8]) / 7 > 0.5  # it sleeps there
    assert sum(shares["read"] for shares in told) > 0
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 9 and all(re.search(r"compute \d+%", line) for line in lines)


@pytest.mark.parametrize("ranks", [False, True])
def test_a_thread_that_does_not_end_is_named_with_what_it_waits_for(
    ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_threads, "JOIN_TIMEOUT", 0.05)
    lines, go_on, begun = Stages(), threading.Event(), threading.Event()
    embeddings: Any = SimpleNamespace(ranks=object() if ranks else None)
    blocked = Lookahead(embeddings, LookaheadOptions(1))._route_blocked

    def blocks(item: int) -> int:
        begun.set()
        go_on.wait()
        return 0

    source, dropped = iter([(1, 0), (2, 0)]), list[int]()
    running = stage_threads.StageThreads(
        source, lines["read"], [stage_threads.Stage("route", lines["route"], blocks, blocked)], 1, dropped.append
    )
    with pytest.warns(UserWarning, match="'hotrow route' has not ended") as said, running:
        running._permit(1)
        begun.wait()
    go_on.set()
    for thread in running._threads:
        thread.join(10)
    assert not living_stage_threads() and dropped == [1]
    assert ("it waits for another rank" in str(said[0].message)) == ranks
    assert "source" not in str(said[0].message)
