"""JaggedLocalActivation: DIN's attention of candidates over their user's history, in jagged form.

The same function and the same weights as `hotrow.nn.attention.LocalActivation`: a small MLP over [target, item,
target - item, target * item] weighs each event, and the weighted events are summed.

It runs over the pairs of a candidate and an event of its user, and over no others. Their number is known only when the
batch is, and a hidden layer of every pair would be large. So the whole is one operator, `hotrow::local_activation`: its
output is as large as its candidates (which export needs), it takes a bounded number of pairs at a time, and its
backward pass computes them again. It reads the lengths on the host, so a GPU waits for it and no CUDA graph can hold
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotrow.nn.attention import LocalActivation
from hotrow.nn.histories.segments import first_events

PAIRS_AT_ONCE = {"cpu": 2_048, "cuda": 1 << 20}
"""Of one call of the MLP. On a CPU the hidden layers of a chunk stay in its cache: the forward pass over 512,000 pairs
of width 32 takes 165 ms in chunks of 2,048 and 441 ms in chunks of 32,768 (medians of 9 in turns, one core of a shared
AMD EPYC). On a GPU a chunk has to be worth its launches."""

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class JaggedLocalActivation(LocalActivation):
    """Sum of a user's events, each weighed by its relevance to a candidate: `[rows, dim]`. Zeros without events.

    >>> attention = JaggedLocalActivation(dim=4, hidden=(8,))
    >>> attention(torch.ones(3, 4), torch.ones(5, 4), torch.tensor([2, 1]), torch.tensor([5, 0])).shape
    torch.Size([3, 4])
    """

    def __init__(
        self, dim: int, hidden: Iterable[int] = (80, 40), *, activation: str = "prelu", normalize: bool = False
    ) -> None:
        super().__init__(dim, hidden, activation=activation, normalize=normalize)
        self.activation = activation

    def forward(  # type: ignore[override]
        self, candidates: Tensor, events: Tensor, rows: Tensor, lengths: Tensor, visible: Tensor | None = None
    ) -> Tensor:
        """`candidates` `[rows, dim]` grouped by user: user `u` has `rows[u]` of them and `lengths[u]` of the events.

        `visible` int64 `[rows]`: how many events each candidate sees, if not all.
        """
        weights: list[Tensor] = list(self.parameters())
        if torch.is_autocast_enabled(events.device.type):
            dtype = torch.get_autocast_dtype(events.device.type)
            candidates, events = candidates.to(dtype), events.to(dtype)
            weights = [weight.to(dtype) for weight in weights]
        out: Tensor = torch.ops.hotrow.local_activation(
            candidates, events, rows, lengths, visible, weights, self.activation, self.normalize
        )
        return out


@torch.library.custom_op("hotrow::local_activation", mutates_args=())
def _operator(
    candidates: Tensor,
    events: Tensor,
    rows: Tensor,
    lengths: Tensor,
    visible: Tensor | None,
    weights: list[Tensor],
    activation: str,
    normalize: bool,
) -> Tensor:
    out = torch.zeros_like(candidates, memory_format=torch.contiguous_format)
    for piece in _chunks(rows, lengths, visible):
        out[piece.rows] = _weighted(candidates, events, piece, weights, activation, normalize)
    return out


@_operator.register_fake
def _shape(candidates: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(candidates, memory_format=torch.contiguous_format)


def _gradients(
    gradient: Tensor,
    candidates: Tensor,
    events: Tensor,
    rows: Tensor,
    lengths: Tensor,
    visible: Tensor | None,
    weights: list[Tensor],
    activation: str,
    normalize: bool,
) -> list[Tensor]:
    found = [torch.zeros_like(tensor) for tensor in (candidates, events, *weights)]
    for piece in _chunks(rows, lengths, visible):
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (candidates[piece.rows], events[piece.events])]
            leaves += [weight.detach().requires_grad_() for weight in weights]
            near = piece.moved()
            out = _weighted(leaves[0], leaves[1], near, leaves[2:], activation, normalize)
            parts = torch.autograd.grad(out, leaves, gradient[piece.rows], materialize_grads=True)
        found[0][piece.rows] += parts[0]
        found[1][piece.events] += parts[1]
        for total, part in zip(found[2:], parts[2:], strict=True):
            total += part
    return found


def _gradient_shapes(
    gradient: Tensor,
    candidates: Tensor,
    events: Tensor,
    rows: Tensor,
    lengths: Tensor,
    visible: Tensor | None,
    weights: list[Tensor],
    *_: Any,
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (candidates, events, *weights)]


# Not a custom_op: those run where autograd records nothing, and `_gradients` uses autograd for a chunk.
_library = torch.library.Library("hotrow", "FRAGMENT")
_library.define(
    "local_activation_backward(Tensor gradient, Tensor candidates, Tensor events, Tensor rows, Tensor lengths, "
    "Tensor? visible, Tensor[] weights, str activation, bool normalize) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("local_activation_backward", _gradients, "CompositeExplicitAutograd")
_library.impl("local_activation_backward", _gradient_shapes, "Meta")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    candidates, events, rows, lengths, visible, weights, *ctx.options = inputs
    ctx.save_for_backward(candidates, events, rows, lengths, visible, *weights)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    candidates, events, rows, lengths, visible, *weights = ctx.saved_tensors
    of_candidates, of_events, *of_weights = torch.ops.hotrow.local_activation_backward(
        gradient.contiguous(), candidates, events, rows, lengths, visible, weights, *ctx.options
    )
    return of_candidates, of_events, None, None, None, of_weights, None, None


_operator.register_autograd(_backward, setup_context=_save)


class _Chunk:
    """Some rows, the events that they see, and their pairs."""

    def __init__(self, rows: slice, events: slice, counts: Tensor, firsts: Tensor) -> None:
        self.rows, self.events, self.counts, self.firsts = rows, events, counts, firsts

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Of each pair the row, counted from the chunk's first, and the event."""
        row = torch.arange(self.counts.shape[0], device=self.counts.device).repeat_interleave(self.counts)
        place = torch.arange(row.shape[0], device=row.device) - first_events(self.counts)[row]
        return row, self.firsts[row] + place

    def moved(self) -> _Chunk:
        """The same over slices that hold the chunk's rows and events alone."""
        return _Chunk(slice(None), slice(None), self.counts, self.firsts - self.events.start)


