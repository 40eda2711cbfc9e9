"""Read-only rows: fp32, fp16 and int8 in DRAM and on SSD, and reads that never wait for the disk."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hotrow.batch import Jagged
from hotrow.config import Initial
from hotrow.errors import BatchError
from hotrow.kernels.rows.layout import RowLayout
from hotrow.kernels.rows.quantize import quantize, quantized
from hotrow.optim import SGD
from hotrow.tiers.host.plan import HostPlan
from hotrow.tiers.host.store import Budget, HostStore, count_cold, prefetch_all

DIM = 13
VALUES = ("fp32", "fp16", "int8")


def store_of(values: str | None, folder: Path | None = None, dram: int = 0, evicts: bool = True) -> HostStore:
    store = HostStore("t", DIM, SGD(lr=0.1), Initial.uniform(-1.0, 1.0), 3, Budget(dram), values)
    if folder is not None:
        store.attach(str(folder), evicts=evicts, buffer=64 << 10)
    return store


def some_rows(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randperm(10 * count, generator=generator)[:count] * 104_729 - 99
    return keys, torch.randn(count, DIM, generator=generator) * 3


def as_stored(values: str, rows: Tensor) -> Tensor:
    """The values as numpy decodes the stored type."""
    plain = rows.numpy()
    if values == "fp16":
        return torch.from_numpy(plain.astype(np.float16).astype(np.float32))
    if values == "int8":
        low, high = plain.min(1, keepdims=True), plain.max(1, keepdims=True)
        scale = (high - low) / np.float32(255)
        codes = np.clip((plain - low) / np.where(scale > 0, scale, np.float32(1)) + np.float32(0.5), 0, 255)
        return torch.from_numpy(codes.astype(np.uint8).astype(np.float32) * scale + low)
    return rows


@pytest.mark.parametrize("values", VALUES)
def test_rows_read_as_numpy_converts_them_from_dram_ssd_and_snapshots(values: str, tmp_path: Path) -> None:
    keys, rows = some_rows(3000)
    expected = as_stored(values, rows)
    writer = store_of(values, tmp_path / "log", evicts=False)
    writer.assign(keys, rows)
    assert torch.equal(writer.read(keys)[0], expected)
    snapshot = writer.begin_snapshot()
    assert snapshot.finish(str(tmp_path / "rows"))["rows"] == 3000
    info = HostStore.snapshot_info(str(tmp_path / "rows"))
    assert (info["values"], info["rows"], info["row_bytes"]) == (values, 3000, writer.row_bytes)
    assert writer.row_bytes == {"fp32": 52, "fp16": 28, "int8": 24}[values]

    for reader in (store_of(values), store_of(values, tmp_path / "ssd", 8 << 20)):
        reader.load_snapshot(str(tmp_path / "rows"))
        assert torch.equal(reader.read(keys)[0], expected)
        scanned = {int(k): v for part in reader.scan() for k, v in zip(part.keys, part.values, strict=True)}
        assert torch.equal(torch.stack([scanned[int(key)] for key in keys]), expected)
        unseen = torch.tensor([1, 2, 3])
        fresh, found = reader.read(unseen)
        assert torch.equal(fresh, store_of(None).read(unseen)[0])
        assert not found.any()
        assert len(reader) == 3000


@pytest.mark.parametrize("values", ["fp16", "int8"])
def test_rows_have_the_bytes_that_the_gpu_reads(values: str) -> None:
    keys, rows = some_rows(40)
    store = store_of(values)
    store.assign(keys, rows)
    plain = RowLayout(DIM)
    padded = torch.zeros(40, plain.stride)
    padded[:, :DIM] = rows
    layout = quantized(plain) if values == "int8" else RowLayout(DIM, (), "fp16")
    wanted = quantize(padded, plain) if values == "int8" else torch.zeros(40, layout.stride)
    if values == "fp16":
        layout.values(wanted)[:] = rows.half()
    raw = torch.empty(40, store.row_bytes // 4)
    assert store.read_raw(keys, raw).all()
    assert torch.equal(raw.view(torch.int32), wanted[:, : layout.width].contiguous().view(torch.int32))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
def test_pooling_adds_the_converted_rows(values: str, pooling: str) -> None:
    keys, rows = some_rows(50)
    store, plain = store_of(values), store_of(None)
    store.assign(keys, rows)
    plain.assign(keys, as_stored(values, rows))
    lengths = torch.tensor([0, 3, 1, 7, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.cat([keys[torch.arange(12) * 5 % 50], torch.tensor([77])])
    bags = Jagged(ids, offsets, None if pooling == "none" else torch.rand(13))
    outputs = []
    for each in (store, plain):
        out = torch.empty(13 if pooling == "none" else 5, DIM)
        plan = HostPlan()
        plan.route([(each, [(bags, pooling)])])
        plan.read()
        plan.gather([out])
        outputs.append(out)
    assert torch.equal(*outputs)


def test_what_does_not_fit_the_type_or_would_train_is_refused(tmp_path: Path) -> None:
    store = store_of("fp16")
    keys = torch.tensor([1])
    with pytest.raises(BatchError, match="keeps fp16 values, which do not reach 70000"):
        store.assign(keys, torch.full((1, DIM), 70000.0))
    with pytest.raises(BatchError, match="keeps int8 values"):
        store_of("int8").assign(keys, torch.tensor([[3e38, -3e38] + [0.0] * (DIM - 2)]))
    for call in (store.create, store.find_or_create):
        with pytest.raises(BatchError, match=r"only read.*without values="):
            call(keys)
    with pytest.raises(BatchError, match="only read"):
        store.set_admission(2, 1.0, 1 << 16)
    plan = HostPlan()
    plan.route([(store, [(Jagged(keys), "sum")])])
    with pytest.raises(BatchError, match=r"only read.*eval\(\)"):
        plan.fetch()
    assert len(store) == 0
    writer = store_of("int8", tmp_path / "log", evicts=False)
    writer.assign(keys, torch.ones(1, DIM))
    writer.begin_snapshot().finish(str(tmp_path / "rows"))
    with pytest.raises(BatchError, match=r"rows of type fp16 but .* has int8"):
        store.load_snapshot(str(tmp_path / "rows"))


@pytest.mark.parametrize("late", ["initial", "default"])
def test_a_batch_is_read_without_the_disk_and_late_ids_are_counted_by_example(late: str, tmp_path: Path) -> None:
    store = store_of("fp16", tmp_path / "ssd", 8 << 20)
    store.default_row = torch.arange(DIM, dtype=torch.float32)
    keys, rows = some_rows(200)
    store.assign(keys, rows)
    assert store.core.evict(200) == 200
    warm, cold = keys[:100], keys[100:]
    assert store.prefetch(warm) == 100
    assert torch.equal(store.cold(keys), torch.arange(200) >= 100)
    assert count_cold([(store, keys), (store, cold)]) == 200

    ids = torch.stack([warm, cold], 1).flatten()  # 50 examples of four, half of them cold
    plan = HostPlan()
    plan.route([(store, [(Jagged(ids, torch.arange(0, 201, 4)), "none"), (Jagged(warm[:50]), "sum")])])
    before = store.tier()["rows_read"]
    plan.read(late)
    out, other = torch.empty(200, DIM), torch.empty(50, DIM)
    plan.gather([out, other])
    assert store.tier()["rows_read"] == before
    expected = as_stored("fp16", rows)
    assert torch.equal(out[::2], expected[:100])
    assert torch.equal(other, expected[:50])
    answer = store_of(None).read(cold)[0] if late == "initial" else store.default_row.expand(100, DIM)
    assert torch.equal(out[1::2], answer)
    assert plan.late_ids == 100
    assert plan.late_by_example(50).tolist() == [2] * 50
    values, answered = store.read_late(keys, late)
    assert torch.equal(answered, torch.arange(200) >= 100)
    assert torch.equal(values, torch.cat([expected[:100], answer]))

    plan.read("wait")
    plan.gather([out, other])
    assert torch.equal(out[1::2], expected[100:])
    assert plan.late_ids == 0


def test_prefetch_of_several_tables_keeps_the_budget_and_lets_every_table_have_rows(tmp_path: Path) -> None:
    budget = Budget(6 << 20)
    stores = []
    keys, rows = some_rows(20_000)
    for name in "abc":
        store = HostStore(name, DIM, SGD(lr=0.1), Initial.uniform(-1.0, 1.0), 3, budget, "fp32")
        store.attach(str(tmp_path / name), evicts=True, buffer=64 << 10)
        store.assign(keys, rows)
        stores.append(store)
    for _ in range(3):
        for store in stores:
            wanted = keys[torch.randperm(keys.numel())[:500]]
            prefetch_all([(store, wanted)])
            assert count_cold([(store, wanted)]) == 0
            assert budget.used <= budget.limit
    assert all(len(store) == 20_000 for store in stores)


def test_lanes_read_the_same_rows_beside_prefetch_and_eviction(tmp_path: Path) -> None:
    stores, keys, rows = [], *some_rows(5000)
    budget = Budget(16 << 20)
    for name, values in zip("ab", ("fp16", "int8"), strict=True):
        store = HostStore(name, DIM, SGD(lr=0.1), Initial.uniform(-1.0, 1.0), 3, budget, values)
        store.attach(str(tmp_path / name), evicts=True, buffer=64 << 10)
        store.assign(keys, rows)
        stores.append(store)
    expected = [as_stored(store.values or "", rows) for store in stores]
    wrong: list[str] = []
    late_ids = [0]
    stop = threading.Event()

    def lane(seed: int, late: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        plan = HostPlan()
        while not stop.is_set():
            pick = torch.randint(0, 5000, (64,), generator=generator)
            plan.route([(store, [(Jagged(keys[pick]), "sum")]) for store in stores])
            plan.read(late)
            out = [torch.empty(64, DIM) for _ in stores]
            plan.gather(out)
            answered = plan.late_by_example(64)
            late_ids[0] += plan.late_ids
            for got, all_rows in zip(out, expected, strict=True):
                same = (got == all_rows[pick]).all(1) | ((got == 0).all(1) & (answered > 0))
                if not bool(same.all()):
                    wrong.append(f"{late}: {int((~same).sum())} rows")

    def bring(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while not stop.is_set():
            pick = keys[torch.randint(0, 5000, (300,), generator=generator)]
            prefetch_all([(store, pick) for store in stores])
            for store in stores:
                store.core.evict(400)

    threads = [threading.Thread(target=lane, args=(i, late)) for i, late in enumerate(["default", "wait", "default"])]
    threads += [threading.Thread(target=bring, args=(i,)) for i in (11, 12)]
    for thread in threads:
        thread.start()
    stop.wait(1.0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert late_ids[0] > 0
    assert all(len(store) == 5000 for store in stores)
