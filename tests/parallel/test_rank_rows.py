"""Rows over ranks equal those of one process that gets all ranks' batches as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import work
from crew import Crew
from work import Case, Rows, rows_after

import hotrow as hr


def put_together(parts: list[Rows], replicated: tuple[str, ...] = ()) -> Rows:
    """All ranks' rows as one process would have them; every row has one owner."""
    whole: Rows = {}
    for name in parts[0]:
        if name in replicated:
            assert all(part[name] == parts[0][name] for part in parts), "copies of a replicated table differ"
            whole[name] = parts[0][name]
            continue
        whole[name] = {key: row for part in parts for key, row in part[name].items()}
        assert len(whole[name]) == sum(len(part[name]) for part in parts), "a row is on two ranks"
    return whole


def check_equal(ours: Rows, theirs: Rows, exactly: bool = False, tolerance: float = 1e-5) -> None:
    for name, rows in theirs.items():
        assert ours[name].keys() == rows.keys(), name
        assert {k: row[1:] for k, row in ours[name].items()} == {k: row[1:] for k, row in rows.items()}, name
        for key, (values, *_) in rows.items():
            if exactly:
                assert ours[name][key][0] == values, (name, key)
            else:
                a, b = (np.frombuffer(data, dtype=np.float32) for data in (ours[name][key][0], values))
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RowWiseAdagrad"])
def test_rows_are_those_of_one_process_to_rounding(crew: Crew, optimizer: str) -> None:
    case = Case(optimizer=optimizer)
    check_equal(put_together(crew.run(rows_after, case)), rows_after(None, case, crew.world))


def test_whole_numbers_give_the_same_bits_as_one_process(crew: Crew) -> None:
    case = Case(whole=True, steps=8)
    check_equal(put_together(crew.run(rows_after, case)), rows_after(None, case, crew.world), exactly=True)


def test_one_rank_has_the_bits_of_a_process_without_ranks() -> None:
    crew = Crew(1)
    try:
        for case in (Case(), Case(silent=True), Case(replicate=True)):
            assert crew.run(rows_after, case) == [rows_after(None, case)]
    finally:
        crew.close()


def test_every_run_gives_the_same_bits(crew: Crew) -> None:
    case = Case(steps=8)
    assert crew.run(rows_after, case) == crew.run(rows_after, case)


def test_vectors_are_those_of_one_process_in_training_and_evaluation(crew: Crew) -> None:
    case = Case()
    ours, whole = crew.run(work.vectors_after, case), work.vectors_after(None, case, crew.world)
    for step, expected in enumerate(whole):
        for name in ("user", "item", "liked", "place"):
            joined = torch.cat([of_rank[step][name] for of_rank in ours])
            torch.testing.assert_close(joined, expected[name], rtol=1e-5, atol=1e-5)


def test_gradients_of_several_batches_make_one_step(crew: Crew) -> None:
    case = Case(accumulate=3, steps=3)
    check_equal(put_together(crew.run(rows_after, case)), rows_after(None, case, crew.world))


def test_rows_without_a_gradient_are_counted_and_not_changed(crew: Crew) -> None:
    case = Case(silent=True)
    check_equal(put_together(crew.run(rows_after, case)), rows_after(None, case, crew.world))


def test_a_key_that_is_seen_hundreds_of_times_is_counted_right(crew: Crew) -> None:
    case = Case(often=300, steps=3)
    whole = rows_after(None, case, crew.world)
    check_equal(put_together(crew.run(rows_after, case)), whole, tolerance=1e-4)
    assert whole["item"][3][1] > 255


@pytest.mark.parametrize(
    "admission", [{"after": 4, "sketch": "1MiB"}, {"probability": 0.4}, {"after": 2, "probability": 0.7}]
)
def test_admission_counts_the_sightings_of_all_ranks(crew: Crew, admission: dict[str, float]) -> None:
    case = Case(whole=True, admission=admission, steps=8, keys=200)
    whole = rows_after(None, case, crew.world)
    check_equal(put_together(crew.run(rows_after, case)), whole, exactly=True)
    everything = rows_after(None, Case(whole=True, steps=8, keys=200), crew.world)
    assert len(whole["item"]) < len(everything["item"])


@pytest.mark.parametrize(
    "expiry", [{"steps": 2, "every": 3}, {"time": "3m", "every": 2}, {"min_count": 3, "every": 2, "grace": 1}]
)
def test_expiry_is_that_of_one_process(crew: Crew, expiry: dict[str, int]) -> None:
    case = Case(whole=True, expiry=expiry, steps=9, keys=100)
    whole = rows_after(None, case, crew.world)
    check_equal(put_together(crew.run(rows_after, case)), whole, exactly=True)
    assert len(whole["item"]) < len(rows_after(None, Case(whole=True, steps=9, keys=100), crew.world)["item"])