def _chunks(rows: Tensor, lengths: Tensor, visible: Tensor | None) -> Iterator[_Chunk]:
    """Rows that have events, at most PAIRS_AT_ONCE pairs at a time, but at least one row."""
    row_users = torch.arange(lengths.shape[0], device=lengths.device).repeat_interleave(rows)
    counts, firsts = lengths[row_users], first_events(lengths)[row_users]
    if visible is not None:
        counts = torch.minimum(counts, visible.clamp(min=0))
    ends = counts.cumsum(0).cpu()
    most = PAIRS_AT_ONCE.get(lengths.device.type, PAIRS_AT_ONCE["cpu"])
    begin, done, count = 0, 0, ends.shape[0]
    while begin < count:
        end = int(torch.searchsorted(ends, done + most, right=True))
        end = max(end, begin + 1)
        if int(ends[end - 1]) > done:
            first = int(firsts[begin])
            last = int((firsts[begin:end] + counts[begin:end]).max())
            yield _Chunk(slice(begin, end), slice(first, last), counts[begin:end], firsts[begin:end])
        done, begin = int(ends[end - 1]), end


def _weighted(
    candidates: Tensor, events: Tensor, piece: _Chunk, weights: list[Tensor], activation: str, normalize: bool
) -> Tensor:
    """The weighted sums of the chunk's rows, differentiable by torch."""
    targets = candidates[piece.rows]
    row, event = piece.pairs()
    items = events.index_select(0, event)
    scores = _scores(targets, items, row, list(weights), activation)
    if normalize:
        top = scores.new_full((targets.shape[0],), -torch.inf).scatter_reduce(0, row, scores.detach(), "amax")
        scores = torch.exp(scores - top[row])
        scores = scores / scores.new_zeros(targets.shape[0]).index_add(0, row, scores)[row]
    return torch.zeros_like(targets).index_add(0, row, scores.unsqueeze(1) * items)


def _scores(targets: Tensor, items: Tensor, row: Tensor, weights: list[Tensor], activation: str) -> Tensor:
    """The MLP's output for each pair. As in LocalActivation, the parts of its first layer are never put side by side:
    what depends on the target alone is computed for each row."""
    of_target, of_item, of_difference, of_product = weights[0].chunk(4, dim=1)
    fixed = F.linear(targets, of_target + of_difference, weights[1])
    x = fixed.index_select(0, row) + F.linear(items, of_item - of_difference)
    x = x + F.linear(targets.index_select(0, row) * items, of_product)
    rest = weights[2:]
    while rest:
        if activation == "prelu":
            slope, *rest = rest
            x = F.prelu(x, slope)
        else:
            x = _PLAIN[activation](x)
        weight, bias, *rest = rest
        x = F.linear(x, weight, bias)
    return x.squeeze(1)
