"""Batches with users: examples of one user share its history, in every tier, and train the same model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.data import Cursor
from hotrow.data.rebatch import slice_batch
from hotrow.errors import BatchError, OptionError
from hotrow.nn.tower_form import TowerForm

FEATURES = ("seen_item", "seen_action", "seen_time", "age")


class TwoParts(nn.Module):
    """A user part that sums each event over time and age, and a candidate part that multiplies."""

    jagged = True
    user_features = FEATURES
    aligned = (("seen_item", "seen_action", "seen_time"),)

    def __init__(self, shared: bool = True) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 4)
        if not shared:
            self.user_features = ()  # type: ignore[assignment]
        self.shapes: list[tuple[int, ...]] = []

    def encode_user(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        lengths, events = vectors["seen_item_lengths"], torch.cat([vectors["seen_item"], vectors["seen_action"]], dim=1)
        self.shapes.append(tuple(events.shape))
        weight = 1 + vectors["seen_time"].unsqueeze(1) / 10
        owner = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
        total = torch.zeros(lengths.numel(), 4).index_add(0, owner, self.mix(events) * weight)
        return {"user": total + vectors["age"]}

    def score(self, vectors: dict[str, Tensor], encoding: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return (encoding["user"][vectors["user_of"]] * vectors["item"]).sum(1) + vectors["tags"].sum(1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        users = torch.arange(vectors["item"].shape[0])
        return self.score({"user_of": users, **vectors}, self.encode_user(vectors), dense)


def tables() -> list[hr.Table]:
    return [
        hr.Table("item", dim=4, features={"seen_item": "none", "item": "sum"}),
        hr.Table("action", dim=4, features={"seen_action": "none"}),
        hr.Table("age", dim=4),
        hr.Table("tags", dim=3, features={"tags": "mean"}),
    ]


def batch_of(seed: int, examples: int = 24, users: int = 7) -> hr.KeyedBatch:
    """Examples of a few users, whose histories have 0 to 6 events."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (users,), generator=draw)
    lengths[0] = 0

    def per_user(most: int) -> list[list[int]]:
        return [torch.randint(0, most, (int(n),), generator=draw).tolist() for n in lengths]

    owner = torch.randint(0, users, (examples,), generator=draw).tolist()
    items, actions, times = per_user(40), per_user(3), per_user(20)
    ids = {
        "seen_item": hr.Jagged.from_lists([items[u] for u in owner]),
        "seen_action": hr.Jagged.from_lists([actions[u] for u in owner]),
        "age": hr.Jagged(torch.tensor([u % 3 for u in owner])),
        "item": hr.Jagged(torch.randint(0, 40, (examples,), generator=draw)),
        "tags": hr.Jagged.from_lists([torch.randint(0, 9, (i % 3,), generator=draw).tolist() for i in range(examples)]),
    }
    numbers = {"seen_time": hr.Jagged.from_lists([times[u] for u in owner])}
    labels = torch.randint(0, 2, (examples,), generator=draw).float()
    return hr.KeyedBatch(ids, labels=labels, numbers=numbers)


class Batches:
    examples = None

    def __init__(self, count: int) -> None:
        self.all = [batch_of(seed) for seed in range(count)]

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[hr.KeyedBatch, Cursor]]:
        for number, batch in enumerate(self.all):
            if number >= (cursor or {}).get("batch", 0):
                yield batch, {"batch": number + 1}

    def describe(self) -> str:
        return "batches of users"


def trained(shared: bool, memory: hr.Memory | None = None, lookahead: int = 0, steps: int = 6) -> hr.Trainer:
    torch.manual_seed(3)
    embeddings = hr.EmbeddingCollection(tables(), hr.optim.SGD(lr=0.1), memory, seed=1, device="cpu")
    trainer = hr.Trainer(hr.Recommender(embeddings, TwoParts(shared)), lookahead=lookahead)
    trainer.fit(Batches(steps), progress=False)
    return trainer


