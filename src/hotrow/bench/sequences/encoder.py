"""A training step of a Transformer encoder over histories: jagged rows beside the same encoder on padded tensors.

Two pre-norm layers, causal, dim 64, 4 heads, FFN 256. A step is forward, the squared error at every event, backward and
SGD. Both sides have the same weights and are checked to have the same loss. The padded side needs no mask: padding is
at the end, where causal attention does not look, and SDPA is faster with `is_causal` than with a mask; its loss reads
the real events alone. Embeddings are given to each side in its own layout.

`jagged/memory` is what autograd keeps for the backward pass: the bytes of all distinct storages that are saved, without
weights and inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import hotrow
from hotrow.bench.harness import Result, alternate, lower
from hotrow.bench.sequences.workload import DIM, HEADS, HIDDEN, LAYERS, cores, device, drawn_lengths, finished
from hotrow.nn.jagged import jagged_attention

WARMUP, REPEATS = 1, 5
MEBIBYTE = 1 << 20


class Layer(nn.Module):
    """A pre-norm Transformer layer of which `attend` computes the attention of q, k and v `[..., heads, dim]`."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_hidden = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.project, self.join = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.widen, self.narrow = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.project(self.before_attention(x)).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(-3)
        x = x + self.join(attend(q, k, v).flatten(-2))
        out: Tensor = x + self.narrow(nn.functional.gelu(self.widen(self.before_hidden(x))))
        return out


class Encoder(nn.Module):
    """The layers; `attend` makes it jagged or padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x, attend)
        return x


def results() -> Iterator[Result | str]:
    """The figures of this group."""
    before = torch.get_num_threads(), hotrow.threads()
    try:
        torch.set_num_threads(cores())
        hotrow.set_threads(cores())
        yield from _measured()
    finally:
        torch.set_num_threads(before[0])
        hotrow.set_threads(before[1])


def _measured() -> Iterator[Result | str]:
    lengths = drawn_lengths()
    generator = torch.Generator().manual_seed(2)
    jagged, target = (torch.randn(int(lengths.sum()), DIM, generator=generator).to(device()) for _ in range(2))
    lengths = lengths.to(device())
    mask = torch.arange(int(lengths.max()), device=device()) < lengths[:, None]
    padded = torch.zeros(*mask.shape, DIM, device=device())
    padded[mask] = jagged
    torch.manual_seed(0)
    encoder = Encoder().to(device())

    def jagged_loss(model: Encoder) -> Tensor:
        out = model(jagged, lambda q, k, v: jagged_attention(q, k, v, lengths, lengths, causal=True))
        loss: Tensor = (out - target).square().mean()
        return loss

    def padded_loss(model: Encoder) -> Tensor:
        loss: Tensor = (model(padded, _attend_padded)[mask] - target).square().mean()
        return loss

    losses = (jagged_loss, padded_loss)
    given = {x.untyped_storage().data_ptr() for x in (jagged, padded, target, lengths, mask)}
    memory = []
    for loss in losses:
        yield f"sequences/jagged: memory of {loss.__name__}"
        value, saved = saved_bytes(lambda loss=loss: loss(encoder), encoder, given)  # type: ignore[misc]
        memory.append((float(value), saved / MEBIBYTE))
    (mine, mine_saved), (peers, peers_saved) = memory
    if abs(mine - peers) > 1e-4 * abs(peers):
        raise AssertionError(f"the jagged encoder has loss {mine}, the padded one {peers}")
    yield "sequences/jagged: in turns"
    steps = [finished(_step(copy.deepcopy(encoder), loss)) for loss in losses]
    ours, torchs = alternate(steps, WARMUP, REPEATS)
    yield lower("sequences/jagged", "ms", ours.median * 1e3, "padded", torchs.median * 1e3, ours.spread)
    yield lower("sequences/jagged/memory", "MiB", mine_saved, "padded", peers_saved)


def _attend_padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _step(model: Encoder, loss: Callable[[Encoder], Tensor]) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def saved_bytes(loss: Callable[[], Tensor], model: nn.Module, given: set[int]) -> tuple[Tensor, int]:
    """The loss, and the bytes that autograd keeps for its backward, without the model's weights and `given`."""
    known = given | {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    held: list[Tensor] = []  # so that no storage is freed and its address used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()
    return value.detach(), sum(kept.values())
