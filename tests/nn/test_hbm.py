"""Training with hot rows in HBM: the same bits for every budget, and what the CPU computes to rounding.

Without a GPU the kernels are interpreted on CPU tensors, so batches are small here; `pytest -m gpu` runs the same tests
on the device with larger ones.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import reference
from torch import Tensor, nn

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.data import Cursor
from hotrow.device.streams import CapturedSteps
from hotrow.errors import GradientError, MemoryBudgetError, OptionError, StorageError
from hotrow.kernels.index.sets import WAYS
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.table import Admission, Expiry, Lookup, Table
from hotrow.tiers.hbm.group_batch import GroupBatch
from hotrow.tiers.hbm.miss_list import MissFinder, MissList
from hotrow.tiers.hbm.pinned_ring import UPLOAD_BUFFERS, WRITE_BACK_BUFFERS, PinnedRing
from hotrow.tiers.hbm.row_transfer import RowTransfer
from hotrow.tiers.hbm.table_group import TableGroup
from hotrow.tiers.host.row_staging import RowLocations
from hotrow.train import tier_traffic
from hotrow.train.report import Report
from hotrow.train.train_step import make_step
from hotrow.train.trainer import Trainer

LARGE = torch.cuda.is_available()  # interpreting a step takes seconds
SIZE, KEYS, STEPS = (600, 20_000, 12) if LARGE else (24, 150, 4)
ROOMY, TIGHT, TINY = ("64MiB", "1MiB", "64KiB") if LARGE else ("4MiB", "48KiB", "12KiB")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (request.param == "cuda") == interpreted:
        pytest.skip("this process interprets kernels" if interpreted else "this process compiles kernels")
    return "cuda" if request.param == "cuda" else "cpu"


class Tower(nn.Module):
    """Over pooled vectors and a sequence."""

    def __init__(self, history: int = 4) -> None:
        super().__init__()
        self.top = nn.Linear(8 + 8 + 8 + history, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        history = (vectors["history"] * vectors["history_mask"].unsqueeze(-1)).sum(1)
        return self.top(torch.cat([vectors["user"], vectors["clicked"], vectors["tags"], history], dim=1)).squeeze(1)


class Clicks:
    """Batches of random keys, the lower ones more often. Bags differ in their lengths; with `even` all batches have the
    same number of ids, so that missing rows are requested by one miss list (tiers/hbm/miss_list.py)."""

    def __init__(self, batches: int, size: int = SIZE, keys: int = KEYS, seed: int = 1, even: bool = True) -> None:
        self.all = [batch_of(seed * 1000 + i, size, keys, even) for i in range(batches)]
        self.examples = batches * size

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        start = 0 if cursor is None else int(cursor["batch"])
        for i, batch in list(enumerate(self.all))[start:]:
            yield batch, {"batch": i + 1}


def batch_of(seed: int, size: int, most: int, even: bool = True) -> KeyedBatch:
    generator = torch.Generator().manual_seed(seed)

    def keys(count: int) -> Tensor:
        return (torch.rand(count, generator=generator) ** 2 * most).to(torch.int64) * 104_729 - 5_000_000

    def bags(weights: bool = False) -> Jagged:
        lengths = torch.randint(0, 4, (size,), generator=generator)
        if even:
            lengths = torch.arange(size)[torch.randperm(size, generator=generator)] % 4
        ids = keys(int(lengths.sum()))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return Jagged(ids, offsets, torch.rand(ids.numel(), generator=generator) if weights else None)

    return KeyedBatch(
        {"user": Jagged(keys(size)), "clicked": bags(), "history": bags(), "tags": bags(weights=True)},
        labels=(torch.rand(size, generator=generator) < 0.4).float(),
        time=torch.full((size,), seed * 1000, dtype=torch.int64),
    )


def tables(**policies: object) -> list[Table]:
    return [
        Table("user", dim=8, **policies),  # type: ignore[arg-type]
        Table("item", dim=8, features={"clicked": "mean"}, **policies),  # type: ignore[arg-type]
        Table("history", dim=4, features={"history": "none"}, optimizer=optim.SGD(lr=0.1)),
        Table("tag", dim=8, features={"tags": "sum"}),
    ]


def trainer_of(memory: Memory | None, device: str | None = None, accumulate: int = 1, **policies: object) -> Trainer:
    torch.manual_seed(0)
    embeddings = EmbeddingCollection(
        tables(**policies), optimizer=optim.Adam(lr=0.01), memory=memory, seed=4, device=device
    )
    return Trainer(Recommender(embeddings, Tower()), accumulate=accumulate)


def rows_of(trainer: Trainer) -> dict[str, list[Tensor]]:
    found = {}
    for rows in trainer.model.embeddings.tables:
        chunks = list(rows.scan())
        keys = torch.cat([chunk.keys for chunk in chunks])
        order = keys.argsort()
        parts = [torch.cat([getattr(c, part) for c in chunks])[order] for part in ("values", "counts", "last_steps")]
        found[rows.table.name] = [keys[order], *parts]
    return found


def assert_same(ours: Trainer, theirs: Trainer) -> None:
    a, b = rows_of(ours), rows_of(theirs)
    for name in a:
        for x, y in zip(a[name], b[name], strict=True):
            assert torch.equal(x, y), name
    for p, q in zip(ours.model.tower.parameters(), theirs.model.tower.parameters(), strict=True):
        assert torch.equal(p, q)


def figures(trainer: Trainer) -> dict[str, int]:
    return figures_of(trainer.model.embeddings)


def figures_of(embeddings: EmbeddingCollection) -> dict[str, int]:
    assert embeddings.hbm_cache is not None
    return embeddings.hbm_cache.report()


def fitted(trainer: Trainer) -> tuple[Trainer, Report]:
    """After STEPS of the same clicks, evaluated on the way."""
    return trainer, trainer.fit(Clicks(STEPS), evaluate=Clicks(1, seed=9), evaluate_every=2, progress=False)


@functools.cache
def roomy_run(device: str, accumulate: int = 1) -> tuple[Trainer, Report]:
    """The run whose rows are all in HBM, for tests that compare with it and do not change it."""
    return fitted(trainer_of(Memory(hbm=ROOMY), device, accumulate))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each batch that used a miss list: whether it was ahead of its turn."""
    batches: list[bool] = []
    plain = MissFinder.find_misses

    def ask(
        miss_finder: MissFinder, keys: Tensor, begins: Tensor, batch: int, settled: int, score: float, ahead: bool
    ) -> MissList:
        batches.append(ahead)
        return plain(miss_finder, keys, begins, batch, settled, score, ahead)

    monkeypatch.setattr(MissFinder, "find_misses", ask)
    return batches


