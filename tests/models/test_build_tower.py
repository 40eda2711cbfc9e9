"""Towers by name, as in a job file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hotrow.errors import OptionError
from hotrow.models import (
    BST,
    DIN,
    DLRM,
    HSTU,
    SIM,
    DCNv2,
    DeepFM,
    JaggedDIN,
    SASRec,
    UserTower,
    WideAndDeep,
    build_tower,
)

FEATURES = {"user": 4, "item": 4}


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("wide_and_deep", WideAndDeep, {"deep": [8], "dropout": 0.1}),
        ("deepfm", DeepFM, {"deep": [8]}),
        ("dlrm", DLRM, {"bottom": [8], "top": [8, 4]}),
        ("dcn_v2", DCNv2, {"layers": 2, "rank": 3, "experts": 2, "deep": []}),
    ],
)
def test_every_name_builds_its_tower(name: str, kind: type[nn.Module], options: dict[str, Any]) -> None:
    tower = build_tower(name, features=FEATURES, dense_features=3, **options)
    assert type(tower) is kind
    assert tower({"user": torch.ones(2, 4), "item": torch.ones(2, 4)}, torch.ones(2, 3)).shape == (2,)


def test_din_takes_the_only_sequence_as_its_history() -> None:
    tower = build_tower("din", features=FEATURES, sequences={"seen": 4}, target="item", attention=[3], top=[3])
    assert isinstance(tower, DIN)
    assert (tower.history, tower.target) == ("seen", "item")


def test_widths_come_from_the_features() -> None:
    tower = build_tower("dcn_v2", features={"user": 16, "country": 3}, layers=1, deep=[4])
    assert isinstance(tower, DCNv2)
    assert tower.deep.in_features == 19


def test_unknown_towers_and_options_list_the_right_ones() -> None:
    with pytest.raises(OptionError, match=r"tower 'dlmr' does not exist; did you mean 'dlrm'"):
        build_tower("dlmr", features=FEATURES)
    with pytest.raises(OptionError, match=r"'dlrm' has no option 'tops'; did you mean 'top'.*: bottom, top, head$"):
        build_tower("dlrm", features=FEATURES, tops=[8])
    with pytest.raises(OptionError, match=r"'dlrm' has no option 'dim'"):
        build_tower("dlrm", features=FEATURES, dim=4)
    with pytest.raises(OptionError, match=r"top is '8'; give the widths"):
        build_tower("dlrm", features=FEATURES, top="8")


def test_histories_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(OptionError, match=r"'dlrm' reads pooled features only, but seen is not pooled"):
        build_tower("dlrm", features=FEATURES, sequences={"seen": 4})
    with pytest.raises(OptionError, match=r"'din' needs a history, but no feature is unpooled"):
        build_tower("din", features=FEATURES, target="item")
    with pytest.raises(OptionError, match=r"'din' needs target=. Choose one of: user, item"):
        build_tower("din", features=FEATURES, sequences={"seen": 4})
    with pytest.raises(OptionError, match=r"'din' needs history=. Choose one of: seen, bought"):
        build_tower("din", features=FEATURES, sequences={"seen": 4, "bought": 4}, target="item")
    with pytest.raises(OptionError, match=r"history 'sen' is not there; did you mean 'seen'"):
        build_tower("din", features=FEATURES, sequences={"seen": 4}, history="sen", target="item")
    with pytest.raises(OptionError, match=r"reads one history, 'seen', but 'bought' is unpooled too; pool it"):
        build_tower("din", features=FEATURES, sequences={"seen": 4, "bought": 4}, history="seen", target="item")
    with pytest.raises(OptionError, match=r"history 'seen' is 8 wide but target 'item' is 4; give both one table"):
        build_tower("din", features=FEATURES, sequences={"seen": 8}, target="item")


SEQUENCES = {"seen": 4, "action": 2}
HISTORIES = [{"features": ["seen", "action"], "times": "seen_time", "max_length": 20}]


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("bst", BST, {"heads": 2, "layers": 2, "interaction": "dot", "positions": "relative", "time": "now"}),
        ("hstu", HSTU, {"heads": 2, "interaction": "cross", "checkpoint": True}),
        ("sasrec", SASRec, {"top": [8]}),
        ("sim", SIM, {"search": "soft", "keep": 5}),
        ("jagged_din", JaggedDIN, {"attention": [4]}),
    ],
)
def test_towers_over_histories_take_their_widths_from_the_tables(
    name: str, kind: type[UserTower], options: dict[str, Any]
) -> None:
    tower = build_tower(
        name, features=FEATURES, dense_features=3, sequences=SEQUENCES, histories=HISTORIES, target="item", width=8,
        user_features=["user"], **options,
    )  # fmt: skip
    assert isinstance(tower, kind)
    assert tower.user_features == ("seen", "action", "seen_time", "user")
    assert tower.aligned == (("seen", "action", "seen_time"),)
    assert tower.max_lengths == {"seen": 20, "action": 20, "seen_time": 20}
    assert tower.histories[0].widths == SEQUENCES


def test_the_only_sequence_is_the_history() -> None:
    tower = build_tower("bst", features=FEATURES, sequences={"seen": 4}, target="item", width=8)
    assert isinstance(tower, BST) and tower.histories[0].name == "seen"
    tower = build_tower("bst", features=FEATURES, sequences={"seen": 4}, histories="seen", target=["item"], width=8)
    assert isinstance(tower, BST) and tower.user_features == ("seen",)


def test_histories_of_a_job_file_that_cannot_be_read_are_refused() -> None:
    def build(**options: Any) -> nn.Module:
        given = {"features": FEATURES, "sequences": SEQUENCES, "target": "item", "histories": HISTORIES}
        return build_tower("bst", **(given | options))

    with pytest.raises(OptionError, match=r"'bst' needs a history, but no feature is unpooled"):
        build(sequences={})
    with pytest.raises(OptionError, match=r"'bst' needs histories=, which says which of seen, action are columns"):
        build(histories=None)
    with pytest.raises(OptionError, match=r"'bst' needs target=. Choose one of: user, item"):
        build_tower("bst", features=FEATURES, sequences={"seen": 4})
    with pytest.raises(OptionError, match=r"history 'sen' is not there; did you mean 'seen'"):
        build(histories=["sen"])
    with pytest.raises(OptionError, match=r"no history of tower 'bst' reads 'action', which is unpooled; add it, or"):
        build(histories=["seen"])
    with pytest.raises(OptionError, match=r"a history has no option 'length'; did you mean 'max_length'"):
        build(histories=[{"features": ["seen", "action"], "length": 5}])
    with pytest.raises(OptionError, match=r"a history has no features"):
        build(histories=[{"max_length": 5}])
    with pytest.raises(OptionError, match=r"'bst' has no option 'positons'; did you mean 'positions'"):
        build(positons="none")
    with pytest.raises(OptionError, match=r"positions='absolute'; Choose one of: learned, relative, none"):
        build(positions="absolute")
    with pytest.raises(OptionError, match=r"interaction='dots'; did you mean 'dot'"):
        build(interaction="dots")
