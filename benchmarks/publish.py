"""Publications: what they cost a trainer, and how long they take from a cut to a reader, on each bus.

    python benchmarks/publish.py [--turns 5] [--buses dir,redis,kafka]

The workload is W-dlrm's shape at dim 16 with a small tower; a trainer publishes every 0.2 s, and a reader in another
process takes whole publications and says when it had them. redis-server and librdkafka's mock cluster run on this
machine. The cost is against the same trainer without publish=, both in one process, in turns over the same batches; on
a machine that others use too, believe the CPU's seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import hotrow as hr
from hotrow import child_process
from hotrow.bench.serving.freshness import open_bench_bus

STEPS = 30  # of a turn
READER = """
import json, sys, time
from hotrow.publish.subscriber import Subscriber
subscriber, late, rows = Subscriber(sys.argv[1], patience=60), [], 0
print("ready", flush=True)
while True:
    for one in subscriber.poll(1.0):
        if one.kind == "delta":
            late.append(time.time() - one.cut)
            rows += one.rows
    if sys.argv[2] and __import__("os").path.exists(sys.argv[2]):
        break
print(json.dumps({"late": late, "rows": rows, "corrupt": subscriber.counters.corrupt}), flush=True)
"""


def trainer_of(publish: hr.Publish | None, dim: int) -> tuple[hr.Trainer, hr.data.Source]:
    clicks = hr.data.synthetic.criteo_like(examples=100_000_000, batch_size=1024)
    embeddings = hr.EmbeddingCollection([hr.Table(name, dim=dim) for name in clicks.shape.sparse])
    torch.manual_seed(0)
    tower = hr.models.DLRM(embeddings.features, dense_features=13, bottom=(64, dim), top=(128, 64))
    return hr.Trainer(hr.Recommender(embeddings, tower), publish=publish), clicks


def fit(trainer: hr.Trainer, source: hr.data.Source, steps: int) -> tuple[float, float]:
    """Seconds, and seconds of all cores, of so many steps. Requires: nothing else runs in this process meanwhile."""
    start, cpu = time.perf_counter(), time.process_time()
    trainer.fit(source, steps=steps, cursor=trainer.cursor, progress=False)
    return time.perf_counter() - start, time.process_time() - cpu


def measure(address: str, turns: int, dim: int) -> dict[str, float]:
    done = Path(tempfile.mkdtemp()) / "done"
    reader = child_process.start([sys.executable, "-c", READER, address, str(done)], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None and reader.stdout.readline().strip() == "ready"
    publishing, source = trainer_of(hr.Publish(address, every_seconds=0.2), dim)
    plain, _ = trainer_of(None, dim)
    spent: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for turn in range(turns + 1):  # both see the same batches; the first turn is to warm up
        for name, one in (("without", plain), ("with", publishing)):
            figures = fit(one, source, STEPS)
            if turn:
                spent[name].append(figures)
    assert publishing.publisher is not None
    counters = publishing.publisher.counters
    publishing.publisher.delivery.flush(30)
    pauses = publishing.publisher.pauses
    publishing.publisher.close()
    time.sleep(1.5)
    done.touch()
    said = json.loads(reader.communicate(timeout=60)[0].splitlines()[-1])
    late = sorted(said["late"][2:])
    with_, without = ([sum(column) for column in zip(*spent[name], strict=True)] for name in ("with", "without"))
    return {
        "publications": counters.published,
        "bytes a publication": counters.bytes / counters.published,
        "changed rows/s": counters.rows * turns / (turns + 1) / with_[0],
        "latency p50, s": late[len(late) // 2],
        "latency p99, s": late[min(len(late) - 1, len(late) * 99 // 100)],
        "pause of a cut, ms": 1000 * statistics.median(pauses),
        "pauses, share of training": sum(pauses) * turns / (turns + 1) / with_[0],
        "CPU of training, with : without": with_[1] / without[1],
        "seconds, with : without": with_[0] / without[0],
        "rows read, share": said["rows"] / max(1, counters.rows),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--dim", type=int, default=16)
    options.add_argument("--buses", default="dir,redis,kafka")
    given = options.parse_args()
    for name in given.buses.split(","):
        with tempfile.TemporaryDirectory() as folder, open_bench_bus(name, Path(folder)) as address:
            if address is None:
                print(f"{name}: its server or its client is not installed")
                continue
            print(name)
            for what, value in measure(address, given.turns, given.dim).items():
                print(f"  {what:34} {value:,.4f}")


if __name__ == "__main__":
    main()
