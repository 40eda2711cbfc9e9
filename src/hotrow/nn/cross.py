"""CrossLayer: one layer of Deep & Cross Network v2.

A layer multiplies the network's input x0 elementwise with a linear map of the previous layer's output x, and adds x:
x' = x0 * (W x + b) + x. After n layers, every product of up to n + 1 inputs has been formed.

W is full (`rank=None`), or a product U V of two thin matrices, which costs 2 x rank x features instead of features
squared. With `experts` above 1 the thin maps become a gated mixture of small non-linear ones, as in the paper:
the sum over experts of gate(x) * (U tanh(C tanh(V x)) + b). Since the gates sum to one, they are applied before U, and
the U of all experts are one matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotrow.errors import OptionError
from hotrow.nn.mlp import linear
from hotrow.nn.sizes import positive


class CrossLayer(nn.Module):
    """x' = x0 * (W x + b) + x, over `[batch, features]`.

    >>> layer = CrossLayer(3, rank=2)
    >>> layer(torch.ones(4, 3), torch.ones(4, 3)).shape
    torch.Size([4, 3])
    """

    def __init__(self, features: int, *, rank: int | None = None, experts: int = 1) -> None:
        super().__init__()
        positive("features", features)
        self.experts = positive("experts", experts)
        if rank is None and experts > 1:
            raise OptionError(f"experts={experts} without a rank; a mixture has low-rank maps, so pass rank= too")
        thin = features if rank is None else experts * positive("rank", rank)
        self.inward = None if rank is None else linear(features, thin, bias=False)
        self.outward = linear(thin, features)
        if rank is not None and experts > 1:
            self.core = nn.Parameter(torch.empty(experts, rank, rank))
            for expert in range(experts):
                nn.init.xavier_uniform_(self.core[expert])
            self.gate = linear(features, experts)

    def forward(self, start: Tensor, x: Tensor) -> Tensor:
        """`start` is the network's input x0, `x` the output of the previous layer; both `[batch, features]`."""
        mapped: Tensor = self.outward(self._thin(x))
        return start * mapped + x

    def _thin(self, x: Tensor) -> Tensor:
        if self.inward is None:
            return x
        thin: Tensor = self.inward(x)
        if self.experts == 1:
            return thin
        thin = torch.tanh(thin).view(x.shape[0], self.experts, self.core.shape[1])
        thin = torch.tanh(torch.einsum("ber,esr->bes", thin, self.core))
        gates = torch.softmax(self.gate(x), dim=1)
        return (thin * gates.unsqueeze(2)).flatten(1)
