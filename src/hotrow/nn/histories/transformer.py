"""TransformerBlock: self-attention and a feed-forward layer over the events of each user.

Norms come first (pre-norm), which trains without a warm-up: x + attention(norm(x)), then x + feed_forward(norm(x)).
After the last block the caller normalises once more.
"""

from __future__ import annotations

from torch import Tensor, nn

from hotrow.nn.histories.encoder_block import EncoderBlock
from hotrow.nn.mlp import MLP, linear
from hotrow.nn.sizes import positive


class TransformerBlock(EncoderBlock):
    """One Transformer layer over jagged events, causal or bidirectional.

    `positions` is the number of distances in events that have a learned bias (0: none), `times` adds a learned bias of
    the distance in time. The feed-forward layer is `expansion` x `width` wide.

    >>> import torch
    >>> block = TransformerBlock(8, heads=2)
    >>> x, keys = block(torch.randn(5, 8), torch.tensor([3, 0, 2]))
    >>> x.shape, keys.shape
    (torch.Size([5, 8]), torch.Size([5, 2, 2, 4]))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = True,
        positions: int = 0,
        times: bool = False,
        expansion: int = 4,
        dropout: float = 0.0,
        activation: str = "gelu",
        checkpoint: bool = False,
    ) -> None:
        super().__init__(
            width,
            heads,
            gates=0,
            causal=causal,
            positions=positions,
            times=times,
            dropout=dropout,
            checkpoint=checkpoint,
        )
        self.out = linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        hidden = positive("expansion", expansion) * width
        self.feed_forward = MLP(width, (hidden, width), activation=activation, dropout=dropout)

    def _finished(self, x: Tensor, gate: Tensor, seen: Tensor) -> Tensor:
        x = x + self.dropout(self.out(seen))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out
