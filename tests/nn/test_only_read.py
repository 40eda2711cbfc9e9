"""A collection that is only read, as a server opens it: from memory, over SSD, and with hot rows in HBM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.config import Memory
from hotrow.errors import BatchError, OptionError
from hotrow.nn import EmbeddingCollection
from hotrow.table import Admission, Table

VALUES = ("fp32", "fp16", "int8")
KEYS = torch.arange(60) * 104_729 - 1000


def tables(values: str | None) -> list[Table]:
    return [
        Table("user", dim=6, values=values, default=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        Table("item", dim=6, features={"clicked": "mean", "history": "none"}, values=values),
        Table("place", dim=5, values=values),
    ]


def filled(values: str | None, memory: Memory | None = None, device: str | None = None) -> EmbeddingCollection:
    embeddings = EmbeddingCollection(tables(values), memory=memory, device=device, seed=4).eval()
    generator = torch.Generator().manual_seed(1)
    for rows in embeddings.tables:
        rows.assign(KEYS, torch.randn(60, rows.table.dim, generator=generator))
    return embeddings


def batch_of(seed: int, size: int = 9) -> KeyedBatch:
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> Tensor:
        known = KEYS[torch.randint(0, 60, (count,), generator=generator)]
        return torch.where(torch.rand(count, generator=generator) < 0.2, known + 1, known)  # some are unseen

    def bags(weights: bool) -> Jagged:
        lengths = torch.randint(0, 4, (size,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        values = ids(int(lengths.sum()))
        return Jagged(values, offsets, torch.rand(values.numel(), generator=generator) if weights else None)

    return KeyedBatch(
        {"user": Jagged(ids(size)), "clicked": bags(True), "history": bags(False), "place": Jagged(ids(size))}
    )


def vectors_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit; but a mean, which a GPU divides first and a CPU last, to rounding."""
    means = torch.allclose(a["clicked"], b["clicked"], rtol=1e-6, atol=1e-6)
    return a.keys() == b.keys() and means and all(torch.equal(a[name], b[name]) for name in a if name != "clicked")


@pytest.mark.parametrize("values", VALUES)
def test_a_collection_reads_the_same_vectors_from_hbm_dram_and_ssd(values: str, tmp_path: Path) -> None:
    plain = filled(values)
    over_ssd = filled(values, Memory(dram="16MiB", ssd=str(tmp_path / "ssd")))
    hot = filled(values, Memory(hbm="8KiB"), device="cpu")
    above_ssd = filled(values, Memory(hbm="8KiB", dram="16MiB", ssd=str(tmp_path / "more")), device="cpu")
    for seed in range(4):
        batch = batch_of(seed)
        expected = plain(batch)
        for other in (over_ssd, hot, above_ssd):
            assert vectors_equal(other(batch), expected)
            for rows in other.tables:
                rows.store.core.evict(20)
                assert len(rows) == 60
    assert hot.hbm_cache is not None
    report = hot.hbm_cache.report()
    assert report["hits"] > 0
    assert report["misses"] > 0
    assert report["evictions"] + report["overflows"] > 0


def test_values_keep_their_error_small() -> None:
    exact, batch = filled("fp32"), batch_of(3)
    for values, most in (("fp16", 2e-3), ("int8", 2e-2)):
        close = filled(values)(batch)
        assert all(torch.allclose(close[name], vector, atol=most) for name, vector in exact(batch).items())


@pytest.mark.parametrize("hbm", [None, "8KiB"])
@pytest.mark.parametrize("late", ["initial", "default"])
def test_late_ids_are_answered_by_policy_and_counted(late: str, hbm: str | None, tmp_path: Path) -> None:
    embeddings = filled(
        "fp16", Memory(hbm=hbm, dram="16MiB", ssd=str(tmp_path / "ssd")), device=None if hbm is None else "cpu"
    )
    user = embeddings.table("user")
    user.store.core.evict(60)
    assert user.store.prefetch(KEYS[:30]) == 30
    batch = KeyedBatch({
        "user": Jagged(torch.stack([KEYS[20], KEYS[40], KEYS[40], KEYS[2]])),
        "clicked": Jagged(KEYS[:4]),
        "history": Jagged(KEYS[:6], torch.tensor([0, 1, 3, 3, 6])),
        "place": Jagged(KEYS[:4]),
    })  # fmt: skip
    expected = filled("fp16")(batch)
    lookup = embeddings.route(batch, ahead=False).read(late)
    vectors = embeddings(lookup)
    assert lookup.late_ids == 2
    assert lookup.late_by_example is not None
    assert lookup.late_by_example.tolist() == [0, 1, 1, 0]
    standard = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    unseen = EmbeddingCollection(tables("fp16"), seed=4).table("user").read(KEYS[40:41])[0]
    expected["user"][1:3] = standard if late == "default" else unseen
    assert vectors_equal(vectors, expected)

    waited = embeddings.route(batch, ahead=False).read()
    assert torch.equal(embeddings(waited)["user"], filled("fp16")(batch)["user"])
    assert waited.late_ids == 0


@pytest.mark.parametrize("memory", [Memory(), Memory(hbm="8KiB")])
def test_training_a_table_that_is_only_read_is_refused_with_the_cure(memory: Memory) -> None:
    embeddings = filled("int8", memory, device=None if memory.hbm is None else "cpu").train()
    with pytest.raises(BatchError, match=r"table 'user' is only read \(values=\"int8\"\).*eval\(\).*without values="):
        embeddings(batch_of(1))
    with torch.no_grad():
        assert embeddings(batch_of(1))["user"].shape == (9, 6)


def test_wrong_options_name_the_cure() -> None:
    with pytest.raises(OptionError, match="values='fp8'"):
        Table("t", dim=4, values="fp8")
    with pytest.raises(OptionError, match="leave admission= and expiry= out"):
        Table("t", dim=4, values="fp16", admission=Admission(after=2))
    with pytest.raises(OptionError, match="default= of 3 numbers; give 4"):
        Table("t", dim=4, default=[0.0, 1.0, 2.0])
    with pytest.raises(OptionError, match="late='never'"):
        filled("fp16").route(batch_of(1), ahead=False).read("never")
    table = Table("t", dim=2, values="int8", default=[0.5, -1.0])
    assert Table.from_dict(table.to_dict()) == Table(
        "t", dim=2, features={"t": "sum"}, values="int8", default=[0.5, -1.0]
    )
