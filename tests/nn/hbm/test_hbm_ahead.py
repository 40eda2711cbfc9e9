"""Rows come up to HBM ahead of their batch's turn: the same bits, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hbm_runs import (
    FEW,
    LARGE,
    MANY,
    ROOMY,
    SIZE,
    STEPS,
    TIGHT,
    TINY,
    Clicks,
    Tower,
    assert_same,
    batch,
    one_table,
    tables,
    train_on,
    trainer_of,
    update,
    with_miss_lists,
)
from torch import nn

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.device.streams import CapturedSteps
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.table import Admission, Expiry, Lookup
from hotrow.tiers.hbm.group_batch import GroupBatch
from hotrow.train import tier_traffic
from hotrow.train.train_step import make_step
from hotrow.train.trainer import Trainer


def fit_ahead(trainer: Trainer, source: Clicks, ahead: int) -> list[float]:
    """As `fit` with a lookahead, on one thread: a batch is looked up when the one so many before it is computed, and
    its rows come when the next one has been, or when a batch needs them."""
    embeddings, losses, staged = trainer.model.embeddings, [], deque[Lookup]()
    embeddings.in_flight(ahead + 1)
    trainer.model.train()
    batches = list(source.all)
    for number in range(len(batches)):
        for later in batches[number + len(staged) : number + 1 + ahead]:
            lookup = embeddings.route(later)
            lookup.prefetch()
            staged.append(lookup)
        for lookup in list(staged)[:-1]:
            lookup.stage()
        logits_and_loss = trainer._forward_backward(embeddings.fetch(staged.popleft()))
        make_step(trainer, [])
        losses.append(float(logits_and_loss[1]))
    return losses


AHEAD = [(budget, ahead) for budget in (TIGHT, TINY, "ssd") for ahead in (1, 3)]


QUICK = {False: [(TIGHT, 1)], True: [("ssd", 3)]}  # by policies; the rows over SSD are in a tiny cache, too


@pytest.mark.parametrize("policies", [False, True])
def test_rows_that_come_ahead_are_the_same_bits(
    device: str, policies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, miss_list_requests: list[bool]
) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.staging_queue.BACKOFF", 0)
    rules = {"admission": Admission(after=2, sketch="4KiB"), "expiry": Expiry(steps=2, every=2)} if policies else {}
    plain = trainer_of(Memory(hbm=ROOMY), device, **rules)
    clicks = Clicks(STEPS - (not LARGE), even=not policies)
    expected = plain.fit(clicks, epochs=2, progress=False).losses
    for budget, ahead in AHEAD if LARGE else QUICK[policies]:
        below = {"dram": "16MiB", "ssd": str(tmp_path / f"{ahead}")}
        memory = Memory(hbm=TINY, **below) if budget == "ssd" else Memory(hbm=budget)
        trainer = trainer_of(memory, device, **rules)  # type: ignore[arg-type]
        losses = fit_ahead(trainer, clicks, ahead)  # mostly of unseen keys,
        losses += fit_ahead(trainer, clicks, ahead)  # and then of none
        assert losses == expected
        assert_same(plain, trainer)
    assert (True in miss_list_requests) == (not policies)


@pytest.mark.gpu
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_lookahead_gives_the_same_bits_on_the_device(
    lookahead: int, accumulate: int, even: bool, monkeypatch: pytest.MonkeyPatch, miss_list_requests: list[bool]
) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.staging_queue.BACKOFF", 0)
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: the interpreter has one thread")
    many = Clicks(4 * STEPS, even=even)
    plain = trainer_of(Memory(hbm=ROOMY), "cuda", accumulate)
    plain.lookahead = 0
    expected = plain.fit(many, evaluate=Clicks(1, seed=9), evaluate_every=5, epochs=2, progress=False)
    for budget in (ROOMY, TIGHT, TINY):
        trainer = trainer_of(Memory(hbm=budget), "cuda", accumulate)
        trainer.lookahead = lookahead
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the lookahead shrinks where the budget is tiny
            report = trainer.fit(many, evaluate=Clicks(1, seed=9), evaluate_every=5, epochs=2, progress=False)
        assert report.losses == expected.losses and report.evaluations == expected.evaluations
        assert_same(plain, trainer)
    if accumulate == 1:
        assert (bool(lookahead) in miss_list_requests) == even


def test_rows_that_come_ahead_do_not_disturb_an_evaluation(device: str) -> None:
    embeddings = one_table(Memory(hbm="2KiB"), device)
    embeddings.in_flight(3)
    read, later = torch.arange(40), torch.arange(1000, 1030)
    embeddings.table("u").create(later)
    train_on(embeddings, read)
    for _ in range(6):
        train_on(embeddings, torch.tensor([5]))
    expected = embeddings.table("u").read(read)
    lookup = embeddings.route(KeyedBatch({"u": Jagged(read)}), ahead=False).read()
    assert embeddings.route(KeyedBatch({"u": Jagged(later)})).stage().rows > 0
    assert torch.equal(lookup.gather()[1][0].cpu(), expected)


def test_rows_without_room_say_that_less_should_come_ahead(device: str) -> None:
    embeddings = one_table(Memory(hbm="2KiB"), device)
    embeddings.in_flight(3)
    many = torch.arange(200)
    embeddings.table("u").create(many)
    lookup = embeddings.route(KeyedBatch({"u": Jagged(many)}))
    lookup.stage()
    assert embeddings.fetch(lookup).plan.prefetch_misses > 100


def test_a_batch_that_was_looked_up_and_dropped_leaves_nothing_behind(device: str) -> None:
    embeddings, plain = one_table(Memory(hbm="2KiB"), device), one_table(None, None)
    keys, others = torch.arange(40), torch.arange(1000, 1030)
    for each in (embeddings, plain):
        each.table("u").create(others)
        train_on(each, keys)
    embeddings.in_flight(3)
    dropped, next_one = (embeddings.route(KeyedBatch({"u": Jagged(others)})) for _ in range(2))
    dropped.prefetch()
    next_one.prefetch()  # finds the keys of the batch before, whose rows are not loaded yet
    embeddings.release(dropped)
    next_one.stage()
    embeddings.fetch(next_one)
    assert torch.equal(next_one.gather()[1][0].cpu(), plain.table("u").read(others))
    embeddings.release(next_one)
    for each in (embeddings, plain):
        train_on(each, torch.cat([keys, others]))
    assert torch.equal(embeddings.table("u").read(keys), plain.table("u").read(keys))
    assert torch.equal(embeddings.table("u").read(others), plain.table("u").read(others))


def test_a_staged_batch_is_not_collected_while_its_rows_are_on_their_way(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings = one_table(Memory(hbm="2KiB"), device)
    others = torch.arange(1000, 1030)
    embeddings.table("u").create(others)
    train_on(embeddings, torch.arange(40))
    embeddings.in_flight(3)
    dropped = embeddings.route(KeyedBatch({"u": Jagged(others)}))
    dropped.prefetch()
    plan = weakref.ref(dropped.plan)
    dropped.plan.itself = dropped.plan  # type: ignore[attr-defined]  # so that only the collector finds it
    del dropped
    gc.collect()
    assert plan() is not None
    stage, alive = GroupBatch.stage, []

    def collect(part: GroupBatch) -> bool:
        gc.collect()  # the release of a plan waits for the thread that loads its rows: this one
        alive.append(plan() is not None)
        return stage(part)

    monkeypatch.setattr(GroupBatch, "stage", collect)
    lookup = embeddings.route(KeyedBatch({"u": Jagged(others)})).fetch()
    assert alive == [True]
    gc.collect()
    assert plan() is None
    assert torch.equal(lookup.gather()[1][0].cpu(), embeddings.table("u").read(others))


def test_what_moves_between_hbm_and_dram_is_drawn_on_a_trace(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_traffic, "INTERVAL", 0.0)
    trainer = trainer_of(Memory(hbm=TIGHT), device)
    trainer.trace = tmp_path / "run.json"
    trainer.fit(Clicks(STEPS), progress=False)
    events = json.loads(trainer.trace.read_text())
    curves: dict[str, list[float]] = {}
    for event in events:
        if event["ph"] == "C":
            curves.setdefault(event["name"], []).extend(event["args"].values())
    for name in ("rows up", "rows down", "bytes up", "bytes down", "ids found", "ids missed"):
        assert len(curves[f"hbm: {name}"]) == STEPS and max(curves[f"hbm: {name}"]) > 0
    assert max(curves["hbm: bytes up"]) > 4 * 8 * max(curves["hbm: rows up"])  # rows of dim 8 or 4, with Adam's state
    assert "hbm: rows without room" in curves
    tracks = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"gpu: rows up", "gpu: rows down", "gpu: compute"} <= tracks or device == "cpu"


def test_a_batch_that_is_looked_up_while_rows_lie_beside_the_cache_evicts_no_other_row(device: str) -> None:
    embeddings, plain = one_table(Memory(hbm="2KiB"), device), one_table(None, None)
    first, second = torch.arange(200, 234).repeat(2)[:40], torch.arange(300, 340)
    for each in (embeddings, plain):
        each.table("u").create(torch.cat([first, second]))
    with_miss_lists(embeddings)
    embeddings.train()
    one, two = (embeddings.route(batch(keys)) for keys in (first, second))
    embeddings.fetch(one)
    assert embeddings.hbm_cache is not None and embeddings.hbm_cache.groups[0].batches_with_extra
    two.prefetch()
    update(embeddings, one)
    two.stage()
    update(embeddings, embeddings.fetch(two))
    for keys in (MANY, *FEW, first, second):
        train_on(plain, keys)
    everything = torch.cat([MANY, torch.arange(1000, 1008), first, second])
    assert torch.equal(embeddings.table("u").read(everything), plain.table("u").read(everything))


def test_only_the_thread_that_trains_records_what_is_launched_again(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While anything is captured, torch refuses random numbers in the whole process: a tower's dropout would fail."""
    recorders: list[threading.Thread] = []

    class Noted(CapturedSteps):
        def __init__(self, device: torch.device, steps: Callable[[], Any], keep_graph: bool = False) -> None:
            recorders.append(threading.current_thread())
            super().__init__(device, steps, keep_graph)

    monkeypatch.setattr("hotrow.tiers.hbm.miss_list.CapturedSteps", Noted)
    embeddings = with_miss_lists(one_table(Memory(hbm="2KiB"), device))
    assert recorders and embeddings.hbm_cache is not None  # those that were requested at their turn
    recorders.clear()
    embeddings.train()
    for number in range(3):
        lookup = embeddings.route(batch(FEW[number]))
        thread = threading.Thread(target=lookup.prefetch)
        thread.start()
        thread.join()
        assert embeddings.hbm_cache.groups[0].miss_finder.capture_pending == (number == 0)
        update(embeddings, embeddings.fetch(lookup))
    assert recorders == [threading.main_thread()]