def test_a_run_equals_the_cpu_to_rounding(device: str) -> None:
    (cpu, by_cpu), (gpu, by_gpu) = fitted(trainer_of(None)), roomy_run(device)
    reports = [by_cpu, by_gpu]
    for a, b in [(by_cpu.metrics, by_gpu.metrics), (by_cpu.evaluations[-1][1], by_gpu.evaluations[-1][1])]:
        assert a["auc"] == pytest.approx(b["auc"], abs=1e-3) and a["logloss"] == pytest.approx(b["logloss"], abs=1e-5)
    torch.testing.assert_close(torch.tensor(reports[0].losses), torch.tensor(reports[1].losses))
    a, b = rows_of(cpu), rows_of(gpu)
    for name in a:
        assert torch.equal(a[name][0], b[name][0])
        torch.testing.assert_close(a[name][1], b[name][1], rtol=1e-4, atol=1e-5)
        assert torch.equal(a[name][2], b[name][2]) and torch.equal(a[name][3], b[name][3])


@pytest.mark.parametrize(("accumulate", "ssd"), [(1, False), (2, True), *([(2, False), (1, True)] if LARGE else [])])
def test_every_budget_gives_the_same_bits(
    device: str, accumulate: int, ssd: bool, tmp_path: Path, asked: list[bool]
) -> None:
    below = {"dram": "16MiB", "ssd": tmp_path} if ssd else {}
    roomy, in_roomy = roomy_run(device, accumulate)
    tight, in_tight = fitted(trainer_of(Memory(hbm=TINY, **below), device, accumulate))
    assert tight.model.embeddings.hbm_cache is not None
    assert all(
        bool(group.row_transfer.zero_copy_share) == (not ssd) for group in tight.model.embeddings.hbm_cache.groups
    )
    assert in_roomy.losses == in_tight.losses
    assert in_roomy.evaluations == in_tight.evaluations and in_roomy.evaluations
    assert in_roomy.hbm["evictions"] == in_roomy.hbm["overflows"] == 0 and in_roomy.hbm["hits"] > 0
    assert figures(tight)["evictions"] > 10 and figures(tight)["overflows"] > 10
    assert in_tight.hbm == {name: figures(tight)[name] for name in in_tight.hbm}
    assert in_tight.hbm["hits"] + in_tight.hbm["misses"] >= in_tight.ids
    assert bool(asked) == (accumulate == 1)  # a step over two batches has other sizes in between
    assert_same(roomy, tight)


