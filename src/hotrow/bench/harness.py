"""Harness: shared by all benchmarks: results, timing of two sides in turns, a table, JSON.

The machines are noisy and shared. So our steps and the peer's alternate in one process. A side's figure is its median;
the spread (half the interquartile range, divided by the median) is shown beside it.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable

from hotrow.errors import OptionError, choices

BENCHES = {
    "rows": "W-rows: rows in DRAM against FBGEMM and torch on the CPU; creation speed; bytes a row",
    "ssd": "rows on SSD against the raw device and RocksDB; RAM of a cold row",
    "tiers": "training with a table ten times the DRAM budget, against all rows in DRAM",
    "pipeline": "overlapping stages: SSD against DRAM, lookahead against one batch at a time",
    "serve": "hotrow serve under load, beside LitServe, Ray Serve and the bare tower (extras serve, bench)",
    "split": "row servers and tower servers beside one server that does both; lookups; servers that die under load",
    "serve_gpu": "a served model with a tenth of its rows in HBM against plain PyTorch on the cores (needs a GPU)",
    "hbm": "hot rows in HBM against FBGEMM TBE and HierarchicalKV (needs a GPU)",
    "kernels": "each kernel of the HBM tier against the time of its bytes at full bandwidth (needs a GPU)",
    "attention_gpu": "jagged attention against FlexAttention and padded SDPA, and its bytes and flops (needs a GPU)",
    "ranks": "two ranks against one, a core each; bytes sent",
    "roles": "row ranks beside the store in process; a tower and a row rank beside one process; over a link (as root)",
    "read": "decoding and features on Ray workers against in-process (needs the extra ray)",
    "online": "live against frozen on a drifting log; freshness on each bus; rows from a Redis cluster",
    "transports": "batched row lookups over Arrow Flight, gRPC, Gloo, ZeroMQ and plain sockets: a server on one core",
    "sequences": "long histories: attention and a Transformer's step against SDPA and padding; AUC against DIN's",
    "eviction": "which rows to keep in DRAM: hit rates of eviction policies on Zipf traces",
}
MODULES = {  # the module of each benchmark, below hotrow.bench
    "rows": "storage.rows",
    "ssd": "storage.ssd",
    "tiers": "storage.tiers",
    "pipeline": "training.pipeline",
    "serve": "serving.serve",
    "split": "serving.split",
    "serve_gpu": "gpu.serve_gpu",
    "hbm": "gpu.hbm",
    "kernels": "gpu.kernels",
    "attention_gpu": "gpu.attention_gpu",
    "ranks": "training.ranks",
    "roles": "training.roles",
    "read": "storage.read",
    "online": "serving.online",
    "transports": "transports.row_transports",
    "sequences": "sequences.groups",
    "eviction": "storage.eviction",
}


@dataclass(frozen=True)
class Result:
    """One figure beside its peer's. `ratio` above 1 always means better than the peer."""

    name: str
    unit: str
    value: float
    peer: str
    peer_value: float
    ratio: float
    spread: float = 0.0

    def to_json(self) -> dict[str, float | str]:
        """The fields of `--json`."""
        values = asdict(self)
        values.pop("spread")
        return values


def higher(name: str, unit: str, value: float, peer: str, peer_value: float, spread: float = 0.0) -> Result:
    """A figure where higher is better."""
    return Result(name, unit, value, peer, peer_value, value / peer_value, spread)


def lower(name: str, unit: str, value: float, peer: str, peer_value: float, spread: float = 0.0) -> Result:
    """A figure where lower is better."""
    return Result(name, unit, value, peer, peer_value, peer_value / value, spread)


@dataclass(frozen=True)
class Timing:
    """The median seconds of one side's steps, and their spread."""

    median: float
    spread: float


def alternate(sides: Sequence[Callable[[int], object]], warmup: int, repeats: int) -> list[Timing]:
    """Time each side's step(i) in turns, so that noise on the machine affects both.

    A pause before each step lets the other side's threads go to sleep: OpenMP threads spin for a while after work.
    """
    seconds: list[list[float]] = [[] for _ in sides]
    for i in range(warmup + repeats):
        for side, step in enumerate(sides):
            time.sleep(0.01)
            start = time.perf_counter()
            step(i)
            if i >= warmup:
                seconds[side].append(time.perf_counter() - start)
    return [timing(values) for values in seconds]


def timing(seconds: list[float]) -> Timing:
    """Median and spread."""
    quarter = statistics.quantiles(seconds, n=4)
    median = statistics.median(seconds)
    return Timing(median, (quarter[2] - quarter[0]) / 2 / median)


DEVICE = "HOTROW_BENCH_DEVICE"  # of the benchmarks in ON_DEVICE
ON_DEVICE = ("sequences",)


def run(name: str, json_file: str | None = None, record: str | None = None, device: str | None = None) -> list[Result]:
    """Run a benchmark, print its table, and write the JSON and the record if requested."""
    if name not in BENCHES:
        raise OptionError(f"there is no benchmark {name!r}; {choices(name, BENCHES)}")
    if device is not None:
        if name not in ON_DEVICE:
            raise OptionError(f"hotrow bench {name} runs where it does; --device is for {', '.join(ON_DEVICE)}")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise OptionError(f"--device {device}: torch sees no GPU; leave it out to measure on the CPU")
        os.environ[DEVICE] = device
    module = importlib.import_module(f"hotrow.bench.{MODULES[name]}")
    console = Console()
    console.print(f"[bold]hotrow bench {name}[/]  {BENCHES[name]}\n{hardware()}", highlight=False)
    results: list[Result] = []
    with console.status("setting up") as status:
        produced: Generator[Result | str, None, None] = module.results()
        with closing(produced):  # on Ctrl-C and SIGTERM, end the processes that the benchmark started
            for item in produced:
                if isinstance(item, str):
                    status.update(item)
                else:
                    results.append(item)
                    if record:  # at once: a benchmark that is ended early keeps what it measured
                        append(Path(record) / f"{name}.jsonl", [item])
    console.print(table(results))
    if json_file:
        Path(json_file).write_text(json.dumps([result.to_json() for result in results], indent=1) + "\n")
    return results


def table(results: Sequence[Result]) -> RichTable:
    """The results as a table for the terminal."""
    view = RichTable()
    for column in ("name", "HotRow", "peer", "peer's", "unit", "ratio", "spread"):
        view.add_column(column, justify="left" if column in ("name", "peer", "unit") else "right", overflow="fold")
    for r in results:
        color = "green" if r.ratio >= 1 else "red"
        view.add_row(
            r.name,
            f"{r.value:,.2f}",
            r.peer,
            f"{r.peer_value:,.2f}",
            r.unit,
            f"[{color}]{r.ratio:.2f}x[/]",
            f"±{r.spread:.0%}" if r.spread else "",
        )
    return view


def append(path: Path, results: Sequence[Result]) -> None:
    """Add rows with hardware, commit and date to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for result in results:
            row = {**asdict(result), "hardware": hardware(), "commit": commit(), "date": time.strftime("%Y-%m-%d")}
            file.write(json.dumps(row) + "\n")


def hardware() -> str:
    """The processor, how many of its cores this process may use, and the GPU if there is one."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    cores = f"{len(os.sched_getaffinity(0))} cores of {model}"
    return f"{cores}, {torch.cuda.get_device_name()}" if torch.cuda.is_available() else cores


def commit() -> str:
    """The commit under test, with "+changes" if the tree has changes."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
        return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
