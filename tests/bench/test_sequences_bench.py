"""`hotrow bench sequences` at the smallest sizes: both sides compute the same, and its groups are chosen by name."""

from __future__ import annotations

import pytest
import torch

from hotrow.bench.harness import Result
from hotrow.bench.sequences import attention, encoder, groups, workload
from hotrow.errors import OptionError


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTROW_BENCH_SCALE", "0.02")
    monkeypatch.setattr(workload, "LONGEST", 40)
    for module in (attention, encoder):
        monkeypatch.setattr(module, "WARMUP", 0)
        monkeypatch.setattr(module, "REPEATS", 2)
        monkeypatch.setattr(module, "cores", lambda: 1)  # a busy machine makes OpenMP's threads wait for each other
    monkeypatch.setattr(attention, "TRIALS", 2)


def test_every_row_has_a_peer_that_computes_the_same(tiny: None) -> None:
    threads = torch.get_num_threads()
    found = {row.name: row for row in groups.results() if isinstance(row, Result)}
    assert {name: row.peer for name, row in found.items()} == {
        "sequences/attention": "sdpa",
        "sequences/attention/head_dim_64": "sdpa",
        "sequences/jagged": "padded",
        "sequences/jagged/memory": "padded",
    }
    assert all(row.value > 0 and row.peer_value > 0 for row in found.values())
    assert torch.get_num_threads() == threads


def test_saved_memory_follows_the_sum_of_the_lengths(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in encoder.results() if isinstance(row, Result) and row.name.endswith("memory")]
    lengths = workload.drawn_lengths()
    padding = lengths.numel() * int(lengths.max()) / int(lengths.sum())
    assert rows[0].ratio == pytest.approx(padding, rel=0.1)


def test_groups_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(groups.ONLY, "jagged")
    assert groups.wanted() == ["jagged"]
    monkeypatch.setenv(groups.ONLY, "jaged")
    with pytest.raises(OptionError, match="did you mean 'jagged'"):
        groups.wanted()
