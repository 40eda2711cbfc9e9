"""Training with a lookahead on a GPU: a tenth of the rows in HBM beside all of them, and W-gpu-cached.

W-dlrm: 26 tables with 100 million keys in total, drawn with Zipf 1.05, dim 128, row-wise Adagrad, batch 16,384, DLRM's
tower. Every key has a row, and batches are created in advance, on the device. `pipeline/hbm10` is examples/s with slots
for a tenth of the rows in HBM, beside examples/s with slots for all. `pipeline/<rule>/10%` is a step of W-gpu-cached
with slots for a tenth, with the default lookahead, beside FBGEMM TBE's (bench hbm). Each is the median of
five rounds of 60 steps, one after another."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.bench.gpu import hbm
from hotrow.bench.harness import Result, Timing, higher, lower, timing
from hotrow.bench.training.pipeline import Drawn
from hotrow.config import Memory
from hotrow.kernels.rows.layout import RowLayout
from hotrow.models import DLRM
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.table import Lookup, Table
from hotrow.tiers.hbm.group_cache import slot_bytes
from hotrow.train import pipeline
from hotrow.train.lookahead import LookaheadOptions
from hotrow.train.trainer import LOOKAHEAD_HBM, Trainer

TABLES, KEYS, DIM, BATCH, DENSE = 26, 100_000_000, 128, 16_384, 13
WARMUP, STEPS, ROUNDS, SHARE = 200, 60, 5, 0.1


def results() -> Iterator[Result | str]:
    """The rows of this benchmark."""
    for name in ("rowwise_adagrad", "adam"):
        yield f"W-gpu-cached with a lookahead, {name}"
        yield from cached(name)
        _free()
    took = {}
    for share in (SHARE, 1.0):
        yield f"W-dlrm, {share:.0%} of the rows in HBM"
        took[share] = dlrm(share)
        _free()
    some, all_rows = (batch_size() / took[share].median / 1e3 for share in (SHARE, 1.0))
    yield higher("pipeline/hbm10", "k examples/s", some, "all", all_rows, took[SHARE].spread)


def batch_size() -> int:
    """Examples in a batch of W-dlrm."""
    return int(BATCH * hbm.scale())


def _free() -> None:
    """Release the last job's memory before the next job."""
    gc.collect()
    torch.cuda.empty_cache()


def cached(name: str) -> Iterator[Result]:
    """W-gpu-cached at a tenth: forward, backward with random gradients, and update, while later batches are staged."""
    rows, ids = int(hbm.ROWS * hbm.scale()), int(hbm.IDS * hbm.scale())
    embeddings = hbm.collection(name, int(hbm.TABLES * rows * SHARE), rows)
    draw = hbm.Ids(rows, ids, embeddings.device)
    gradients = hbm.Steps(embeddings, draw).gradients
    batches = [draw.batch() for _ in range(WARMUP + ROUNDS * STEPS)]
    embeddings.in_flight(LOOKAHEAD_HBM + 1)
    torch.cuda.synchronize()

    def compute(lookup: Lookup) -> None:
        lookup.gather()
        lookup.accept(list(gradients))
        embeddings._waiting.append(lookup)
        embeddings.step()

    took = timed(embeddings, batches, compute)
    yield lower(f"pipeline/{name}/10%", "ms", took.median * 1e3, "tbe", hbm.TBE[name, "10%"], took.spread)


def timed(embeddings: EmbeddingCollection, batches: Sequence[KeyedBatch], compute: Callable[[Lookup], None]) -> Timing:
    """Seconds of a step in each round, after the warm-up."""
    marks = []
    done = pipeline.run(Drawn(batches), embeddings, compute, options=LookaheadOptions(LOOKAHEAD_HBM))
    for number, _ in enumerate(done):
        if number >= WARMUP - 1 and (number + 1 - WARMUP) % STEPS == 0:
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
    return timing([(end - begin) / STEPS for begin, end in itertools.pairwise(marks)])


def dlrm(share: float) -> Timing:
    """Seconds of a step of W-dlrm with slots in HBM for a share of the rows, in each round."""
    optimizer = optim.RowWiseAdagrad(lr=0.01)
    rows = int(KEYS * hbm.scale()) // TABLES
    layout = RowLayout(DIM, (1,), "fp32")
    slots = int(TABLES * rows * (share if share < 1 else 1 / hbm.FILL))
    tables = [Table(f"t{t}", dim=DIM, features=[f"f{t}"]) for t in range(TABLES)]
    embeddings = EmbeddingCollection(tables, optimizer, Memory(hbm=slots * slot_bytes(layout) + (1 << 20)), seed=1)
    for table in embeddings.tables:
        for begin in range(0, rows, 1 << 20):
            table.create(torch.arange(begin, min(rows, begin + (1 << 20))))
    if share == 1:
        everything = torch.arange(rows, device=embeddings.device)
        for begin in [*range(0, rows, 65_536)] * 2:
            ids = {f"f{t}": Jagged(everything[begin : begin + 65_536]) for t in range(TABLES)}
            lookup = embeddings.route(KeyedBatch(ids)).fetch()
            lookup.gather()
            lookup.plan.release()
    torch.manual_seed(0)
    tower = DLRM(embeddings.features, dense_features=DENSE, bottom=(512, 256), top=(1024, 1024, 512, 256))
    model = Recommender(embeddings, tower)
    trainer = Trainer(model, torch.optim.Adam(model.tower.parameters(), fused=True))
    draw = hbm.Ids(rows, batch_size(), embeddings.device)
    trainer.fit(Drawn([batch_of(draw) for _ in range(WARMUP)]), progress=False)
    seconds = []
    for _ in range(ROUNDS):
        batches = [batch_of(draw) for _ in range(STEPS)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        trainer.fit(Drawn(batches), progress=False)
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - start) / STEPS)
    return timing(seconds)


def batch_of(draw: hbm.Ids) -> KeyedBatch:
    """Ids, dense features and labels, on the device."""
    ids = {f"f{t}": Jagged(draw._draw()) for t in range(TABLES)}
    dense = torch.rand(draw.ids, DENSE, device=draw.device, generator=draw.generator)
    labels = (torch.rand(draw.ids, device=draw.device, generator=draw.generator) < 0.3).float()
    return KeyedBatch(ids, dense, labels)
