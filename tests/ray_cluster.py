"""A Ray cluster of several nodes on this machine. Import it after `pytest.importorskip("ray")`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.cluster_utils import Cluster

STORE = 100 << 20  # bytes of a node's object store
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "disabled",  # whatever tokens this machine has
    "RAY_idle_worker_killing_time_threshold_ms": "600000",  # a new one imports torch again
}


def start_cluster(nodes: Sequence[Mapping[str, Any]], tries: int = 3) -> Cluster:
    """The first node is the head. Ray waits thirty seconds for a node, which is too short if its files are read from
    disk for the first time."""
    os.environ.update(ENVIRONMENT)
    made = Cluster()
    try:
        for options in nodes:
            made.add_node(object_store_memory=STORE, **options)
        return made
    except Exception:
        made.shutdown()
        if tries == 1:
            raise
    return start_cluster(nodes, tries - 1)


def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Whether the condition becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
