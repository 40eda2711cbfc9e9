"""Network: several machines on one, joined by links with a delay, a rate and loss, which can be cut.

    with Network(["towers", "rows"], rate=125e6, delay=0.001) as network:
        child_process.start(network.command("rows", ["hotrow", "train", ...]))
        network.down("rows")

Each machine is a network namespace with loopback and one device with an address of its own, so a process in it reaches
the other machines of this network and nothing else. A process of ours carries the packets between them
(network_switch.py). Namespaces end with the `with` block, or with this process; those of a switch that was killed are
removed when the next one starts. Names are unique, so any number of networks may exist at once.

It needs root, `ip` and TUN devices: `unavailable()` says what is missing.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hotrow import child_process
from hotrow.bench.servers import network_switch
from hotrow.errors import OptionError

NET = "10.77.0"  # the same in all networks: they cannot reach each other
LARGEST_MTU = 65_000


class Network:
    """Machines and the switch between them.

    `rate` is in bytes a second, in each direction of each machine's link; 0 is without limit. `delay` is the seconds
    from one machine to another, `loss` the share of packets that are lost, `queue` how many bytes a link holds back.
    Bytes are those of IP packets.
    """

    def __init__(
        self, machines: Iterable[str], rate: float = 0, delay: float = 0, loss: float = 0, queue: int = 1 << 20,
        mtu: int = LARGEST_MTU, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name = f"hotrow-{os.getpid()}-{secrets.token_hex(3)}"
        self.addresses = {machine: f"{NET}.{number}" for number, machine in enumerate(machines, 1)}
        link = {"rate": rate, "delay": delay, "loss": loss, "queue": queue, "seed": seed}
        options = {"network": self.name, "machines": self.addresses, "mtu": mtu, "link": link}
        command = [sys.executable, "-I", "-S", network_switch.__file__, json.dumps(options)]
        self.switch = child_process.start(
            command, signal.SIGTERM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        answer = self._answer()
        if answer != "ready":
            self.close()
            raise OptionError(f"this machine cannot emulate a network: {answer or 'the switch did not start'}")

    def namespace(self, machine: str) -> str:
        """The name of a machine's namespace, for `ip netns`."""
        if machine not in self.addresses:
            raise OptionError(f"there is no machine {machine!r} in this network, but {', '.join(self.addresses)}")
        return f"{self.name}-{machine}"

    def command(self, machine: str, command: Sequence[str]) -> list[str]:
        """A command that runs `command` on a machine."""
        return ["ip", "netns", "exec", self.namespace(machine), *command]

    def enter(self, machine: str) -> None:
        """Move the calling thread, and the threads and processes that it starts from now on, to a machine."""
        enter(self.namespace(machine))

    def shape(self, **link: float) -> None:
        """Change rate, delay, loss or queue of all links, from the next packet on."""
        unknown = link.keys() - {"rate", "delay", "loss", "queue"}
        if unknown:
            raise OptionError(f"a link has no {', '.join(sorted(unknown))}, but rate, delay, loss and queue")
        self._tell({"link": link})

    def down(self, *machines: str) -> None:
        """Cut the links of these machines, or of all."""
        self._tell({"machines": dict.fromkeys(machines or self.addresses, True)})

    def up(self, *machines: str) -> None:
        """Mend the links of these machines, or of all."""
        self._tell({"machines": dict.fromkeys(machines or self.addresses, False)})

    def counts(self) -> dict[str, dict[str, int]]:
        """For each machine: bytes sent and received, and packets dropped."""
        counts: dict[str, dict[str, int]] = self._tell({})["machines"]
        return counts

    def switch_seconds(self) -> float:
        """The processor time that the switch has taken."""
        return float(self._tell({})["seconds"])

    def processes(self) -> list[int]:
        """The ids of all processes on the machines."""
        found: list[int] = []
        for machine in self.addresses:
            command = ["ip", "netns", "pids", self.namespace(machine)]
            found += map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
        return found

    def close(self) -> None:
        """Stop the switch and remove the machines' namespaces."""
        assert self.switch.stdin is not None and self.switch.stdout is not None
        with suppress(BrokenPipeError):  # the switch was killed
            self.switch.stdin.close()
        try:
            self.switch.wait(10)
        except subprocess.TimeoutExpired:
            self.switch.kill()
            self.switch.wait()
        self.switch.stdout.close()

    def _tell(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.switch.stdin is not None
        try:
            self.switch.stdin.write(json.dumps(order) + "\n")
            self.switch.stdin.flush()
        except BrokenPipeError:
            pass  # then there is no answer either
        if not (answer := self._answer()):
            raise OptionError("the switch of the emulated network has ended")
        return dict(json.loads(answer))

    def _answer(self) -> str:
        assert self.switch.stdout is not None
        line: str = self.switch.stdout.readline()
        return line.strip()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def enter(namespace: str) -> None:
    """Move the calling thread, and the threads and processes that it starts from now on, into a namespace."""
    with open(network_switch.NAMESPACES / namespace) as file:
        network_switch.enter(file.fileno())


@functools.cache
def unavailable() -> str | None:
    """Why networks cannot be emulated here; None if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian, Ubuntu: apt-get install iproute2)"
    if not Path("/dev/net/tun").exists() or not hasattr(ctypes.CDLL(None), "setns"):
        return "there are no TUN devices (/dev/net/tun)"
    try:
        Network(["probe"]).close()
    except OptionError as error:
        return str(error)
    return None