def test_a_cap_is_for_the_rows_of_all_ranks(crew: Crew) -> None:
    """16,384 rows at most, 16 for each shard; each rank alone has fewer, all together more."""
    case = Case(whole=True, expiry={"max_rows": 16_384, "every": 2}, steps=4, keys=1 << 40, sizes=(2500,))
    whole = rows_after(None, case, crew.world)
    parts = crew.run(rows_after, case)
    check_equal(put_together(parts), whole, exactly=True)
    uncapped = rows_after(None, Case(**{**vars(case), "expiry": None}), crew.world)
    assert len(whole["item"]) < 16_384 < len(uncapped["item"])


def test_a_replicated_table_is_the_same_on_every_rank(crew: Crew) -> None:
    case = Case(replicate=True)
    parts = crew.run(rows_after, case)
    check_equal(put_together(parts, ("place",)), rows_after(None, case, crew.world))


def test_tables_that_are_all_replicated_are_the_same_on_every_rank(crew: Crew) -> None:
    """The part of the sharded tables is then empty."""
    case = Case(replicate_all=True, silent=True)
    parts = crew.run(rows_after, case)
    check_equal(put_together(parts, ("user", "item", "place")), rows_after(None, case, crew.world))


def test_rows_over_ssd_have_the_bits_of_rows_in_dram(crew: Crew, tmp_path: Path) -> None:
    case = Case(keys=20_000, sizes=(900,), steps=5, memory={"dram": "3.5MiB"})
    assert crew.run(rows_after, case, 1, tmp_path) == crew.run(rows_after, Case(**{**vars(case), "memory": {}}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank-{rank:04d}" for rank in range(crew.world)]


def test_a_gradient_that_is_nan_on_one_rank_stops_all_and_changes_nothing(crew: Crew) -> None:
    for message, unchanged in crew.run(work.bad_gradient, Case(sizes=(5,)), crew.world - 1):
        assert f"infinite on rank {crew.world - 1};" in message
        assert unchanged


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
def test_what_travels_is_a_key_and_two_rows_for_each_remote_key(crew: Crew, wire: str) -> None:
    for sent, remote, row in crew.run(work.bytes_of_a_step, wire):
        expected = remote * (8 + 2 * row)
        assert remote > 5000
        assert expected <= sent <= 1.1 * expected


@pytest.mark.parametrize(("wire", "rounding"), [("fp16", 2.0**-11), ("bf16", 2.0**-8)])
def test_a_narrow_wire_is_as_close_as_its_rounding(crew: Crew, wire: str, rounding: float) -> None:
    """Rows and gradients are of the size of 1 and the rate is small: measured, half of one rounding is left of all."""
    case = Case(optimizer="SGD", steps=2)
    ours = crew.run(work.narrow_wire, case, wire)
    check_equal(put_together(ours), rows_after(None, case, crew.world), tolerance=rounding)
    assert ours != crew.run(rows_after, case)


def test_a_sum_beyond_the_wire_is_an_error_that_names_the_wire(crews: dict[int, Crew]) -> None:
    """1e6 is finite, and no fp16."""
    for message, unchanged in crews[2].run(work.beyond_the_wire, "fp16", 1e6):
        assert "a sum of gradients on rank 1 is finite but beyond 65504, the largest float16 on the wire" in message
        assert "Pass wire='fp32'" in message
        assert unchanged
    for message, _ in crews[2].run(work.beyond_the_wire, "fp16", float("inf")):
        assert "NaN or infinite on rank 1;" in message
    assert [message for message, _ in crews[2].run(work.beyond_the_wire, "bf16", 1e6)] == ["", ""]


def test_routes_that_ran_ahead_are_settled(crew: Crew) -> None:
    case = Case(steps=2)
    assert crew.run(work.routes_ahead, case) == crew.run(rows_after, case)


def test_owners_have_whole_shards_and_every_shard_has_one() -> None:
    from hotrow.parallel.ownership import Roles, owners, shard_range

    for world in (1, 2, 3, 7, 64, 1000, 1024):
        owner_of = owners(world).tolist()
        for rank in range(world):
            begin, end = shard_range(rank, world)
            assert begin < end
            assert set(owner_of[begin:end]) == {rank}
        assert Roles.everyone(world).owner_of.tolist() == owner_of
    with pytest.raises(hr.OptionError, match="1025 ranks"):
        owners(1025)
