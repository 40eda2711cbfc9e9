"""Training with hot rows in HBM: the same bits for every budget, and what the CPU computes to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hbm_runs import (
    KEYS,
    LARGE,
    ROOMY,
    STEPS,
    TIGHT,
    TINY,
    Clicks,
    assert_same,
    figures,
    figures_of,
    fitted,
    one_table,
    roomy_run,
    rows_of,
    train_on,
    trainer_of,
)
from kernels import reference

from hotrow.config import Memory
from hotrow.errors import GradientError
from hotrow.kernels.index.sets import WAYS
from hotrow.table import Admission, Expiry


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
    device: str, accumulate: int, ssd: bool, tmp_path: Path, miss_list_requests: list[bool]
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
    assert bool(miss_list_requests) == (accumulate == 1)  # a step over two batches has other sizes in between
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
    first = trainer_of(Memory(hbm=ROOMY), device)
    first.fit(Clicks(STEPS), steps=STEPS // 2, progress=False)
    first.save(tmp_path)
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
