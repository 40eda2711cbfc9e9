"""Towers refuse options and inputs that do not match, when they are built or at the first batch, and name the cure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hotrow.errors import BatchError, OptionError
from hotrow.models import DIN, DLRM, DCNv2, DeepFM, WideAndDeep


@pytest.mark.parametrize("tower", [WideAndDeep, DeepFM, DLRM, DCNv2])
def test_lists_of_features_are_checked_by_every_tower(tower: type[DLRM]) -> None:
    with pytest.raises(OptionError, match=r"features name 'a' 2 times; name each feature once"):
        tower(["a", "b", "a"], 4)
    with pytest.raises(OptionError, match=r"features is 'ab'; give a list of names"):
        tower("ab", 4)
    with pytest.raises(OptionError, match=r"features is empty; name at least one"):
        tower([], 4)
    with pytest.raises(OptionError, match=r"features hold '', which is not a name"):
        tower(["a", ""], 4)
    with pytest.raises(OptionError, match=r"dim is missing; pass dim="):
        tower(["a", "b"])
    with pytest.raises(OptionError, match=r"dim=4 beside features that carry their own widths; leave dim out"):
        tower({"a": 4, "b": 4}, 4)
    with pytest.raises(OptionError, match=r"the width of feature 'b' is 0"):
        tower({"a": 4, "b": 0})
    with pytest.raises(OptionError, match=r"dense_features is -1"):
        tower(["a", "b"], 4, dense_features=-1)


def test_dot_products_need_one_width() -> None:
    for tower, why in ((DLRM, "a dot product"), (DeepFM, "the factorization machine")):
        with pytest.raises(OptionError, match=rf"feature 'b' is 8 wide but 'a' is 4, and {why} needs one width; give"):
            tower({"a": 4, "b": 8})


def test_sizes_that_leave_a_part_without_input_are_refused() -> None:
    with pytest.raises(OptionError, match=r"one feature and no dense ones make no pair"):
        DLRM(["a"], 4)
    with pytest.raises(OptionError, match=r"every feature is 1 wide, which is its wide weight"):
        WideAndDeep(["a", "b"], 1)
    with pytest.raises(OptionError, match=r"features are 1 wide.* give their tables dim=1 \+ the vector's width"):
        DeepFM(["a", "b"], 1)


def test_din_wants_its_target_among_the_pooled_features_and_its_history_not() -> None:
    with pytest.raises(OptionError, match=r"target 'itm' is not among the features; did you mean 'item'"):
        DIN(["user", "item"], "seen", "itm", 4)
    with pytest.raises(OptionError, match=r"history 'user' is among the pooled features; leave it out of features="):
        DIN(["user", "item"], "user", "item", 4)


def test_a_missing_or_misshapen_vector_is_named_at_forward() -> None:
    tower = DLRM(["a", "b"], 4, top=(3,))
    a = torch.zeros(2, 4)
    with pytest.raises(BatchError, match=r"no vectors for 'b'; the collection gave: a, c. Add the feature to a table"):
        tower({"a": a, "c": a}, None)
    with pytest.raises(BatchError, match=r"feature 'b' came as \[2, 5\], but the tower reads one vector 4 wide"):
        tower({"a": a, "b": torch.zeros(2, 5)}, None)
    with pytest.raises(BatchError, match=r"feature 'b' came as \[2, 3, 4\].* pool the feature"):
        tower({"a": a, "b": torch.zeros(2, 3, 4)}, None)


@pytest.mark.parametrize(
    ("built", "dense", "came"), [(0, torch.zeros(2, 3), 3), (3, None, 0), (3, torch.zeros(2, 4), 4)]
)
def test_dense_features_of_another_number_are_refused(built: int, dense: Tensor | None, came: int) -> None:
    tower = DCNv2(["a"], 4, dense_features=built, deep=(3,))
    with pytest.raises(BatchError, match=rf"built with dense_features={built} but the batch has {came}; build it with"):
        tower({"a": torch.zeros(2, 4)}, dense)


def test_dense_of_no_columns_is_no_dense() -> None:
    tower = DLRM(["a", "b"], 4, top=(3,))
    vectors = {"a": torch.ones(2, 4), "b": torch.ones(2, 4)}
    assert torch.equal(tower(vectors, torch.zeros(2, 0)), tower(vectors, None))


def test_a_history_that_was_pooled_or_has_no_mask_is_named() -> None:
    tower = DIN(["item"], "seen", "item", 4, attention=(3,), top=(3,))
    item, mask = torch.zeros(2, 4), torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(BatchError, match=r"no vectors for 'seen_mask'"):
        tower({"item": item, "seen": torch.zeros(2, 5, 4)}, None)
    with pytest.raises(BatchError, match=r"feature 'seen' came as \[2, 4\].* leave the feature unpooled"):
        tower({"item": item, "seen": item, "seen_mask": mask}, None)
    with pytest.raises(BatchError, match=r"'seen_mask' is torch.float32 of 2 dimensions; give bool"):
        tower({"item": item, "seen": torch.zeros(2, 5, 4), "seen_mask": mask.float()}, None)
