"""TowerTop: the end of a tower, either one logit per row or a head's logits of several tasks.

Without a head it is an MLP with a last layer of width 1, and gives `[rows]`. With a head (nn/multitask.py) it is the
hidden layers alone, each with its activation, and the head reads the last of them and gives `[rows, tasks]`. With no
hidden layers the head reads the input.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hotrow.errors import OptionError
from hotrow.nn.mlp import MLP
from hotrow.nn.multitask import Head
from hotrow.nn.sizes import positive


class TowerTop(nn.Module):
    """Hidden layers of the given widths, then one logit or `head`.

    `head` is a factory: it is called with the width that it will read, and returns a module from `[rows, width]` to
    `[rows, tasks]`.

    >>> import torch
    >>> TowerTop(8, (16,))(torch.zeros(5, 8)).shape
    torch.Size([5])
    >>> TowerTop(8, (16,), lambda width: nn.Linear(width, 3))(torch.zeros(5, 8)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        head: Head | None = None,
        *,
        activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.head = None
        self.in_features = positive("in_features", in_features)
        if head is None:
            self.layers = MLP(in_features, (*widths, 1), activation=activation, dropout=dropout).layers
            return
        if not callable(head):
            raise OptionError(
                f"head={head!r}: give a function from the width it reads to a module, such as "
                "functools.partial(hr.nn.MMoE, tasks=['click', 'like'])"
            )
        width, self.layers = self.in_features, nn.Sequential()
        if widths:
            mlp = MLP(in_features, widths, activation=activation, dropout=dropout, last_activation=True)
            width, self.layers = mlp.out_features, mlp.layers
        self.head = head(width)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in_features]` in; logits `[rows]`, or `[rows, tasks]` with a head."""
        out: Tensor = self.layers(x)
        logits: Tensor = out.squeeze(-1) if self.head is None else self.head(out)
        return logits


def add_to_each_task(logits: Tensor, shared: Tensor) -> Tensor:
    """Logits `[rows]` or `[rows, tasks]` plus a number per row, `[rows]`, that all tasks share."""
    return shared + logits if logits.dim() == 1 else shared.unsqueeze(1) + logits
