"""What long histories are worth: AUC on the synthetic log with planted long-range interests, beside DIN's.

The log (hr.data.long_interests) shows each interest of a user by a few bought items, all of them older than the newest
50 events. DIN reads the newest 50, as it does where attention has to be paid for every candidate; SIM searches the
whole history. Both see the same examples once, in batches of the same size, with tables, optimizers and MLPs of the
same form. The AUC is that of TESTED later examples; the known best is the AUC of the true logit on them.

HSTU over whole histories is left out: after 48,000 examples it had not found which of 500 events matter (AUC 0.55, as
DIN over 50), where SIM's search by category leaves it eight.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import hotrow as hr
from hotrow.bench.harness import Result, higher
from hotrow.models import SIM, History, JaggedDIN, UserTower

TRAINED, TESTED, BATCH, CANDIDATES = 96_000, 16_000, 200, 4
LONGEST, NEWEST, ITEMS = 500, 50, 1024
DIM, WIDTH, TOP = 8, 32, (64, 32)
LOG = {"history_length": LONGEST, "recent": NEWEST, "items": ITEMS, "candidates": CANDIDATES}
TARGET = ("category", "item")
COLUMNS = ("seen_category", "seen_item", "seen_action")  # begins as the target, so both have one projection
WIDTHS = dict.fromkeys(COLUMNS, DIM)


@dataclass(frozen=True)
class Examples:
    """The log's batches with at most `newest` events of each history, and with categories as numbers for hard search.

    A tower does not see what its history leaves out.
    """

    log: hr.data.long_interests
    newest: int | None = None

    @property
    def examples(self) -> int:
        return self.log.examples

    def describe(self) -> str:
        return self.log.describe()

    def batches(self, cursor: hr.data.Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, hr.data.Cursor]]:
        for batch, after in self.log.batches(cursor):
            yield self._shortened(batch), after

    def _shortened(self, batch: hr.KeyedBatch) -> hr.KeyedBatch:
        seen = batch.ids["seen_item"]
        assert seen.offsets is not None
        lengths = seen.lengths()
        kept = lengths if self.newest is None else lengths.clamp(max=self.newest)
        offsets = torch.cat([kept.new_zeros(1), kept.cumsum(0)])
        at = torch.arange(int(offsets[-1])) + (seen.offsets[1:] - offsets[1:]).repeat_interleave(kept)

        def cut(column: hr.Jagged) -> hr.Jagged:
            return hr.Jagged(column.values[at], offsets)

        ids = {name: cut(batch.ids[name]) for name in COLUMNS} | {name: batch.ids[name] for name in TARGET}
        numbers = {
            "seen_time": cut(batch.numbers["seen_time"]),
            "seen_group": ids["seen_category"],
            "group": ids["category"],
        }
        return hr.KeyedBatch(ids, None, batch.labels, batch.time, numbers)


def din() -> UserTower:
    return JaggedDIN(dict.fromkeys(TARGET, DIM), [_history(NEWEST)], TARGET, attention=(32,), width=WIDTH, top=TOP)


def sim() -> UserTower:
    return SIM(
        dict.fromkeys(TARGET, DIM), [_history(categories="seen_group")], TARGET,
        search="hard", category="group", keep=NEWEST, width=WIDTH, heads=2, top=TOP,
    )  # fmt: skip


TOWERS: dict[str, Callable[[], UserTower]] = {"sim": sim}


def _history(longest: int = LONGEST, categories: str | None = None) -> History:
    return History(WIDTHS, categories=categories, max_length=longest)


def auc_of(tower: UserTower, newest: int | None = None) -> float:
    """The AUC on later examples of a model that was trained on the first ones."""
    torch.manual_seed(0)
    embeddings = hr.EmbeddingCollection(
        [
            hr.Table("item", DIM, {"item": "sum", "seen_item": "none"}),
            hr.Table("category", DIM, {"category": "sum", "seen_category": "none"}, hr.Initial.normal(0.0, 0.3)),
            hr.Table("action", DIM, {"seen_action": "none"}, hr.Initial.normal(0.0, 0.3)),
        ],
        optimizer=hr.optim.Adam(lr=5e-3),
    )
    trainer = hr.Trainer(hr.Recommender(embeddings, tower), torch.optim.Adam(tower.parameters(), lr=2e-3))
    trained, tested = sizes()
    trainer.fit(Examples(hr.data.long_interests(examples=trained, batch_size=BATCH, **LOG), newest), progress=False)
    later = hr.data.long_interests(examples=tested, offset=trained, batch_size=BATCH, **LOG)
    return trainer.evaluate(Examples(later, newest), progress=False)["auc"]


def sizes() -> tuple[int, int]:
    """Examples to train on and to test on, scaled by HOTROW_BENCH_SCALE."""
    scale = float(os.environ.get("HOTROW_BENCH_SCALE", "1"))
    return tuple(max(BATCH, math.ceil(count * scale)) for count in (TRAINED, TESTED))  # type: ignore[return-value]


def results() -> Iterator[Result | str]:
    """The figures of this group."""
    trained, tested = sizes()
    best = hr.data.long_interests(examples=trained, **LOG).best_auc(tested)
    yield "DIN over the newest events"
    peer = auc_of(din(), NEWEST)
    for name, make in TOWERS.items():
        yield f"{name} over whole histories"
        found = auc_of(make())
        yield higher(f"sequences/accuracy/{name}", "AUC", found, "din", peer)
        yield higher(f"sequences/accuracy/{name}/best", "AUC", found, "known best", best)
