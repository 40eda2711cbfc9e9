"""A server's lookups of jagged batches in HBM: the bits of a batch that is read without a lane, whatever is cached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.nn import EmbeddingCollection
from hotrow.nn.tower_form import TowerForm
from hotrow.table import Table
from hotrow.tiers.hbm.jagged_reader import Histories, JaggedBuffers, JaggedReader, Scratch
from hotrow.tiers.hbm.serving_reader import ServingReader
from hotrow.tiers.host.store import HostStore

KEYS = 150
ROWS, USERS = 6, 3
SEEN, SHOPS = ("seen", "seen_at"), ("shops",)
GROUPS = (SEEN, SHOPS)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cpu" if request.param == "interpreter" else "cuda"


@pytest.fixture(autouse=True)
def lane_stream(device: str) -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
        yield


def collection(device: str, values: str = "fp32", place_dim: int = 6, **memory: str) -> EmbeddingCollection:
    tables = [
        Table("user", dim=4, features={"user": "sum", "friends": "mean"}, values=values),
        Table("item", dim=4, features={"item": "sum", "seen": "none"}, values=values),
        Table("place", dim=place_dim, features={"places": "sum", "shops": "none"}, values=values),
    ]
    memory = {"hbm": "6KiB", **memory}
    embeddings = EmbeddingCollection(tables, optim.SGD(), memory=Memory(**memory), device=device, seed=3)
    generator = torch.Generator().manual_seed(0)
    for rows in embeddings.tables:
        rows.assign(torch.arange(KEYS), torch.randn(KEYS, rows.table.dim, generator=generator))
    return embeddings.eval()


def jagged(draw: np.random.Generator, lengths: np.ndarray, weights: bool = False) -> Jagged:
    count = int(lengths.sum())
    keys = torch.from_numpy(draw.zipf(1.3, count).astype(np.int64) % (KEYS + 20))  # some have no row
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int64))
    factors = torch.from_numpy(draw.normal(size=count).astype(np.float32)) if weights else None
    return Jagged(keys, offsets, factors)


def make_batch(
    draw: np.random.Generator, rows: int, users: int | None = None, longest: int = 5, weights: bool = False
) -> KeyedBatch:
    entries = rows if users is None else users
    seen = draw.integers(0, longest + 1, entries)
    events = int(seen.sum())
    one = Jagged(torch.from_numpy(draw.integers(0, KEYS + 20, rows)))
    ids = {
        "user": Jagged(torch.from_numpy(draw.integers(0, KEYS, entries))),
        "friends": jagged(draw, draw.integers(0, 4, entries), weights),
        "item": one,
        "seen": jagged(draw, seen),
        "places": jagged(draw, draw.integers(0, 3, rows)),
        "shops": jagged(draw, draw.integers(0, longest + 1, entries)),
    }
    times = Jagged(torch.from_numpy(draw.integers(0, 1 << 40, events)), ids["seen"].offsets)
    of_user = frozenset({"user", "friends", "seen", "seen_at", "shops"})
    return KeyedBatch(
        ids, numbers={"seen_at": times},
        user_of=None if users is None else torch.from_numpy(np.sort(draw.integers(0, users, rows))),
        user_features=frozenset() if users is None else of_user,
    )  # fmt: skip


def histories(jagged: bool, users: bool = False) -> Histories:
    of_user = frozenset({"user", "friends", "seen", "seen_at", "shops"}) if users else frozenset()
    return Histories(GROUPS, jagged, of_user, (None, None))


def run(
    reader: JaggedReader, buffers: JaggedBuffers, batch: KeyedBatch, policy: str = "wait"
) -> dict[str, torch.Tensor]:
    buffers.fill(batch)
    buffers.enqueue_lookup()
    buffers.read_misses(policy)
    found = {name: value.cpu() for name, value in buffers.vectors().items()}
    buffers.offer()
    return found


def expected(embeddings: EmbeddingCollection, batch: KeyedBatch) -> dict[str, torch.Tensor]:
    """Pooled features as plain sums in the order of the ids, and histories without padding."""
    found = {}
    for rows in embeddings.tables:
        for name, pooling in rows.table.poolings.items():
            ids = batch.ids[name]
            vectors = rows.store.read(ids.values)[0]
            if pooling == "none":
                found[name] = vectors
                continue
            factors = torch.ones(ids.values.numel()) if ids.weights is None else ids.weights
            pooled, begin = torch.zeros(ids.size, rows.table.dim), 0
            for entry, length in enumerate(ids.lengths().tolist()):
                for at in range(begin, begin + length):
                    factor = factors[at] / length if pooling == "mean" else factors[at]
                    term = vectors[at] * factor
                    pooled[entry] = term if at == begin else pooled[entry] + term
                begin += length
            found[name] = pooled
    return {**found, "seen_at": batch.numbers["seen_at"].values}


def check(embeddings: EmbeddingCollection, reader: JaggedReader, buffers: JaggedBuffers, batch: KeyedBatch) -> None:
    """The buffers give the bits of `expected`, and padding where they have more than the batch."""
    got = run(reader, buffers, batch)
    for name, wanted in expected(embeddings, batch).items():
        if name not in ("seen", "seen_at", "shops"):
            assert torch.equal(got[name][: len(wanted)], wanted), name
            continue
        lengths = batch.column(name).lengths()
        if reader.histories.jagged:
            assert torch.equal(got[name][: len(wanted)], wanted), name
            assert torch.equal(got[f"{name}_lengths"][: len(lengths)], lengths)
            assert not got[f"{name}_lengths"][len(lengths) :].any()  # entries of padding have no events
            continue
        mask = torch.arange(got[name].shape[1]) < lengths.unsqueeze(1)
        assert torch.equal(got[f"{name}_mask"][: len(lengths)], mask) and not got[f"{name}_mask"][len(lengths) :].any()
        assert torch.equal(got[name][: len(lengths)][mask], wanted), name
        assert not got[name][: len(lengths)][~mask].any()
    if batch.user_of is not None:
        users, rows = got["user_of"], batch.size
        assert torch.equal(users[:rows], batch.user_of) and users[rows:].tolist() == [buffers.users - 1] * (
            len(users) - rows
        )


@pytest.mark.parametrize(("form", "below"), [("jagged", "dram"), ("padded", "ssd"), ("users", "dram")])
def test_vectors_have_the_bits_of_plain_sums_whatever_is_cached(
    device: str, form: str, below: str, tmp_path: Path
) -> None:
    embeddings = collection(device, **({"dram": "4MiB", "ssd": str(tmp_path)} if below == "ssd" else {}))
    users = USERS if form == "users" else None
    embeddings.form = TowerForm(form != "padded", ("user", "friends", "seen", "seen_at", "shops") if users else ())
    assert embeddings.hbm_cache is not None
    reader = JaggedReader(
        ServingReader(embeddings.layout, embeddings.hbm_cache), histories(form != "padded", bool(users))
    )
    draw, scratch, lane = np.random.default_rng(1), Scratch(), reader.base.add_lane()
    large = make_batch(draw, ROWS, users, longest=9)
    lengths = tuple(max(1, length) for length in reader.lengths_of(large))
    wide = tuple(length + 7 for length in lengths)
    both = [JaggedBuffers(reader, ROWS, sizes, True, lane, scratch) for sizes in (lengths, wide)]
    check(embeddings, reader, both[0], large)
    for number in range(3):
        rows = int(draw.integers(1, ROWS + 1))
        batch = make_batch(draw, rows, users and int(draw.integers(1, users + 1)), (0, 1, 4)[number % 3], number > 1)
        assert reader.supports(batch) and reader.weighted(batch)
        check(embeddings, reader, both[1], batch)
        if all(mine <= fits for mine, fits in zip(reader.lengths_of(batch), lengths, strict=True)):
            check(embeddings, reader, both[0], batch)
        reader.base.filler.run_round()
    assert reader.base.filler.rows_inserted > 0 and reader.base.filler.error is None
    reader.base.close()


def test_vectors_have_the_bits_of_a_read_without_a_lane(device: str) -> None:
    embeddings = collection(device)
    embeddings.form = TowerForm(True)
    assert embeddings.hbm_cache is not None
    reader = JaggedReader(ServingReader(embeddings.layout, embeddings.hbm_cache), histories(True))
    batch = make_batch(np.random.default_rng(6), 4, weights=True)
    buffers = JaggedBuffers(
        reader, 4, tuple(n + 1 for n in reader.lengths_of(batch)), True, reader.base.add_lane(), Scratch()
    )
    got = run(reader, buffers, batch)
    with torch.inference_mode(), reader.base.changing():
        plain = embeddings(batch)
    assert plain.keys() == got.keys()
    assert all(torch.equal(got[name][: len(value)], value.cpu()) for name, value in plain.items())
    reader.base.close()


def test_rows_of_every_type_and_dims_that_are_no_multiple_of_four(device: str) -> None:
    for values, dim in (("fp16", 17), ("fp32", 68)):
        embeddings = collection(device, values, dim, hbm="64KiB")
        embeddings.form = TowerForm(True)
        assert embeddings.hbm_cache is not None
        reader = JaggedReader(ServingReader(embeddings.layout, embeddings.hbm_cache), histories(True))
        draw = np.random.default_rng(2)
        batch = make_batch(draw, ROWS)
        lengths = tuple(length + 1 for length in reader.lengths_of(batch))
        buffers = JaggedBuffers(reader, ROWS, lengths, True, reader.base.add_lane(), Scratch())
        for _ in range(2):
            check(embeddings, reader, buffers, batch)
            reader.base.filler.run_round()
        reader.base.close()


def test_late_ids_are_counted_by_example(device: str, tmp_path: Path) -> None:
    embeddings = collection(device, dram="4MiB", ssd=str(tmp_path))
    embeddings.form = TowerForm(True)
    assert embeddings.hbm_cache is not None
    reader = JaggedReader(ServingReader(embeddings.layout, embeddings.hbm_cache), histories(True))
    batch = make_batch(np.random.default_rng(3), ROWS)
    for rows in embeddings.tables:
        rows.store.core.evict(KEYS)
    buffers = JaggedBuffers(
        reader, ROWS, tuple(n + 1 for n in reader.lengths_of(batch)), True, reader.base.add_lane(), Scratch()
    )
    run(reader, buffers, batch, "default")
    by_row, total = buffers.late(batch)
    with torch.inference_mode(), reader.base.changing():
        lookup = embeddings.route(batch, ahead=False).read("default")
        embeddings(lookup)
    assert total == lookup.late_ids > 0 and by_row is not None and torch.equal(by_row, lookup.late_by_example)
    reader.base.close()


class StoreBelow:
    """Reads of rows elsewhere, here in the host's stores; some of them are late."""

    publications = (1, 1)

    def __init__(self) -> None:
        self.asked: list[torch.Tensor] = []

    def read(self, store: HostStore, keys: torch.Tensor, late: str) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(keys)
        return store.read(keys)[0], keys % 7 == 0

    def finish(self, late: str) -> None:
        assert late == "default"


