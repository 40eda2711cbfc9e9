"""A batch's lookup stage by stage: route, fetch or read, gather, accept, update, against loops over ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_table import HIGHEST, LOWEST, PlainTable, assert_same_bits, assert_same_rows
from torch import Tensor

from hotrow.batch import Jagged, KeyedBatch
from hotrow.errors import BatchError, GradientError
from hotrow.optim import SGD, Adagrad, Adam
from hotrow.table import Lookup, Table, TableRows
from hotrow.table.lookup import MergedLookup
from hotrow.tiers.feature_layout import Layout
from hotrow.tiers.host.store import Budget

OPTIMIZER = Adam(lr=0.1)
SEED = 5
TABLES = [
    Table("item", dim=3, features={"one": "sum", "bag": "mean", "path": "none"}, optimizer=Adagrad(lr=0.5)),
    Table("user", dim=8, features={"user": "sum"}),
]
WIDTH = 3 + 3 + 8

keys = st.sampled_from([0, -1, 5, LOWEST, HIGHEST, 1 << 40]) | st.integers(0, 20)


class Case:
    """A batch over both tables, the tables that it goes through, and their oracles."""

    def __init__(self, batch: KeyedBatch) -> None:
        self.batch = batch
        self.tables = [TableRows(table, OPTIMIZER, SEED, Budget()) for table in TABLES]
        self.plain = [PlainTable(table, OPTIMIZER, SEED) for table in TABLES]
        self.layout = Layout(self.tables)

    def lookup(self) -> Lookup:
        return Lookup(self.layout, self.batch).route()

    def ids_of(self, feature: str) -> list[list[tuple[int, float]]]:
        """Ids and weights of each example."""
        jagged = self.batch.ids[feature]
        weights = torch.ones(jagged.values.numel()) if jagged.weights is None else jagged.weights
        lengths = jagged.lengths().tolist()
        pairs = list(zip(jagged.values.tolist(), weights, strict=True))
        return [[pairs.pop(0) for _ in range(length)] for length in lengths]

    def pooled_by_loops(self) -> Tensor:
        rows = []
        for i in range(self.batch.size):
            parts = []
            for plain, feature, mean in (
                (self.plain[0], "one", 0),
                (self.plain[0], "bag", 1),
                (self.plain[1], "user", 0),
            ):
                total = torch.zeros(plain.dim)
                pairs = self.ids_of(feature)[i]
                for at, (key, weight) in enumerate(pairs):
                    value = plain.read([key])[0] * weight
                    total = value if at == 0 else total + value
                parts.append(total / len(pairs) if mean and pairs else total)
            rows.append(torch.cat(parts))
        return torch.stack(rows) if rows else torch.empty(0, WIDTH)

    def path_by_loops(self) -> Tensor:
        values = [self.plain[0].read([key])[0] * weight for row in self.ids_of("path") for key, weight in row]
        return torch.stack(values) if values else torch.empty(0, 3)

    def train_by_loops(self, pooled: Tensor, path: Tensor, step: int) -> None:
        item: list[tuple[int, Tensor]] = []
        for feature, columns in (("one", slice(0, 3)), ("bag", slice(3, 6))):
            for gradient, row in zip(pooled[:, columns], self.ids_of(feature), strict=True):
                share = torch.tensor(float(len(row) if feature == "bag" else 1))
                item += [(key, gradient * (weight / share)) for key, weight in row]
        steps = [pair for row in self.ids_of("path") for pair in row]
        item += [(key, gradient * weight) for (key, weight), gradient in zip(steps, path, strict=True)]
        user = [(row[0][0], gradient) for row, gradient in zip(self.ids_of("user"), pooled[:, 6:], strict=True)]
        for plain, pairs in zip(self.plain, (item, user), strict=True):
            plain.train([key for key, _ in pairs], [gradient for _, gradient in pairs], step)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(0, 5))

    def jagged(weighted: bool) -> Jagged:
        rows = [draw(st.lists(keys, max_size=4)) for _ in range(size)]
        plain = Jagged.from_lists(rows)
        if not weighted:
            return plain
        count = plain.values.numel()
        weights = draw(st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.3]), min_size=count, max_size=count))
        return Jagged(plain.values, plain.offsets, torch.tensor(weights))

    def single() -> Jagged:
        return Jagged(torch.tensor(draw(st.lists(keys, min_size=size, max_size=size)), dtype=torch.int64))

    return Case(
        KeyedBatch(
            {
                "one": single(),
                "bag": jagged(draw(st.booleans())),
                "path": jagged(draw(st.booleans())),
                "user": single(),
            }
        )
    )


def some(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def gathered(lookup: Lookup) -> tuple[Tensor, Tensor]:
    """The pooled matrix and the vectors of "path"."""
    pooled, outputs = lookup.gather()
    return pooled, outputs[2]


def accept(lookup: Lookup, pooled: Tensor | None, path: Tensor | None) -> None:
    """Gradients of the pooled matrix and of "path", cut into the features'."""
    cut = [None if pooled is None or not p.pooled else pooled[:, p.begin : p.end] for p in lookup.layout.outputs]
    lookup.accept([path if p.feature == "path" else c for p, c in zip(lookup.layout.outputs, cut, strict=True)])


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_stages_match_loops_over_the_ids(case: Case) -> None:
    for step in (1, 2):
        lookup = case.lookup().fetch()
        pooled, path = gathered(lookup)
        assert_same_bits(pooled, case.pooled_by_loops())
        assert_same_bits(path, case.path_by_loops())
        gradients = some(len(pooled), WIDTH, step), some(len(path), 3, -step)
        accept(lookup, gradients[0], gradients[1])
        lookup.update(step)
        case.train_by_loops(*gradients, step)
        for rows, plain in zip(case.tables, case.plain, strict=True):
            assert_same_rows(rows, plain)


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_reading_gives_what_fetching_would_and_creates_nothing(case: Case) -> None:
    read = gathered(case.lookup().read())
    assert [len(rows) for rows in case.tables] == [0, 0]
    fetched = gathered(case.lookup().fetch())
    assert_same_bits(read[0], fetched[0])
    assert_same_bits(read[1], fetched[1])


