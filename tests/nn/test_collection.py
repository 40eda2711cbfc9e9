"""The collection against torch's embedding functions: vectors, gradients, accumulation; evaluation changes no row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_embeddings import PlainEmbeddings, change
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import BatchError
from hotrow.nn import EmbeddingCollection
from hotrow.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RowWiseAdagrad
from hotrow.table import Table

TABLES = [
    Table("user", dim=4),
    Table("item", dim=5, features={"clicked": "mean", "item": "sum", "history": "none"}),
    Table("tag", dim=3, features=["tags", "topics"]),
]


def collection_of(optimizer: Optimizer | None = None, seed: int = 1) -> EmbeddingCollection:
    return EmbeddingCollection(TABLES, optimizer or SGD(lr=1.0), seed=seed)


def some_batch(seed: int, size: int, weighted: bool = True, keys: int = 12) -> KeyedBatch:
    generator = torch.Generator().manual_seed(seed)

    def single() -> Jagged:
        return Jagged(torch.randint(-keys, keys, (size,), generator=generator))

    def bags() -> Jagged:
        lengths = torch.randint(0, 5, (size,), generator=generator)
        values = torch.randint(-keys, keys, (int(lengths.sum()),), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return Jagged(values, offsets, torch.randn(values.numel(), generator=generator) if weighted else None)

    return KeyedBatch(
        {"user": single(), "item": single(), "clicked": bags(), "history": bags(), "tags": bags(), "topics": bags()}
    )


def keys_of(*batches: KeyedBatch) -> dict[str, Tensor]:
    return {
        table.name: torch.cat([batch.ids[feature].values for batch in batches for feature in table.poolings])
        for table in TABLES
    }


def loss_of(vectors: dict[str, Tensor], seed: int = 0) -> Tensor:
    """Some smooth function of all vectors, with other weights for each of them."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(())
    for name in sorted(vectors):
        if not name.endswith("_mask"):
            weight = torch.randn(vectors[name].shape[-1], generator=generator)
            total = total + (vectors[name] * weight).sum() + (vectors[name] ** 2).sum()
    return total


def snapshot(collection: EmbeddingCollection) -> dict[str, dict[int, tuple[bytes, int, int]]]:
    """Every row's bits, count and last step."""
    return {
        rows.table.name: {
            key: (values.numpy().tobytes(), count, step)
            for chunk in rows.scan()
            for key, values, count, step in zip(
                chunk.keys.tolist(), chunk.values, chunk.counts.tolist(), chunk.last_steps.tolist(), strict=True
            )
        }
        for rows in collection.tables
    }


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), size=st.integers(0, 9), weighted=st.booleans(), training=st.booleans())
def test_vectors_are_those_of_torchs_embedding_bag(seed: int, size: int, weighted: bool, training: bool) -> None:
    batch = some_batch(seed, size, weighted)
    collection = collection_of().train(training)
    want = PlainEmbeddings(collection, keys_of(batch))(batch)
    got = collection(batch)
    assert set(got) == set(want)
    for name, vectors in want.items():
        torch.testing.assert_close(got[name], vectors, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), size=st.integers(0, 9), weighted=st.booleans())
def test_gradients_are_those_of_torchs_embedding_bag(seed: int, size: int, weighted: bool) -> None:
    batch = some_batch(seed, size, weighted)
    collection = collection_of(SGD(lr=1.0))
    plain = PlainEmbeddings(collection, keys_of(batch))
    loss_of(plain(batch)).backward()
    loss = loss_of(collection(batch))
    loss.backward()
    collection.step()
    for name, weight in plain.weights.items():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        changed = change(collection.table(name), plain.keys[name], weight.detach())
        torch.testing.assert_close(changed, gradient, rtol=1e-4, atol=1e-4)


def test_the_pooled_matrix_is_the_vectors_side_by_side() -> None:
    batch, collection = some_batch(3, 6), collection_of()
    vectors = collection(batch)
    assert torch.equal(collection.pooled(batch), torch.cat([vectors[name] for name in collection.features], dim=1))
    assert collection.features == {"user": 4, "clicked": 5, "item": 5, "tags": 3, "topics": 3}
    assert collection.sequences == {"history": 5}