def test_rows_elsewhere_are_read_once_for_each_key_of_a_table(device: str) -> None:
    embeddings = collection(device)
    assert embeddings.hbm_cache is not None
    reader = JaggedReader(ServingReader(embeddings.layout, embeddings.hbm_cache), histories(True))
    batch, below = make_batch(np.random.default_rng(7), ROWS), StoreBelow()
    buffers = JaggedBuffers(
        reader, ROWS, tuple(n + 1 for n in reader.lengths_of(batch)), True, reader.base.add_lane(), Scratch()
    )
    buffers.fill(batch)
    buffers.enqueue_lookup()
    buffers.read_misses("default", below)  # type: ignore[arg-type]
    got = {name: value.cpu() for name, value in buffers.vectors().items()}
    for name, wanted in expected(embeddings, batch).items():
        assert torch.equal(got[name][: len(wanted)], wanted), name
    counts = torch.zeros(ROWS, dtype=torch.int32)
    for ids in batch.ids.values():
        counts.index_add_(0, torch.repeat_interleave(ids.lengths()), (ids.values % 7 == 0).int())
    by_row, total = buffers.late(batch)
    assert by_row is not None and torch.equal(by_row, counts) and total == int(counts.sum())
    assert len(below.asked) == 3 and all(keys.unique().numel() == keys.numel() for keys in below.asked)
    reader.base.close()


def test_batches_that_lanes_cannot_take_are_refused(device: str) -> None:
    embeddings = collection(device)
    assert embeddings.hbm_cache is not None
    reader = JaggedReader(ServingReader(embeddings.layout, embeddings.hbm_cache), histories(True))
    batch = make_batch(np.random.default_rng(4), 3)
    weighted = Jagged(batch.ids["seen"].values, batch.ids["seen"].offsets, torch.ones(batch.ids["seen"].values.numel()))
    assert reader.supports(batch)
    assert not reader.supports(KeyedBatch({**batch.ids, "seen": weighted}, numbers=batch.numbers))
    assert not reader.supports(KeyedBatch(batch.ids))  # without times
    assert not reader.supports(make_batch(np.random.default_rng(5), 3, 2))  # users that the tower does not have
    reader.base.close()
