"""A small training over all poolings and optimizers; prints a digest of every bit it left.

`python training_digest.py` is run by the tests with other settings of the environment.
"""

from __future__ import annotations

import hashlib

import torch

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Initial
from hotrow.nn import EmbeddingCollection
from hotrow.optim import FTRL, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from hotrow.table import Table

OPTIMIZERS = [SGD(lr=0.1), Adagrad(), RowWiseAdagrad(clip_norm=0.5), Adam(), AdamW(), FTRL(l1=0.01, clip_value=0.3)]
DIMS = [1, 7, 8, 16, 24, 64]


def digest(steps: int = 2, size: int = 4000, keys: int = 6000) -> str:
    """A hash of all vectors that training saw and all rows that it left."""
    tables = [
        Table(f"t{i}", dim, {f"sum{i}": "sum", f"mean{i}": "mean", f"seq{i}": "none"}, Initial.normal(), optimizer)
        for i, (dim, optimizer) in enumerate(zip(DIMS, OPTIMIZERS, strict=True))
    ]
    collection = EmbeddingCollection(tables, seed=11)
    generator = torch.Generator().manual_seed(1)
    seen = hashlib.sha256()
    for _ in range(steps):
        vectors = collection(KeyedBatch({f: _bags(generator, size, keys) for t in tables for f in t.poolings}))
        seen.update(
            torch.cat([vectors[f].detach().flatten() for f in sorted(vectors) if "_" not in f]).numpy().tobytes()
        )
        weights = {name: torch.randn(vector.shape[-1], generator=generator) for name, vector in vectors.items()}
        sum(((vectors[f] * weights[f]).sum() for f in vectors if "_" not in f), torch.zeros(())).backward()
        collection.step()
    for rows in collection.tables:
        for chunk in rows.scan():
            for part in (chunk.keys, chunk.values, chunk.counts, chunk.last_steps):
                seen.update(part.numpy().tobytes())
    return seen.hexdigest()


def _bags(generator: torch.Generator, size: int, keys: int) -> Jagged:
    lengths = torch.randint(0, 4, (size,), generator=generator)
    values = torch.randint(-keys, keys, (int(lengths.sum()),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Jagged(values, offsets, torch.rand(values.numel(), generator=generator))


if __name__ == "__main__":
    from hotrow import _core

    print(_core.simd(), digest())
