"""A million mutated requests leave `hotrow serve` as it was: `make soak`.

HOTROW_FUZZ_COUNT sends fewer, HOTROW_FUZZ_SEED others, HOTROW_FUZZ_PROCESSES from more or fewer clients.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import fuzz_campaign
import psutil
import pytest
from fuzz_campaign import Campaign
from in_process import SPEC, small_model
from server_process import Server

import hotrow as hr
from hotrow.serve.protocol.limits import Limits

MIB = 1 << 20
GROWTH = 128 * MIB  # of a process in the second half; in the first the allocator reaches what it keeps of large bodies
EVERY = 5.0  # seconds
WARM_UP = 3_000  # requests, one in five of them large: as many large ones as there are among 150,000


class Watched:
    """The server's processes, as they were after the first half and as they are."""

    def __init__(self, server: Server) -> None:
        self.server = server
        parent = psutil.Process(server.process.pid)
        self.processes = {_name(process): process for process in [parent, *parent.children(recursive=True)]}
        assert {"engine", "front end"} <= set(self.processes), self.processes
        self.before: dict[str, tuple[int, int, int]] = {}

    def now(self) -> dict[str, tuple[int, int, int]]:
        """Resident bytes, file descriptors and threads of each."""
        return {name: _figures(process) for name, process in self.processes.items()}

    def settled(self, seconds: float = 10.0) -> dict[str, tuple[int, int, int]]:
        """The least of each for a while: connections end and memory goes back a moment after the last reply."""
        found = self.now()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.5)
            found = {name: tuple(map(min, found[name], new)) for name, new in self.now().items()}  # type: ignore[misc]
        return found

    def check(self) -> None:
        """Raise for a process that has grown since `before`, or that is another one."""
        for name, (memory, files, threads) in self.settled().items():
            old_memory, old_files, old_threads = self.before[name]
            assert memory - old_memory < GROWTH, f"{name}: {old_memory / MIB:.0f} MiB became {memory / MIB:.0f}"
            assert files <= old_files + 2, f"{name}: {old_files} descriptors became {files}"
            assert threads <= old_threads, f"{name}: {old_threads} threads became {threads}"
        log = self.server.text()
        assert "starts again" not in log and "Traceback" not in log, log[-5_000:]


def _name(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    names = {"engine_process": "engine", "frontend_process": "front end"}
    return next((name for word, name in names.items() if word in command), f"process {process.pid}")


def _figures(process: psutil.Process) -> tuple[int, int, int]:
    with process.oneshot():
        return process.memory_info().rss, process.num_fds(), process.num_threads()


def shown(figures: tuple[int, int, int]) -> str:
    return f"{figures[0] / MIB:.0f} MiB, {figures[1]} descriptors, {figures[2]} threads"


@pytest.mark.soak
def test_a_million_mutated_requests_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count = int(os.environ.get("HOTROW_FUZZ_COUNT", "1000000"))
    seed = int(os.environ.get("HOTROW_FUZZ_SEED", "2"))
    processes = int(os.environ.get("HOTROW_FUZZ_PROCESSES", "3"))
    limit = Limits().body_bytes
    hr.export(small_model(), tmp_path / "repository" / "ctr", features=SPEC)
    with Server(tmp_path, "--grpc", "0", "--deadline", "10s") as server, capsys.disabled():
        (line,) = (line for line in server.text().splitlines() if "grpc://" in line)
        http, grpc = f"127.0.0.1:{server.ports['http']}", line.rpartition("//")[2]
        watched = Watched(server)

        def send(first: str, many: int, seed: int, **options: int) -> Counter[str]:
            began = shown_at = time.monotonic()

            def report_progress(sent: int, seen: Counter[str]) -> None:
                nonlocal shown_at
                if time.monotonic() - shown_at >= EVERY:
                    shown_at = time.monotonic()
                    memory = ", ".join(f"{name} {figures[0] / MIB:.0f} MiB" for name, figures in watched.now().items())
                    speed = sent / (shown_at - began)
                    print(f"{first}: {sent:,} of {many:,}, {speed:,.0f}/s; {memory}", flush=True)

            seen = fuzz_campaign.run(Campaign(http, grpc, seed, limit, **options), many, processes, report_progress)
            print(f"{first}: {many:,} in {time.monotonic() - began:,.0f} s: {dict(sorted(seen.items()))}", flush=True)
            return seen

        print(flush=True)
        send("warm-up", WARM_UP, seed + 1, large_every=5, block=100)
        seen = send("first half", count // 2, seed)
        watched.before = watched.settled()
        seen += send("second half", count - count // 2, seed + 2)
        watched.check()
        for name, figures in watched.settled(2.0).items():
            print(f"{name}: {shown(watched.before[name])} became {shown(figures)}")
    assert seen["400"] > count // 4 and seen["200"] > count // 100 and seen["OK"] and seen["INVALID_ARGUMENT"], seen