def whole_case() -> Case:
    return Case(
        KeyedBatch(
            {
                "one": Jagged(torch.tensor([1, 2, 1])),
                "bag": Jagged.from_lists([[1, 2, 3], [], [3]]),
                "path": Jagged.from_lists([[], [4, 1], [2]]),
                "user": Jagged(torch.tensor([7, 7, 7])),
            }
        )
    )


def test_a_second_arrival_of_gradients_is_added_to_the_first() -> None:
    case = whole_case()
    lookup = case.lookup().fetch()
    lookup.gather()
    first, second, path = some(3, WIDTH, 1), some(3, WIDTH, 2), some(3, 3, 3)
    accept(lookup, first, None)
    accept(lookup, second, path)
    lookup.update(1)
    case.train_by_loops(first + second, path, 1)
    assert_same_rows(case.tables[0], case.plain[0])
    assert_same_rows(case.tables[1], case.plain[1])


def test_features_without_gradient_are_counted_and_not_changed() -> None:
    case = whole_case()
    lookup = case.lookup().fetch()
    lookup.gather()
    before = case.tables[1].read(torch.tensor([7]))
    accept(lookup, None, some(3, 3))
    lookup.update(4)
    (user,) = case.tables[1].scan()
    assert (user.counts.tolist(), user.last_steps.tolist()) == ([3], [4])
    assert_same_bits(case.tables[1].read(torch.tensor([7])), before)


def test_lookups_that_are_merged_give_each_row_one_step_with_the_sum() -> None:
    case = whole_case()
    gradients = [(some(3, WIDTH, 1), some(3, 3, 2)), (some(3, WIDTH, 3), some(3, 3, 4))]
    lookups = []
    for pooled, path in gradients:
        lookup = case.lookup().fetch()
        lookup.gather()
        accept(lookup, pooled, path)
        lookups.append(lookup)
    MergedLookup(lookups).update(1)
    user = sum(pooled[:, 6:].sum(0) for pooled, _ in gradients)
    state = case.tables[1].state(next(case.tables[1].scan()))
    torch.testing.assert_close(state["m"][0], 0.1 * user)  # one step of Adam's mean, not two
    assert next(case.tables[1].scan()).counts.tolist() == [6]


