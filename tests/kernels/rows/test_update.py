"""The update against optim.py's rules: bit for bit, given the sums in the order that update.py promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import triton
from kernels import reference

from hotrow.errors import BatchError
from hotrow.kernels.rows.layout import Items, RowLayout, Source, items_of_positions
from hotrow.kernels.rows.runs import group
from hotrow.kernels.rows.update import DEFAULT, Coefficients, RowMetadata, Tuning, update
from hotrow.optim import FTRL, SGD, Adagrad, Adam, AdamW, Optimizer, RowWiseAdagrad, clip

RULES: list[Optimizer] = [
    SGD(lr=0.1),
    Adagrad(lr=0.1, initial_accumulator=0.01),
    RowWiseAdagrad(lr=0.1),
    Adam(lr=0.01),
    AdamW(lr=0.01, weight_decay=0.1),
    FTRL(lr=0.1, l1=0.02, l2=0.01),
]
STEP = 7
INTERPRETED = replace(DEFAULT, elements=1024)  # the interpreter takes as long for a wide tile as for a narrow one


@dataclass
class Case:
    """A batch on the CPU; `run` does it on a device and `expect` by the reference."""

    layout: RowLayout
    optimizers: list[Optimizer]
    source: Source
    slots: torch.Tensor
    keys: torch.Tensor
    items: Items
    gradients: list[torch.Tensor | None]
    meta: RowMetadata
    grad_scale: float = 1.0

    def run(
        self, device: torch.device, flag: int = 0, tuning: Tuning = DEFAULT, shared: bool = False
    ) -> tuple[Source, RowMetadata]:
        def there(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.clone().to(device)

        source = Source(there(self.source.rows), there(self.source.extra))  # type: ignore[arg-type]
        meta = RowMetadata(*(there(x) for x in vars(self.meta).values()))  # type: ignore[arg-type]
        items = Items(*(there(x) for x in vars(self.items).values()))  # type: ignore[arg-type]
        gradients = [None if g is None else _moved(g, device) for g in self.gradients]
        coefficients = [
            Coefficients(optimizer.coefficients(STEP), optimizer.clip_value or 0.0, optimizer.clip_norm or 0.0)
            for optimizer in self.optimizers[: 1 if shared else None]
        ]
        streams = torch.arange(len(self.optimizers), device=device) * -(2**61) - 12345
        if triton.knobs.runtime.interpret and tuning is DEFAULT:
            tuning = INTERPRETED
        update(
            source, self.layout, self.optimizers[0].code, group(self.slots.to(device)), items, gradients,
            self.keys.to(device), coefficients, streams, streams + 1, STEP, self.grad_scale, meta,
            torch.tensor([flag], dtype=torch.int32, device=device), tuning=tuning,
        )  # fmt: skip
        back = [x.cpu() if x is not None else None for x in (source.rows, source.extra, *vars(meta).values())]
        return Source(back[0], back[1]), RowMetadata(*back[2:])  # type: ignore[arg-type]

    def expect(self, piece: int = DEFAULT.piece) -> tuple[Source, RowMetadata]:
        source = Source(self.source.rows.clone(), None if self.source.extra is None else self.source.extra.clone())
        meta = RowMetadata(*(None if x is None else x.clone() for x in vars(self.meta).values()))  # type: ignore[arg-type]
        order, starts, unique = reference.group(self.slots)
        sums, given = reference.sum_runs(self.slots, self.items, self.gradients, self.layout.dim, piece)
        item_of = range(len(order)) if self.items.item_of is None else self.items.item_of.tolist()
        capacity, dim = source.capacity, self.layout.dim
        for run, slot in enumerate(unique):
            if slot < 0:
                continue
            first, length = order[starts[run]], starts[run + 1] - starts[run]
            feature = int((self.items.begins[1:] <= item_of[first]).sum())
            table, key = int(self.items.tables[feature]), int(self.keys[first])
            stream = table * -(2**61) - 12345
            row, stamps, counts, at = source.rows, meta.last_steps, meta.counts, slot
            if slot >= capacity:
                row, stamps, counts, at = source.extra, meta.extra_last_steps, meta.extra_counts, slot - capacity  # type: ignore[assignment]
            counts[at] = reference.add_count(int(counts[at]), length, stream, key, STEP)
            stamps[at] = STEP
            if given[run]:
                optimizer = self.optimizers[table]
                g = clip(sums[run : run + 1] * self.grad_scale, optimizer.clip_value, optimizer.clip_norm)
                values = self.layout.values(row[at : at + 1])
                w, state, offset = values.float(), {}, self.layout.state_offset
                for part in optimizer.state(dim):
                    state[part.name] = row[at : at + 1, offset : offset + part.width]
                    offset += part.width
                optimizer.rule(w, g, state, optimizer.coefficients(STEP))
                if self.layout.dtype != "fp32":
                    bits = torch.tensor(reference.draws(stream + 1, key, STEP, dim))[None]
                    w = reference.stochastic_round(w, bits, values.dtype)
                values.copy_(w)
        return source, meta


def _moved(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device with the same strides."""
    if 0 in matrix.stride():
        one = matrix[tuple(slice(1) if stride == 0 else slice(None) for stride in matrix.stride())]
        return one.to(device).expand(matrix.shape)
    like = torch.empty_strided(matrix.shape, matrix.stride(), dtype=matrix.dtype, device=device)
    return like.copy_(matrix)


