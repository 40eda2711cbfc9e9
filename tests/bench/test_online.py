"""What `hotrow bench online` measures, at a small scale."""

from __future__ import annotations

import pytest

from hotrow.bench.harness import BENCHES
from hotrow.bench.serving import freshness, online
from hotrow.errors import HotRowError

SMALL = online.Scale(freeze=30_000, examples=90_000, window=10_000, per_day=10_000, keys=50_000)


def test_the_live_model_stays_above_the_frozen_one_and_the_curve_is_the_same_again() -> None:
    first, again = (online.train(SMALL, frozen_windows=None) for _ in range(2))
    assert first == again
    assert len(first.live) == 9 and len(first.frozen) == 6
    assert first.live[-1] - first.frozen[-1] >= online.BAR
    assert first.frozen[-1] < first.frozen[0]  # it falls


def test_rows_have_the_names_and_peers_that_the_bars_ask_for() -> None:
    assert "online" in BENCHES
    measured = freshness.Measurement([0.1] * 200, [5.0] * 200, [5.0] * 200, 30_000)
    rows = {row.name: row for row in freshness.rows("dir", measured)}
    assert rows["online/freshness_p99/dir"].peer == "bar"
    assert rows["online/freshness_p99/dir"].ratio == pytest.approx(10)
    assert rows["online/serving_p99/dir"].ratio == pytest.approx(1.3)
    assert rows["online/changed_rows/dir"].ratio == pytest.approx(1.5)
    with pytest.raises(HotRowError, match="only 3 answers"):
        list(freshness.rows("dir", freshness.Measurement([0.1] * 3, [], [], 0)))
