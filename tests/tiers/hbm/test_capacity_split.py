"""How a cache is divided between its tables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotrow.tiers.hbm.capacity_split import MIN_SETS, WAYS, divide

tables = st.lists(
    st.tuples(st.integers(MIN_SETS, 500), st.floats(0, 1), st.integers(0, 10_000)), min_size=1, max_size=8
)


@given(tables)
def test_no_set_is_lost_and_every_table_keeps_what_it_uses(drawn: list[tuple[int, float, int]]) -> None:
    sets = [s for s, _, _ in drawn]
    used = [int(s * WAYS * share) for s, share, _ in drawn]
    divided = divide(sets, used, [missed for _, _, missed in drawn])
    if divided is None:
        return
    assert sum(divided) == sum(sets) and min(divided) >= MIN_SETS
    assert all(d * WAYS >= u for d, u in zip(divided, used, strict=True))
    assert divide(divided, used, [0] * len(used)) is None  # and without misses nothing moves
