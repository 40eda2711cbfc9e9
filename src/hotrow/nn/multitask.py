"""Heads of several tasks: modules from `[rows, width]` to logits `[rows, tasks]`, in the order of the tasks.

    SharedBottom  one MLP that all tasks read
    MMoE          experts that all tasks read, each by a gate of its own (multi-gate mixture of experts)
    PLE           levels of shared experts and of experts of one task (progressive layered extraction)

Each ends in a small MLP per task. Experts and these MLPs are stacked: their weights are `[count, in, out]`, so one
batched matrix product computes a layer of all of them. A layer then takes as many kernels for 16 experts as for one.

A head fits any tower: `hr.models.DLRM(..., head=partial(hr.nn.MMoE, tasks=["click", "like"]))`. `task_names` is what a
trainer compares with its tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hotrow.errors import OptionError
from hotrow.nn.mlp import MLP, activation_named, linear
from hotrow.nn.sizes import at_least, positive, widths
from hotrow.task import Task, task_names

Head = Callable[[int], nn.Module]
"""A factory: from the width of a head's input to the head."""


class StackedMLP(nn.Module):
    """`count` MLPs of one shape side by side, each with weights of its own.

    `[rows, in]` (all read the same) or `[count, rows, in]` in, `[count, rows, widths[-1]]` out. An activation follows
    each layer but the last, or each with `last_activation=True`.

    >>> StackedMLP(4, 8, (16, 2))(torch.zeros(5, 8)).shape
    torch.Size([4, 5, 2])
    """

    def __init__(
        self,
        count: int,
        in_features: int,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        last_activation: bool = False,
    ) -> None:
        super().__init__()
        self.count = positive("count", count)
        width = positive("in_features", in_features)
        self.activation = activation_named(activation)()
        self.last_activation = last_activation
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for size in sizes:
            weight = torch.empty(count, width, size)
            for one in weight:
                nn.init.xavier_uniform_(one)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(count, 1, size)))
            width = size
        self.out_features = width

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in]` or `[count, rows, in]` in, `[count, rows, out_features]` out."""
        if x.dim() == 2:
            x = x.unsqueeze(0).expand(self.count, -1, -1)
        last = len(self.weights) - 1
        for place, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x, weight)
            if place < last or self.last_activation:
                x = self.activation(x)
        return x


class TaskTowers(nn.Module):
    """A small MLP per task: `[tasks, rows, in]` or `[rows, in]` in, logits `[rows, tasks]` out.

    >>> TaskTowers(3, 8, (4,))(torch.zeros(3, 5, 8)).shape
    torch.Size([5, 3])
    """

    def __init__(self, tasks: int, in_features: int, tower: Sequence[int]) -> None:
        super().__init__()
        self.mlp = StackedMLP(tasks, in_features, (*widths("tower", tower), 1))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, `[rows, tasks]`."""
        logits: Tensor = self.mlp(x)
        return logits.squeeze(2).transpose(0, 1)


class SharedBottom(nn.Module):
    """One MLP of `bottom` widths, then an MLP of `tower` widths per task.

    >>> SharedBottom(32, tasks=["click", "like"], bottom=(16,), tower=(8,))(torch.zeros(5, 32)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        in_features: int,
        tasks: Sequence[Task | str],
        *,
        bottom: Sequence[int] = (),
        tower: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        self.task_names = task_names(tasks)
        width, sizes = positive("in_features", in_features), widths("bottom", bottom)
        self.bottom = MLP(width, sizes, last_activation=True) if sizes else nn.Identity()
        self.towers = TaskTowers(len(self.task_names), sizes[-1] if sizes else width, tower)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in_features]` in, logits `[rows, tasks]` out."""
        logits: Tensor = self.towers(self.bottom(x))
        return logits


class MMoE(nn.Module):
    """A mixture of `experts` MLPs with a gate per task, then an MLP of `tower` widths per task.

    A gate is a softmax over the experts of a linear map of the input. `expert` are the widths of one expert, with an
    activation after each.

    >>> head = MMoE(32, tasks=["click", "like"], experts=4, expert=(16,), tower=(8,))
    >>> head(torch.zeros(5, 32)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        in_features: int,
        tasks: Sequence[Task | str],
        *,
        experts: int = 8,
        expert: Sequence[int] = (256, 128),
        tower: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        self.task_names = task_names(tasks)
        width, count = positive("in_features", in_features), positive("experts", experts)
        self.experts = StackedMLP(count, width, _expert_widths(expert), last_activation=True)
        self.gates = linear(width, len(self.task_names) * count, bias=False)
        self.towers = TaskTowers(len(self.task_names), self.experts.out_features, tower)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in_features]` in, logits `[rows, tasks]` out."""
        outputs: Tensor = self.experts(x)
        gates = torch.softmax(self.gates(x).view(-1, len(self.task_names), self.experts.count), dim=2)
        mixed = torch.bmm(gates.to(outputs.dtype), outputs.transpose(0, 1))
        logits: Tensor = self.towers(mixed.transpose(0, 1))
        return logits


class PLE(nn.Module):
    """`levels` of shared experts and of experts of one task, then an MLP of `tower` widths per task.

    At every level each task has a stream, and there is one shared stream; all begin as the input. A task's next stream
    mixes the outputs of its own `task_experts` and of the `shared_experts`, by a gate that reads its stream. The next
    shared stream mixes the outputs of all experts. `expert` are the widths of one expert.

    >>> head = PLE(32, tasks=["click", "like"], levels=2, expert=(16,), tower=(8,))
    >>> head(torch.zeros(5, 32)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        in_features: int,
        tasks: Sequence[Task | str],
        *,
        levels: int = 2,
        shared_experts: int = 2,
        task_experts: int = 2,
        expert: Sequence[int] = (256, 128),
        tower: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        self.task_names = task_names(tasks)
        count, width = len(self.task_names), positive("in_features", in_features)
        self.levels = nn.ModuleList()
        for level in range(positive("levels", levels)):
            last = level == levels - 1
            self.levels.append(_ExtractionLevel(width, count, task_experts, shared_experts, expert, last))
            width = _expert_widths(expert)[-1]
        self.towers = TaskTowers(count, width, tower)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in_features]` in, logits `[rows, tasks]` out."""
        streams = x.unsqueeze(0).expand(len(self.task_names) + 1, -1, -1)
        for level in self.levels:
            streams = level(streams)
        logits: Tensor = self.towers(streams)
        return logits


class _ExtractionLevel(nn.Module):
    """Streams `[tasks + 1, rows, in]`, the shared one last, to the next; the last level gives no shared stream."""

    def __init__(self, width: int, tasks: int, own: int, shared: int, expert: Sequence[int], last: bool) -> None:
        super().__init__()
        self.tasks, self.own = tasks, at_least(1, "task_experts", own)
        self.shared = at_least(1, "shared_experts", shared)
        self.own_experts = StackedMLP(tasks * own, width, _expert_widths(expert), last_activation=True)
        self.shared_experts = StackedMLP(shared, width, _expert_widths(expert), last_activation=True)
        self.gates = nn.ModuleList(linear(width, own + shared, bias=False) for _ in range(tasks))
        self.shared_gate = None if last else linear(width, tasks * own + shared, bias=False)

    def forward(self, streams: Tensor) -> Tensor:
        """The next streams, `[tasks + 1, rows, out]` or, from the last level, `[tasks, rows, out]`."""
        of_tasks = streams[: self.tasks].unsqueeze(1).expand(-1, self.own, -1, -1)
        own: Tensor = self.own_experts(of_tasks.flatten(0, 1))
        shared: Tensor = self.shared_experts(streams[self.tasks])
        following = [
            _mix(gate(streams[task]), torch.cat([own[task * self.own : (task + 1) * self.own], shared]))
            for task, gate in enumerate(self.gates)
        ]
        if self.shared_gate is not None:
            following.append(_mix(self.shared_gate(streams[self.tasks]), torch.cat([own, shared])))
        return torch.stack(following)


def _mix(gate: Tensor, outputs: Tensor) -> Tensor:
    """The sum of experts' `outputs` `[experts, rows, out]`, weighted by softmax of `gate` `[rows, experts]`."""
    weights = torch.softmax(gate, dim=1).to(outputs.dtype).unsqueeze(1)
    return torch.bmm(weights, outputs.transpose(0, 1)).squeeze(1)


def _expert_widths(expert: Sequence[int]) -> tuple[int, ...]:
    sizes = widths("expert", expert)
    if not sizes:
        raise OptionError("expert is empty; an expert needs at least one layer, for instance expert=(256, 128)")
    return sizes
