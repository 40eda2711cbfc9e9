"""SASRec in plain torch, as its paper describes it, on the batches of examples/sequence_ranking.py.

    python benchmarks/sasrec_plain_torch.py PATH [options of examples/sequence_ranking.py]

It is the reference for the example's accuracy: the same split, batches, negatives and ranking, but padded histories,
nn.Embedding and the layers of the paper (arXiv 1808.09781): items scaled by the root of dim, learned places counted
from the newest event, attention of normed queries over events that are not normed, a ReLU layer of the same width, and
the dot product with the item's own embedding. Figures are in docs/histories.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from torch import Tensor, nn

import hotrow as hr


def example() -> ModuleType:
    """examples/sequence_ranking.py."""
    path = Path(__file__).parents[1] / "examples" / "sequence_ranking.py"
    spec = importlib.util.spec_from_file_location("sequence_ranking", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sequence_ranking"] = module
    spec.loader.exec_module(module)
    return module


class Layer(nn.Module):
    """Attention and a feed-forward layer of one width, each behind a norm."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.hidden_norm = nn.LayerNorm(dim, eps=1e-8), nn.LayerNorm(dim, eps=1e-8)
        self.attention = nn.MultiheadAttention(dim, 1, dropout, batch_first=True)
        self.widen, self.narrow = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor, real: Tensor) -> Tensor:
        """`hidden` bool `[batch, length, length]`: what an event must not see."""
        q = self.norm(x)
        x = q + self.attention(q, x, x, attn_mask=hidden, need_weights=False)[0]
        x = self.hidden_norm(x)
        x = x + self.dropout(self.narrow(self.dropout(torch.relu(self.widen(x)))))
        return x * real


class PlainSASRec(nn.Module):
    """The outputs of all events, `[batch, length, dim]`; padding is at the beginning, with item number `items`."""

    def __init__(self, items: int, length: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items + 1, dim, padding_idx=items), nn.Embedding(length, dim)
        self.layers = nn.ModuleList(Layer(dim, dropout) for _ in range(2))
        self.norm, self.dropout = nn.LayerNorm(dim, eps=1e-8), nn.Dropout(dropout)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.xavier_normal_(weight)
        self.items.weight.data[items] = 0

    def forward(self, seen: Tensor) -> Tensor:
        length = seen.shape[1]
        real = (seen != self.items.num_embeddings - 1).unsqueeze(2)
        places = torch.arange(length - 1, -1, -1)
        x = self.dropout(self.items(seen) * self.items.embedding_dim**0.5 + self.places(places)) * real
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = later | ~real.transpose(1, 2)
        hidden = hidden & ~torch.eye(length, dtype=torch.bool)  # padding sees itself, so that no row is empty
        for layer in self.layers:
            x = layer(x, hidden, real)
        out: Tensor = self.norm(x)
        return out

    def pad(self, history: hr.Jagged) -> tuple[Tensor, Tensor]:
        """Items `[batch, longest]`, and where the events are."""
        lengths = history.lengths()
        longest = int(lengths.max())
        mask = torch.arange(longest) >= longest - lengths[:, None]
        seen = torch.full(mask.shape, self.items.num_embeddings - 1)
        seen[mask] = history.values
        return seen, mask


def main() -> None:
    sequence_ranking = example()
    options: argparse.Namespace = sequence_ranking.arguments().parse_args()
    console = Console()
    log = sequence_ranking.read_log(options.path, options.columns, options.min_events)
    torch.manual_seed(options.seed)
    model = PlainSASRec(log.item_count, options.length, options.dim, options.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr, betas=(0.9, 0.98))
    source = sequence_ranking.NextItems(
        log, options.users, options.negatives, options.length, options.epochs, options.seed
    )
    loss_of = nn.functional.binary_cross_entropy_with_logits
    if options.loss == "softmax":
        loss_of = sequence_ranking.softmax_loss(options.negatives)
    validation, test = (sequence_ranking.Ranking(log, options.length, which) for which in (True, False))

    @torch.inference_mode()
    def scores(items: hr.Jagged, times: hr.Jagged) -> Tensor:
        model.eval()
        return model(model.pad(items)[0])[:, -1] @ model.items.weight[: log.item_count].T

    best = None
    for epoch in range(1, options.epochs + 1):
        model.train()
        for number in range((epoch - 1) * source.steps, epoch * source.steps):
            batch = source.batch(number)
            seen, mask = model.pad(batch.ids["seen_item"])
            events = model(seen)[mask]
            items = model.items(batch.ids["item"].values.view(len(events), -1))
            loss = loss_of((items @ events.unsqueeze(2)).view(-1), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % options.evaluate_every and epoch != options.epochs:
            continue
        sampled, of_all = validation.figures(scores)
        console.print(
            f"epoch {epoch} loss {loss.item():.4f} validation NDCG@10 {of_all[1]:.4f} {sampled[1]:.4f}", highlight=False
        )
        if best is None or of_all[1] > best[0]:
            best = of_all[1], epoch, test.figures(scores)
        elif epoch - best[1] >= options.patience:
            break
    assert best is not None
    sequence_ranking.show(f"this run: plain torch, {options.path.name}, epoch {best[1]}", best[2], console)


if __name__ == "__main__":
    main()
