"""Rows trained in 16 bits: the rule in fp32, rounded stochastically, the same bits in every tier and budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernels import reference
from torch import Tensor, nn

import hotrow as hr
from hotrow import optim
from hotrow.batch import Jagged, KeyedBatch
from hotrow.data import Cursor
from hotrow.errors import BatchError, OptionError
from hotrow.job import load_job
from hotrow.nn import EmbeddingCollection, Recommender
from hotrow.table import Expiry, Table, TableRows
from hotrow.train.trainer import Trainer

DTYPES = ("fp16", "bf16")
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
KEYS = 3000


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(17 + 24, 1)

    def forward(self, vectors: dict[str, Tensor], dense: Tensor | None = None) -> Tensor:
        return self.top(torch.cat([vectors["user"], vectors["item"]], dim=1)).squeeze(1)


class Clicks:
    """Batches of random keys; whether an example is clicked follows from its keys, with some noise."""

    def __init__(self, batches: int, size: int = 400, seed: int = 1) -> None:
        self.all = [batch_of(seed * 1000 + i, size) for i in range(batches)]
        self.examples = batches * size

    def batches(self, cursor: Cursor | None = None) -> Iterator[tuple[KeyedBatch, Cursor]]:
        start = 0 if cursor is None else int(cursor["batch"])
        for i, batch in list(enumerate(self.all))[start:]:
            yield batch, {"batch": i + 1}


def batch_of(seed: int, size: int) -> KeyedBatch:
    generator = torch.Generator().manual_seed(seed)
    user, item = ((torch.rand(size, generator=generator) ** 2 * KEYS).to(torch.int64) for _ in range(2))
    taste = 0.5 + 0.25 * ((user * 7919 % 97 < 48).float() - (item * 104_729 % 89 < 44).float())
    labels = (torch.rand(size, generator=generator) < taste).float()
    lengths = torch.randint(0, 4, (size,), generator=generator)
    more = (torch.rand(int(lengths.sum()), generator=generator) * KEYS).to(torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return KeyedBatch({"user": Jagged(user), "item": Jagged(item), "more": Jagged(more, offsets)}, labels=labels)


def trainer_of(
    dtype: str, memory: hr.Memory | None = None, device: str | None = None, expiry: Expiry | None = None
) -> Trainer:
    torch.manual_seed(0)
    tables = [
        Table("user", dim=17, dtype=dtype, optimizer=optim.RowWiseAdagrad(lr=0.1), expiry=expiry),
        Table("item", dim=24, features={"item": "sum", "more": "mean"}, dtype=dtype, expiry=expiry),
    ]
    embeddings = EmbeddingCollection(tables, optimizer=optim.Adam(lr=0.01), memory=memory, seed=4, device=device)
    return Trainer(Recommender(embeddings, Tower()), lookahead=1)


def rows_of(table: TableRows) -> list[Tensor]:
    chunks = list(table.scan())
    keys = torch.cat([chunk.keys for chunk in chunks])
    order = keys.argsort()
    return [keys[order], *(torch.cat([getattr(c, f) for c in chunks])[order] for f in ("values", "counts"))]


def assert_same(ours: Trainer, theirs: Trainer) -> None:
    for a, b in zip(ours.model.embeddings.tables, theirs.model.embeddings.tables, strict=True):
        for x, y in zip(rows_of(a), rows_of(b), strict=True):
            assert torch.equal(x, y), a.table.name


def step(embeddings: EmbeddingCollection, keys: Tensor, gradient: Tensor) -> None:
    (embeddings(KeyedBatch({"t": Jagged(keys)}))["t"] * gradient.to(embeddings.device)).sum().backward()
    embeddings.step()


def one_table(
    dtype: str, rule: optim.Optimizer, memory: hr.Memory | None = None, dim: int = 5, device: str = "cpu"
) -> EmbeddingCollection:
    return EmbeddingCollection([Table("t", dim=dim, dtype=dtype)], rule, seed=9, memory=memory, device=device)


EVERY_KIND = torch.tensor([0, -1, 5, 2**63 - 1, -(2**63), 1 << 40])
RULES = [optim.SGD(lr=0.3), optim.RowWiseAdagrad(lr=0.1), optim.Adam(lr=0.02), optim.FTRL(lr=0.1, l1=0.01)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_an_update_is_the_rule_in_fp32_rounded_by_chance(dtype: str, rule: optim.Optimizer) -> None:
    """Against the optimizer in plain torch and the plain rounding."""
    embeddings = one_table(dtype, rule)
    table, dim = embeddings.tables[0], 5
    table.create(EVERY_KIND)
    _, oracle, _ = rows_of(table)
    keys = EVERY_KIND.sort().values
    stream = int(table.store.core.rounding_stream)
    for number in range(1, 5):
        gradient = torch.randn(len(keys), dim, generator=torch.Generator().manual_seed(number))
        step(embeddings, keys, gradient)
        w, *states = oracle.split([dim, *(part.width for part in rule.state(dim))], dim=1)
        state = {part.name: tensor for part, tensor in zip(rule.state(dim), states, strict=True)}
        rule.rule(w, gradient, state, rule.coefficients(number))
        bits = torch.tensor([reference.draws(stream, key, number, dim) for key in keys.tolist()])
        w.copy_(reference.stochastic_round(w, bits, TORCH[dtype]).float())
        assert torch.equal(rows_of(table)[1], oracle), number


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_rows_are_what_unseen_keys_read(dtype: str) -> None:
    table = one_table(dtype, optim.SGD(lr=0.1)).tables[0]
    plain = one_table("fp32", optim.SGD(lr=0.1)).tables[0]
    unseen = table.read(EVERY_KIND)
    table.create(EVERY_KIND)
    assert torch.equal(table.read(EVERY_KIND), unseen)
    assert torch.equal(unseen, plain.read(EVERY_KIND).to(TORCH[dtype]).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_updates_too_small_for_the_type_add_up(dtype: str) -> None:
    """Updates of a tenth of the last place, which rounding to nearest would always drop."""
    keys, place = torch.arange(500), 2.0**-8 if dtype == "bf16" else 2.0**-11
    embeddings = one_table(dtype, optim.SGD(lr=1.0))
    embeddings.tables[0].assign(keys, torch.full((500, 5), 0.75))
    for _ in range(60):
        step(embeddings, keys, torch.full((500, 5), -0.1 * place))
    grown = (embeddings.tables[0].read(keys) - 0.75) / place
    assert abs(float(grown.mean()) - 6.0) < 0.2


def test_rows_take_half_the_memory_and_state_stays_fp32() -> None:
    sizes = {dtype: one_table(dtype, optim.RowWiseAdagrad(lr=0.1), dim=64).tables[0] for dtype in ("fp32", *DTYPES)}
    assert [table.store.row_bytes for table in sizes.values()] == [260, 132, 132]
    assert [table.store.width for table in sizes.values()] == [65, 65, 65]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_budget_and_a_resume_give_the_same_bits(dtype: str, tmp_path: Path) -> None:
    expiry = Expiry(steps=6, every=4)
    whole = trainer_of(dtype, expiry=expiry)
    losses = whole.fit(Clicks(14), progress=False).losses
    small = trainer_of(dtype, hr.Memory(dram="9MiB", ssd=str(tmp_path / "rows")), expiry=expiry)
    assert small.fit(Clicks(14), progress=False).losses == losses
    assert_same(small, whole)
    first = trainer_of(dtype, hr.Memory(dram="9MiB", ssd=str(tmp_path / "more")), expiry=expiry)
    first.fit(Clicks(14), steps=7, progress=False)
    first.save(tmp_path / "saved")
    again = trainer_of(dtype, expiry=expiry)
    again.load(tmp_path / "saved")
    again.fit(Clicks(14), cursor=again.cursor, progress=False)
    assert_same(again, whole)


@pytest.mark.parametrize(("saved", "into"), [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16")])
def test_a_checkpoint_loads_into_rows_of_another_type(saved: str, into: str, tmp_path: Path) -> None:
    trained = trainer_of(saved)
    trained.fit(Clicks(4), progress=False)
    trained.save(tmp_path / "saved")
    for memory in (None, hr.Memory(dram="9MiB", ssd=str(tmp_path / "rows"))):
        other = trainer_of(into, memory)
        other.load(tmp_path / "saved")
        for mine, theirs in zip(other.model.embeddings.tables, trained.model.embeddings.tables, strict=True):
            (keys, rows, counts), (as_saved, expected, seen) = rows_of(mine), rows_of(theirs)
            dim = mine.table.dim
            expected[:, :dim] = expected[:, :dim].to(TORCH[into]).float()
            assert torch.equal(keys, as_saved) and torch.equal(counts, seen) and torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_server_answers_what_the_trainer_predicts_for_unseen_keys_too(dtype: str, tmp_path: Path) -> None:
    trainer = trainer_of(dtype)
    trainer.fit(Clicks(4), progress=False)
    asked = batch_of(99, 64)
    asked.ids["user"].values[:20] += 1 << 50  # never seen
    hr.export(trainer.model, tmp_path / "repository" / "ctr")
    with hr.Engine(tmp_path / "repository" / "ctr") as engine:
        torch.testing.assert_close(engine.predict(asked), trainer.predict(asked), rtol=0, atol=1e-6)


def test_learning_in_bf16_is_as_good_as_in_fp32() -> None:
    aucs = {dtype: trainer_of(dtype).fit(Clicks(150), progress=False).metrics["auc"] for dtype in ("fp32", "bf16")}
    assert aucs["fp32"] > 0.6 and abs(aucs["bf16"] - aucs["fp32"]) < 0.005


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_hbm_are_those_in_dram_bit_for_bit(dtype: str, device: str) -> None:
    """No key twice in a batch, so that the order of sums is no question; a cache that is too small for the rows."""
    if (device == "cpu") != (os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip("this process interprets kernels" if device == "cuda" else "this process compiles kernels")
    memories = [None, hr.Memory(hbm="4MiB", dram="64MiB"), hr.Memory(hbm="2KiB", dram="64MiB")]
    for rule in (optim.SGD(lr=0.3), optim.Adam(lr=0.02)):
        all_rows = []
        for memory in memories:
            embeddings = one_table(dtype, rule, memory, device="cpu" if memory is None else device)
            for number in range(4):
                generator = torch.Generator().manual_seed(number)
                keys = torch.randperm(90, generator=generator)[:30] * 7919 - 100_000
                step(embeddings, keys, torch.randn(30, 5, generator=generator))
            with torch.no_grad():  # rows that the cache lacks are borrowed, unseen ones too
                asked = torch.arange(-5, 95) * 7919 - 100_000
                vectors = embeddings.eval()(KeyedBatch({"t": Jagged(asked)}))["t"]
            all_rows.append([*rows_of(embeddings.tables[0]), vectors.cpu()])
        for other in all_rows[1:]:
            for x, y in zip(all_rows[0], other, strict=True):
                assert torch.equal(x, y)


def test_a_job_file_says_the_type_for_all_tables_and_for_one(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[data]\nsource = "synthetic"\nexamples = 2000\nkeys = 1_000_000\n[embeddings]\ndim = 4\ndtype = "bf16"\n'
        '[[tables]]\nname = "item"\ndtype = "fp16"\n[tower]\nkind = "dlrm"\nbottom = [8]\ntop = [8]\n'
    )
    tables = load_job(job).trainer.model.embeddings.tables
    assert {rows.table.name: rows.table.dtype for rows in tables} == {"item": "fp16"} | {
        rows.table.name: "bf16" for rows in tables if rows.table.name != "item"
    }
    assert len(tables) > 1


def test_types_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(OptionError, match=r"table 'user' has dtype='int8'.*fp32, fp16, bf16"):
        Table("user", dim=4, dtype="int8")
    table = one_table("fp16", optim.SGD(lr=0.1)).tables[0]
    with pytest.raises(BatchError, match=r'keeps fp16 values, which do not reach 70000.*dtype="fp32"'):
        table.assign(torch.tensor([1]), torch.full((1, 5), 70000.0))
    assert Table.from_dict(Table("user", dim=4, dtype="bf16").to_dict()).dtype == "bf16"
