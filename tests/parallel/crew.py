"""Real ranks for tests: processes that join once and then run one function after another, all of them the same."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import torch

import hotrow as hr

SECONDS = 120.0  # for one function; far more than any needs


class Failed(AssertionError):  # noqa: N818
    """A rank raised what the test did not expect."""


class Crew:
    """So many ranks. `run` gives each rank's result; `errors` what each rank raised."""

    def __init__(
        self, world: int, timeout: float = 30.0, backend: str = "gloo", rows: int = 0, env: dict[str, str] | None = None
    ) -> None:
        self.world, self.rows = world, rows
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = forked.Pipe()
            process = forked.Process(
                target=_work, args=(rank, port, (world, timeout, backend, rows, env or {}), there), daemon=True
            )
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        answers = self._ask(function, arguments)
        failed = [f"rank {rank}:\n{answer[2]}" for rank, answer in enumerate(answers) if answer[0] == "error"]
        if failed:
            raise Failed("\n".join(failed))
        return [answer[1] for answer in answers]

    def errors(self, function: Callable[..., Any], *arguments: Any) -> list[BaseException | None]:
        return [answer[1] if answer[0] == "error" else None for answer in self._ask(function, arguments)]

    def _ask(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(SECONDS):
                raise Failed(f"rank {rank} did not answer")
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Relative paths begin in `folder`, which is made."""
    before = Path.cwd()
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _work(rank: int, port: int, options: tuple[int, float, str, int, dict[str, str]], pipe: Any) -> None:
    world, timeout, backend, rows, env = options
    os.environ.update(environment(rank, world, port) | env)
    torch.set_num_threads(1)
    hr.set_threads(1)
    torch.use_deterministic_algorithms(True)
    ranks = hr.join_ranks(backend, timeout=timeout, alone=True, rows=rows)
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            answer: tuple[Any, ...] = ("ok", function(ranks, *arguments))
        except Exception as error:
            answer = ("error", error, traceback.format_exc())
        pipe.send(answer)
