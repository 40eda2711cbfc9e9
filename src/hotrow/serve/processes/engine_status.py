"""EngineStatus: an engine's models and figures as documents, for front ends, the supervisor and clients.

Any thread may call it. `check_staleness` is called by one thread.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from hotrow.serve.batching.lanes import Lanes
from hotrow.serve.batching.miss_queue import MissQueue
from hotrow.serve.batching.tensorbatch import TensorBatch
from hotrow.serve.batching.versions import Model, Models, Version
from hotrow.serve.repository.releases import CANARY, SHADOW, STABLE
from hotrow.serve.updates.freshness import StalenessAlarm

log = logging.getLogger(__name__)


class EngineStatus:
    """Reads the state of one engine. `stale_after` is the age in seconds that raises an alarm; None: no alarm."""

    def __init__(
        self, models: Models, tensorbatch: TensorBatch, misses: MissQueue, lanes: Lanes, stale_after: float | None
    ) -> None:
        self.models, self.tensorbatch, self.misses, self.lanes = models, tensorbatch, misses, lanes
        self.stale_after = stale_after
        self._alarms: dict[str, StalenessAlarm] = {}

    def describe_models(self) -> list[dict[str, Any]]:
        """For front ends: models and versions with their numbers and signatures."""
        return [_describe(model) for model in self.models.by_name.values()]

    @property
    def rows_up(self) -> bool:
        """Whether every model in service can read all its rows now."""
        current = [model.current for model in self.models.by_name.values()]
        return all(getattr(v.servable, "rows_up", True) for v in current if v is not None)

    def index(self) -> list[dict[str, str]]:
        """Every model and version in the repository, and the aliases of loaded models as `model@alias`."""
        entries = []
        for name in self.models.names():
            model = self.models.by_name.get(name)
            for version in self.models.available(name):
                ready = model is not None and version in model.versions
                why = "" if ready else "unloaded" if model is None else model.refused.get(version, "not in service")
                state = "READY" if ready else "UNAVAILABLE"
                entries.append({"name": name, "version": version, "state": state, "reason": why})
            for alias, version in ({} if model is None else model.release.named()).items():
                state = "READY" if model is not None and version in model.versions else "UNAVAILABLE"
                why = "" if state == "READY" or model is None else model.refused.get(version, "not in service")
                entries.append({"name": f"{name}@{alias}", "version": version, "state": state, "reason": why})
        return entries

    def statistics(self, name: str, version: str) -> list[dict[str, Any]]:
        """Triton's model_stats."""
        return [
            _version_statistics(model.name, v)
            for model in self.models.by_name.values()
            for v in model.versions.values()
            if name in ("", model.name) and version in ("", v.name)
        ]

    def figures(self) -> dict[str, Any]:
        """All counters and gauges of the engine."""
        counts = dataclasses.asdict(self.tensorbatch.counts)
        misses = dataclasses.asdict(self.misses.counts)
        return {
            "queue": {**self.tensorbatch.figures(), **counts, "aside": self.misses.waiting, "misses": misses},
            "latency": self.lanes.latency.counts,
            "models": [
                {
                    "model": model.name,
                    "version": model.current.name if model.current else "",
                    "pending": model.group.pieces + model.lookups.pieces,
                    "shed": {why: count + model.lookups.shed[why] for why, count in model.group.shed.items()},
                    "shares": _shares(model),
                }
                for model in self.models.by_name.values()
            ],
            "versions": [
                {
                    "model": model.name,
                    "version": v.name,
                    "publication": v.publication,
                    "freshness": self._freshness(model, v),
                    **dataclasses.asdict(v.counts),
                    "shadow": v.shadow.figures(time.monotonic()) if v.shadow.since else None,
                    "tower": v.servable.figures() if hasattr(v.servable, "figures") else {},
                }
                for model in self.models.by_name.values()
                for v in model.versions.values()
            ],
        }

    def _freshness(self, model: Model, version: Version) -> dict[str, Any]:
        """The current and recent age of a version's data, and its follower's figures."""
        follower = getattr(version.servable, "follower", None)
        fresh = getattr(version.servable, "fresh", None)
        alarm = self._alarms.get(model.name)
        return {
            "age": None if fresh is None else fresh.age(time.time()),
            "ages": version.ages.percentiles(),
            "stale": alarm is not None and alarm.on and version is model.current,
            "follower": None if follower is None else follower.figures(),
        }

    def check_staleness(self, report_event: Callable[..., None]) -> None:
        """Report each model that follows a bus when its data becomes stale, and when it is fresh again."""
        for model in self.models.by_name.values():
            follower = None if model.current is None else getattr(model.current.servable, "follower", None)
            if follower is None:
                continue
            alarm = self._alarms.setdefault(model.name, StalenessAlarm(self.stale_after))
            age = follower.age(time.time())
            if (changed := alarm.update(age)) is not None:
                why = f" ({follower.state}{': ' + follower.why if follower.why else ''})" if changed else ""
                log.warning("model %s answers from data that is %.1f s old%s", model.name, age, why)
                report_event("stale" if changed else "fresh", model=model.name, age=age, why=follower.why)


def _describe(model: Model) -> dict[str, Any]:
    return {
        "name": model.name,
        "number": model.number,
        "current": model.current.name if model.current else None,
        "refused": model.refused,
        "aliases": model.release.named(),
        "canary": None if (canary := model.release.canary) is None else [str(canary.version), canary.share],
        "versions": [
            {
                "name": v.name,
                "number": v.number,
                **v.signature.as_json(),
                "spec": getattr(v.servable, "features", None),
                "widths": list(getattr(v.servable, "widths", ())),
                "config": getattr(v.servable, "config", None) or {},
            }
            for v in model.versions.values()
        ],
    }


def _shares(model: Model) -> list[tuple[str, str, float]]:
    """Version, role and configured share of the requests that name no version."""
    release, current = model.release, model.current
    if current is None:
        return []
    canary = 0.0 if release.canary is None else release.canary.share
    shares = [(current.name, STABLE, 1.0 - canary)]
    for role, given in ((CANARY, release.canary), (SHADOW, release.shadow)):
        if given is not None:
            shares.append((str(given.version), role, given.share))
    return shares


def _version_statistics(name: str, version: Version) -> dict[str, Any]:
    c = version.counts

    def spent(count: int, seconds: float) -> dict[str, int]:
        return {"count": count, "ns": int(seconds * 1e9)}

    total = c.queue_seconds + c.join_seconds + c.run_seconds + c.answer_seconds
    return {
        "name": name,
        "version": version.name,
        "last_inference": int(c.last * 1e3),
        "inference_count": c.rows,
        "execution_count": c.executions,
        "inference_stats": {
            "success": spent(c.requests, total),
            "fail": spent(c.failed, 0.0),
            "queue": spent(c.requests, c.queue_seconds),
            "compute_input": spent(c.requests, c.join_seconds),
            "compute_infer": spent(c.requests, c.run_seconds),
            "compute_output": spent(c.requests, c.answer_seconds),
        },
        "batch_stats": [
            {"batch_size": 1 << power, "compute_infer": spent(int(count), seconds)}
            for power, (count, seconds, _) in sorted(version.sizes.items())
        ],
    }
