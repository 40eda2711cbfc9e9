"""Each tower's logit against its formula, written out for one example at a time over its own layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hotrow.models import DIN, DLRM, DCNv2, DeepFM, WideAndDeep
from hotrow.nn.cross import CrossLayer


def random_vectors(widths: dict[str, int], batch: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(batch, width) for name, width in widths.items()}


def check(logits: Tensor, expected: list[Tensor]) -> None:
    torch.testing.assert_close(logits, torch.stack(expected))


@pytest.mark.parametrize("dense_features", [0, 2])
def test_wide_and_deep_takes_the_first_column_as_wide_weight(dense_features: int) -> None:
    widths = {"user": 4, "cross": 1, "item": 3}
    vectors, dense = random_vectors(widths), torch.randn(4, dense_features)
    tower = WideAndDeep(widths, dense_features=dense_features, deep=(6,))
    expected = []
    for example in range(4):
        wide = sum((vectors[name][example, 0] for name in widths), torch.zeros(()))
        if tower.wide_dense is not None:
            wide = wide + (tower.wide_dense.weight[0] * dense[example]).sum()
        deep = torch.cat([*(vectors[name][example, 1:] for name in widths), dense[example]])
        expected.append(wide + tower.deep(deep))
    check(tower(vectors, dense if dense_features else None), expected)


@pytest.mark.parametrize("dense_features", [0, 2])
def test_deepfm_adds_all_pairs_of_vectors(dense_features: int) -> None:
    names = ["a", "b", "c"]
    vectors, dense = random_vectors(dict.fromkeys(names, 5)), torch.randn(4, dense_features)
    tower = DeepFM(names, 5, dense_features=dense_features, deep=(6,))
    expected = []
    for example in range(4):
        rows = [vectors[name][example] for name in names]
        logit = sum((row[0] for row in rows), torch.zeros(()))
        for later in range(3):
            for earlier in range(later):
                logit = logit + rows[later][1:] @ rows[earlier][1:]
        if tower.first_order_dense is not None:
            logit = logit + (tower.first_order_dense.weight[0] * dense[example]).sum()
        expected.append(logit + tower.deep(torch.cat([*(row[1:] for row in rows), dense[example]])))
    check(tower(vectors, dense if dense_features else None), expected)


@pytest.mark.parametrize("dense_features", [0, 2])
def test_dlrm_feeds_its_top_with_bottom_and_pairs(dense_features: int) -> None:
    names = ["a", "b", "c"]
    vectors, dense = random_vectors(dict.fromkeys(names, 5)), torch.randn(4, dense_features)
    tower = DLRM(names, 5, dense_features=dense_features, bottom=(6,), top=(7,))
    expected = []
    for example in range(4):
        rows = [vectors[name][example] for name in names]
        head = []
        if tower.bottom is not None:
            head = [tower.bottom(dense[example])]
            rows = head + rows
        pairs = [rows[later] @ rows[earlier] for later in range(len(rows)) for earlier in range(later)]
        expected.append(tower.top(torch.cat([*head, torch.stack(pairs)])))
    check(tower(vectors, dense if dense_features else None), expected)


def test_dlrm_of_the_published_shape_has_the_published_layers() -> None:
    tower = DLRM([f"C{place}" for place in range(1, 27)], 16, dense_features=13)
    assert tower.bottom is not None
    assert [tuple(weight.shape) for weight in tower.bottom.parameters() if weight.dim() == 2] == [
        (512, 13),
        (256, 512),
        (16, 256),
    ]
    assert [tuple(weight.shape) for weight in tower.top.parameters() if weight.dim() == 2] == [
        (1024, 16 + 27 * 26 // 2),
        (1024, 1024),
        (512, 1024),
        (256, 512),
        (1, 256),
    ]


@pytest.mark.parametrize(("dense_features", "rank"), [(0, None), (2, 3)])
def test_dcn_v2_crosses_the_whole_input(dense_features: int, rank: int | None) -> None:
    widths = {"a": 2, "b": 5}
    vectors, dense = random_vectors(widths), torch.randn(4, dense_features)
    tower = DCNv2(widths, dense_features=dense_features, layers=2, rank=rank, deep=(6,))
    expected = []
    for example in range(4):
        start = torch.cat([vectors["a"][example], vectors["b"][example], dense[example]])
        x = start
        for cross in tower.cross:
            assert isinstance(cross, CrossLayer)
            thin = x if cross.inward is None else cross.inward(x)
            x = start * cross.outward(thin) + x
        expected.append(tower.deep(x))
    check(tower(vectors, dense if dense_features else None), expected)


@pytest.mark.parametrize("dense_features", [0, 2])
def test_din_reads_features_then_interest_then_dense(dense_features: int) -> None:
    widths = {"user": 3, "item": 5}
    vectors, dense = random_vectors(widths), torch.randn(4, dense_features)
    vectors["seen"] = torch.randn(4, 6, 5)
    vectors["seen_mask"] = torch.rand(4, 6) < 0.5
    tower = DIN(widths, "seen", "item", dense_features=dense_features, attention=(4,), top=(6,))
    expected = []
    for example in range(4):
        alone = slice(example, example + 1)
        interest = tower.attention(vectors["item"][alone], vectors["seen"][alone], vectors["seen_mask"][alone])[0]
        reads = [vectors["user"][example], vectors["item"][example], interest, dense[example]]
        expected.append(tower.top(torch.cat(reads)))
    check(tower(vectors, dense if dense_features else None), expected)


def test_state_of_a_tower_holds_weights_only() -> None:
    tower = DLRM(["a", "b"], 4, top=(3,))
    assert set(tower.state_dict()) == {name for name, _ in tower.named_parameters()}
