"""Sparse optimizers: the state of a row beside its values, and how a gradient updates both.

The C++ core, the GPU kernels and the tests all use the one description here. An optimizer is a frozen value with three
methods:

- `state(dim)`: the parts of a row's optimizer state, in the order in which they follow the values in memory;
- `coefficients(step)`: the float32 numbers that the rule needs at that step (learning rate after its schedule, bias
  corrections). They are computed once per step, so that every implementation reads the same bits;
- `rule(...)`: the update in plain torch. It is the reference: core/optim/rules.h agrees with it bit for bit.

To add an optimizer, write its class here and its rule in core/optim/ and in kernels/rows/rules.py.

Rules are *lazy*: only a batch that contains a row's key touches the row. So Adam's moments and AdamW's decay of a row
do not change on other steps, and bias correction follows the table's step, as in torch's SparseAdam.

Duplicates of a key within a batch are summed first, in batch order; `clip_value` (each element) and `clip_norm` (the
norm of a row's summed gradient) are applied after that. `lr` may be a number or a schedule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from hotrow.errors import OptionError, choices


@dataclass(frozen=True)
class Schedule:
    """A learning rate that changes with the step: linear warm-up, then constant, cosine or exponential decay.

    >>> Schedule(0.1, warmup=10).at(5)
    0.05
    >>> round(Schedule(0.1, decay="cosine", steps=100).at(50), 6)
    0.05
    """

    lr: float
    warmup: int = 0
    decay: str = "constant"
    steps: int = 0
    rate: float = 0.5
    floor: float = 0.0

    def __post_init__(self) -> None:
        _positive("lr", self.lr)
        if self.decay not in ("constant", "cosine", "exponential"):
            raise OptionError(f"decay={self.decay!r}: {choices(self.decay, ['constant', 'cosine', 'exponential'])}")
        _positive("rate", self.rate)
        for name in ("warmup", "steps", "floor"):
            _not_negative(name, getattr(self, name))
        if self.decay != "constant" and self.steps < 1:
            raise OptionError(f"decay={self.decay!r} needs steps= (over how many steps), got {self.steps}")

    def at(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 1."""
        if step < self.warmup:
            return self.lr * step / self.warmup
        done = (step - self.warmup) / max(1, self.steps)
        if self.decay == "cosine":
            return self.floor + (self.lr - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if self.decay == "exponential":
            return max(self.floor, self.lr * math.pow(self.rate, done))
        return self.lr


@dataclass(frozen=True)
class StatePart:
    """One part of a row's optimizer state: its name, how many floats, and what a new row starts with."""

    name: str
    width: int
    initial: float = 0.0


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base of the sparse optimizers. Compare, hash and print them like any value."""

    lr: float | Schedule = 0.01
    clip_value: float | None = None
    clip_norm: float | None = None

    code: ClassVar[int]  # RuleKind in core/optim/rule_kind.h

    def __post_init__(self) -> None:
        if not isinstance(self.lr, Schedule):
            _positive("lr", self.lr)
        for name in ("clip_value", "clip_norm"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for option in (field.name for field in fields(self)):
            if option == "eps":
                _positive(option, getattr(self, option))
            elif option in ("initial_accumulator", "weight_decay", "beta", "l1", "l2"):
                _not_negative(option, getattr(self, option))

    def lr_at(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 1."""
        return self.lr.at(step) if isinstance(self.lr, Schedule) else self.lr

    def width(self, dim: int) -> int:
        """Floats in a row: its values and its state."""
        return dim + sum(part.width for part in self.state(dim))

    @abstractmethod
    def state(self, dim: int) -> tuple[StatePart, ...]:
        """The parts of the state, in the order in which they follow the values."""

    @abstractmethod
    def coefficients(self, step: int) -> tuple[float, ...]:
        """The numbers that the rule reads at update number `step`, counted from 1."""

    @abstractmethod
    def rule(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], c: tuple[float, ...]) -> None:
        """Update values `w` [n, dim] and `state` in place with gradients `g` [n, dim]. The reference."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; `from_dict` reads it back."""
        values = asdict(self)
        return {"kind": type(self).__name__, **{k: v for k, v in values.items() if v is not None}}


