"""Ladders against an exhaustive search for the least padding, and plans against their costs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrow.errors import OptionError
from hotrow.serve.compile.buckets import Costs, Ladder, Part, Traffic, least_padding, padded_cost, plan
from hotrow.serve.graph.tower_graph import Shape

histograms = st.dictionaries(st.integers(1, 60), st.integers(1, 50), min_size=1, max_size=7)


def brute_force(counts, most, cost=float):
    best = float("inf")
    for count in range(1, most + 1):
        for chosen in itertools.combinations(sorted(counts), min(count, len(counts))):
            if chosen[-1] == max(counts):
                best = min(
                    best, sum(n * cost(min(c for c in chosen if c >= size)) for size, n in counts.items())
                )  # fmt: skip
    return best


@settings(max_examples=150, deadline=None)
@given(histograms, st.integers(1, 5))
def test_a_learned_ladder_has_the_least_padding_of_all(counts, most):
    sizes, cost = least_padding(counts, most)
    assert len(sizes) <= most and sizes[-1] >= max(counts) and list(sizes) == sorted(set(sizes))
    assert cost == brute_force(counts, most) == padded_cost(counts, sizes)


@settings(max_examples=100, deadline=None)
@given(histograms, st.integers(1, 4), st.lists(st.floats(0.1, 9), min_size=61, max_size=61))
def test_measured_costs_decide_where_they_are_known(counts, most, steps):
    measured = list(itertools.accumulate(steps))
    sizes, cost = least_padding(counts, most, measured.__getitem__)
    assert cost == pytest.approx(brute_force(counts, most, measured.__getitem__))
    assert cost == pytest.approx(padded_cost(counts, sizes, measured.__getitem__))


def test_sizes_are_multiples_of_the_quantum_and_thousands_of_sizes_are_thinned():
    sizes, _ = least_padding(dict.fromkeys(range(1, 5000), 1), 8, quantum=8)
    assert len(sizes) == 8 and all(size % 8 == 0 for size in sizes) and sizes[-1] >= 4999


def test_a_ladder_changes_only_for_a_gain():
    traffic = Traffic(buckets=2, min_batches=10, quantum=1)
    for _ in range(50):
        traffic.count(Shape(50))
    assert traffic.propose(Ladder((52, 64))) == Ladder((52, 64)), "4% is not worth a compilation"
    for _ in range(50):
        traffic.count(Shape(50))
    assert traffic.propose(Ladder((64, 128))) == Ladder((50,))


def test_little_traffic_proposes_nothing():
    traffic = Traffic(min_batches=10)
    traffic.count(Shape(3))
    assert traffic.propose(Ladder((64,))) == Ladder((64,))


def test_old_traffic_decays():
    traffic = Traffic(buckets=1, min_batches=8, quantum=1)
    for _ in range(16):
        traffic.count(Shape(100))
    now = traffic.propose(Ladder((128,)))
    assert now == Ladder((100,))
    for _ in range(8):
        for _ in range(16):
            traffic.count(Shape(10))
        now = traffic.propose(now)
    assert now == Ladder((10,))


def test_lengths_are_learned_beside_rows():
    traffic = Traffic(buckets=1, lengths=2, min_batches=10, quantum=1)
    for length in (5, 5, 5, 40) * 5:
        traffic.count(Shape(10, (length,)))
    assert traffic.propose(Ladder((64,), ((64,),))) == Ladder((10,), ((5, 40),))


def test_a_ladder_covers_what_it_can():
    ladder = Ladder((8, 64), ((5, 40),))
    assert ladder.cover(Shape(3, (6,))) == Shape(8, (40,))
    assert ladder.cover(Shape(500, (5,))) == Shape(64, (5,)), "more rows are split"
    assert ladder.cover(Shape(3, (41,))) is None, "a longer history stays with the original graph"


@pytest.mark.parametrize("rows", [(), (0, 3), (8, 4), (4, 4)])
def test_a_ladder_that_makes_no_sense_is_refused(rows):
    with pytest.raises(OptionError, match="increasing order"):
        Ladder(rows)


def test_without_buckets_the_original_graph_runs():
    assert plan(Shape(7), [], Costs()) == (Part(7, None),)


def test_a_batch_larger_than_all_buckets_is_split_into_largest_ones_and_a_rest():
    costs = Costs({Shape(64): 1.0, Shape(256): 2.0}, {Shape(64): 2.0, Shape(256): 8.0})
    parts = plan(Shape(800), costs.buckets, costs)
    assert parts == (Part(256, Shape(256)),) * 3 + (Part(32, Shape(64)),)


def test_splitting_beats_padding_where_it_is_cheaper():
    costs = Costs({Shape(64): 1.0, Shape(1024): 16.0}, {Shape(64): 5.0, Shape(1024): 80.0})
    assert plan(Shape(70), costs.buckets, costs) == (Part(64, Shape(64)), Part(6, Shape(64)))
    assert plan(Shape(1000), costs.buckets, costs) == (Part(1000, Shape(1024)),)


def test_a_small_batch_runs_on_the_original_graph_when_its_bucket_is_mostly_padding():
    costs = Costs({Shape(1024): 16.0}, {Shape(64): 1.1, Shape(1024): 20.0})
    assert plan(Shape(10), costs.buckets, costs) == (Part(10, None),)


def test_a_bucket_is_used_only_for_sequences_within_its_lengths():
    costs = Costs({Shape(64, (20,)): 1.0}, {Shape(64, (20,)): 2.0})
    assert plan(Shape(64, (10,)), costs.buckets, costs)[0].bucket == Shape(64, (20,))
    assert plan(Shape(64, (21,)), costs.buckets, costs)[0].bucket is None


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3000),
    st.dictionaries(st.integers(1, 500), st.floats(0.01, 9), min_size=1, max_size=6),
    st.floats(0.01, 9),
)
def test_a_plan_has_all_rows_once_and_never_more_than_a_bucket_holds(rows, buckets, original):
    costs = Costs({Shape(size): cost for size, cost in buckets.items()}, {Shape(100): original})
    parts = plan(Shape(rows), costs.buckets, costs)
    assert sum(part.rows for part in parts) == rows
    assert all(part.bucket is None or part.rows <= part.bucket.rows for part in parts)
    seconds = sum(costs.of_original(Shape(p.rows)) if p.bucket is None else costs.buckets[p.bucket] for p in parts)
    assert seconds <= costs.of_original(Shape(rows)) + 1e-9
