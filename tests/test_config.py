"""Memory budgets and initial values: the options and their errors."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hotrow.config import Initial, Memory
from hotrow.errors import OptionError
from hotrow.optim import Adam
from hotrow.table import Table


@pytest.mark.parametrize("text", ["0.5B", "0.0001KiB", "0.4"])
def test_a_size_below_one_byte_is_refused_and_never_means_no_limit(text: str) -> None:
    with pytest.raises(OptionError, match="dram"):
        Memory(dram=text)


def test_memory_without_a_limit_has_none() -> None:
    assert Memory().dram_bytes == 0
    assert Memory(dram="4GiB").dram_bytes == 4 << 30
    assert Memory(dram=1000).dram_bytes == 1000
    assert Memory().hbm_bytes == 0 and Memory(hbm="8GiB").hbm_bytes == 8 << 30


@pytest.mark.parametrize("option", [{"dram": "lots"}, {"hbm": "some"}, {"ssd": "rows"}])
def test_memory_names_the_tier_that_it_cannot_give(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(option))}="):
        Memory(**option)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Initial("unifrm"), r"initial kind='unifrm': did you mean 'uniform'"),
        (lambda: Initial.uniform(0.5, -0.5), "uniform from 0.5 to -0.5: give the lower bound first"),
        (lambda: Initial.normal(0.0, -1.0), "standard deviation -1.0"),
        (lambda: Initial.constant(math.nan), "must be finite"),
        (lambda: Initial.uniform(-math.inf, 0.0), "must be finite"),
        (lambda: Initial.from_dict({"kind": "normal", "std": 1.0}), "initial has no option 'std'"),
    ],
)
def test_initial_values_that_make_no_sense_are_refused(make: Any, why: str) -> None:
    with pytest.raises(OptionError, match=why):
        make()


def test_an_initial_value_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="initial"):
        Initial.from_dict({"kind": "normal", "a": "0.1"})


@pytest.mark.parametrize("value", [1e39, -1e39])
def test_initial_values_beyond_float32_are_refused(value: float) -> None:
    with pytest.raises(OptionError, match="initial"):
        Initial.constant(value)


def test_a_uniform_range_wider_than_float32_is_refused() -> None:
    """Its width would be infinite, and a draw of zero NaN."""
    with pytest.raises(OptionError, match="uniform"):
        Initial.uniform(-3e38, 3e38)


@pytest.mark.parametrize(
    "initial", [Initial(), Initial.zeros(), Initial.constant(2.0), Initial.uniform(0.0, 1.0), Initial.normal(1.0, 2.0)]
)
def test_initial_values_survive_the_way_through_a_dict(initial: Initial) -> None:
    assert Initial.from_dict(initial.to_dict()) == initial


@pytest.mark.parametrize(
    "table",
    [
        Table("user", dim=8),
        Table("item", 3, {"item": "sum", "history": "none"}, Initial.zeros(), Adam(lr=0.5)),
        Table("tag", 1, ["tags", "topics"]),
    ],
)
def test_a_table_survives_the_way_through_a_dict(table: Table) -> None:
    again = Table.from_dict(table.to_dict())
    assert again.poolings == table.poolings and again.optimizer == table.optimizer
    assert (again.name, again.dim, again.initial) == (table.name, table.dim, table.initial)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"name": "", "dim": 2}, "non-empty name"),
        ({"name": "a/b", "dim": 2}, "without '/'"),
        ({"name": ".a", "dim": 2}, "leading '.'"),
        ({"name": "a", "dim": 0}, r"dim=0; give a whole number from 1 to 65536"),
        ({"name": "a", "dim": 65537}, "dim=65537"),
        ({"name": "a", "dim": 2.0}, "dim=2.0"),
        ({"name": "a", "dim": 2, "features": "a"}, r"features='a' is one string; write \['a'\]"),
        ({"name": "a", "dim": 2, "features": {"a": "max"}}, "feature 'a' has pooling 'max'"),
        ({"name": "a", "dim": 2, "dims": 2}, "table 'a' has no option 'dims'; did you mean 'dim'"),
        ({"name": "a"}, "a table needs 'dim'"),
        ({}, "a table needs 'name'; got nothing"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_with_the_cure(options: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        Table.from_dict(options)


def test_a_feature_listed_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="'a'"):
        Table("t", dim=2, features=["a", "a"])
