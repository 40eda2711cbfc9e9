"""MLP: the stack of linear layers inside every tower.

Weights start Xavier-uniform and biases at zero, so a square layer keeps the variance of its input. torch's default
scales the signal by 1/sqrt(3) per layer, which matters over the five layers of a ranking model. Activations are looked
up by name in `ACTIVATIONS`, because a job file can only contain a name.

Left out on purpose: batch norm and DIN's Dice. Their statistics include padding and depend on how examples are divided
into batches. The same examples on another number of ranks, or padded to another bucket, would train another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from hotrow.errors import OptionError, choices
from hotrow.nn.sizes import fraction, positive, widths

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "prelu": nn.PReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def activation_named(name: str) -> Callable[[], nn.Module]:
    """A factory of the activation with this name.

    >>> activation_named("relu")()
    ReLU()
    """
    if name not in ACTIVATIONS:
        raise OptionError(f"activation {name!r} does not exist; {choices(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def linear(in_features: int, out_features: int, *, bias: bool = True) -> nn.Linear:
    """A linear layer with Xavier-uniform weights and zero bias.

    >>> linear(3, 2).bias.tolist()
    [0.0, 0.0]
    """
    layer = nn.Linear(in_features, out_features, bias=bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Module):
    """Linear layers of the given widths, an activation and dropout after each but the last.

    `last_activation=True` puts the activation after the last layer too, as in DLRM's bottom MLP. Works on the last
    dimension: `[..., in_features]` in, `[..., widths[-1]]` out.

    >>> import torch
    >>> MLP(13, (64, 16))(torch.zeros(5, 13)).shape
    torch.Size([5, 16])
    """

    def __init__(
        self,
        in_features: int,
        widths: Iterable[int],
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        last_activation: bool = False,
    ) -> None:
        super().__init__()
        sizes = _layer_widths(widths)
        make_activation = activation_named(activation)
        dropout = fraction("dropout", dropout)
        layers: list[nn.Module] = []
        width = positive("in_features", in_features)
        for place, size in enumerate(sizes):
            layers.append(linear(width, size))
            if last_activation or place < len(sizes) - 1:
                layers.append(make_activation())
                if dropout:
                    layers.append(nn.Dropout(dropout))
            width = size
        self.in_features = in_features
        self.out_features = width
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` in, `[..., out_features]` out."""
        out: Tensor = self.layers(x)
        return out


def _layer_widths(values: Iterable[int]) -> tuple[int, ...]:
    sizes = widths("widths", values)
    if not sizes:
        raise OptionError("widths is empty; an MLP needs at least one layer, for instance widths=(64, 16)")
    return sizes