def test_scaling_of_gradients_comes_before_the_rule() -> None:
    a, b = whole_case(), whole_case()
    for case, factor, scale in ((a, 1.0, 0.5), (b, 0.5, 1.0)):
        lookup = case.lookup().fetch()
        lookup.gather()
        accept(lookup, factor * some(3, WIDTH), factor * some(3, 3))
        lookup.update(1, grad_scale=scale)
    for ours, theirs in zip(a.tables, b.tables, strict=True):
        assert_same_bits(next(ours.scan()).values, next(theirs.scan()).values)


def test_gradients_of_any_layout_and_precision_are_understood() -> None:
    want, got = whole_case(), whole_case()
    gradient = some(3, WIDTH).bfloat16()
    transposed = gradient.double().t().contiguous().t()
    for case, given_gradient in ((want, gradient.float()), (got, transposed)):
        lookup = case.lookup().fetch()
        lookup.gather()
        accept(lookup, given_gradient, torch.ones(1, 1).expand(3, 3))
        lookup.update(1)
    for ours, theirs in zip(got.tables, want.tables, strict=True):
        assert_same_bits(next(ours.scan()).values, next(theirs.scan()).values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["pooled", "path"])
def test_a_gradient_that_is_not_finite_changes_no_row(bad: float, where: str) -> None:
    case = whole_case()
    lookup = case.lookup().fetch()
    lookup.gather()
    before = [next(rows.scan()) for rows in case.tables]
    pooled, path = some(3, WIDTH), some(3, 3)
    (pooled if where == "pooled" else path)[1, 2] = bad
    accept(lookup, pooled, path)
    with pytest.raises(GradientError, match="no row was changed"):
        lookup.update(1)
    for rows, was in zip(case.tables, before, strict=True):
        (now,) = rows.scan()
        assert_same_bits(now.values, was.values)
        assert now.counts.tolist() == was.counts.tolist() and now.last_steps.tolist() == was.last_steps.tolist()


def test_rows_erased_between_fetch_and_update_start_anew() -> None:
    case = whole_case()
    lookup = case.lookup().fetch()
    lookup.gather()
    accept(lookup, torch.zeros(3, WIDTH), None)
    case.tables[1].erase(torch.tensor([7]))
    case.tables[1].create(torch.tensor([8]))  # takes the free slot
    lookup.update(1)
    assert case.tables[1].contains(torch.tensor([7, 8])).tolist() == [True, True]
    assert_same_bits(case.tables[1].read(torch.tensor([8])), case.plain[1].read([8]))


def test_an_update_needs_gradients_and_a_feature_needs_ids() -> None:
    case = whole_case()
    with pytest.raises(BatchError, match="update before backward"):
        case.lookup().fetch().update(1)
    batch = KeyedBatch({name: ids for name, ids in case.batch.ids.items() if name != "bag"})
    with pytest.raises(BatchError, match=r"the batch has no feature 'bag'; .*Choose one of: one, path, user"):
        Lookup(case.layout, batch).route()


def test_ids_that_lie_apart_in_memory_are_refused() -> None:
    rows = TableRows(Table("t", dim=2), SGD(), 0, Budget())
    batch = KeyedBatch({"t": Jagged(torch.arange(6)[::2])})
    with pytest.raises(BatchError, match=r"contiguous CPU tensors; call .cpu\(\).contiguous\(\)"):
        Lookup(Layout([rows]), batch).route()


def test_offsets_changed_behind_our_back_are_still_refused() -> None:
    rows = TableRows(Table("t", dim=2), SGD(), 0, Budget())
    offsets = torch.tensor([0, 1, 2])
    batch = KeyedBatch({"t": Jagged(torch.arange(2), offsets)})
    offsets[1] = 1 << 40
    with pytest.raises(BatchError, match="offsets must start at 0, never fall, and end at the number of ids"):
        Lookup(Layout([rows]), batch).route()
    assert len(rows) == 0