def test_admission_and_expiry_do_not_depend_on_the_cache(device: str) -> None:
    policies = {
        "admission": Admission(after=2, sketch="4KiB"),
        "expiry": Expiry(steps=3, every=2, min_count=2, grace=2),
    }
    trainers = [trainer_of(memory, device if memory else None, **policies) for memory in
                (None, Memory(hbm=ROOMY), Memory(hbm=TIGHT))]  # fmt: skip
    for trainer in trainers:
        trainer.fit(Clicks(STEPS + 1), progress=False)
    assert_same(trainers[1], trainers[2])
    cpu, gpu = rows_of(trainers[0]), rows_of(trainers[1])
    for name in cpu:
        for part in (0, 2, 3):
            assert torch.equal(cpu[name][part], gpu[name][part])
    assert 0 < len(trainers[1].model.embeddings.tables[0]) < KEYS


def test_a_checkpoint_has_the_rows_that_are_in_hbm(device: str, tmp_path: Path) -> None:
    straight, _ = roomy_run(device)
    zero_copy_count = trainer_of(Memory(hbm=ROOMY), device)
    zero_copy_count.fit(Clicks(STEPS), steps=STEPS // 2, progress=False)
    zero_copy_count.save(tmp_path)
    other = trainer_of(Memory(hbm=TINY), device)
    other.fit(Clicks(1, seed=5), progress=False)  # something else, that must be gone
    other.load(tmp_path)
    other.fit(Clicks(STEPS), cursor=other.cursor, steps=STEPS // 2, progress=False)
    assert_same(straight, other)


def test_rows_are_read_set_and_erased_through_the_cache(device: str) -> None:
    trainer = trainer_of(Memory(hbm=ROOMY), device)
    trainer.fit(Clicks(2), progress=False)
    users = trainer.model.embeddings.table("user")
    batch = Clicks(1).all[0]
    before = trainer.predict(batch)
    key = batch.ids["user"].values[:1]
    users.assign(key, users.read(key) + 1.0)
    assert not torch.equal(trainer.predict(batch), before)
    assert users.erase(key) == 1
    assert not bool(users.contains(key))


def test_a_bad_gradient_changes_nothing(device: str) -> None:
    trainer = trainer_of(Memory(hbm=ROOMY), device)
    trainer.fit(Clicks(2), progress=False)
    before = rows_of(trainer)
    embeddings = trainer.model.embeddings
    vectors = embeddings(Clicks(1, seed=3).all[0])
    (vectors["user"].sum() * float("nan") + vectors["clicked"].sum()).backward()
    with pytest.raises(GradientError, match="NaN"):
        embeddings.step()
    embeddings.discard()
    after = rows_of(trainer)
    for name in before:
        known = torch.isin(after[name][0], before[name][0])
        for x, y in zip(before[name], after[name], strict=True):
            assert torch.equal(x, y[known])
    trainer.fit(Clicks(1, seed=4), progress=False)  # and no row is pinned


def test_budgets_that_cannot_work_are_refused_with_the_one_that_does(device: str, tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"hbm=1\.0 KiB is too small for 4 tables; give at least"):
        trainer_of(Memory(hbm="1KiB"), device)
    with pytest.raises(MemoryBudgetError, match=r"a row in HBM keeps its slot in DRAM\. Give dram= at least"):
        trainer_of(Memory(hbm="64MiB", dram="8MiB", ssd=tmp_path), device)
    with pytest.raises(MemoryBudgetError, match="keeps its slot in DRAM") as too_small:
        trainer_of(Memory(hbm="4MiB", dram="5MiB", ssd=tmp_path / "small"), device)
    works = re.findall("at least ([0-9]+MiB)", str(too_small.value))[0]
    trainer_of(Memory(hbm="4MiB", dram=works, ssd=tmp_path / "enough"), device)
    with pytest.raises(MemoryBudgetError, match=r"rows pass through 64\.0 KiB of pinned memory .* at least 1MiB"):
        trainer_of(Memory(hbm="64KiB", dram="100KiB"), device)
    if device == "cpu":
        with pytest.raises(OptionError, match="needs a GPU"):
            EmbeddingCollection(tables(), memory=Memory(hbm="1MiB"))


@pytest.mark.gpu
def test_hbm_stays_inside_its_budget(device: str) -> None:
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    take_cublas_workspace()
    before = torch.cuda.memory_allocated()
    trainer = trainer_of(Memory(hbm="256MiB"), device)
    assert torch.cuda.memory_allocated() - before <= 256 << 20
    trainer.fit(Clicks(20, size=4096, keys=500_000), progress=False)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 260 << 20  # with the tower and the last batch


def take_cublas_workspace() -> None:
    """cuBLAS allocates 32 MiB for each thread that multiplies, once: for the forward and for the backward pass."""
    product = nn.Linear(32, 32, device="cuda")(torch.ones(64, 32, device="cuda", requires_grad=True))
    product.sum().backward()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.gpu
def test_hbm_stays_inside_its_budget_and_scratch_with_batches_ahead(device: str) -> None:
    """The scratch is what docs/hbm.md says: a batch's ids and missing rows, for each batch in flight."""
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    size, lookahead, hbm = 4096, 3, 64 << 20
    take_cublas_workspace()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer = trainer_of(Memory(hbm=hbm), device)
    trainer.lookahead = lookahead
    clicks = Clicks(30, size=size, keys=400_000)
    trainer.fit(clicks, epochs=2, progress=False)
    torch.cuda.synchronize()
    ids = clicks.all[0].id_count()
    widest = max(group.width for group in trainer.model.embeddings.hbm_cache.groups)  # type: ignore[union-attr]
    scratch = (lookahead + 2) * ids * (200 + 2 * 4 * widest) + ids * 8 * 32 + (16 << 20)
    assert torch.cuda.max_memory_allocated() - before <= hbm + scratch


def test_many_rows_come_down_a_few_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.row_transfer.CHUNK_BYTES", 1 << 10)
    trainer, plain = trainer_of(Memory(hbm=ROOMY), device), trainer_of(None)
    for each in (trainer, plain):
        each.fit(Clicks(1), progress=False)
    assert trainer.model.embeddings.hbm_cache is not None
    assert (
        max(
            group.cache.dirty().numel() / group.row_transfer.chunk_rows
            for group in trainer.model.embeddings.hbm_cache.groups
        )
        > 4
    )
    ours, theirs = rows_of(trainer), rows_of(plain)
    for name in ours:
        torch.testing.assert_close(ours[name][1], theirs[name][1], rtol=1e-4, atol=1e-5)


def test_rows_that_could_not_be_put_away_are_an_error_until_a_checkpoint_is_loaded(device: str, tmp_path: Path) -> None:
    trainer = trainer_of(Memory(hbm=ROOMY), device)
    trainer.fit(Clicks(1), progress=False)
    trainer.save(tmp_path)
    saved = rows_of(trainer)
    assert trainer.model.embeddings.hbm_cache is not None

    def fails(places: RowLocations, clean: int) -> None:
        raise StorageError("disk full")

    group = trainer.model.embeddings.hbm_cache.groups[0]
    group._store_in_background(fails, group.locate(group.cache.resident()), 0, None)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"could not be written back: disk full\. They are lost"):
            trainer.model.embeddings.table("user").read(torch.tensor([1]))
    trainer.load(tmp_path)
    for name, parts in rows_of(trainer).items():
        assert all(torch.equal(x, y) for x, y in zip(parts, saved[name], strict=True))


def test_tables_that_are_full_get_what_others_leave_empty(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.capacity_split.FIRST_CHECK", 2)
    few = {"user": "user", "item": "clicked"}

    def trainer(hbm: str) -> Trainer:
        torch.manual_seed(0)
        made = [Table(name, dim=8, features={feature: "sum"}) for name, feature in [*few.items(), ("tag", "tags")]]
        made.append(Table("history", dim=8, features={"history": "none"}))
        embeddings = EmbeddingCollection(made, optim.SGD(lr=0.1), Memory(hbm=hbm), seed=4, device=device)
        return Trainer(Recommender(embeddings, Tower(history=8)))

    def narrowed(batch: KeyedBatch) -> KeyedBatch:
        ids = {
            n: Jagged(j.values % 3 if n in few.values() else j.values, j.offsets, j.weights)
            for n, j in batch.ids.items()
        }
        return KeyedBatch(ids, labels=batch.labels)

    source = Clicks(STEPS)
    source.all = [narrowed(batch) for batch in source.all]
    tight, roomy = trainer("40KiB" if LARGE else "12KiB"), trainer(ROOMY)
    reports = [each.fit(source, progress=False) for each in (tight, roomy)]
    assert reports[0].losses == reports[1].losses
    assert_same(tight, roomy)
    assert tight.model.embeddings.hbm_cache is not None
    sets = tight.model.embeddings.hbm_cache.groups[0].cache.index.counts
    assert min(sets[2:]) > 2 * max(sets[:2])


@pytest.mark.parametrize("share", [0.0, 0.6] if LARGE else [0.0])  # every budget is run with the usual share
def test_rows_that_are_read_in_place_or_not_are_the_same_bits(
    device: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.row_transfer.ZERO_COPY_SHARE", share)
    monkeypatch.setattr("hotrow.tiers.hbm.row_transfer.ZERO_COPY_SHARE_AHEAD", share)
    tight = trainer_of(Memory(hbm=TINY), device)
    assert tight.model.embeddings.hbm_cache is not None
    assert all(group.row_transfer.zero_copy_share == share for group in tight.model.embeddings.hbm_cache.groups)
    report = tight.fit(Clicks(STEPS), progress=False)
    assert report.losses == roomy_run(device)[1].losses
    assert_same(roomy_run(device)[0], tight)


def fit_ahead(trainer: Trainer, source: Clicks, ahead: int) -> list[float]:
    """As `fit` with a lookahead, on one thread: a batch is looked up when the one so many before it is computed, and
    its rows come when the next one has been, or when somebody needs them."""
    embeddings, losses, staged = trainer.model.embeddings, [], deque[Lookup]()
    embeddings.in_flight(ahead + 1)
    trainer.model.train()
    batches = list(source.all)
    for number in range(len(batches)):
        for batch in batches[number + len(staged) : number + 1 + ahead]:
            lookup = embeddings.route(batch)
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
    device: str, policies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[bool]
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
    assert (True in asked) == (not policies)


@pytest.mark.gpu
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_lookahead_gives_the_same_bits_on_the_device(
    lookahead: int, accumulate: int, even: bool, monkeypatch: pytest.MonkeyPatch, asked: list[bool]
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
        assert (bool(lookahead) in asked) == even


def one_table(memory: Memory | None, device: str | None, seed: int = 1) -> EmbeddingCollection:
    return EmbeddingCollection([Table("u", dim=4)], optim.SGD(lr=1.0), memory, seed=seed, device=device)


def train_on(embeddings: EmbeddingCollection, keys: Tensor) -> None:
    embeddings.train()
    embeddings(KeyedBatch({"u": Jagged(keys)}))["u"].sum().backward()  # type: ignore[no-untyped-call]
    embeddings.step()


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


@pytest.mark.parametrize("seed", [1, 2])
def test_a_fetch_that_fails_loses_no_row(device: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, plain = one_table(Memory(hbm="2KiB"), device, seed), one_table(None, None, seed)
    keys, others = torch.arange(70), torch.arange(1000, 1012)
    embeddings.table("u").create(others)
    for each in (embeddings, plain):
        train_on(each, keys)

    def full(*_: object) -> None:
        raise MemoryBudgetError("dram= is full")

    with monkeypatch.context() as patch, pytest.raises(MemoryBudgetError):
        patch.setattr("hotrow.tiers.host.row_staging.HostRowFetch.fetch", full)
        embeddings(KeyedBatch({"u": Jagged(torch.cat([others, torch.tensor([777])]))}))
    assert torch.equal(embeddings.table("u").read(keys), plain.table("u").read(keys))


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


def batch(keys: Tensor) -> KeyedBatch:
    return KeyedBatch({"u": Jagged(keys)})


def update(embeddings: EmbeddingCollection, lookup: Lookup) -> None:
    embeddings(lookup)["u"].sum().backward()  # type: ignore[no-untyped-call]
    embeddings.step()


MANY, FEW = torch.arange(40), [torch.full((40,), 1000 + number) for number in range(8)]


def asked_at_once(embeddings: EmbeddingCollection) -> EmbeddingCollection:
    """After batches of 40 ids that all missed some, the next ones use a miss list. Rows of the first have not
    been used for so long that any batch may take their places."""
    embeddings.in_flight(3)
    for keys in (MANY, *FEW):
        train_on(embeddings, keys)
    assert embeddings.hbm_cache is not None and embeddings.hbm_cache.groups[0].miss_finder.ready(40)
    return embeddings


def test_a_batch_that_is_looked_up_while_rows_lie_beside_the_cache_takes_nobodys_place(device: str) -> None:
    embeddings, plain = one_table(Memory(hbm="2KiB"), device), one_table(None, None)
    zero_copy_count, second = torch.arange(200, 234).repeat(2)[:40], torch.arange(300, 340)
    for each in (embeddings, plain):
        each.table("u").create(torch.cat([zero_copy_count, second]))
    asked_at_once(embeddings)
    embeddings.train()
    one, two = (embeddings.route(batch(keys)) for keys in (zero_copy_count, second))
    embeddings.fetch(one)
    assert embeddings.hbm_cache is not None and embeddings.hbm_cache.groups[0].batches_with_extra
    two.prefetch()
    update(embeddings, one)
    two.stage()
    update(embeddings, embeddings.fetch(two))
    for keys in (MANY, *FEW, zero_copy_count, second):
        train_on(plain, keys)
    everything = torch.cat([MANY, torch.arange(1000, 1008), zero_copy_count, second])
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
    embeddings = asked_at_once(one_table(Memory(hbm="2KiB"), device))
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
    embeddings = asked_at_once(one_table(Memory(hbm="2KiB"), device))
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


LOST = r"could not be written back: no memory\. They are lost; fix this and load"


def no_memory(*_: object) -> None:
    raise RuntimeError("no memory")


def test_keys_that_took_places_of_rows_that_could_not_leave_are_an_error(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings = one_table(Memory(hbm="2KiB"), device)
    embeddings.table("u").create(torch.arange(300, 340))
    asked_at_once(embeddings)
    lookup = embeddings.route(batch(torch.arange(300, 340)))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(RowTransfer, "begin_write_back", no_memory)
        lookup.prefetch()
    embeddings.release(lookup)
    with pytest.raises(StorageError, match=LOST):
        embeddings.table("u").read(MANY)


@pytest.mark.parametrize(("failing", "ahead"), [("begin_write_back", 0), ("begin_write_back", 1), ("deliver", 0)])
def test_an_error_while_rows_move_loses_none_or_says_so(
    device: str, failing: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of a batch's turn and at it, step by step: rows that were not moved yet are unchanged."""
    embeddings, plain = one_table(Memory(hbm="2KiB"), device), one_table(None, None)
    others = torch.arange(1000, 1030)
    for each in (embeddings, plain):
        each.table("u").create(others)
        train_on(each, MANY)
    embeddings.in_flight(ahead)
    for _ in range(4):
        for each in (embeddings, plain):
            train_on(each, torch.tensor([5]))
    lookup = embeddings.route(batch(others))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        if failing == "deliver":
            patch.setattr("hotrow.tiers.hbm.table_group.transfer.deliver", no_memory)
        else:
            patch.setattr(RowTransfer, "begin_write_back", no_memory)
        lookup.prefetch()
        embeddings.fetch(lookup).gather()
    embeddings.release(lookup)
    if failing == "deliver":
        with pytest.raises(StorageError, match=LOST):
            embeddings.table("u").read(MANY)
    else:
        assert torch.equal(embeddings.table("u").read(MANY), plain.table("u").read(MANY))


def test_rows_beside_the_cache_that_could_not_leave_are_an_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = one_table(Memory(hbm="2KiB"), device)
    embeddings.train()
    lookup = embeddings.fetch(embeddings.route(batch(torch.arange(60))))
    embeddings(lookup)["u"].sum().backward()  # type: ignore[no-untyped-call]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(RowTransfer, "begin_write_back", no_memory)
        embeddings.step()
    embeddings.discard()
    with pytest.raises(StorageError, match=LOST):
        embeddings.table("u").read(torch.arange(60))


def test_rows_that_the_gpu_cannot_reach_are_gathered(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise StorageError("the GPU cannot reach 1 GiB of DRAM rows; lower dram=")

    monkeypatch.setattr("hotrow.kernels.rows.transfer.register_host_memory", unreachable)
    embeddings, plain = one_table(Memory(hbm="64KiB"), device), one_table(None, None)
    for each in (embeddings, plain):
        each.table("u").create(MANY)
    with pytest.warns(UserWarning, match=r"lower dram=\. Until then all rows are gathered") as warned:
        for each in (embeddings, plain):
            train_on(each, MANY)
            train_on(each, MANY + 20)
    assert len(warned) == 1
    assert torch.equal(embeddings.table("u").read(MANY), plain.table("u").read(MANY))


def test_few_rows_wait_to_be_written_back_however_slow_that_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write-back thread is replaced by one that runs a task only when a caller waits for it."""
    monkeypatch.setattr("hotrow.tiers.hbm.row_transfer.CHUNK_BYTES", 64)
    embeddings = one_table(Memory(hbm="64KiB"), device)
    train_on(embeddings, torch.arange(300))
    assert embeddings.hbm_cache is not None
    group, waiting, most = embeddings.hbm_cache.groups[0], list[Callable[[], None]](), 0

    class Waiting:
        def __init__(self, put: Callable[[], None]) -> None:
            self.put: Callable[[], None] | None = put
            waiting.append(put)

        def result(self) -> None:
            while self.put in waiting:
                waiting.pop(0)()

    def begin_write_back(*given: Any, **options: Any) -> Callable[[], None]:
        put = TableGroup.begin_write_back(group, *given, **options)

        def behind() -> None:
            nonlocal most
            group.last_write_back = Waiting(put)  # type: ignore[assignment]
            most = max(most, len(waiting))

        return behind

    monkeypatch.setattr(group, "begin_write_back", begin_write_back)
    monkeypatch.setattr(group, "_submit_write_back", group._store)  # this test's thread is the only background thread
    group.flush()
    assert most == 2 and not waiting


def test_hbm_is_free_when_a_collection_is_let_go(device: str) -> None:
    embeddings = asked_at_once(one_table(Memory(hbm="2KiB"), device))
    assert embeddings.hbm_cache is not None
    rows = weakref.ref(embeddings.hbm_cache.groups[0].cache)
    gc.disable()
    try:
        del embeddings
        assert rows() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("dram", [None, "8MiB"])
def test_rows_pass_through_memory_that_is_part_of_dram(
    device: str, dram: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts, where a buffer holds four rows; ahead of their batch's turn and at it."""
    monkeypatch.setattr("hotrow.tiers.hbm.pinned_ring.MIN_BYTES", 64)
    monkeypatch.setattr("hotrow.tiers.hbm.pinned_ring.MAX_BYTES", 64)
    used = [0]

    class Watched(PinnedRing):
        def buffer(self, floats: int) -> Tensor:
            made = super().buffer(floats)
            used.append(sum(size * number for size, number in self._used.items()))
            return made

    monkeypatch.setattr("hotrow.tiers.hbm.cache.PinnedRing", Watched)
    embeddings, plain = one_table(Memory(hbm="2KiB", dram=dram), device), one_table(None, None)
    charged = embeddings.budget.used - one_table(Memory(dram=dram), None).budget.used
    assert embeddings.hbm_cache is not None and embeddings.hbm_cache.groups[0].row_transfer.buffer_rows == 4
    assert (
        charged == figures_of(embeddings)["pinned_bytes"] == (64 * (UPLOAD_BUFFERS + WRITE_BACK_BUFFERS) if dram else 0)
    )
    embeddings.in_flight(1)
    keys = [(torch.arange(40) * 7 + 11 * number) % 90 for number in range(5)]
    for number in range(10):
        for each in (embeddings, plain):
            each.train()
        lookup = embeddings.route(batch(keys[number % 5]))
        lookup.stage()
        update(embeddings, embeddings.fetch(lookup))
        train_on(plain, keys[number % 5])
    everything = torch.arange(90)
    assert torch.equal(embeddings.table("u").read(everything), plain.table("u").read(everything))
    pinned = figures_of(embeddings)["pinned_bytes"]
    assert 0 < max(used) <= pinned and (dram is None or pinned == charged)
    with_it, budget = embeddings.budget.used, embeddings.budget
    del embeddings, lookup
    assert budget.used <= with_it - pinned


def test_a_budget_that_the_device_does_not_have_is_refused_with_one_that_it_has(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotrow.tiers.hbm.cache.free_bytes", lambda device: 1 << 20)
    with pytest.raises(MemoryBudgetError, match=r"hbm=2\.0 MiB does not fit .* give hbm= at most 896\.0 KiB"):
        one_table(Memory(hbm="2MiB"), device)
    one_table(Memory(hbm="896KiB"), device)


@pytest.mark.parametrize("where", ["compact_keys", "gather", "update"])
def test_hbm_that_runs_out_says_which_budget_to_change(
    device: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings = one_table(Memory(hbm="64KiB"), device)
    train_on(embeddings, MANY)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 139 GiB")

    monkeypatch.setattr(f"hotrow.tiers.hbm.group_batch.{where}", full)
    with pytest.raises(MemoryBudgetError, match=r"beside hbm=64\.0 KiB: .*2\.00 GiB\. Give hbm= at most 56\.0 KiB"):
        train_on(embeddings, MANY + 5)


EXTREMES = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1, -(2**63) + 1, 2**63 - 2, -(2**32), 2**32, 2**31, -(2**31)])


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_keys_of_all_kinds_and_batches_of_all_sizes_train_as_without_a_cache(device: str, policy: str) -> None:
    """Nothing, one, the ends of int64, and keys that all want the same two sets of a cache that has more."""
    embeddings = one_table(Memory(hbm="4KiB", hbm_policy=policy), device)
    plain = one_table(None, None)
    assert embeddings.hbm_cache is not None
    index = embeddings.hbm_cache.groups[0].cache.index
    assert index.capacity > 80
    keys = torch.arange(-20_000, 20_000)
    one, other = (
        of(reference.hash_key(keys), torch.tensor(0), torch.tensor(index.counts[0]))
        for of in (reference.set_of, reference.second_set_of)
    )
    crowd = keys[(one == one[0]) & (other == other[0])][:40]
    assert crowd.numel() == 40 > 2 * WAYS
    none = torch.zeros(0, dtype=torch.int64)
    for some in (none, EXTREMES, EXTREMES[:1], crowd, EXTREMES.flip(0), none, crowd[:1], torch.cat([crowd, EXTREMES])):
        for each in (embeddings, plain):
            train_on(each, some)
    everything = torch.cat([crowd, EXTREMES])
    assert torch.equal(embeddings.table("u").read(everything), plain.table("u").read(everything))
    assert figures_of(embeddings)["overflows"] > 0
