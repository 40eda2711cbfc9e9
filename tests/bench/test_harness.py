"""Results are written as promised: ratio above 1 always means better than the peer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hotrow.bench.harness import alternate, append, higher, lower, table


def test_ratio_above_one_is_better_for_both_kinds() -> None:
    assert higher("a", "rows/s", 10.0, "peer", 5.0).ratio == 2.0
    assert lower("a", "ms", 5.0, "peer", 10.0).ratio == 2.0


def test_json_has_exactly_the_promised_fields() -> None:
    row = higher("rows/x", "M ids/s", 3.0, "fbgemm", 2.0, spread=0.1).to_json()
    assert list(row) == ["name", "unit", "value", "peer", "peer_value", "ratio"]
    assert table([higher("rows/x", "M ids/s", 3.0, "fbgemm", 2.0)]).row_count == 1


def test_sides_take_turns_and_warmup_is_left_out() -> None:
    calls: list[tuple[str, int]] = []
    timings = alternate([lambda i: calls.append(("a", i)), lambda i: calls.append(("b", i))], 1, 3)
    assert calls[:4] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert len(timings) == 2


def test_recorded_rows_carry_hardware_commit_and_spread(tmp_path: Path) -> None:
    append(tmp_path / "rows.jsonl", [higher("a", "x", 1.0, "bar", 1.0, 0.2)])
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["hardware"]
    assert row["commit"]
    assert row["spread"] == 0.2


def test_a_row_costs_at_most_twenty_bytes_over_its_payload() -> None:
    """In a process of its own, because it measures the whole process's memory and other tests leave some allocated."""
    code = "from hotrow.bench.storage.rows import measure_overhead; print(measure_overhead(2_000_000, 2_400_000))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(out) < 22  # 2 MiB pages weigh more here than at 5 million rows
