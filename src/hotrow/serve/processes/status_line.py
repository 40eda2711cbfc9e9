"""StatusLine: one line for the terminal with the engines' figures since the last line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hotrow.serve.load_estimate import percentile


class StatusLine:
    """Keeps the last counts, to show the differences."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float, float, list[int]] | None = None
        self._rows_before: Counter[str] = Counter()
        self._users_before = (0, 0)

    def _cached_users(self, figures: list[dict[str, Any]]) -> str:
        """The part of users whose encodings were cached, since the last line; empty without a cache or users."""
        caches = _user_caches(figures)
        now = sum(one["hits"] for one in caches), sum(one["misses"] for one in caches)
        (hits, misses), self._users_before = (a - b for a, b in zip(now, self._users_before, strict=True)), now
        return f"  ·  {hits / (hits + misses):.0%} of users cached" if caches and hits >= 0 < hits + misses else ""

    def line(self, figures: list[dict[str, Any]], versions: dict[str, str], devices: Sequence[str] = ()) -> str:
        """The line, from the engines' figures and the names of their devices."""
        by_device: Counter[str] = Counter()
        for one, device in zip(figures, devices, strict=False):
            by_device[device] += one["queue"]["batch_rows"] if one else 0
        rows_before, self._rows_before = self._rows_before, by_device
        found = [f for f in figures if f]
        queue = [f["queue"] for f in found]
        cached = self._cached_users(found)
        latency = [sum(counts) for counts in zip(*[f["latency"] for f in found], strict=True)]
        now = (
            time.monotonic(),
            float(sum(q["admitted"] for q in queue)),
            float(sum(q["batches"] for q in queue)),
            float(sum(q["batch_rows"] for q in queue)),
            latency,
        )
        before, self._before = self._before, now
        models = "  ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        if before is None or len(before[4]) != len(latency) or now[1] < before[1]:
            return models
        seconds, requests, batches, rows = (a - b for a, b in zip(now[:4], before[:4], strict=True))
        shares = ", ".join(
            f"{name} {max(0.0, count - rows_before[name]) / seconds:,.0f}" for name, count in by_device.items()
        )
        recent = [max(0, a - b) for a, b in zip(latency, before[4], strict=True)]
        return (
            f"{models}  ·  {requests / seconds:,.0f} requests/s  ·  p99 {percentile(recent, 0.99) * 1e3:.1f} ms  ·  "
            f"{rows / max(1.0, batches):,.0f} rows a batch{f'  ·  rows/s: {shares}' if len(by_device) > 1 else ''}"
            f"{cached}{_freshness(found, versions)}"
        )


def _user_caches(figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of the user caches of all engines and versions."""
    users = [(version.get("tower") or {}).get("users") or {} for one in figures for version in one["versions"]]
    return [one["cache"] for one in users if one.get("cache")]


def _freshness(figures: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The publication and the age of the models that follow a bus."""
    texts = []
    for name, version in sorted(versions.items()):
        parts = [v for f in figures for v in f["versions"] if (v["model"], v["version"]) == (name, version)]
        if not any(part["freshness"]["follower"] for part in parts):
            continue
        ages = [part["freshness"]["age"] for part in parts if part["freshness"]["age"] is not None]
        states = {part["freshness"]["follower"]["state"] for part in parts if part["freshness"]["follower"]}
        parts_shown = [f"publication {min(part['publication'] for part in parts)}"]
        parts_shown += [f"{max(ages):.1f} s old"] if ages else []
        parts_shown += sorted(states - {"following"})
        texts.append(
            f"  ·  {name}: {', '.join(parts_shown)}" if len(versions) > 1 else f"  ·  {', '.join(parts_shown)}"
        )
    return "".join(texts)
