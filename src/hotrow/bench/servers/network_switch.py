"""The switch of an emulated network: a program that network.py starts. It imports only the standard library.

It makes a network namespace for each machine, with loopback and one TUN device, and then carries IP packets from device
to device. This process sees every packet, so it can delay, drop and pace them: tc's netem, which does that in the
kernel, is missing in many kernels of virtual machines.

A machine's port has a rate in each direction. A packet that would wait behind more than `queue` bytes is dropped, as by
a real switch, so TCP finds the rate. Then the packet takes `delay` to the other machine. Loss is drawn from a seeded
generator. Packets from or to a machine that is down are dropped, those on their way too.

With an MTU of 65,000 a packet costs about 30 us here: two system calls, and the kernel's work for the receiver, which
is done in the second one. So 1 Gbit/s in both directions takes about a fifth of a core. A cable does not wait for a
core, so this process has real-time priority where it may.

A lock file says that a network's switch is alive. A switch removes the namespaces of those that were killed.

Protocol: a JSON object in the first argument, then one JSON object a line on stdin, each answered by a line on stdout.
The switch ends at the end of stdin and on SIGTERM, and removes its namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LOCKS = Path("/run/hotrow-networks")
NAMESPACES = Path("/var/run/netns")
CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DEVICE = "link0"
BURST = 0.002  # seconds that a link may be idle and catch up: this process wakes late on a busy machine
PACKETS = 32  # read from one device before the others have their turn
DESTINATION = slice(16, 20)  # in an IPv4 header


class Port:
    """A machine's device, and when each direction of its link is free again."""

    def __init__(self, name: str, device: int) -> None:
        self.name, self.device = name, device
        self.out_free = self.in_free = 0.0
        self.down = False
        self.sent = self.received = self.dropped = 0  # bytes, bytes, packets


class Switch:
    """Carries packets between ports."""

    def __init__(self, ports: dict[bytes, Port], link: dict[str, Any]) -> None:
        self.ports, self.link = ports, link
        self.of_device = {port.device: port for port in ports.values()}
        self.random = random.Random(link["seed"])
        self.flying: list[tuple[float, int, Port, Port, bytes]] = []  # a heap by time of arrival
        self.number = 0

    def run(self) -> None:
        """Carry packets until stdin ends."""
        devices = [0, *self.of_device]
        while True:
            now = time.monotonic()
            while self.flying and self.flying[0][0] <= now:
                self.deliver(*heapq.heappop(self.flying)[2:])
            wait = max(0.0, self.flying[0][0] - now) if self.flying else None
            ready, _, _ = select.select(devices, [], [], wait)
            for device in ready:
                if device:
                    self.receive(self.of_device[device])
                elif not self.obey():
                    return

    def receive(self, port: Port) -> None:
        """Take the packets that a machine has sent."""
        for _ in range(PACKETS):
            try:
                packet = os.read(port.device, 65536)
            except BlockingIOError:
                return
            to = self.ports.get(packet[DESTINATION]) if packet[0] >> 4 == 4 else None
            if to is not None:  # else IPv6 or multicast, which no machine uses
                self.send(port, to, packet)

    def send(self, port: Port, to: Port, packet: bytes) -> None:
        """Put a packet on its way, or drop it."""
        now, size, link = time.monotonic(), len(packet), self.link
        if port.down or to.down or self.random.random() < link["loss"]:
            port.dropped += 1
            return
        arrival = now
        if link["rate"]:
            seconds, longest = size / link["rate"], link["queue"] / link["rate"]
            begin = max(now - BURST, port.out_free)
            end = max(begin + seconds, to.in_free + seconds)  # bytes are passed on as they come in
            if end - seconds - now > longest:
                port.dropped += 1
                return
            port.out_free, to.in_free, arrival = begin + seconds, end, end
        port.sent += size
        self.number += 1
        heapq.heappush(self.flying, (arrival + link["delay"], self.number, port, to, packet))

    def deliver(self, port: Port, to: Port, packet: bytes) -> None:
        """Hand a packet to the machine that it is for."""
        if port.down or to.down:
            port.dropped += 1
            return
        with contextlib.suppress(OSError):  # the machine's queue is full, or it has no device any more
            os.write(to.device, packet)
            to.received += len(packet)

    def obey(self) -> bool:
        """Do what a line on stdin says; returns whether there was one."""
        line = sys.stdin.readline()
        if not line:
            return False
        order = json.loads(line)
        self.link.update(order.get("link", {}))
        for port in self.ports.values():
            if port.name in order.get("machines", {}):
                port.down = order["machines"][port.name]
        counts = {p.name: {"sent": p.sent, "received": p.received, "dropped": p.dropped} for p in self.ports.values()}
        print(json.dumps({"seconds": time.process_time(), "machines": counts}), flush=True)
        return True


def ip(*lines: str) -> None:
    """Run these commands of `ip`, in the namespace of this thread."""
    done = subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, capture_output=True)
    if done.returncode:
        raise OSError(done.stderr.strip() or f"ip ended with {done.returncode}")


def enter(namespace: int) -> None:
    """Move this thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns: " + os.strerror(ctypes.get_errno()))


def make_machine(name: str, address: str, mtu: int) -> int:
    """Make a namespace with loopback and a device of this address; returns the device."""
    ip(f"netns add {name}")
    namespace = os.open(NAMESPACES / name, os.O_RDONLY)
    enter(namespace)
    os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    ip("link set lo up", f"link set {DEVICE} mtu {mtu} up", f"addr add {address}/24 dev {DEVICE}")
    return device


def lock(network: str) -> int:
    """Take the lock of this network, for as long as the process lives."""
    LOCKS.mkdir(exist_ok=True)
    while True:
        file = os.open(LOCKS / network, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(LOCKS / network).st_ino == os.fstat(file).st_ino:
                return file
        os.close(file)  # another switch removed it in between


def remove(network: str) -> None:
    """Remove the namespaces of a network and its lock."""
    for namespace in NAMESPACES.glob(f"{network}-*"):
        with contextlib.suppress(OSError):
            ip(f"netns del {namespace.name}")
    with contextlib.suppress(FileNotFoundError):
        (LOCKS / network).unlink()


def remove_stale() -> None:
    """Remove the networks whose switch was killed."""
    for path in LOCKS.glob("*"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(path.name)
            finally:
                os.close(file)


def main() -> None:
    """Make the machines, say so on stdout, and carry packets."""
    options = json.loads(sys.argv[1])
    network: str = options["network"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the process that started this one closes us
    with contextlib.suppress(OSError):  # a container may not
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        remove_stale()
        held = lock(network)
        assert held >= 0
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        ports: dict[bytes, Port] = {}
        for machine, address in options["machines"].items():
            device = make_machine(f"{network}-{machine}", address, options["mtu"])
            ports[bytes(map(int, address.split(".")))] = Port(machine, device)
            enter(home)
        print("ready", flush=True)
        Switch(ports, options["link"]).run()
    except OSError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        remove(network)


if __name__ == "__main__":
    main()
