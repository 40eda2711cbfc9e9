"""The model, the data and the comparisons of the tests of training with hot rows in HBM.

Without a GPU the kernels are interpreted on CPU tensors, so batches are small here; `pytest -m gpu` runs the same tests
on the device with larger ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.data import Cursor
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.table import Lookup, Table
from hotrow.train.report import Report
from hotrow.train.trainer import Trainer

LARGE = torch.cuda.is_available()  # interpreting a step takes seconds
SIZE, KEYS, STEPS = (600, 20_000, 12) if LARGE else (24, 150, 4)
ROOMY, TIGHT, TINY = ("64MiB", "1MiB", "64KiB") if LARGE else ("4MiB", "48KiB", "12KiB")


class Tower(nn.Module):
    """Over pooled vectors and a sequence."""

    def __init__(self, history: int = 4) -> None:
        super().__init__()
        self.top = nn.Linear(8 + 8 + 8 + history, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        history = (vectors["history"] * vectors["history_mask"].unsqueeze(-1)).sum(1)
        return self.top(torch.cat([vectors["user"], vectors["clicked"], vectors["tags"], history], dim=1)).squeeze(1)


class Clicks:
    """Batches of random keys, the lower ones more often. Bags differ in their lengths; with `even` all batches have the
    same number of ids, so that missing rows are requested by one miss list (tiers/hbm/miss_list.py)."""

    def __init__(self, batches: int, size: int = SIZE, keys: int = KEYS, seed: int = 1, even: bool = True) -> None:
        self.all = [batch_of(seed * 1000 + i, size, keys, even) for i in range(batches)]
        self.examples = batches * size

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        start = 0 if cursor is None else int(cursor["batch"])
        for i, batch in list(enumerate(self.all))[start:]:
            yield batch, {"batch": i + 1}


def batch_of(seed: int, size: int, most: int, even: bool = True) -> KeyedBatch:
    generator = torch.Generator().manual_seed(seed)

    def keys(count: int) -> Tensor:
        return (torch.rand(count, generator=generator) ** 2 * most).to(torch.int64) * 104_729 - 5_000_000

    def bags(weights: bool = False) -> Jagged:
        lengths = torch.randint(0, 4, (size,), generator=generator)
        if even:
            lengths = torch.arange(size)[torch.randperm(size, generator=generator)] % 4
        ids = keys(int(lengths.sum()))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return Jagged(ids, offsets, torch.rand(ids.numel(), generator=generator) if weights else None)

    return KeyedBatch(
        {"user": Jagged(keys(size)), "clicked": bags(), "history": bags(), "tags": bags(weights=True)},
        labels=(torch.rand(size, generator=generator) < 0.4).float(),
        time=torch.full((size,), seed * 1000, dtype=torch.int64),
    )


def tables(**policies: object) -> list[Table]:
    return [
        Table("user", dim=8, **policies),  # type: ignore[arg-type]
        Table("item", dim=8, features={"clicked": "mean"}, **policies),  # type: ignore[arg-type]
        Table("history", dim=4, features={"history": "none"}, optimizer=optim.SGD(lr=0.1)),
        Table("tag", dim=8, features={"tags": "sum"}),
    ]


def trainer_of(memory: Memory | None, device: str | None = None, accumulate: int = 1, **policies: object) -> Trainer:
    torch.manual_seed(0)
    embeddings = EmbeddingCollection(
        tables(**policies), optimizer=optim.Adam(lr=0.01), memory=memory, seed=4, device=device
    )
    return Trainer(Recommender(embeddings, Tower()), accumulate=accumulate)


def rows_of(trainer: Trainer) -> dict[str, list[Tensor]]:
    found = {}
    for rows in trainer.model.embeddings.tables:
        chunks = list(rows.scan())
        keys = torch.cat([chunk.keys for chunk in chunks])
        order = keys.argsort()
        parts = [torch.cat([getattr(c, part) for c in chunks])[order] for part in ("values", "counts", "last_steps")]
        found[rows.table.name] = [keys[order], *parts]
    return found


def assert_same(ours: Trainer, theirs: Trainer) -> None:
    a, b = rows_of(ours), rows_of(theirs)
    for name in a:
        for x, y in zip(a[name], b[name], strict=True):
            assert torch.equal(x, y), name
    for p, q in zip(ours.model.tower.parameters(), theirs.model.tower.parameters(), strict=True):
        assert torch.equal(p, q)


def figures(trainer: Trainer) -> dict[str, int]:
    return figures_of(trainer.model.embeddings)


def figures_of(embeddings: EmbeddingCollection) -> dict[str, int]:
    assert embeddings.hbm_cache is not None
    return embeddings.hbm_cache.report()


def fitted(trainer: Trainer) -> tuple[Trainer, Report]:
    """After STEPS of the same clicks, evaluated on the way."""
    return trainer, trainer.fit(Clicks(STEPS), evaluate=Clicks(1, seed=9), evaluate_every=2, progress=False)


@functools.cache
def roomy_run(device: str, accumulate: int = 1) -> tuple[Trainer, Report]:
    """The run whose rows are all in HBM, for tests that compare with it and do not change it."""
    return fitted(trainer_of(Memory(hbm=ROOMY), device, accumulate))


def one_table(memory: Memory | None, device: str | None, seed: int = 1) -> EmbeddingCollection:
    return EmbeddingCollection([Table("u", dim=4)], optim.SGD(lr=1.0), memory, seed=seed, device=device)


def train_on(embeddings: EmbeddingCollection, keys: Tensor) -> None:
    embeddings.train()
    embeddings(KeyedBatch({"u": Jagged(keys)}))["u"].sum().backward()  # type: ignore[no-untyped-call]
    embeddings.step()


def batch(keys: Tensor) -> KeyedBatch:
    return KeyedBatch({"u": Jagged(keys)})


def update(embeddings: EmbeddingCollection, lookup: Lookup) -> None:
    embeddings(lookup)["u"].sum().backward()  # type: ignore[no-untyped-call]
    embeddings.step()


MANY, FEW = torch.arange(40), [torch.full((40,), 1000 + number) for number in range(8)]


def with_miss_lists(embeddings: EmbeddingCollection) -> EmbeddingCollection:
    """After batches of 40 ids that all missed some, the next ones use a miss list. Rows of the first have not
    been used for so long that any batch may take their places."""
    embeddings.in_flight(3)
    for keys in (MANY, *FEW):
        train_on(embeddings, keys)
    assert embeddings.hbm_cache is not None and embeddings.hbm_cache.groups[0].miss_finder.ready(40)
    return embeddings
