"""A training run in a process of its own that reports its phases, so that a test can kill it in a chosen one.

    with Run(folder, Options(ssd=True)) as run:
        run.reach("save", 2)         # its second save has just begun
        run.kill()
    result = finish(folder, Options(ssd=True))

Runs are forked from a server that has torch loaded, so a kill costs milliseconds and not the seconds of an import.
Small segments and an unbounded compaction make the log's background work as busy as that of a run of days.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "train"))

import forked
import torch
from runs import SHAPE, bits, make_trainer

import hotrow as hr
from hotrow import _core
from hotrow.data.synthetic_log.clicks import SyntheticClicks
from hotrow.tiers.host.core_errors import core_errors
from hotrow.tiers.host.store import HostStore, Snapshot

PHASES = ("start", "load", "step", "save")
STEPS, EVERY = 60, 3
SEGMENT, DRAM = 256 << 10, "12MiB"


@dataclass(frozen=True)
class Options:
    """Which tiers the run uses, and the faults that it injects itself."""

    ssd: bool = True
    checkpoints: bool = True
    dram: str = DRAM
    lookahead: int = 2
    hbm: str | None = None
    device: str | None = None  # of rows in HBM
    size: int = 1024  # of a batch
    steps: int = STEPS
    dim: int = 64


def clicks(steps: int = STEPS, size: int = 1024) -> SyntheticClicks:
    return SyntheticClicks(examples=steps * size, batch_size=size, keys=300_000, shape=SHAPE)


def over_ssd(folder: Path, options: Options, **more: Any) -> hr.Trainer:
    """A trainer whose rows (800 bytes each) outgrow DRAM by a factor of two when they live over SSD."""
    memory = hr.Memory(hbm=options.hbm, dram=options.dram, ssd=folder / "ssd") if options.ssd else None
    if options.hbm is not None and memory is None:
        memory = hr.Memory(hbm=options.hbm)
    more = {"lookahead": options.lookahead, **more}
    saves = {"checkpoints": folder / "checkpoints", "checkpoint_every": EVERY, "keep": 2} if options.checkpoints else {}
    return make_trainer(dim=options.dim, memory=memory, device=options.device, **{**saves, **more})


def digest(trainer: hr.Trainer) -> dict[str, str]:
    """`bits` by part, each as a checksum; equal in two equal runs."""
    return {name: hashlib.sha256(_canonical(value)).hexdigest() for name, value in bits(trainer).items()}


def _canonical(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"{" + b",".join(repr(k).encode() + b":" + _canonical(value[k]) for k in sorted(value, key=repr)) + b"}"
    return value if isinstance(value, bytes) else repr(value).encode()


def small_segments(patch: Callable[[type, str, Any], None] = setattr, size: int = SEGMENT) -> None:
    """Makes the segments and buffers of later logs small."""

    def attach(
        store: HostStore, folder: str, evicts: bool, buffer: int = 1 << 20, lock: Any = None, segment: int = 0
    ) -> None:
        with core_errors():
            store.core.attach(folder, evicts, min(buffer, size // 4), size, lock=lock)

    patch(HostStore, "attach", attach)


def _announce(owner: Any, name: str, say: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        say()
        return real(*args, **options)

    setattr(owner, name, call)


def train(folder: Path, options: Options, pipe: Connection | None = None) -> None:
    """The whole run, resumed if there is a checkpoint; writes its result to result.json."""
    warnings.simplefilter("error")  # a kill never damages a checkpoint: none may be skipped
    warnings.filterwarnings("ignore", message=".*cannot hold the rows of the batches in flight")
    torch.set_num_threads(1)
    _core.set_compaction_rate(1 << 40)
    small_segments()
    if pipe is not None:
        pipe.send("start")
        _announce(HostStore, "load_snapshot", lambda: pipe.send("load"))
        _announce(Snapshot, "finish", lambda: pipe.send("save"))
        _announce(hr.EmbeddingCollection, "step", lambda: pipe.send("step"))
    trainer = over_ssd(folder, options)
    report = trainer.fit(clicks(options.steps, options.size), resume=options.checkpoints, progress=False)
    hot = trainer.model.embeddings.hbm_cache
    tiers = [rows.store.tier() for rows in trainer.model.embeddings.tables]
    result = {
        "digest": digest(trainer),
        "losses": report.losses,
        "resumed_from": report.resumed_from,
        "evicted": sum(tier["evicted"] for tier in tiers),
        "left_hbm": 0 if hot is None else hot.figures()["evictions"],
        "compacted": sum(tier["compacted_bytes"] for tier in tiers),
        "compaction_errors": sum(tier["compaction_errors"] for tier in tiers),
        "over_budget": options.ssd and trainer.model.embeddings.budget.used > trainer.model.embeddings.budget.limit,
    }
    (folder / "result.json.tmp").write_text(json.dumps(result))
    os.rename(folder / "result.json.tmp", folder / "result.json")


class Run:
    """One process that trains, with its output."""

    def __init__(self, folder: Path, options: Options) -> None:
        self.folder = folder
        self.pipe, theirs = forked.Pipe(duplex=False)
        self.process = forked.Process(target=train, args=(folder, options, theirs))
        self.process.start()
        theirs.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def reach(self, phase: str, times: int, seconds: float = 60) -> bool:
        """Wait until it reports the phase for the `times`-th time; False if it ended first."""
        deadline = time.monotonic() + seconds
        try:
            while times:
                if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"the run hangs: no {phase!r} in {seconds:.0f} s")
                times -= self.pipe.recv() == phase
        except EOFError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: no handler and no flush."""
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def result(self) -> dict[str, Any]:
        """Wait for the end."""
        self.reach("the end", 1)
        self.process.join()
        assert self.process.exitcode == 0, f"the run ended with {self.process.exitcode}; its error is above"
        return dict(json.loads((self.folder / "result.json").read_text()))


def finish(folder: Path, options: Options) -> dict[str, Any]:
    """Run to the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with Run(folder, options) as run:
        return run.result()


def use_folder(folder: Path, kind: str, pipe: Connection) -> None:
    """Train and save with `folder` for its rows or for its checkpoints, without root's rights; returns the error."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    try:
        memory = hr.Memory(dram=DRAM, ssd=folder) if kind == "ssd" else None
        trainer = make_trainer(folder if kind == "checkpoints" else None, memory=memory)
        trainer.fit(clicks(), steps=1, progress=False)
        trainer.save()
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def as_nobody(folder: Path, kind: str) -> str:
    """The result of `use_folder` in a process of its own."""
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=use_folder, args=(folder, kind, theirs))
    process.start()
    theirs.close()
    words = str(ours.recv()) if ours.poll(60) else "it hangs"
    process.kill()
    process.join()
    return words
