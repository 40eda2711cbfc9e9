"""Two Gloo ranks on CPU beside two of TorchRec: examples per second of all ranks together.

W-rows' tables at 100,000 keys, dim 16: 26 tables, batch 4,096 a rank, one Zipf 1.1 id per table and example, row-wise
Adagrad. The tower is one linear layer over the pooled vectors, trained by SGD, so that the sparse part decides. A rank
has a core, and batches are drawn in advance.

TorchRec is set up as its guides do: a row-wise sharded EmbeddingBagCollection whose fused optimizer runs in backward,
DistributedModelParallel, and TrainPipelineSparseDist, which distributes the keys of the next batches while one is
computed. Its tables are dense arrays, and each key of a batch is an index. HotRow's are hash tables of 64-bit keys, as
always; all keys have a row before the first turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hotrow.bench.harness import Result, higher, timing
from hotrow.bench.training.rank_processes import Figures, RankProcesses, Turn
from hotrow.bench.training.repeated_batches import RepeatedBatches
from hotrow.errors import OptionError

DIM, KEYS, STEPS, WARMUP, TURNS = 16, 100_000, 160, 1, 7


MISSING = (
    "the peer torchrec is missing: run make bench, or pip install 'hotrow[bench]' and then pip install --no-deps "
    "torchrec==1.8.0"
)


def results(first: int, second: int) -> Iterator[Result | str]:
    """The row of this comparison, after status lines."""
    if find_spec("torchrec") is None:
        raise OptionError(MISSING)
    name, cores = "ranks/torchrec", [[first], [second]]
    yield f"{name}: setting up two ranks on both sides"
    with RankProcesses(cores, prepare_hotrow) as ours, RankProcesses(cores, prepare_torchrec) as theirs:
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(-WARMUP, TURNS):
            yield f"{name}: turn {max(turn, 0) + 1} of {TURNS}"
            for side, ranks in (("ours", ours), ("theirs", theirs)):
                taken = max(rank["seconds"] / rank["examples"] for rank in ranks.work()) / len(cores)
                if turn >= 0:
                    seconds[side].append(taken)
    ours_time, theirs_time = timing(seconds["ours"]), timing(seconds["theirs"])
    yield higher(name, "k examples/s", 1e-3 / ours_time.median, "torchrec", 1e-3 / theirs_time.median, ours_time.spread)


def drawn(rank: int) -> list[Any]:
    """A rank's batches of ids, [tables, batch] each, and labels."""
    import torch

    from hotrow.bench.storage.rows import draw_ids

    generator = torch.Generator().manual_seed(rank)
    every = draw_ids()
    return [
        ((ids % KEYS).contiguous(), (torch.rand(ids.shape[1], generator=generator) < 0.3).float())
        for ids in every[rank :: 2]
    ]  # fmt: skip


def linear(tables: int) -> Any:
    """The tower, with the same weights on both sides."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Linear(tables * DIM, 1)


def prepare_hotrow(rank: int) -> Turn:
    """A rank of HotRow."""
    import torch

    import hotrow as hr
    from hotrow.bench.storage.rows import TABLES

    torch.set_num_threads(1)
    hr.set_threads(1)
    ranks = hr.join_ranks("gloo", timeout=120)
    assert ranks is not None
    names = [f"t{i}" for i in range(TABLES)]
    rule = hr.optim.RowWiseAdagrad(lr=0.01)
    embeddings = hr.EmbeddingCollection([hr.Table(name, dim=DIM) for name in names], optimizer=rule, ranks=ranks)

    class Model(hr.Recommender):
        def forward(self, batch: Any) -> torch.Tensor:
            return self.tower(self.embeddings.pooled(batch)).squeeze(1)  # type: ignore[no-any-return]

    tower = linear(TABLES)
    trainer = hr.Trainer(Model(embeddings, tower), torch.optim.SGD(tower.parameters(), lr=0.01))
    batches = [
        hr.KeyedBatch({name: hr.Jagged(row.contiguous()) for name, row in zip(names, ids, strict=True)}, None, labels)
        for ids, labels in drawn(rank)
    ]
    source = RepeatedBatches(batches)
    trainer.fit(source, steps=len(batches), progress=False)  # every key that occurs has a row now

    def turn() -> Figures:
        report = trainer.fit(source, steps=STEPS, progress=False)
        return {"seconds": report.seconds, "examples": report.examples / 2}

    return turn


def prepare_torchrec(rank: int) -> Turn:
    """A rank of TorchRec."""
    import time

    import torch
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.distributed.types import ShardingPlan, ShardingType
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.streamable import Pipelineable

    from hotrow.bench.storage.rows import TABLES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    device, names = torch.device("cpu"), [f"t{i}" for i in range(TABLES)]
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=KEYS, feature_names=[name]) for name in names
    ]

    class RowWiseSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
        def sharding_types(self, compute_device_type: str) -> list[str]:  # row-wise is left out on CPU, and works there
            return [ShardingType.ROW_WISE.value]

    @dataclass
    class Batch(Pipelineable):  # type: ignore[misc]
        ids: Any
        labels: torch.Tensor

        def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
            return self

        def record_stream(self, stream: Any) -> None:
            pass

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
            self.linear = linear(TABLES)

        def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.linear(self.embeddings(batch.ids).values()).squeeze(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            return loss, logits.detach()

    model: Any = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.parameters(), {"lr": 0.01})
    sharder, world = RowWiseSharder(), dist.get_world_size()
    tables = construct_module_sharding_plan(
        model.embeddings, {name: row_wise() for name in names}, sharder, world, world, "cpu"
    )
    plan = ShardingPlan({"embeddings": tables})
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    batches = [
        Batch(
            KeyedJaggedTensor(names, ids.reshape(-1), lengths=torch.ones(ids.numel(), dtype=torch.int32)), labels
        )
        for ids, labels in drawn(rank)
    ]  # fmt: skip

    def forever() -> Iterator[Batch]:
        while True:
            yield from batches

    stream = forever()

    def turn() -> Figures:
        begin = time.perf_counter()
        for _ in range(STEPS):
            pipeline.progress(stream)
        return {"seconds": time.perf_counter() - begin, "examples": float(STEPS * len(batches[0].labels))}

    return turn
