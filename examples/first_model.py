"""Train a first model and look at what it learned.

    python examples/first_model.py

The synthetic click log has users, items, sites and a history of items. Replace it with your own files:
`hr.data.parquet("clicks/*.parquet", features=spec)`.
"""

from __future__ import annotations

import argparse

import torch

import hotrow as hr


def build(memory: hr.Memory | None = None) -> hr.Recommender:
    """An EmbeddingCollection (keys in, vectors out) and a tower (vectors in, logits out)."""
    embeddings = hr.EmbeddingCollection(
        tables=[
            hr.Table("user", dim=16),
            hr.Table("item", dim=16, features={"item": "sum", "history": "mean"}),  # two features share a table
            hr.Table("site", dim=16),
        ],
        optimizer=hr.optim.RowWiseAdagrad(lr=0.05),
        memory=memory or hr.Memory(dram="1GiB"),
    )
    tower = hr.models.DLRM(embeddings.features, dense_features=4, bottom=(32,), top=(64, 32))
    return hr.Recommender(embeddings, tower)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200_000)
    parser.add_argument("--checkpoints", default="runs/first_model")
    options = parser.parse_args()

    torch.manual_seed(0)
    clicks = hr.data.synthetic(examples=options.examples, keys=20_000, batch_size=1024)
    model = build()
    trainer = hr.Trainer(
        model,
        dense_optimizer=torch.optim.Adam(model.tower.parameters(), lr=3e-3),
        checkpoints=options.checkpoints,
    )
    report = trainer.fit(clicks, resume=True)  # continues from the newest checkpoint if there is one
    print(f"AUC {report.metrics['auc']:.4f}, best possible {clicks.best_auc():.4f}")
    print(f"{len(model.embeddings.table('item')):,} items have a row; the most frequent:")
    for item in model.embeddings.table("item").hottest(3):
        print(f"  key {item.key}: seen {item.count:,} times")
    print("checkpoint:", trainer.save().path)


if __name__ == "__main__":
    main()