def test_two_features_of_one_table_share_their_rows_and_add_their_gradients() -> None:
    collection = EmbeddingCollection([Table("item", dim=2, features=["a", "b"])], SGD(lr=1.0))
    batch = KeyedBatch({"a": Jagged(torch.tensor([7])), "b": Jagged(torch.tensor([7]))})
    before = collection.table("item").read(torch.tensor([7]))
    vectors = collection(batch)
    assert torch.equal(vectors["a"], vectors["b"]) and len(collection.table("item")) == 1
    (2 * vectors["a"] + 3 * vectors["b"]).sum().backward()
    collection.step()
    assert torch.equal(change(collection.table("item"), torch.tensor([7]), before), torch.full((1, 2), 5.0))
    assert next(collection.table("item").scan()).counts.tolist() == [2]


@pytest.mark.parametrize(
    "optimizer", [SGD(lr=0.5), RowWiseAdagrad(lr=0.5), Adam(lr=0.5)], ids=lambda o: type(o).__name__
)
def test_accumulated_gradients_are_one_step_of_the_big_batch(optimizer: Optimizer) -> None:
    halves = [some_batch(5, 6), some_batch(6, 6)]
    big = KeyedBatch({name: joined(halves[0].ids[name], halves[1].ids[name]) for name in halves[0].ids})
    parts, whole = collection_of(optimizer), collection_of(optimizer)
    for step in (1, 2):
        for half in halves:
            loss_of(parts(half)).backward()
        parts.step()
        loss_of(whole(big)).backward()
        whole.step()
        assert parts.steps == whole.steps == step
    for ours, theirs in zip(parts.tables, whole.tables, strict=True):
        (a,), (b,) = ours.scan(), theirs.scan()
        order_a, order_b = a.keys.argsort(), b.keys.argsort()
        assert torch.equal(a.keys[order_a], b.keys[order_b])
        assert torch.equal(a.counts[order_a], b.counts[order_b])
        torch.testing.assert_close(a.values[order_a], b.values[order_b], rtol=1e-3, atol=1e-3)


def joined(a: Jagged, b: Jagged) -> Jagged:
    values = torch.cat([a.values, b.values])
    if a.offsets is None or b.offsets is None:
        return Jagged(values)
    weights = None if a.weights is None or b.weights is None else torch.cat([a.weights, b.weights])
    return Jagged(values, torch.cat([a.offsets, b.offsets[1:] + a.values.numel()]), weights)


def test_each_row_gets_exactly_one_optimizer_step_when_gradients_accumulate() -> None:
    collection = EmbeddingCollection([Table("t", dim=1)], Adagrad(lr=1.0, eps=1e-10))
    batch = KeyedBatch({"t": Jagged(torch.tensor([1]))})
    for _ in range(3):
        collection(batch)["t"].sum().backward()
    collection.step()
    (row,) = collection.table("t").scan()
    assert row.values[0, 1] == 9.0  # (1 + 1 + 1) squared, not 1 + 1 + 1
    assert (row.counts.tolist(), row.last_steps.tolist()) == ([3], [1])


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_evaluation_creates_no_row_and_touches_no_count(how: str) -> None:
    collection, batch = collection_of(), some_batch(8, 5)
    loss_of(collection(batch)).backward()
    collection.step()
    before = snapshot(collection)
    unseen = some_batch(9, 50, keys=1000)
    if how == "eval":
        vectors = collection.eval()(unseen)
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            vectors = collection(unseen)
    assert not any(vector.requires_grad for vector in vectors.values())
    collection.step()
    assert snapshot(collection) == before and collection.steps == 1
    for name, want in PlainEmbeddings(collection, keys_of(unseen))(unseen).items():
        torch.testing.assert_close(vectors[name], want.detach(), rtol=1e-5, atol=1e-6)


def test_a_forward_pass_alone_creates_rows_and_counts_nothing() -> None:
    collection, batch = collection_of(), some_batch(8, 5)
    collection(batch)
    assert len(collection.table("user")) == len(batch.ids["user"].values.unique())
    assert all(count == 0 for rows in snapshot(collection).values() for _, count, _ in rows.values())
    collection.step()
    assert collection.steps == 0


