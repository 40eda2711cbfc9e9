"""Engine statistics: the figures of several engines added up, for Triton's model statistics and the metrics page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.serve.protocol.backend import Figures
from hotrow.serve.protocol.metrics import DIFFERENCE_BOUNDS as BOUNDS


def add_statistics(entries: Sequence[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Model statistics of several engines, one entry a version."""
    found: dict[tuple[str, str], Any] = {}
    for entry in entries:
        key = (entry["name"], entry["version"])
        found[key] = entry if key not in found else _add(found[key], entry)
    return list(found.values())


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, dict):
        return {
            key: max(a[key], b[key]) if key == "last_inference" else _add(a[key], b[key]) if key in b else a[key]
            for key in a
        }
    if isinstance(a, list):
        sizes = {entry["batch_size"]: entry for entry in a}
        for entry in b:
            size = entry["batch_size"]
            old = sizes.get(size)
            merged = entry if old is None else {**_add(old, entry), "batch_size": size}
            sizes[size] = merged
        return [sizes[size] for size in sorted(sizes)]
    return a + b if isinstance(a, (int, float)) else a


_ROW_SERVERS = {  # a figure of row servers → the metric's name
    "lookups": "hotrow_row_lookups_total",
    "keys": "hotrow_row_keys_total",
    "pooled": "hotrow_row_pooled_total",
    "late": "hotrow_row_late_total",
    "bytes": "hotrow_row_bytes_total",
    "hedges": "hotrow_row_hedges_total",
    "hedges_won": "hotrow_row_hedges_won_total",
    "retries": "hotrow_row_retries_total",
    "up": "hotrow_row_servers_complete",
}
_REMOTE = {  # a remote store's figure → the metric's name
    "hits": "hotrow_remote_hits_total",
    "misses": "hotrow_remote_misses_total",
    "absent": "hotrow_remote_absent_total",
    "late": "hotrow_remote_late_total",
    "bytes": "hotrow_remote_bytes_total",
    "rows": "hotrow_remote_cached_rows",
    "fallback": "hotrow_remote_fallback_total",
    "up": "hotrow_remote_up",
}

_USERS = {  # a count of the user part → the metric's name
    "batches": "hotrow_user_batches_total",
    "users": "hotrow_users_encoded_total",
    "events": "hotrow_user_events_total",
}
_USER_CACHE = {  # a figure of the user cache → the metric's name, and a reason
    "hits": ("hotrow_user_cache_hits_total",),
    "misses": ("hotrow_user_cache_misses_total",),
    "evicted": ("hotrow_user_cache_evictions_total", "size"),
    "outdated": ("hotrow_user_cache_evictions_total", "outdated"),
    "bytes": ("hotrow_user_cache_bytes",),
    "users": ("hotrow_user_cache_users",),
}

_BUS = {  # a follower's count → the metric's name
    "publications": "hotrow_bus_publications_total",
    "rows": "hotrow_bus_rows_total",
    "switch_seconds": "hotrow_bus_switch_seconds_total",
    "corrupt": "hotrow_bus_bad_messages_total",
    "bus_errors": "hotrow_bus_errors_total",
    "reloads": "hotrow_bus_reloads_total",
}


_COUNTERS = {  # a version's count → the metric's name and its unit
    "rows": (("nv_inference_count", 1), ("hotrow_rows_total", 1)),
    "executions": (("nv_inference_exec_count", 1),),
    "lookups": (("hotrow_lookups_total", 1),),
    "lookup_rows": (("hotrow_lookup_rows_total", 1),),
    "lookup_bytes": (("hotrow_lookup_bytes_total", 1),),
    "queue_seconds": (("nv_inference_queue_duration_us", 1e6),),
    "join_seconds": (("nv_inference_compute_input_duration_us", 1e6),),
    "run_seconds": (("nv_inference_compute_infer_duration_us", 1e6),),
    "answer_seconds": (("nv_inference_compute_output_duration_us", 1e6),),
}


