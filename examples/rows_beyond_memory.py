"""Train a table larger than its DRAM budget, with SSD below, and compare the rows with those of a run all in DRAM.

    python examples/rows_beyond_memory.py

Every budget gives the same losses and the same rows, bit for bit. A smaller budget only costs reads from SSD.
"""

from __future__ import annotations

import argparse
import tempfile

import torch

import hotrow as hr


def train(memory: hr.Memory, examples: int) -> tuple[hr.EmbeddingCollection, list[float]]:
    """The same model and data for every budget."""
    torch.manual_seed(0)
    embeddings = hr.EmbeddingCollection(
        tables=[hr.Table(name, dim=64) for name in ("user", "item", "site")],
        optimizer=hr.optim.RowWiseAdagrad(lr=0.05),
        memory=memory,
    )
    tower = hr.models.DLRM(embeddings.features, dense_features=4, bottom=(64,), top=(64,))
    clicks = hr.data.synthetic(examples=examples, keys=1_000_000, batch_size=1024)
    report = hr.Trainer(hr.Recommender(embeddings, tower)).fit(clicks)
    return embeddings, report.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--dram", default="8MiB", help="the small budget")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        large, losses = train(hr.Memory(), options.examples)
        small, losses_small = train(hr.Memory(dram=options.dram, ssd=folder), options.examples)
        assert losses == losses_small, "the losses differ"
        for name in ("user", "item", "site"):
            keys = torch.cat([rows.keys for rows in large.table(name).scan()])
            assert torch.equal(large.table(name).read(keys), small.table(name).read(keys)), name
            tier = small.table(name).store.tier()
            print(f"{name}: {keys.numel():,} rows, {tier['cold_rows']:,} of them on SSD only; same bits in both runs")
        used, unlimited = (run.budget.used / 2**20 for run in (small, large))
        print(f"DRAM used: {used:.1f} MiB of {options.dram}; without a limit: {unlimited:.1f} MiB")


if __name__ == "__main__":
    main()