def test_two_losses_over_one_forward_pass_add_up() -> None:
    batch = some_batch(10, 5)
    once, twice = collection_of(), collection_of()
    vectors = once(batch)
    (loss_of(vectors, 1) + loss_of(vectors, 2)).backward()
    once.step()
    vectors = twice(batch)
    loss_of(vectors, 1).backward(retain_graph=True)
    loss_of(vectors, 2).backward()
    twice.step()
    for ours, theirs in zip(twice.tables, once.tables, strict=True):
        (a,), (b,) = ours.scan(), theirs.scan()
        assert torch.equal(a.keys, b.keys) and torch.equal(a.counts, b.counts)
        torch.testing.assert_close(a.values, b.values)


def test_a_retained_graph_is_refused_once_its_step_is_done() -> None:
    """Its rows have changed since; and the gradients of the first backward must not be applied again."""
    collection, batch = collection_of(), some_batch(16, 3)
    loss = loss_of(collection(batch))
    loss.backward(retain_graph=True)
    collection.step()
    before = snapshot(collection)
    with pytest.raises(BatchError, match="forward"):
        loss.backward()
    collection.step()
    assert snapshot(collection) == before


def test_a_sequence_that_no_loss_used_is_counted_and_not_changed() -> None:
    collection, batch = collection_of(AdamW(lr=0.1, weight_decay=0.5)), some_batch(11, 6, keys=500)
    loss_of(collection(batch)).backward()
    collection.step()
    before = snapshot(collection)["item"]
    vectors = collection(batch)
    loss_of({name: vectors[name] for name in ("user", "item", "clicked")}).backward()
    collection.step()
    after = snapshot(collection)["item"]
    used = set(torch.cat([batch.ids["item"].values, batch.ids["clicked"].values]).tolist())
    alone = set(batch.ids["history"].values.tolist()) - used
    assert alone
    for key in alone:
        assert after[key][0] == before[key][0]
        assert after[key][1] > before[key][1] and after[key][2] == 2


def test_a_pooled_feature_that_no_loss_used_is_counted_and_not_changed() -> None:
    """Even under Adam, whose moments would move a row at a gradient of zero."""
    collection = EmbeddingCollection([Table("a", dim=2), Table("b", dim=2)], AdamW(lr=0.1, weight_decay=0.5))
    batch = KeyedBatch({"a": Jagged(torch.tensor([1])), "b": Jagged(torch.tensor([1]))})
    vectors = collection(batch)
    (vectors["a"] + vectors["b"]).sum().backward()
    collection.step()
    before = snapshot(collection)
    collection(batch)["a"].sum().backward()
    collection.step()
    after = snapshot(collection)
    assert after["a"][1][0] != before["a"][1][0]
    assert after["b"][1][0] == before["b"][1][0]
    assert after["b"][1][1:] == (2, 2)


def test_a_lookup_prepared_ahead_gives_the_same_as_the_batch() -> None:
    batch = some_batch(12, 7)
    direct, ahead = collection_of(), collection_of()
    for _ in range(2):
        loss_of(direct(batch)).backward()
        direct.step()
        loss_of(ahead(ahead.route(batch).fetch())).backward()
        ahead.step()
    assert snapshot(direct) == snapshot(ahead)


def test_discarded_gradients_never_arrive() -> None:
    collection, batch = collection_of(), some_batch(13, 4)
    collection(batch)
    before = snapshot(collection)
    loss_of(collection(batch)).backward()
    collection.discard()
    collection.step()
    assert snapshot(collection) == before and collection.steps == 0


def test_gradient_scale_is_the_same_as_a_scaled_loss() -> None:
    a, b, batch = collection_of(SGD(lr=0.1)), collection_of(SGD(lr=0.1)), some_batch(14, 6)
    loss_of(a(batch)).backward()
    a.step(grad_scale=0.5)
    (0.5 * loss_of(b(batch))).backward()
    b.step()
    for ours, theirs in zip(a.tables, b.tables, strict=True):
        torch.testing.assert_close(next(ours.scan()).values, next(theirs.scan()).values)


def test_a_batch_of_no_examples_trains_nothing() -> None:
    collection, batch = collection_of(), some_batch(15, 0)
    vectors = collection(batch)
    assert vectors["user"].shape == (0, 4) and vectors["history"].shape == (0, 1, 5)
    loss_of(vectors).backward()
    collection.step()
    assert all(len(rows) == 0 for rows in collection.tables)