def rows_of(trainer: hr.Trainer) -> dict[str, dict[int, Tensor]]:
    trainer.model.embeddings.flush()
    found: dict[str, dict[int, Tensor]] = {}
    for rows in trainer.model.embeddings.tables:
        of_table = found.setdefault(rows.table.name, {})
        for chunk in rows.scan():
            of_table |= dict(zip(chunk.keys.tolist(), chunk.values, strict=True))
    return found


def test_a_shared_history_trains_the_model_of_repeated_ones() -> None:
    shared, repeated = trained(True), trained(False)
    for one, other in zip(shared.parameters, repeated.parameters, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    left, right = rows_of(shared), rows_of(repeated)
    assert left.keys() == right.keys()
    for name, rows in left.items():
        assert rows.keys() == right[name].keys()
        for key, values in rows.items():
            torch.testing.assert_close(values, right[name][key], rtol=1e-4, atol=1e-5)


def test_each_user_is_encoded_once() -> None:
    trainer = trained(True, steps=2)
    for batch, shape in zip(Batches(2).all, list(trainer.model.tower.shapes), strict=True):
        assert shape[0] == batch.share_users(FEATURES).ids["seen_item"].values.numel()
        assert shape[0] < batch.ids["seen_item"].values.numel()


@pytest.mark.parametrize("lookahead", [pytest.param(0, marks=pytest.mark.soak), 2])
@pytest.mark.parametrize(
    "tiers", [{"dram": "12MiB", "ssd": True}, pytest.param({"hbm": "4MiB"}, marks=pytest.mark.soak), {"hbm": "24KiB"}]
)
def test_every_budget_and_lookahead_gives_the_same_bits(
    tmp_path: Path, tiers: dict[str, object], lookahead: int
) -> None:
    if "hbm" in tiers and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("this process compiles kernels")
    reference = trained(True, hr.Memory(hbm="64MiB") if "hbm" in tiers else None)
    if "ssd" in tiers:
        tiers = {**tiers, "ssd": tmp_path}
    got = trained(True, hr.Memory(**tiers), lookahead)  # type: ignore[arg-type]
    for one, other in zip(got.parameters, reference.parameters, strict=True):
        assert torch.equal(one, other)
    left, right = rows_of(got), rows_of(reference)
    for name, rows in left.items():
        assert all(torch.equal(values, right[name][key]) for key, values in rows.items())


def test_the_vectors_of_a_shared_batch_are_those_of_its_examples() -> None:
    embeddings = hr.EmbeddingCollection(tables(), seed=1).eval()
    batch = batch_of(5)
    plain = embeddings(batch)
    shared = batch.share_users(FEATURES)
    embeddings.form = TowerForm.of(TwoParts())
    found = embeddings(batch)
    assert torch.equal(found["user_of"], shared.user_of)
    assert torch.equal(found["age"][shared.user_of], plain["age"])
    assert torch.equal(found["item"], plain["item"])
    assert found["seen_item"].shape[0] == int(found["seen_item_lengths"].sum()) == found["seen_time"].numel()
    pieces = found["seen_item"].split(found["seen_item_lengths"].tolist())
    for example, user in enumerate(shared.user_of.tolist()):
        mask = plain["seen_item_mask"][example]
        assert torch.equal(pieces[user], plain["seen_item"][example][mask])
        assert torch.equal(plain["seen_time"][example][plain["seen_time_mask"][example]].long(),
                           found["seen_time"].split(found["seen_time_lengths"].tolist())[user])  # fmt: skip


def test_histories_of_unequal_columns_are_refused() -> None:
    embeddings = hr.EmbeddingCollection(tables(), seed=1)
    embeddings.form = TowerForm.of(TwoParts())
    batch = batch_of(1, examples=2)
    ids = {
        **batch.ids,
        "seen_item": hr.Jagged.from_lists([[1, 2], [3]]),
        "seen_action": hr.Jagged.from_lists([[1], [2]]),
    }
    numbers = {"seen_time": hr.Jagged.from_lists([[1, 2], [3]])}
    with pytest.raises(
        BatchError, match="'seen_item' and 'seen_action' are columns of one history, but entry 0 has 2 and 1"
    ):
        embeddings(hr.KeyedBatch(ids, numbers=numbers))


def test_towers_with_half_a_declaration_are_refused() -> None:
    class NoScore(nn.Module):
        jagged, user_features = True, ("seen",)

        def encode_user(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
            return vectors

    with pytest.raises(OptionError, match=r"no score\(\)"):
        TowerForm.of(NoScore())
    NoScore.jagged = False
    with pytest.raises(OptionError, match="jagged = True"):
        TowerForm.of(NoScore())


class Causal(TwoParts):
    """Each event's encoding is the sum of the events up to it; a candidate reads the last one that it sees."""

    prefixes = TwoParts.aligned

    def encode_user(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        lengths, events = vectors["seen_item_lengths"], torch.cat([vectors["seen_item"], vectors["seen_action"]], dim=1)
        self.shapes.append(tuple(events.shape))
        sums = [self.mix(part).cumsum(0) for part in events.split(lengths.tolist())]
        return {"events": torch.cat(sums), "events_lengths": lengths, "user": vectors["age"]}

    def score(self, vectors: dict[str, Tensor], encoding: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        users, lengths = vectors["user_of"], encoding["events_lengths"]
        seen = vectors.get("seen_item_visible", lengths[users])
        none = torch.zeros(1, 4)
        last = torch.where(seen > 0, (lengths.cumsum(0) - lengths)[users] + seen, 0)
        state = torch.cat([none, encoding["events"]])[last] + encoding["user"][users]
        return (state * vectors["item"]).sum(1)


def test_growing_histories_train_a_causal_tower_as_repeated_ones() -> None:
    def growing(seed: int) -> hr.KeyedBatch:
        draw = torch.Generator().manual_seed(seed)
        items, cuts = torch.randint(0, 40, (20,), generator=draw), torch.randint(0, 21, (12,), generator=draw).tolist()
        lists = [items[:cut].tolist() for cut in cuts]
        ids = {"seen_item": hr.Jagged.from_lists(lists), "seen_action": hr.Jagged.from_lists(lists)}
        ids |= {"age": hr.Jagged(torch.zeros(12, dtype=torch.int64)), "item": hr.Jagged(torch.arange(12))}
        ids["tags"] = hr.Jagged(torch.arange(12) % 3)
        labels = torch.randint(0, 2, (12,), generator=draw).float()
        return hr.KeyedBatch(ids, labels=labels, numbers={"seen_time": hr.Jagged.from_lists(lists)})

    found = []
    for shared in (True, False):
        torch.manual_seed(3)
        tower = Causal(shared)
        trainer = hr.Trainer(hr.Recommender(hr.EmbeddingCollection(tables(), hr.optim.SGD(lr=0.1), seed=1), tower))
        source = Batches(0)
        source.all = [growing(seed) for seed in range(4)]
        trainer.fit(source, progress=False)
        assert (tower.shapes[0][0] <= 20) == shared
        found.append((list(trainer.parameters), rows_of(trainer)))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for name, rows in found[0][1].items():
        for key, values in rows.items():
            torch.testing.assert_close(values, found[1][1][name][key], rtol=1e-4, atol=1e-5)


def test_a_prediction_equals_that_of_each_example_alone() -> None:
    trainer = trained(True, steps=2)
    batch = batch_of(9)
    together = trainer.predict(batch)
    alone = torch.cat([trainer.predict(slice_batch(batch, at, at + 1)) for at in range(batch.size)])
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


def test_accumulated_batches_with_users_make_one_update() -> None:
    torch.manual_seed(0)
    embeddings = hr.EmbeddingCollection(tables(), hr.optim.SGD(lr=0.1), seed=1)
    trainer = hr.Trainer(hr.Recommender(embeddings, TwoParts()), accumulate=3, lookahead=0)
    trainer.fit(Batches(6), progress=False)
    assert trainer.steps == 2
    assert all(
        bool(torch.isfinite(chunk).all()) for chunk in itertools.chain(*(r.values() for r in rows_of(trainer).values()))
    )
