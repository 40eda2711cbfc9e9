"""LocalActivation: DIN's attention of a target over a history.

A small MLP over [target, item, target - item, target * item] weighs each item of the history, and the weighed items
are summed. As in the paper the weights are not normalised: many items similar to the target give a longer vector than
one such item. `normalize=True` applies a softmax.

The first layer never concatenates the four parts. With its weights split into Wt, Wi, Wd, Wp, it equals
(Wt + Wd) target + (Wi - Wd + Wp * target) item + b: one matrix per example that includes the target, and one batched
product over the items. On one core of a shared AMD EPYC, forward and backward of that layer at
512 examples x 200 items x 32 take 38 to 54 ms against 185 to 195 ms with concatenated parts (50 items x 16: 9
to 11 against 20 to 25 ms).

A masked item has weight exactly zero, so an empty history gives zeros, and padding changes no result.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hotrow.nn.mlp import MLP, activation_named, linear
from hotrow.nn.sizes import positive, widths


class LocalActivation(nn.Module):
    """Sum of a history's items, each weighed by its relevance to the target: `[batch, dim]`.

    >>> attention = LocalActivation(dim=4, hidden=(8,))
    >>> all_histories_empty = torch.zeros(2, 3, dtype=torch.bool)
    >>> attention(torch.ones(2, 4), torch.zeros(2, 3, 4), all_histories_empty).abs().sum().item()
    0.0
    """

    def __init__(
        self, dim: int, hidden: Iterable[int] = (80, 40), *, activation: str = "prelu", normalize: bool = False
    ) -> None:
        super().__init__()
        self.dim = positive("dim", dim)
        self.normalize = normalize
        first, *rest = (*widths("hidden", hidden), 1)
        self.first = linear(4 * dim, first)
        activate = activation_named(activation)
        self.rest = nn.Sequential(activate(), MLP(first, rest, activation=activation)) if rest else nn.Identity()

    def forward(self, target: Tensor, items: Tensor, mask: Tensor) -> Tensor:
        """`target` `[batch, dim]`, `items` `[batch, length, dim]`, `mask` bool `[batch, length]`; `[batch, dim]` out.

        Requires: masked items are finite (the collection pads with zeros).
        """
        weights = self.weights(target, items, mask)
        return torch.bmm(weights.unsqueeze(1), items).squeeze(1)

    def weights(self, target: Tensor, items: Tensor, mask: Tensor) -> Tensor:
        """The weight of each item, `[batch, length]`; zero where the mask is False."""
        scores: Tensor = self.rest(self._first(target, items)).squeeze(2)
        if self.normalize:
            lowest = torch.finfo(scores.dtype).min  # finite: a softmax over -inf alone would be NaN
            scores = torch.softmax(scores.masked_fill(~mask, lowest), dim=1)
        return scores.masked_fill(~mask, 0.0)

    def _first(self, target: Tensor, items: Tensor) -> Tensor:
        of_target, of_item, of_difference, of_product = self.first.weight.chunk(4, dim=1)
        constant = nn.functional.linear(target, of_target + of_difference, self.first.bias)
        folded = torch.addcmul(of_item - of_difference, of_product, target.unsqueeze(1))  # [batch, width, dim]
        return torch.baddbmm(constant.unsqueeze(1), items, folded.transpose(1, 2))
