"""Kafka without a Kafka, for benchmarks and tests: librdkafka's mock cluster in a process of its own.

Everything else reaches it over the network, as it would brokers. It keeps a few MiB of a partition, in memory, makes
topics when they are used but not when asked to (`?create=no`), and ends with the `with` block, or with this process.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hotrow import child_process
from hotrow.errors import StorageError

_CLUSTER = """
import sys, confluent_kafka
owner = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 0})
broker = next(iter(owner.list_topics(timeout=30).brokers.values()))
print(f"{broker.host}:{broker.port}", flush=True)
sys.stdin.read()
"""


@contextmanager
def brokers() -> Iterator[str]:
    """HOST:PORT of its one broker. Requires: confluent_kafka is installed."""
    command = [sys.executable, "-c", _CLUSTER]
    cluster = child_process.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cluster.stdout is not None
    try:
        address = cluster.stdout.readline().strip()
        if not address:
            raise StorageError("librdkafka's mock cluster did not start; its error is above")
        yield address
    finally:
        cluster.communicate(timeout=20)