@dataclass(frozen=True)
class SGD(Optimizer):
    """w -= lr * g.

    >>> SGD(lr=0.1).width(16)
    16
    """

    code: ClassVar[int] = 0

    def state(self, dim: int) -> tuple[StatePart, ...]:
        return ()

    def coefficients(self, step: int) -> tuple[float, ...]:
        return (self.lr_at(step),)

    def rule(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], c: tuple[float, ...]) -> None:
        w -= c[0] * g


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad with one accumulator per element.

    >>> Adagrad(lr=0.1).width(16)
    32
    """

    eps: float = 1e-8
    initial_accumulator: float = 0.0

    code: ClassVar[int] = 1

    def state(self, dim: int) -> tuple[StatePart, ...]:
        return (StatePart("sum", dim, self.initial_accumulator),)

    def coefficients(self, step: int) -> tuple[float, ...]:
        return (self.lr_at(step), self.eps)

    def rule(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], c: tuple[float, ...]) -> None:
        lr, eps = c
        state["sum"] += g * g
        w -= lr * g / (square_root(state["sum"]) + eps)


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row: the running sum of the gradient's mean square. Four bytes of state a row.

    >>> RowWiseAdagrad(lr=0.1).width(16)
    17
    """

    eps: float = 1e-8
    initial_accumulator: float = 0.0

    code: ClassVar[int] = 2

    def state(self, dim: int) -> tuple[StatePart, ...]:
        return (StatePart("sum", 1, self.initial_accumulator),)

    def coefficients(self, step: int) -> tuple[float, ...]:
        return (self.lr_at(step), self.eps)

    def rule(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], c: tuple[float, ...]) -> None:
        lr, eps = c
        state["sum"] += sum_of_squares(g).unsqueeze(1) / w.shape[1]
        w -= torch.tensor(lr) / (square_root(state["sum"]) + eps) * g


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, lazy: moments of a row move only when its key is seen.

    >>> Adam(lr=1e-3).width(16)
    48
    """

    lr: float | Schedule = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    code: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.betas, (list, tuple)):
            object.__setattr__(self, "betas", tuple(self.betas))
        if not isinstance(self.betas, tuple) or len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise OptionError(f"betas={self.betas}: give two numbers from 0 up to, not including, 1")

    def state(self, dim: int) -> tuple[StatePart, ...]:
        return (StatePart("m", dim), StatePart("v", dim))

    def coefficients(self, step: int) -> tuple[float, ...]:
        b1, b2 = self.betas
        return (
            self.lr_at(step) / (1 - b1**step),
            1 / math.sqrt(1 - b2**step),
            self.eps,
            b1,
            1 - b1,
            b2,
            1 - b2,
            self._decay_factor(step),
        )

    def _decay_factor(self, step: int) -> float:
        return 1.0

    def rule(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], c: tuple[float, ...]) -> None:
        step_size, unbias, eps, b1, a1, b2, a2, decay = c
        m, v = state["m"], state["v"]
        m.copy_(b1 * m + a1 * g)
        v.copy_(b2 * v + a2 * g * g)
        w.copy_(decay * w - step_size * m / (square_root(v) * unbias + eps))


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, applied to the rows that a batch touches.

    >>> AdamW(lr=1e-3, weight_decay=0.01).width(16)
    48
    """

    weight_decay: float = 0.01

    code: ClassVar[int] = 4

    def _decay_factor(self, step: int) -> float:
        return 1.0 - self.lr_at(step) * self.weight_decay


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-proximal (McMahan et al., 2013): sparse weights under l1.

    >>> FTRL(lr=0.1, l1=1.0).width(1)
    3
    """

    lr: float | Schedule = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    code: ClassVar[int] = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lr, Schedule) and self.lr.decay != "constant" and self.lr.floor == 0:
            raise OptionError("FTRL divides by its learning rate, which this schedule takes to 0; give it floor=")

    def state(self, dim: int) -> tuple[StatePart, ...]:
        return (StatePart("z", dim), StatePart("n", dim))

    def coefficients(self, step: int) -> tuple[float, ...]:
        return (1 / self.lr_at(step), self.beta, self.l1, self.l2)

    def rule(self, w: Tensor, g: Tensor, state: Mapping[str, Tensor], c: tuple[float, ...]) -> None:
        rate, beta, l1, l2 = c
        z, n = state["z"], state["n"]
        old_root = square_root(n)
        n += g * g
        root = square_root(n)
        z += g - (root - old_root) * rate * w
        shrunk = torch.where(z > 0, z - l1, z + l1)
        value = -shrunk / ((beta + root) * rate + l2)
        w.copy_(torch.where(z.abs() <= l1, torch.zeros_like(w), value))


KINDS: dict[str, type[Optimizer]] = {kind.__name__: kind for kind in (SGD, Adagrad, RowWiseAdagrad, Adam, AdamW, FTRL)}


def from_dict(values: Mapping[str, Any]) -> Optimizer:
    """An optimizer from plain values, such as a job file's `[optimizer]`. Names are matched without case.

    >>> from_dict({"kind": "adam", "lr": 0.01})
    Adam(lr=0.01, clip_value=None, clip_norm=None, betas=(0.9, 0.999), eps=1e-08)
    """
    options = dict(values)
    name = str(options.pop("kind", ""))
    found = {known.lower(): kind for known, kind in KINDS.items()}.get(name.lower().replace("_", ""))
    if found is None:
        raise OptionError(f"optimizer kind={name!r}: {choices(name, KINDS)}")
    _check_names(f"optimizer {found.__name__}", options, found)
    if isinstance(options.get("lr"), Mapping):
        _check_names("schedule", options["lr"], Schedule)
        options["lr"] = Schedule(**options["lr"])
    return found(**options)


def sum_of_squares(g: Tensor) -> Tensor:
    """Sum of squares of each row in the core's order: over lanes i % 8, then the lanes as a tree."""
    padded = torch.nn.functional.pad(g, (0, -g.shape[1] % 8))
    lanes = torch.zeros(g.shape[0], 8)
    for chunk in padded.split(8, dim=1):
        lanes = lanes + chunk * chunk
    a, b, c, d = (lanes[:, i] + lanes[:, i + 4] for i in range(4))
    return (a + c) + (b + d)


def square_root(x: Tensor) -> Tensor:
    """The correctly rounded square root, computed in float64: torch's float32 one is up to one bit off on CPU (MKL)."""
    return x.double().sqrt().to(x.dtype)


def clip(g: Tensor, clip_value: float | None, clip_norm: float | None) -> Tensor:
    """Clip gradients, elements first, then each row's norm. The reference for the core and the kernels."""
    if clip_value is not None:
        g = g.clamp(-clip_value, clip_value)
    if clip_norm is not None:
        norm = square_root(sum_of_squares(g)).unsqueeze(1)
        g = torch.where(norm > clip_norm, g * (torch.tensor(clip_norm) / norm), g)
    return g


def _check_names(where: str, options: Mapping[str, Any], kind: type[Optimizer] | type[Schedule]) -> None:
    known = [field.name for field in fields(kind)]
    for option in options:
        if option not in known:
            raise OptionError(f"{where} has no option {option!r}; {choices(option, known)}")


def _not_negative(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and value >= 0 and math.isfinite(value)):
        raise OptionError(f"{name}={value!r}: give a number that is 0 or above")


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and value > 0 and math.isfinite(value)):
        raise OptionError(f"{name}={value!r}: give a number above 0")