def add_figures(engines: Sequence[dict[str, Any]]) -> Figures:
    """(metric, labels) → value, over all engines, by the names of metrics.TABLE."""
    totals: dict[tuple[str, ...], float] = {}

    def put(value: float, *key: str) -> None:
        totals[key] = totals.get(key, 0.0) + value

    for figures in engines:
        for model in figures["models"]:
            labels = (model["model"], model["version"])
            put(model["pending"], "nv_inference_pending_request_count", *labels)
            for why, count in model["shed"].items():
                put(count, "hotrow_shed_total", *labels, why)
            for number, role, share in model.get("shares", ()):
                share_of = ("hotrow_release_share", model["model"], number, role)
                totals[share_of] = max(share, totals.get(share_of, 0.0))
        for version in figures["versions"]:
            labels = (version["model"], version["version"])
            for name, metrics in _COUNTERS.items():
                for metric, unit in metrics:
                    put(version[name] * unit, metric, *labels)
            without_bucket = version["executions"] - version["compiled"] - version["without_tower"]
            put(without_bucket, "hotrow_fallback_total", *labels)
            for policy, count in version["late_by_policy"].items():
                put(count, "hotrow_late_rows_total", *labels, policy)
            tower = version.get("tower", {})
            users = tower.get("users") or {}
            for name, metric in _USERS.items() if users else ():
                put(users[name], metric, *labels)
            for name, (metric, *reason) in _USER_CACHE.items() if users.get("cache") else ():
                put(users["cache"][name], metric, *labels, *reason)
            for bucket, hits in tower.get("buckets", {}).items():
                put(hits, "hotrow_bucket_hits_total", *labels, bucket)
            if "padded_rows" in tower:
                put(tower["padded_rows"], "hotrow_padding_rows_total", *labels)
                put(tower["compile_queue"], "hotrow_compile_queue")
                put(tower["compile_seconds"], "hotrow_compile_seconds_total", *labels)
                put(tower["compiled_pieces"], "hotrow_compiled_pieces", *labels)
            for op, buckets in tower.get("eager_ops", {}).items():
                put(buckets, "hotrow_eager_ops", *labels, op)
            if tower.get("row_servers"):
                put_row_servers(put, labels, tower["row_servers"])
            for name, metric in _REMOTE.items() if tower.get("remote") else ():
                put(tower["remote"][name], metric, *labels)
            put_freshness(totals, labels, version)
            if version.get("shadow"):
                put_shadow(totals, labels, version["shadow"])
    return totals


def put_row_servers(put: Any, labels: tuple[str, str], figures: Mapping[str, Any]) -> None:
    """A version's counters over row servers, and the state of each server, summed over engines."""
    for name, metric in _ROW_SERVERS.items():
        put(figures[name], metric, *labels)
    for address, server in figures["servers"].items():
        put(server["up"], "hotrow_row_server_up", *labels, address)
        put(server["in_flight"], "hotrow_row_server_in_flight", *labels, address)
        put(server["errors"], "hotrow_row_server_errors_total", *labels, address)


def put_shadow(totals: dict[tuple[str, ...], float], labels: tuple[str, str], shadow: Mapping[str, Any]) -> None:
    """Add a version's figures as a shadow; the largest difference is that of all engines."""

    def put(value: float, *key: str) -> None:
        totals[key] = totals.get(key, 0.0) + value

    put(shadow["requests"], "hotrow_shadow_requests_total", *labels)
    put(shadow["rows"], "hotrow_shadow_rows_total", *labels)
    for why, count in shadow["dropped"].items():
        put(count, "hotrow_shadow_dropped_total", *labels, why)
    below = 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), shadow["buckets"], strict=True):
        below += count
        put(below, "hotrow_shadow_difference_bucket", *labels, bound)
    put(shadow["total"], "hotrow_shadow_difference_sum", *labels)
    put(shadow["values"], "hotrow_shadow_difference_count", *labels)
    largest = ("hotrow_shadow_difference_max", *labels)
    totals[largest] = max(shadow["max"], totals.get(largest, 0.0))


def put_freshness(totals: dict[tuple[str, ...], float], labels: tuple[str, str], version: Mapping[str, Any]) -> None:
    """Combine freshness as the worst of the engines: the lowest publication, the greatest age."""
    number = ("hotrow_publication", *labels)
    totals[number] = min(version["publication"], totals.get(number, version["publication"]))
    freshness = version.get("freshness") or {}

    def worst(value: float, *key: str) -> None:
        totals[key] = max(value, totals.get(key, 0.0))

    if freshness.get("age") is not None:
        worst(freshness["age"], "hotrow_freshness_seconds", *labels)
    for quantile, seconds in freshness.get("ages", {}).items():
        worst(seconds, "hotrow_freshness_quantile_seconds", *labels, quantile)
    follower = freshness.get("follower")
    if follower is not None:
        key = ("hotrow_stale", *labels)
        totals[key] = totals.get(key, 0.0) + freshness["stale"]
        for name, metric in _BUS.items():
            totals[(metric, *labels)] = totals.get((metric, *labels), 0.0) + follower[name]
