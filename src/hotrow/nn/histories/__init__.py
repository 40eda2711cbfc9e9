"""Layers over histories in jagged form: events `[events, dim]` and the number of each user's, `lengths` `[users]`.

    segments.py          which user an event belongs to, its place, last event and mean of a user, rows grouped by user
    positions.py         LearnedPositions, RelativeBias
    encoder_block.py     EncoderBlock: one layer over events, and over candidates behind them
    transformer.py       TransformerBlock
    hstu.py              HSTUBlock
    target_attention.py  TargetAttention: candidates over a history by softmax; SelectedAttention: over k events of each
    local_activation.py  JaggedLocalActivation: DIN's MLP over candidates and events
    search.py            the k events of a long history that matter to a candidate: by category, or by similarity

The events of user 0 come first, then those of user 1, each oldest first. There may be more events than the sum of the
lengths, because a compiled bucket pads at the end. What lies there reaches no result, as long as it is finite. The cost
of a layer follows the number of events, not users x longest. Every layer exports with free numbers of users, events and
rows, of at least one each.

Queries of candidates are rows grouped by user (`segments.group_rows`). Imported by models. Any thread may run a layer
that is not being trained.
"""

from hotrow.nn.histories.hstu import HSTUBlock
from hotrow.nn.histories.local_activation import JaggedLocalActivation
from hotrow.nn.histories.positions import LearnedPositions, RelativeBias
from hotrow.nn.histories.target_attention import SelectedAttention, TargetAttention
from hotrow.nn.histories.transformer import TransformerBlock

__all__ = [
    "HSTUBlock",
    "JaggedLocalActivation",
    "LearnedPositions",
    "RelativeBias",
    "SelectedAttention",
    "TargetAttention",
    "TransformerBlock",
]
