"""Stores of the remote tier, over real servers that are started once for all tests that do not break them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotrow.bench.servers.redis_cluster import RedisServers
from hotrow.tiers.remote.store import RemoteStore, open_remote


@pytest.fixture(scope="session")
def cluster(redis_installed: None) -> Iterator[RedisServers]:
    with RedisServers(masters=3) as servers:
        yield servers


@pytest.fixture(params=["redis", "cluster", "rocksdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteStore]:
    """A fresh store of every kind."""
    if request.param == "rocksdb":
        pytest.importorskip("rocksdict")
        opened = open_remote(f"rocksdb:{tmp_path / 'rows'}")
    else:
        servers = request.getfixturevalue(request.param)
        opened = open_remote(servers.url, namespace=uuid.uuid4().hex, timeout=5.0)
    yield opened
    opened.close()
