"""Real servers for all tests: started by the first test that uses one, and shared by tests that use their own names.

A test that stops the Redis starts it again with its data, because its log is on disk. One that breaks more than that
starts `RedisServers` of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import forked
import interpreter_speedup
import pytest
import torch

from hotrow.bench.servers.kafka_mock import brokers
from hotrow.bench.servers.redis_cluster import RedisServers, installed

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    interpreter_speedup.install()


@pytest.fixture(autouse=True)
def default_signals() -> None:
    """Every test starts with default handlers, whatever its parent ignores or a library of another test installed."""
    forked.default_signals()


@pytest.fixture(scope="session", autouse=True)
def default_signals_at_start() -> None:
    """Session fixtures start servers before the first test's fixtures run; those servers need Ctrl-C, too."""
    forked.default_signals()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny tensors on a busy machine, where threads of one operation only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def redis_installed() -> None:
    """For tests with servers of their own."""
    if not installed():
        pytest.skip("there is no redis-server; apt-get install redis-server")


@pytest.fixture(scope="session")
def redis(redis_installed: None) -> Iterator[RedisServers]:
    with RedisServers(options=["--appendonly", "yes"]) as servers:
        yield servers


@pytest.fixture(scope="session")
def kafka_brokers() -> Iterator[str]:
    pytest.importorskip("confluent_kafka", reason="pip install hotrow[kafka]")
    with brokers() as address:
        yield address
