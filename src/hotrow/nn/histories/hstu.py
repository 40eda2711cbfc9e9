"""HSTUBlock: the layer of Hierarchical Sequential Transduction Units.

One projection gives a gate u, values v, queries q and keys k, all through SiLU. Attention is pointwise: the sum of
silu(q.k + bias) v, without a softmax, so that many similar events weigh more than one. It is normalised and gated:
x + out(norm(attention) * u). There is no feed-forward layer.

The published layer divides the sum by the longest length. The norm behind it makes the result independent of that
divisor, but for the norm's epsilon, which a sum over few events divided by 1,024 would fall below. So the divisor is 1.
"""

from __future__ import annotations

from torch import Tensor, nn

from hotrow.nn.histories.encoder_block import EncoderBlock
from hotrow.nn.mlp import linear


class HSTUBlock(EncoderBlock):
    """One HSTU layer over jagged events, with biases of position (`positions` distances, 0: none) and time.

    >>> import torch
    >>> block = HSTUBlock(8, heads=2, positions=16)
    >>> x, keys = block(torch.randn(5, 8), torch.tensor([3, 0, 2]))
    >>> x.shape
    torch.Size([5, 8])
    """

    kind = "silu"

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = True,
        positions: int = 0,
        times: bool = False,
        dropout: float = 0.0,
        checkpoint: bool = False,
    ) -> None:
        super().__init__(
            width,
            heads,
            gates=1,
            causal=causal,
            positions=positions,
            times=times,
            dropout=dropout,
            checkpoint=checkpoint,
        )
        self.attention_norm = nn.LayerNorm(width)
        self.out = linear(width, width)

    def _activated(self, raw: Tensor) -> Tensor:
        return nn.functional.silu(raw)

    def _finished(self, x: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
        out: Tensor = x + self.out(self.dropout(self.attention_norm(seen) * gate))
        return out
