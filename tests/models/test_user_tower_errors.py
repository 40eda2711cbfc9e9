"""Towers over histories refuse options and batches that do not match, and name the cure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from user_batches import DENSE, FEATURES, ITEMS, LONGEST, batch_of, make

from hotrow.errors import BatchError, OptionError
from hotrow.models import BST, SIM, History, JaggedDIN, SASRec


def bst(**options: Any) -> BST:
    given: dict[str, Any] = {"features": ["user", "item"], "histories": ["seen"], "target": "item", "dim": 4}
    return BST(**{**given, "width": 4, "heads": 2, **options})


def test_columns_of_one_history_with_other_lengths_are_named() -> None:
    vectors, dense = batch_of([3, 2], [0, 1])
    vectors["seen_action_lengths"] = torch.tensor([2, 3])
    with pytest.raises(
        BatchError, match=r"'seen_item' and 'seen_action' are columns of one history.*lengths differ; give"
    ):
        make("bst")(vectors, dense)


def test_a_history_longer_than_max_length_is_named() -> None:
    with pytest.raises(BatchError, match=rf"'seen_item' has {LONGEST + 1} events, but max_length={LONGEST}; keep the"):
        make("hstu")(*batch_of([LONGEST + 1], [0], searches=[0]))


def test_missing_and_misshapen_columns_are_named() -> None:
    tower = make("bst")
    vectors, dense = batch_of([3, 2], [0, 1])

    def refused(changes: Mapping[str, Tensor | None], match: str) -> None:
        changed = {key: vector for key, vector in {**vectors, **changes}.items() if vector is not None}
        with pytest.raises(BatchError, match=match):
            tower(changed, dense)

    refused({"seen_item": None}, r"no vectors for 'seen_item'; the collection gave: .*Add the feature to a table")
    refused({"item": None}, r"no vectors for 'item'")
    refused({"age": None}, r"no vectors for 'age'")
    refused({"seen_time_lengths": None}, r"no vectors for 'seen_time_lengths'")
    refused({"seen_item": torch.zeros(2, 9, 4), "seen_item_mask": torch.ones(2, 9).bool()}, r"came padded, but the")
    refused({"seen_item": torch.zeros(5, 3)}, r"'seen_item' came as \[5, 3\], but the tower reads events 4 wide")
    refused({"seen_time": torch.zeros(5)}, r"'seen_time' is torch.float32 \[5\]; give it as a number: int64 \[events\]")
    refused({"seen_item": torch.zeros(4, 4)}, r"'seen_item' has 4 events, but its lengths sum to 5")
    with pytest.raises(BatchError, match=rf"built with dense_features={DENSE} but the batch has 0"):
        tower(vectors)


def test_numbers_of_candidates_have_one_value_each() -> None:
    vectors, dense = batch_of([3, 2], [0, 1])
    with pytest.raises(BatchError, match=r"example 1 has 2 values of 'now'; give each example one"):
        make("hstu")(vectors | {"now_lengths": torch.tensor([1, 2]), "now": torch.zeros(3, dtype=torch.int64)}, dense)


def test_a_tower_that_is_not_causal_refuses_rows_that_see_a_beginning() -> None:
    vectors, dense = batch_of([3, 2], [0, 1])
    with pytest.raises(BatchError, match=r"has 'seen_item_visible', .* but this tower encodes whole histories"):
        make("sasrec")(vectors | {"seen_item_visible": torch.tensor([2, 2])}, dense)
    assert make("sasrec").prefixes is None


def test_a_part_that_reads_the_other_part_is_told_so() -> None:
    class Curious(BST):
        def score(
            self, vectors: Mapping[str, Tensor], encoding: Mapping[str, Tensor], dense: Tensor | None = None
        ) -> Tensor:
            return super().score(vectors, encoding, dense) + vectors["seen"].sum()

    class Early(BST):
        def encode_user(self, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {"item": vectors["item"]}

    vectors = {"seen": torch.zeros(3, 4), "seen_lengths": torch.tensor([3]), "user_of": torch.zeros(2).long()}
    vectors |= {"item": torch.zeros(2, 4), "user": torch.zeros(2, 4)}
    built: dict[str, Any] = {"features": ["user", "item"], "histories": ["seen"], "target": "item", "dim": 4}
    with pytest.raises(BatchError, match=r"score\(\) reads 'seen', which is a feature of the user .* the encoding"):
        Curious(**built, width=4, heads=2)(vectors)
    with pytest.raises(
        BatchError, match=r"encode_user\(\) reads 'item', which is no feature of the user \(seen\); rea"
    ):
        Early(**built, width=4, heads=2)(vectors)


def test_wrong_options_name_the_cure() -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(OptionError, match=match):
            bst(**options)

    refused(r"target has 'itm', which is not among the features; did you mean 'item'", target="itm")
    refused(r"target is empty; name the features", target=[])
    refused(r"user_features has 'usr', which is not among the features; did you mean 'user'", user_features=["usr"])
    refused(r"target 'item' is among user_features.*leave it out of user_features", user_features=["item"])
    refused(r"histories is empty; give at least one", histories=[])
    refused(r"a history is 3; give hr.models.History", histories=[3])
    refused(r"'user' is a column of a history and among the pooled features", histories=["user"])
    refused(r"column 'seen' is in two histories", histories=["seen", "seen"])
    refused(r"has column 'seen' twice", histories=[{"features": ["seen", "seen"]}])
    refused(r"history 'seen' has no widths; pass dim=", features={"user": 4, "item": 4}, dim=None)
    refused(r"time='when' is a column of a history", histories=[History(["seen"], times="when")], time="when")
    refused(r"max_length is 0", histories=[{"features": ["seen"], "max_length": 0}])
    refused(
        r"combine='add' of history 'seen'; Choose one of: concat, sum",
        histories=[{"features": "seen", "combine": "add"}],
    )
    refused(r"width=4 cannot be divided into heads=3", heads=3)
    refused(r"layers is 0", layers=0)


def test_searches_that_cannot_work_name_the_cure() -> None:
    with pytest.raises(OptionError, match=r"search='easy'; did you mean|search='easy'; Choose one of: hard, soft"):
        SIM(FEATURES, [ITEMS], "item", search="easy")
    with pytest.raises(OptionError, match=r"hard search needs category=, the number feature"):
        SIM(FEATURES, [ITEMS], "item", keep=3)
    with pytest.raises(OptionError, match=r"hard search over 'seen' needs categories= of the history.*max_length=3"):
        SIM(["item"], ["seen"], "item", 4, keep=3, category="category")
    with pytest.raises(
        OptionError, match=r"soft search compares the target, \[4\] wide, with .* \[3\] wide; list first"
    ):
        SIM({"item": 4}, [History({"seen": 3})], "item", keep=3, search="soft")


def test_towers_without_an_mlp_or_a_projection_say_what_they_cannot_read() -> None:
    with pytest.raises(
        OptionError, match=r"a dot product reads the histories and the target alone, not user; pass top"
    ):
        SASRec(["user", "item"], ["seen"], "item", 4)
    with pytest.raises(OptionError, match=r"history 'seen' is 3 wide but the target is 4; pass width= to project both"):
        JaggedDIN({"item": 4}, [History({"seen": 3})], "item")
