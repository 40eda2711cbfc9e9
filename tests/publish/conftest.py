"""Buses for the behaviour tests: a folder, a real redis-server, librdkafka's mock cluster in a process of its own."""

from __future__ import annotations

import itertools
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

_names = itertools.count()
_KAFKA = """
import sys, confluent_kafka
owner = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "none", "log_level": 0})
broker = next(iter(owner.list_topics(timeout=30).brokers.values()))
print(f"{broker.host}:{broker.port}", flush=True)
sys.stdin.read()
"""


class RedisServer:
    """A server that can be stopped and started again, with what it had."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            [*command, "--appendonly", "yes", "--save", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 30
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as line:
                    line.sendall(b"PING\r\n")
                    if line.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            time.sleep(0.05)
        raise RuntimeError("redis-server does not answer")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
            self.process = None


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="pip install hotrow[redis]")
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server: apt-get install redis-server")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def kafka_brokers() -> Iterator[str]:
    pytest.importorskip("confluent_kafka", reason="pip install hotrow[kafka]")
    cluster = subprocess.Popen([sys.executable, "-c", _KAFKA], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cluster.stdout is not None
    yield cluster.stdout.readline().strip()
    cluster.communicate(timeout=20)


@pytest.fixture(params=["dir", "redis", "kafka"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty bus, of each kind."""
    name = f"bus{next(_names)}"
    if request.param == "dir":
        return f"dir:{tmp_path / name}"
    if request.param == "redis":
        return f"redis://127.0.0.1:{request.getfixturevalue('redis_server').port}/0?stream={name}"
    brokers = request.getfixturevalue("kafka_brokers")
    return f"kafka://{brokers}/{name}?create=no"  # the mock makes topics when they are used, but not when asked to


@pytest.fixture
def folder_bus(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'bus'}"
