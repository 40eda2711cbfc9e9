"""Train one model over several processes: each owns a part of the rows and computes a part of each step's examples.

    torchrun --nproc-per-node=2 examples/ranks.py
    python examples/ranks.py                         # the same model in one process

The program is the same on every rank. `hr.join_ranks()` returns None when there is only one process.
"""

from __future__ import annotations

import argparse

import torch

import hotrow as hr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200_000)
    options = parser.parse_args()

    torch.manual_seed(0)  # the towers of all ranks must start equal; fit() checks it
    ranks = hr.join_ranks(timeout=60)
    embeddings = hr.EmbeddingCollection(
        tables=[hr.Table("user", dim=16), hr.Table("item", dim=16), hr.Table("site", dim=16)],
        ranks=ranks,
    )
    tower = hr.models.DLRM(embeddings.features, dense_features=4, bottom=(32,), top=(64, 32))
    trainer = hr.Trainer(hr.Recommender(embeddings, tower))
    clicks = hr.data.synthetic(examples=options.examples, keys=1_000_000, batch_size=512)
    report = trainer.fit(clicks)  # every rank makes the same calls in the same order
    rank, world = (ranks.rank, ranks.world) if ranks is not None else (0, 1)
    rows = len(embeddings.table("user"))
    print(f"rank {rank} of {world}: owns {rows:,} user rows, AUC of all ranks {report.metrics['auc']:.4f}", flush=True)


if __name__ == "__main__":
    main()