def test_an_evaluation_of_other_sizes_does_not_undo_what_was_recorded(device: str) -> None:
    embeddings = with_miss_lists(one_table(Memory(hbm="2KiB"), device))
    assert embeddings.hbm_cache is not None
    miss_finder = embeddings.hbm_cache.groups[0].miss_finder
    captures = dict(miss_finder._captures)
    embeddings.eval()
    embeddings(batch(torch.arange(5)))
    assert miss_finder.ready(40) and miss_finder._captures == captures and captures


@pytest.mark.gpu
def test_a_tower_with_dropout_trains_while_batches_come_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: nothing is captured without one")
    monkeypatch.setattr("hotrow.tiers.hbm.staging_queue.BACKOFF", 0)

    class Dropping(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Sequential(nn.Dropout(0.5), self.top)  # type: ignore[assignment]

    losses = []
    for lookahead in (0, 3):
        torch.manual_seed(0)
        embeddings = EmbeddingCollection(tables(), optim.Adam(lr=0.01), Memory(hbm=TINY), seed=4, device="cuda")
        trainer = Trainer(Recommender(embeddings, Dropping()), lookahead=lookahead)
        sizes = [Clicks(10, size=size).all for size in (SIZE, SIZE // 2, SIZE)]  # each of them is captured again
        many = Clicks(0)
        many.all = [batch for batches in sizes for batch in batches]
        losses.append(trainer.fit(many, epochs=2, progress=False).losses)
    assert losses[0] == losses[1]
