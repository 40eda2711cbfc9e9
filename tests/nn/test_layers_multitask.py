"""Heads of several tasks against a plain reference that computes one row, expert and task at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hotrow.errors import OptionError
from hotrow.models import DIN, DLRM, DCNv2, DeepFM, WideAndDeep, build_tower
from hotrow.nn import PLE, MMoE, SharedBottom
from hotrow.nn.multitask import StackedMLP
from hotrow.task import Task

TASKS = ["click", "like", "dwell"]


def one_mlp(stack: StackedMLP, number: int, x: Tensor) -> Tensor:
    """MLP `number` of a stack, for one row."""
    last = len(stack.weights) - 1
    for place in range(last + 1):
        x = x @ stack.weights[place][number] + stack.biases[place][number, 0]
        if place < last or stack.last_activation:
            x = torch.relu(x)
    return x


def mixture(gate: Tensor, outputs: list[Tensor]) -> Tensor:
    shares = gate.exp() / gate.exp().sum()
    return sum((share * output for share, output in zip(shares, outputs, strict=True)), torch.zeros(()))


def plain_shared_bottom(head: SharedBottom, row: Tensor) -> list[Tensor]:
    bottom = row
    if not isinstance(head.bottom, nn.Identity):
        for layer in head.bottom.layers:
            bottom = layer(bottom)
    return [one_mlp(head.towers.mlp, task, bottom)[0] for task in range(len(head.task_names))]


def plain_mmoe(head: MMoE, row: Tensor) -> list[Tensor]:
    count = head.experts.count
    outputs = [one_mlp(head.experts, expert, row) for expert in range(count)]
    logits = []
    for task in range(len(head.task_names)):
        gate = head.gates.weight[task * count : (task + 1) * count] @ row
        logits.append(one_mlp(head.towers.mlp, task, mixture(gate, outputs))[0])
    return logits


def plain_ple(head: PLE, row: Tensor) -> list[Tensor]:
    tasks = len(head.task_names)
    streams = [row] * (tasks + 1)
    for level in head.levels:
        own = [
            [one_mlp(level.own_experts, task * level.own + one, streams[task]) for one in range(level.own)]
            for task in range(tasks)
        ]
        shared = [one_mlp(level.shared_experts, one, streams[tasks]) for one in range(level.shared)]
        following = [mixture(level.gates[task].weight @ streams[task], own[task] + shared) for task in range(tasks)]
        if level.shared_gate is not None:
            everyone = [output for outputs in own for output in outputs] + shared
            following.append(mixture(level.shared_gate.weight @ streams[tasks], everyone))
        streams = following
    return [one_mlp(head.towers.mlp, task, streams[task])[0] for task in range(tasks)]


CASES: list[tuple[Callable[[int], nn.Module], Callable[..., list[Tensor]]]] = [
    (partial(SharedBottom, tasks=TASKS, bottom=(6, 5), tower=(4,)), plain_shared_bottom),
    (partial(SharedBottom, tasks=["click"], tower=()), plain_shared_bottom),
    (partial(MMoE, tasks=TASKS, experts=4, expert=(6, 5), tower=(4,)), plain_mmoe),
    (partial(MMoE, tasks=["click"], experts=1, expert=(3,), tower=()), plain_mmoe),
    (partial(PLE, tasks=TASKS, levels=3, shared_experts=2, task_experts=3, expert=(6, 5), tower=(4,)), plain_ple),
    (partial(PLE, tasks=["click"], levels=1, shared_experts=1, task_experts=1, expert=(3,), tower=()), plain_ple),
]


@pytest.mark.parametrize(("make", "plain"), CASES)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_head_gives_the_logits_and_gradients_of_its_formula(
    make: Callable[[int], nn.Module], plain: Callable[..., list[Tensor]], rows: int
) -> None:
    torch.manual_seed(rows)
    head = make(8).double()
    for weight in head.parameters():
        nn.init.normal_(weight, std=0.5)  # biases too
    x = torch.randn(rows, 8, dtype=torch.float64, requires_grad=True)
    logits = head(x)
    assert logits.shape == (rows, len(head.task_names))
    if rows == 0:
        return
    expected = torch.stack([torch.stack(plain(head, row)) for row in x])
    torch.testing.assert_close(logits, expected)
    pull = torch.randn_like(logits)
    ours = torch.autograd.grad((logits * pull).sum(), [x, *head.parameters()])
    theirs = torch.autograd.grad((expected * pull).sum(), [x, *head.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("wide_and_deep", WideAndDeep, {"deep": [8]}),
        ("deepfm", DeepFM, {"deep": [8]}),
        ("dlrm", DLRM, {"bottom": [8], "top": []}),
        ("dcn_v2", DCNv2, {"layers": 1, "deep": [6]}),
    ],
)
def test_every_tower_ends_in_a_head_by_name(name: str, kind: type[nn.Module], options: dict[str, object]) -> None:
    head = {"kind": "ple", "levels": 1, "expert": [5], "tower": []}
    tower = build_tower(
        name, features={"user": 4, "item": 4}, dense_features=3, tasks=[Task("a"), Task("b")], head=head, **options
    )
    assert type(tower) is kind
    assert tower({"user": torch.ones(2, 4), "item": torch.ones(2, 4)}, torch.ones(2, 3)).shape == (2, 2)


def test_din_ends_in_a_head_too() -> None:
    tower = DIN(["item"], "seen", "item", 4, attention=(3,), top=(5,), head=partial(MMoE, tasks=TASKS, expert=(4,)))
    vectors = {"item": torch.ones(2, 4), "seen": torch.ones(2, 3, 4), "seen_mask": torch.ones(2, 3, dtype=torch.bool)}
    assert tower(vectors, None).shape == (2, 3)


def test_the_wide_part_is_added_to_the_logit_of_each_task() -> None:
    tower = WideAndDeep({"user": 3, "cross": 1}, deep=(4,), head=lambda width: nn.Linear(width, 2))
    vectors = {"user": torch.randn(5, 3), "cross": torch.randn(5, 1)}
    moved = {**vectors, "cross": vectors["cross"] + 2.0}
    torch.testing.assert_close(tower(moved, None), tower(vectors, None) + 2.0)


def test_wrong_heads_are_named_with_the_cure() -> None:
    with pytest.raises(OptionError, match=r"task 'click' is there 2 times"):
        MMoE(4, ["click", "click"])
    with pytest.raises(OptionError, match="give a list of names"):
        MMoE(4, "click")
    with pytest.raises(OptionError, match="expert is empty"):
        PLE(4, ["click"], expert=())
    with pytest.raises(OptionError, match=r"task_experts is 0"):
        PLE(4, ["click"], task_experts=0)
    features = {"user": 4, "item": 4}
    with pytest.raises(OptionError, match=r"2 tasks need a head: give \[tower\] head = one of shared_bottom"):
        build_tower("dlrm", features=features, tasks=["a", "b"])
    with pytest.raises(OptionError, match=r"head 'mmo' does not exist; did you mean 'mmoe'"):
        build_tower("dlrm", features=features, tasks=["a"], head="mmo")
    with pytest.raises(OptionError, match=r"head 'mmoe' has no option 'expers'; did you mean 'expert"):
        build_tower("dlrm", features=features, tasks=["a"], head={"kind": "mmoe", "expers": 3})
    with pytest.raises(OptionError, match=r"head 'mmoe' without tasks; list them in \[\[tasks\]\]"):
        build_tower("dlrm", features=features, head="mmoe")