def _case(
    optimizers: list[Optimizer],
    dim: int,
    slots: torch.Tensor,
    counts: Sequence[int] | None = None,
    capacity: int = 40,
    extra: int = 0,
    dtype: str = "fp32",
    seed: int = 0,
) -> Case:
    """Rows, states, gradients and meta drawn at random. `counts` are the features' positions; tables take turns."""
    draws = torch.Generator().manual_seed(seed)
    layout = RowLayout(dim, tuple(part.width for part in optimizers[0].state(dim)), dtype)
    rows = torch.full((capacity + extra, layout.stride), float("nan"))
    rows[:, : layout.width] = torch.rand(capacity + extra, layout.width, generator=draws)
    values = layout.values(rows)
    values.copy_(torch.randn(values.shape, generator=draws))
    counts = [len(slots)] if counts is None else counts
    begins = torch.tensor([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0)], dtype=torch.int32)
    tables = torch.arange(len(counts), dtype=torch.int32) % len(optimizers)
    codes = torch.randint(0, 5000, (capacity + extra,), dtype=torch.int32, generator=draws)
    stamps = torch.zeros_like(codes)
    # A key is a function of its slot, below 0 half the time.
    keys = (slots.long() + 1) * 0x1234567 * torch.where(slots % 2 == 0, 1, -(2**33))
    more = (rows[capacity:], stamps[capacity:], codes[capacity:]) if extra else (None, None, None)
    return Case(
        layout,
        optimizers,
        Source(rows[:capacity], more[0]),
        slots,
        keys,
        Items(begins, tables),
        [torch.randn(n, dim, generator=draws) for n in counts],
        RowMetadata(stamps[:capacity], codes[:capacity], more[1], more[2]),
    )


def _same(got: tuple[Source, RowMetadata], expected: tuple[Source, RowMetadata]) -> None:
    for name in ("rows", "extra"):
        a, b = getattr(got[0], name), getattr(expected[0], name)
        if b is not None:
            assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"{name}: {_differences(a, b)}"
    for name, value in vars(expected[1]).items():
        assert value is None or torch.equal(getattr(got[1], name), value), name


def _differences(a: torch.Tensor, b: torch.Tensor) -> str:
    where = (a.view(torch.int32) != b.view(torch.int32)).nonzero()
    return f"{len(where)} differ, first at {where[0].tolist()}: {a[tuple(where[0])]} {b[tuple(where[0])]}"


