"""A server's lookups in HBM: the values of the tiers below, whatever is in the cache."""

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
from hotrow.table import Table
from hotrow.tiers.hbm.serving_reader import ServingReader

KEYS = 200


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return "cpu" if request.param == "interpreter" else "cuda"


def collection(device: str, **memory: str) -> EmbeddingCollection:
    tables = [
        Table("user", dim=4, features=["user", "friend"], values="fp32"),
        Table("item", dim=4, values="fp32"),
        Table("place", dim=8, values="fp32"),
    ]
    embeddings = EmbeddingCollection(tables, optim.SGD(), memory=Memory(hbm="6KiB", **memory), device=device, seed=3)
    generator = torch.Generator().manual_seed(0)
    for rows in embeddings.tables:
        rows.assign(torch.arange(KEYS), torch.randn(KEYS, rows.table.dim, generator=generator))
    return embeddings.eval()


def batch(generator: np.random.Generator, examples: int) -> KeyedBatch:
    def keys() -> torch.Tensor:
        return torch.from_numpy(generator.zipf(1.3, examples).astype(np.int64) % (KEYS + 20))  # some have no row

    return KeyedBatch({name: Jagged(keys()) for name in ("user", "friend", "item", "place")})


def expected(embeddings: EmbeddingCollection, batch: KeyedBatch) -> torch.Tensor:
    parts = [rows.store.read(batch.ids[f].values)[0] for rows in embeddings.tables for f in rows.table.poolings]
    return torch.cat(parts, dim=1)


@pytest.fixture(autouse=True)
def lane_stream(device: str) -> Iterator[None]:
    """Lanes have streams of their own; the default one cannot be captured."""
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
        yield


@pytest.mark.parametrize("below", ["dram", "ssd"])
def test_lookups_give_the_values_of_below_while_the_cache_fills(device: str, below: str, tmp_path: Path) -> None:
    embeddings = collection(device, **({"dram": "4MiB", "ssd": str(tmp_path)} if below == "ssd" else {}))
    assert embeddings.hbm_cache is not None
    reader = ServingReader(embeddings.layout, embeddings.hbm_cache)
    lanes = [reader.lane(16), reader.lane(16)]
    generator = np.random.default_rng(1)
    misses = []
    for number in range(8):
        examples = int(generator.integers(1, 17))
        asked = batch(generator, examples)
        assert reader.supports(asked)
        lane = lanes[number % 2]
        if number == 2:
            for each in lanes:
                each.capture()
        pooled, late = lane.find(asked)
        assert torch.equal(pooled.cpu(), expected(embeddings, asked)) and late == 0
        misses.append(lane.misses / lane.ids)
        reader.filler.run_round()
    assert misses[0] == 1.0 and min(misses[3:]) < 0.7 and reader.filler.rows_inserted > 0
    assert reader.filler.error is None
    reader.close()


def test_batches_that_are_not_one_id_each_are_not_taken(device: str) -> None:
    embeddings = collection(device)
    assert embeddings.hbm_cache is not None
    reader = ServingReader(embeddings.layout, embeddings.hbm_cache)
    asked = batch(np.random.default_rng(0), 2)
    jagged = {**asked.ids, "item": Jagged(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))}
    assert not reader.supports(KeyedBatch(jagged))
    reader.close()


def test_rows_that_change_below_are_brought_up_to_date(device: str) -> None:
    embeddings = collection(device)
    assert embeddings.hbm_cache is not None
    reader = ServingReader(embeddings.layout, embeddings.hbm_cache)
    generator = np.random.default_rng(5)
    lane, asked = reader.lane(16), batch(generator, 16)
    lane.find(asked)
    reader.filler.run_round()
    user, _, place = embeddings.tables
    changed, gone = torch.arange(0, KEYS, 2), torch.arange(1, 9, 2)
    touched = {id(user.store): torch.cat([changed, gone]), id(place.store): changed}
    with reader.refreshing(touched) as refresh:
        user.store.assign(changed, torch.full((changed.numel(), 4), 7.0))
        user.store.erase(gone)
        place.store.assign(changed, torch.full((changed.numel(), 8), -7.0))
        refresh()
    found, _ = lane.find(asked)
    assert torch.equal(found.cpu(), expected(embeddings, asked))
    assert lane.misses < lane.ids  # rows that were cached are still cached
    reader.close()
