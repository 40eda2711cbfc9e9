"""The emulated network delays, limits, loses and cuts, and its machines reach each other and nothing else."""

from __future__ import annotations

import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

import hotrow as hr
from hotrow.bench.servers import network_switch
from hotrow.bench.servers.network import Network, unavailable

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no emulated network: {unavailable()}")
Result = TypeVar("Result")
SECONDS = 60.0


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["left", "right"], seed=1) as made:
        yield made


def on(network: Network, machine: str, work: Callable[[], Result]) -> Result:
    """Call `work` on a thread of this process that is on a machine. The sockets that it opens stay there."""
    with ThreadPoolExecutor(1, initializer=network.enter, initargs=(machine,)) as thread:
        return thread.submit(work).result(SECONDS)


def connected(network: Network) -> tuple[socket.socket, socket.socket]:
    """A TCP connection from left to right: both ends."""
    place = network.addresses["right"]
    listener = on(network, "right", lambda: socket.create_server((place, 0)))
    left = on(network, "left", lambda: socket.create_connection(listener.getsockname(), timeout=SECONDS))
    right, _ = listener.accept()
    listener.close()
    for end in (left, right):
        end.settimeout(SECONDS)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return left, right


def transfer(left: socket.socket, right: socket.socket, size: int) -> float:
    """Send so many bytes; returns the seconds until all have arrived."""
    begin = time.monotonic()
    sender = threading.Thread(target=left.sendall, args=(bytes(size),))
    sender.start()
    got = 0
    while got < size:
        part = len(right.recv(1 << 20))
        assert part
        got += part
    sender.join()
    return time.monotonic() - begin


def test_a_delay_is_added_in_each_direction(network: Network) -> None:
    left, right = connected(network)
    trips: dict[float, list[float]] = {0.0: [], 0.02: []}
    for delay, seconds in trips.items():
        network.shape(delay=delay)
        for _ in range(15):
            begin = time.monotonic()
            left.sendall(b"x")
            right.recv(1)
            right.sendall(b"y")
            left.recv(1)
            seconds.append(time.monotonic() - begin)
    assert min(trips[0.02]) >= 0.04
    assert statistics.median(trips[0.02]) < statistics.median(trips[0.0]) + 0.04 + 0.03


def test_a_link_has_a_rate(network: Network) -> None:
    """20 MB at 20 MB/s. The upper bound is for a busy machine; the benchmark roles/link shows how near it comes."""
    network.shape(rate=20e6)
    seconds = transfer(*connected(network), 20_000_000)
    assert 1 - network_switch.BURST - 0.02 < seconds < 5
    assert network.counts()["right"]["received"] > 20_000_000


def test_packets_are_lost(network: Network) -> None:
    network.shape(loss=0.25)
    ends = [on(network, name, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for name in ("left", "right")]
    ends[1].bind((network.addresses["right"], 0))
    size, arrived = 30, 0  # of a packet with two bytes
    for number in range(1, 401):
        ends[0].sendto(b"xx", ends[1].getsockname())
        while (counts := network.counts())["left"]["dropped"] + counts["right"]["received"] / size < number:
            time.sleep(0.001)
        with suppress(BlockingIOError):
            arrived += len(ends[1].recv(100, socket.MSG_DONTWAIT)) == 2
    assert 240 < arrived < 360 and arrived == 400 - network.counts()["left"]["dropped"]


def test_a_connection_outlives_a_cut(network: Network) -> None:
    left, right = connected(network)
    network.down("left")
    left.sendall(b"x" * 1000)
    right.settimeout(0.5)
    with pytest.raises(TimeoutError):
        right.recv(1)
    assert network.counts()["left"]["dropped"] >= 1
    network.up("left")
    right.settimeout(SECONDS)
    assert right.recv(1) == b"x"


def test_machines_reach_nothing_else(network: Network) -> None:
    here = socket.create_server(("127.0.0.1", 0))
    with Network(["left", "right"]) as other:
        there = on(other, "right", lambda: socket.create_server((other.addresses["right"], 0)))
        for place in (here.getsockname(), there.getsockname(), ("192.0.2.1", 80)):
            with pytest.raises(OSError, match=r"refused|unreachable"):
                on(network, "left", lambda place=place: socket.create_connection(place, timeout=5))  # type: ignore[misc]
    ran = subprocess.run(network.command("left", ["ip", "-brief", "address"]), capture_output=True, text=True)
    assert network.addresses["left"] in ran.stdout and network.processes() == []


def test_errors_name_what_is_there(network: Network) -> None:
    with pytest.raises(hr.OptionError, match="no machine 'middle' in this network, but left, right"):
        network.namespace("middle")
    with pytest.raises(hr.OptionError, match="a link has no speed, but rate"):
        network.shape(speed=1)


def namespaces(name: str) -> list[Path]:
    return list(network_switch.NAMESPACES.glob(f"{name}-*"))


def test_namespaces_are_removed_even_after_a_kill() -> None:
    killed = Network(["left"])
    assert len(namespaces(killed.name)) == 1
    killed.switch.kill()
    killed.switch.wait()
    with pytest.raises(hr.OptionError, match="switch of the emulated network has ended"):
        killed.down("left")
    with Network(["left"]) as other:  # whose switch removes what the first one has left
        assert not namespaces(killed.name) and len(namespaces(other.name)) == 1
    assert not namespaces(other.name)
    killed.close()