def _slots(n: int, highest: int, seed: int = 0, lowest: int = 0) -> torch.Tensor:
    return torch.randint(lowest, highest, (n,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("optimizer", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("dim", [1, 17, 128])
def test_every_rule_gives_the_bits_of_its_oracle(optimizer: Optimizer, dim: int, device: torch.device) -> None:
    case = _case([optimizer], dim, _slots(40, 25))
    _same(case.run(device), case.expect())


@pytest.mark.parametrize("dim", [3, 200])
def test_odd_dims(dim: int, device: torch.device) -> None:
    case = _case([Adam()], dim, _slots(25, 30))
    _same(case.run(device), case.expect())


@pytest.mark.parametrize("limits", [(0.5, None), (None, 0.7), (0.5, 0.7)])
def test_clipping_gives_the_bits_of_its_oracle(limits: tuple[float | None, float | None], device: torch.device) -> None:
    rules: list[Optimizer] = [SGD(lr=0.1, clip_value=limits[0], clip_norm=limits[1]), SGD(lr=0.2)]
    case = _case(rules, 17, torch.cat([_slots(20, 20), _slots(20, 20) + 20]), [20, 20])
    case.grad_scale = 0.25
    _same(case.run(device), case.expect())


@pytest.mark.parametrize("n", [0, 1, 2])
def test_small_batches(n: int, device: torch.device) -> None:
    case = _case([RowWiseAdagrad()], 8, _slots(n, 5))
    _same(case.run(device), case.expect())


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65, 3000])
def test_one_row_owns_many_positions(length: int, device: torch.device) -> None:
    slots = torch.cat([torch.full((length,), 3, dtype=torch.int32), _slots(40, 10), torch.full((40,), 5).int()])
    case = _case([SGD(lr=0.01)], 8, slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(0))])
    _same(case.run(device), case.expect())
    plain = torch.zeros(40, 8, dtype=torch.float64).index_add(0, case.slots.long(), case.gradients[0].double())  # type: ignore[union-attr]
    rows = case.source.rows[:, :8].double() - 0.01 * plain
    assert torch.allclose(case.run(device)[0].rows[:, :8].double(), rows, rtol=1e-5, atol=1e-5)


def test_runs_of_every_length_side_by_side(device: torch.device) -> None:
    lengths = [1, 33, 32, 40, 63, 64, 65, 1, 34, 96, 97, 2, 35, 33, 33, 1]
    slots = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    case = _case([SGD(lr=0.01)], 8, slots)
    _same(case.run(device), case.expect())


@pytest.mark.parametrize("tuning", [{}, {"piece": 8}, {"elements": 16, "programs": 3}, {"elements": 1024, "ahead": 2}])
def test_how_the_work_is_cut_does_not_change_a_bit(tuning: dict[str, int], device: torch.device) -> None:
    case = _case([RowWiseAdagrad()], 16, torch.cat([_slots(40, 20), torch.full((70,), 3).int()]), extra=0)
    _same(case.run(device, tuning=Tuning(**tuning)), case.expect(tuning.get("piece", DEFAULT.piece)))


def test_features_of_several_tables_and_their_own_coefficients(device: torch.device) -> None:
    counts = [0, 20, 1, 0, 30, 15, 0]
    rules: list[Optimizer] = [Adagrad(lr=0.1), Adagrad(lr=0.5, eps=1e-3), Adagrad(lr=0.01, clip_norm=1.0)]
    tables = torch.arange(7) % 3
    slots = _slots(66, 12) + 13 * torch.repeat_interleave(tables, torch.tensor(counts)).int()
    case = _case(rules, 8, slots, counts)
    _same(case.run(device), case.expect())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tables_may_share_coefficients_and_keep_their_streams(dtype: str, device: torch.device) -> None:
    rules: list[Optimizer] = [Adam(clip_norm=1.0)] * 3
    slots = _slots(60, 12) + 13 * torch.arange(3).repeat_interleave(20).int()
    case = _case(rules, 8, slots, [20, 20, 20], dtype=dtype)
    _same(case.run(device, shared=True), case.expect())


def test_extra_rows_and_absent_ones(device: torch.device) -> None:
    case = _case([Adam()], 12, _slots(90, 25, lowest=-1), capacity=10, extra=15)
    _same(case.run(device), case.expect())
    case.slots = torch.full((50,), -1, dtype=torch.int32)
    got = case.run(device)
    _same(got, (case.source, case.meta))


