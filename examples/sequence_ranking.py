"""Rank the next item: SASRec or HSTU on MovieLens or on your own log, beside the published figures.

    python examples/sequence_ranking.py ml-1m/ratings.dat
    python examples/sequence_ranking.py ml-100k/u.data --model hstu --loss softmax --negatives 128
    python examples/sequence_ranking.py log.parquet --columns user_id,item_id,time

PATH is MovieLens' `ratings.dat` or `u.data`, a RecBole `.inter` file, or CSV or Parquet. The last item of each user is
for the test, the one before for validation, as in SASRec's paper. The model is trained to tell the next item after
every event from sampled ones. A batch has the history of each user once, and an example for every pair of an event and
an item: the item is compared with the output of that event. The test figures are those of the epoch with the best
validation NDCG@10.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import hotrow as hr
from hotrow.nn.histories.segments import last_events

Array = NDArray[np.int64]
SAMPLED = 100  # negatives of the sampled test, as in SASRec's paper
PAPER = "SASRec's paper, arXiv 1808.09781"
META = "github.com/facebookresearch/generative-recommenders, README"
RECBOLE = "RecBole's SASRec in github.com/kanishkaRandunu/pswrec2k26, results/ml100k_results.md"
PUBLISHED = [  # what, HR@10 and NDCG@10 among 101 items and among all items, and by whom
    ("ML-1M, SASRec", (0.8245, 0.5905), None, PAPER),
    ("ML-1M, SASRec, softmax", None, (0.2853, 0.1603), META),
    ("ML-1M, HSTU, softmax", None, (0.3097, 0.1720), META),
    ("ML-100K, SASRec", None, (0.1198, 0.0594), RECBOLE),
]


@dataclass(frozen=True)
class Log:
    """Events sorted by user and time. User `u` has items `items[offsets[u]:offsets[u + 1]]`, numbered from 0."""

    items: Array
    times: Array
    offsets: Array
    item_count: int

    @property
    def users(self) -> int:
        return len(self.offsets) - 1

    def items_of(self, user: int) -> Array:
        return self.items[self.offsets[user] : self.offsets[user + 1]]


def read_log(path: Path, columns: str, fewest: int) -> Log:
    """The events of a file. Users and items with fewer than `fewest` events are left out."""
    names = columns.split(",")
    if path.name == "ratings.dat":
        split = [line.split("::") for line in path.read_text(encoding="latin-1").splitlines()]
        table = [np.array([int(row[i]) for row in split]) for i in (0, 1, 3)]
    elif path.name == "u.data":
        raw = np.loadtxt(path, dtype=np.int64, delimiter="\t", ndmin=2)
        table = [raw[:, i] for i in (0, 1, 3)]
    else:
        if path.suffix == ".inter":
            whole = pa.csv.read_csv(path, parse_options=pa.csv.ParseOptions(delimiter="\t"))
            whole = whole.rename_columns([name.split(":")[0] for name in whole.column_names])
            names = names if names != ["user", "item", "timestamp"] else ["user_id", "item_id", "timestamp"]
        else:
            whole = pa.csv.read_csv(path) if path.suffix == ".csv" else pa.parquet.read_table(path)
        missing = [name for name in names if name not in whole.column_names]
        if missing or len(names) != 3:
            raise SystemExit(
                f"{path} has no column {missing[0]!r}, only {', '.join(whole.column_names)}; "
                "name the user, the item and the time: --columns user_id,item_id,time"
                if missing
                else f"--columns {columns!r}: name three, of the user, the item and the time"
            )
        table = [whole[name].to_numpy() for name in names]
    users, items = (np.unique(column, return_inverse=True)[1] for column in table[:2])
    kept = (np.bincount(users)[users] >= fewest) & (np.bincount(items)[items] >= fewest)
    if not kept.any():
        raise SystemExit(f"{path}: no user and item has {fewest} events; lower --min-events")
    users, items = (np.unique(column[kept], return_inverse=True)[1].astype(np.int64) for column in (users, items))
    times = table[2][kept].astype(np.float64)
    order = np.lexsort((np.arange(len(users)), times, users))
    offsets = np.concatenate([[0], np.bincount(users).cumsum()]).astype(np.int64)
    return Log(items[order], (times[order] * 1000).astype(np.int64), offsets, int(items.max()) + 1)


class NextItems:
    """A source of training batches: `users` users, each event of them with its next item and `negatives` others.

    The test and the validation item of a user are left out. One pass is `epochs` passes over the users, each in its own
    order and with its own negatives; a batch depends on the seed and its number alone.
    """

    def __init__(self, log: Log, users: int, negatives: int, longest: int, epochs: int, seed: int) -> None:
        self.log, self.negatives, self.seed = log, negatives, seed
        lengths = log.offsets[1:] - log.offsets[:-1]
        self.ends = log.offsets[1:] - 3  # where the history ends whose last target is before the validation item
        self.events = np.minimum(lengths - 3, longest)
        self.trained = np.flatnonzero(self.events > 0)
        self.users = users
        self.steps = -(-len(self.trained) // users)
        self.examples: int | None = int(self.events[self.trained].sum()) * (1 + negatives) * epochs
        self.epochs = epochs
        owners = np.repeat(np.arange(log.users), lengths)
        self.known = np.unique(owners * log.item_count + log.items)

    def describe(self) -> str:
        return f"next items of {len(self.trained):,} users, {self.negatives} negatives each"

    def batches(self, cursor: hr.data.Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, hr.data.Cursor]]:
        for number in range(0 if cursor is None else int(cursor["batch"]), self.epochs * self.steps):
            yield self.batch(number), {"batch": number + 1}

    def batch(self, number: int) -> hr.KeyedBatch:
        epoch, place = divmod(number, self.steps)
        order = np.random.default_rng((self.seed, epoch)).permutation(self.trained)
        users = order[place * self.users : (place + 1) * self.users]
        counts = self.events[users]
        starts = self.ends[users] - counts
        first = np.concatenate([[0], counts.cumsum()])
        within = np.arange(first[-1]) - np.repeat(first[:-1], counts)
        at = np.repeat(starts, counts) + within
        owners = np.repeat(users, counts)
        wrong = self._draw(np.repeat(owners, self.negatives), np.random.default_rng((self.seed, number, 1)))
        items = np.concatenate([self.log.items[at + 1][:, None], wrong.reshape(-1, self.negatives)], axis=1)
        pairs = 1 + self.negatives
        labels = np.zeros(items.shape, np.float32)
        labels[:, 0] = 1
        visible = torch.from_numpy(np.repeat(within + 1, pairs))
        offsets = torch.from_numpy(first)
        return hr.KeyedBatch(
            ids={
                "item": hr.Jagged(torch.from_numpy(items.reshape(-1))),
                "seen_item": hr.Jagged(torch.from_numpy(self.log.items[at]), offsets),
            },
            labels=torch.from_numpy(labels.reshape(-1)),
            numbers={"seen_time": hr.Jagged(torch.from_numpy(self.log.times[at]), offsets)},
            user_of=torch.from_numpy(np.repeat(np.arange(len(users)), counts * pairs)),
            user_features=frozenset({"seen_item", "seen_time"}),
            visible={"seen_item": visible, "seen_time": visible},
        )

    def _draw(self, owners: Array, random: np.random.Generator) -> Array:
        """An item for each owner, which the owner has never seen."""
        items = random.integers(0, self.log.item_count, len(owners))
        while True:
            pairs = owners * self.log.item_count + items
            found = np.minimum(np.searchsorted(self.known, pairs), len(self.known) - 1)
            again = np.flatnonzero(self.known[found] == pairs)
            if not len(again):
                return items
            items[again] = random.integers(0, self.log.item_count, len(again))


Figures = tuple[tuple[float, float], tuple[float, float]]


class Ranking:
    """HR@10 and NDCG@10 of the last item of each user (or with `validation` of the one before)."""

    def __init__(self, log: Log, longest: int, validation: bool, seed: int = 0) -> None:
        lengths = log.offsets[1:] - log.offsets[:-1]
        self.log, self.longest, self.back = log, longest, 2 if validation else 1
        self.users = np.flatnonzero(lengths >= 3)
        random = np.random.default_rng((seed, self.back))
        self.sampled: list[Array] = []
        for user in self.users:
            others = np.setdiff1d(np.arange(log.item_count), log.items_of(user))
            self.sampled.append(random.permutation(others)[:SAMPLED])

    def histories(self, chunk: Array) -> tuple[hr.Jagged, hr.Jagged]:
        """What users did before the item to rank: items and times."""
        ends = self.log.offsets[chunk + 1] - self.back
        starts = np.maximum(ends - self.longest, self.log.offsets[chunk])
        at = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        offsets = torch.from_numpy(np.concatenate([[0], (ends - starts).cumsum()]))
        items, times = torch.from_numpy(self.log.items[at]), torch.from_numpy(self.log.times[at])
        return hr.Jagged(items, offsets), hr.Jagged(times, offsets)

    def figures(self, scores: Callable[[hr.Jagged, hr.Jagged], Tensor]) -> Figures:
        """HR@10 and NDCG@10 among 1 + SAMPLED items, and among all that the user has not seen before."""
        ranks: list[tuple[int, int]] = []
        for at in range(0, len(self.users), 256):
            chunk = self.users[at : at + 256]
            of_all = scores(*self.histories(chunk)).numpy()
            for i, user in enumerate(chunk):
                end = self.log.offsets[user + 1] - self.back
                right, before = self.log.items[end], self.log.items[self.log.offsets[user] : end]
                mine = of_all[i]
                sampled = int((mine[self.sampled[at + i]] >= mine[right]).sum())
                others = mine >= mine[right]
                others[before] = False
                others[right] = False
                ranks.append((sampled, int(others.sum())))
        best = np.array(ranks).T
        found = [(float((r < 10).mean()), float(np.where(r < 10, 1 / np.log2(r + 2), 0).mean())) for r in best]
        return found[0], found[1]


class Scores:
    """The model's score of every item after histories, [users, items]."""

    def __init__(self, model: hr.Recommender, tower: hr.models.SASRec, item_count: int) -> None:
        self.model, self.tower, self.catalog = model, tower, torch.arange(item_count)

    @torch.inference_mode()
    def __call__(self, items: hr.Jagged, times: hr.Jagged) -> Tensor:
        self.model.eval()
        batch = hr.KeyedBatch(
            ids={"item": hr.Jagged(self.catalog), "seen_item": items},
            numbers={"seen_time": times},
            user_of=torch.zeros_like(self.catalog),
            user_features=frozenset({"seen_item", "seen_time"}),
        )
        vectors = self.model.embeddings(batch)
        (events,), (candidates,) = self.tower.event_vectors(vectors), self.tower.candidate_vectors(vectors["item"])
        return last_events(events, vectors["seen_item_lengths"]) @ candidates.T


