"""`hotrow bench sequences` at the smallest sizes: both sides compute the same, and its groups are chosen by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import hotrow as hr
from hotrow.bench import harness
from hotrow.bench.harness import Result
from hotrow.bench.sequences import (
    accuracy,
    attention,
    encoder,
    groups,
    two_stage_search,
    user_once,
    user_server,
    workload,
)
from hotrow.errors import HotRowError, OptionError


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTROW_BENCH_SCALE", "0.02")
    monkeypatch.setattr(workload, "LONGEST", 40)
    for module in (attention, encoder, user_once, two_stage_search):
        monkeypatch.setattr(module, "WARMUP", 0)
        monkeypatch.setattr(module, "REPEATS", 2)
        monkeypatch.setattr(module, "cores", lambda: 1)  # a busy machine makes OpenMP's threads wait for each other
    monkeypatch.setattr(attention, "TRIALS", 2)
    monkeypatch.setattr(user_once, "CHUNKS", (4,))
    monkeypatch.setattr(user_once, "EXPANDED_REPEATS", 2)
    monkeypatch.setitem(accuracy.LOG, "history_length", 200)


def test_every_row_has_a_peer_that_computes_the_same(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(groups.ONLY, ",".join(name for name in groups.GROUPS if name != "server"))
    threads = torch.get_num_threads()
    found = {row.name: row for row in groups.results() if isinstance(row, Result)}
    assert {name: row.peer for name, row in found.items()} == {
        **{f"sequences/accuracy/{name}": "din" for name in accuracy.TOWERS},
        **{f"sequences/accuracy/{name}/best": "known best" for name in accuracy.TOWERS},
        "sequences/attention": "sdpa",
        "sequences/attention/head_dim_64": "sdpa",
        "sequences/jagged": "padded",
        "sequences/jagged/memory": "padded",
        "sequences/user_once": "expanded",
        "sequences/user_once/cached": "no cache",
        "sequences/user_once/hstu": "expanded",
        "sequences/user_once/hstu/cached": "no cache",
        "sequences/search/hard": "full",
        "sequences/search/hard/bar": "1.3 x 100 events",
        "sequences/search/soft": "full",
        "sequences/search/soft/bar": "1.3 x 100 events",
    }
    assert all(row.value > 0 and row.peer_value > 0 for row in found.values())
    assert torch.get_num_threads() == threads


def test_saved_memory_follows_the_sum_of_the_lengths(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in encoder.results() if isinstance(row, Result) and row.name.endswith("memory")]
    lengths = workload.drawn_lengths()
    padding = lengths.numel() * int(lengths.max()) / int(lengths.sum())
    assert rows[0].ratio == pytest.approx(padding, rel=0.1)


def test_din_sees_the_newest_events_alone() -> None:
    options = {**accuracy.LOG, "history_length": 200, "interests": 2}
    log = hr.data.long_interests(examples=12, batch_size=12, **options)
    (whole, _), (short, _) = (next(iter(accuracy.Examples(log, newest).batches())) for newest in (None, 50))
    assert whole.size == short.size == 12 and torch.equal(whole.numbers["group"].values, whole.ids["category"].values)
    for name in ("seen_item", "seen_category", "seen_action", "seen_time", "seen_group"):
        long, cut = whole.column(name), short.column(name)
        assert cut.lengths().tolist() == [50] * 12 and int(long.lengths().min()) >= 100
        for mine, theirs in zip(long.values.split(long.lengths().tolist()), cut.values.split(50), strict=True):
            assert torch.equal(mine[-50:], theirs)


def test_groups_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(groups.ONLY, "jagged")
    assert groups.wanted() == ["jagged"]
    monkeypatch.setenv(groups.ONLY, "jaged")
    with pytest.raises(OptionError, match="did you mean 'jagged'"):
        groups.wanted()


@pytest.mark.soak
def test_a_search_that_finds_other_events_is_an_error(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Callable[..., torch.Tensor] = two_stage_search._found
    monkeypatch.setattr(two_stage_search, "_found", lambda *given: found(*given)[:-1])
    with pytest.raises(HotRowError, match="logits of hard search differ by"):
        list(two_stage_search.results())


def test_the_cache_of_the_server_holds_some_of_the_users_but_not_all(tiny: None) -> None:
    events = workload.scaled(user_once.EVENTS, 8)
    encoding = {"keys": torch.zeros(events, workload.LAYERS, 2, workload.HEADS, workload.DIM // workload.HEADS)}
    bytes_of_one = encoding["keys"].nbytes
    held = int(user_server.cache_bytes()) / bytes_of_one
    assert 2 < held < user_server.USERS / 2


def test_percentiles_of_requests() -> None:
    seconds = [float(value) for value in range(101)]
    assert (user_server.percentile(seconds, 50), user_server.percentile(seconds, 99)) == (50.0, 99.0)
    turns = user_server.in_turns([lambda i: i, lambda i: i], 3)
    assert [len(side) for side in turns] == [3, 3]


def test_a_device_is_for_benchmarks_that_take_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"hotrow bench rows runs where it does; --device is for sequences"):
        harness.run("rows", device="cuda")
    if not torch.cuda.is_available():
        with pytest.raises(OptionError, match="torch sees no GPU"):
            harness.run("sequences", device="cuda")
    monkeypatch.setenv("HOTROW_BENCH_DEVICE", "cpu")
    assert workload.device().type == "cpu"