def test_bags_spread_their_gradient(device: torch.device) -> None:
    lengths = [0, 3, 1, 0, 9, 2, 0, 5, 0, 4]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    n = int(offsets[-1])
    case = _case([SGD(lr=0.1)], 8, _slots(n, 9))
    begins, tables = torch.tensor([0, 4, 4, 10], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    scales = torch.rand(n, generator=torch.Generator().manual_seed(5))
    case.items = Items(begins, tables, offsets, scales, items_of_positions(offsets, 10, n))
    wide = torch.randn(6, 30, generator=torch.Generator().manual_seed(6))
    for gradients in ([wide[:4, 3:11], wide[:0, :8], wide[:, 12:20]], [wide[:4, :8], None, wide[:, 8:16]]):
        case.gradients = gradients
        _same(case.run(device), case.expect())


def test_a_feature_without_gradient_gives_nothing_and_is_counted(device: torch.device) -> None:
    counts = [30, 60, 20]
    slots = torch.cat([_slots(30, 15), torch.full((60,), 14).int(), _slots(20, 30) + 10])
    case = _case([RowWiseAdagrad()], 8, slots, counts)
    for missing in ([1], [0, 2], [0, 1, 2]):
        gradients = [None if f in missing else g for f, g in enumerate(case.gradients)]
        some = replace(case, gradients=gradients)
        _same(some.run(device), some.expect())
    rows, meta = replace(case, gradients=[None] * 3).run(device)
    assert torch.equal(rows.rows.view(torch.int32), case.source.rows.view(torch.int32))
    assert not torch.equal(meta.counts, case.meta.counts)


def test_a_set_flag_writes_nothing(device: torch.device) -> None:
    case = _case([Adam()], 8, _slots(80, 20))
    _same(case.run(device, flag=1), (case.source, case.meta))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("dim", [3, 16])
def test_half_precision_rows_are_rounded_by_chance(dtype: str, dim: int, device: torch.device) -> None:
    case = _case([Adagrad(lr=1e-3)], dim, _slots(50, 25), dtype=dtype, extra=3)
    _same(case.run(device), case.expect())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients(dtype: torch.dtype, device: torch.device) -> None:
    case = _case([SGD(lr=0.1)], 8, torch.cat([_slots(30, 9), torch.full((50,), 3).int()]))
    case.gradients = [case.gradients[0].to(dtype)]  # type: ignore[union-attr]
    _same(case.run(device), case.expect())


def test_gradients_that_autograd_expanded(device: torch.device) -> None:
    case = _case([SGD(lr=0.1)], 8, _slots(12, 5))
    for gradient in (torch.ones(1, 1).expand(12, 8), torch.randn(8).expand(12, 8), torch.randn(8, 12).t()):
        expected = replace(case, gradients=[gradient.contiguous()]).expect()
        _same(replace(case, gradients=[gradient]).run(device), expected)


def test_a_row_does_not_depend_on_its_slot_or_on_other_rows(device: torch.device) -> None:
    """The same run among others, at another slot, in the cache or in overflow: the same bits."""
    n = 150
    mine = torch.arange(n) % 3 == 0
    results = []
    for seed, slot in ((0, 3), (1, 38), (2, 41)):
        others = _slots(n, 30, seed) + 4
        case = _case([Adam()], 16, torch.where(mine, slot, others).int(), extra=5, seed=seed)
        fixed = torch.Generator().manual_seed(9)
        every = torch.cat([case.source.rows, case.source.extra])  # type: ignore[list-item]
        every[slot, :48] = torch.rand(48, generator=fixed)
        case.source = Source(every[:40], every[40:])
        case.gradients[0][mine] = torch.randn(50, 16, generator=fixed)  # type: ignore[index]
        case.keys[mine] = -77
        got = case.run(device)[0]
        results.append(torch.cat([got.rows, got.extra])[slot, :48])  # type: ignore[list-item]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_meta_may_be_two_columns_of_one_tensor(device: torch.device) -> None:
    case = _case([SGD(lr=0.1)], 8, _slots(50, 20))
    expected = case.expect()
    both = torch.stack([case.meta.last_steps, case.meta.counts], dim=1).to(device)
    source = Source(case.source.rows.clone().to(device))
    streams = torch.tensor([-12345], device=device)
    update(
        source, case.layout, 0, group(case.slots.to(device)), Items(*(x if x is None else x.to(device) for x in
        vars(case.items).values())), [case.gradients[0].to(device)], case.keys.to(device),
        [Coefficients((0.1,))], streams, None, STEP, 1.0, RowMetadata(both[:, 0], both[:, 1]),
        torch.zeros(1, dtype=torch.int32, device=device),
    )  # type: ignore[arg-type, union-attr]  # fmt: skip
    _same((Source(source.rows.cpu()), RowMetadata(both[:, 0].cpu(), both[:, 1].cpu())), expected)


def test_what_cannot_be_updated_is_refused(device: torch.device) -> None:
    case = _case([SGD(lr=0.1)], 8, _slots(5, 5))
    with pytest.raises(BatchError, match="1 features need as many gradients"):
        replace(case, gradients=[None, None]).run(device)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(BatchError, match="items_of_positions"):
        replace(case, items=Items(case.items.begins, case.items.tables, offsets)).run(device)
    with pytest.raises(BatchError, match="read-only"):
        replace(case, layout=RowLayout(8, (), "int8")).run(device)