def softmax_loss(negatives: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Sampled softmax: each next item against its negatives, which follow it."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        groups = logits.view(-1, 1 + negatives)
        return torch.nn.functional.cross_entropy(groups, groups.new_zeros(groups.shape[0], dtype=torch.int64))

    return loss


def build(options: argparse.Namespace) -> tuple[hr.Recommender, hr.models.SASRec]:
    """The item table and the tower. HSTU is the same encoder with other layers, and biases of position and time.

    The paper multiplies an item by the root of dim where it is an event. The tower divides it by that where it is a
    candidate, so rows here are larger by this factor, and so is their learning rate.
    """
    scale = options.dim**0.5
    embeddings = hr.EmbeddingCollection(
        [hr.Table("item", options.dim, {"item": "sum", "seen_item": "none"}, hr.Initial.normal(0.0, 0.04 * scale))],
        optimizer=hr.optim.Adam(lr=options.lr * scale, betas=(0.9, 0.98)),
        seed=options.seed,
    )
    hstu = options.model == "hstu"
    tower = hr.models.SASRec(
        {"item": options.dim},
        [hr.models.History({"seen_item": options.dim}, times="seen_time" if hstu else None, max_length=options.length)],
        "item",
        width=options.dim,
        heads=1,
        layers=2,
        block="hstu" if hstu else "transformer",
        positions="relative" if hstu else "learned",
        dropout=options.dropout,
        every_event=True,
        project=False,
    )
    return hr.Recommender(embeddings, tower), tower


def train(options: argparse.Namespace, log: Log, console: Console) -> tuple[int, Figures]:
    """The epoch with the best validation NDCG@10 (among all items), and its test figures."""
    torch.manual_seed(options.seed)
    model, tower = build(options)
    source = NextItems(log, options.users, options.negatives, options.length, options.epochs, options.seed)
    loss = softmax_loss(options.negatives) if options.loss == "softmax" else None
    dense = torch.optim.Adam(tower.parameters(), lr=options.lr, betas=(0.9, 0.98))
    trainer = hr.Trainer(model, dense, loss=loss, checkpoints=options.checkpoints, keep=1)
    validation, test = (Ranking(log, options.length, validation) for validation in (True, False))
    console.print(f"{log.users:,} users, {log.item_count:,} items, {len(log.items):,} events; {source.describe()}")
    scores = Scores(model, tower, log.item_count)
    best: tuple[float, int, Figures] | None = None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("epoch", total=options.epochs)
        for epoch in range(1, options.epochs + 1):
            report = trainer.fit(source, steps=source.steps, cursor=trainer.cursor, progress=False)
            bar.advance(task)
            if epoch % options.evaluate_every and epoch != options.epochs:
                continue
            sampled, of_all = validation.figures(scores)
            text = (
                f"epoch {epoch} loss {np.mean(report.losses):.4f} validation NDCG@10 {of_all[1]:.4f} {sampled[1]:.4f}"
            )
            bar.update(task, description=text)
            if not console.is_terminal:
                console.print(text)
            if best is None or of_all[1] > best[0]:
                best = of_all[1], epoch, test.figures(scores)
                if options.checkpoints:
                    trainer.save(notes={"epoch": epoch})
            elif epoch - best[1] >= options.patience:
                break
    assert best is not None
    return best[1], best[2]


def show(name: str, figures: Figures, console: Console) -> None:
    """Our figures beside the published ones."""
    table = Table(title="The last item of each user, HR@10 and NDCG@10")
    table.add_column("")
    for column in ("among 101", "", "among all", ""):
        table.add_column(column, justify="right", min_width=6)
    sources: list[str] = []
    for label, sampled, of_all, source in [(name, *figures, ""), *PUBLISHED]:
        if source and source not in sources:
            sources.append(source)
        cells = [f"{pair[i]:.4f}" if pair else "" for pair in (sampled, of_all) for i in (0, 1)]
        table.add_row(f"{label} \\[{sources.index(source) + 1}]" if source else label, *cells)
    console.print(table)
    for number, source in enumerate(sources, 1):
        console.print(f"[{number}] {source}", markup=False, highlight=False)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--columns", default="user,item,timestamp", help="of CSV, Parquet and .inter files")
    parser.add_argument("--min-events", type=int, default=5, help="drop users and items with fewer")
    parser.add_argument("--model", choices=["sasrec", "hstu"], default="sasrec")
    parser.add_argument("--loss", choices=["bce", "softmax"], default="bce", help="with 1 negative, or more")
    parser.add_argument("--negatives", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--evaluate-every", type=int, default=20, metavar="EPOCHS")
    parser.add_argument("--patience", type=int, default=60, metavar="EPOCHS", help="end without a better validation")
    parser.add_argument("--users", type=int, default=128, help="of a batch")
    parser.add_argument("--length", type=int, default=200, help="newest events of a history")
    parser.add_argument("--dim", type=int, default=50)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", help="save the best model into this folder")
    return parser


def main() -> None:
    options = arguments().parse_args()
    console = Console()
    log = read_log(options.path, options.columns, options.min_events)
    epoch, figures = train(options, log, console)
    show(f"this run: {options.model}, {options.path.name}, epoch {epoch}", figures, console)


if __name__ == "__main__":
    main()
