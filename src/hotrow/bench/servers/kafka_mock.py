"""Kafka mock: librdkafka's mock cluster in its own process, for benchmarks and tests.

Clients reach it over the network like real brokers. It keeps a few MiB of a partition in memory. It creates a topic on
first use but refuses an explicit request to create one, so addresses need `?create=no`. It ends with the `with` block,
or with this process.
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
    """HOST:PORT of the one broker. Requires: confluent_kafka is installed."""
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
