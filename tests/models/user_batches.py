"""Towers over histories, and batches for them: shared users, the same expanded, and padded as a bucket pads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hotrow.models import BST, HSTU, SIM, History, JaggedDIN, SASRec, UserTower

DIM, ACTION, DENSE, LONGEST = 4, 3, 2, 7
FEATURES = {"age": 3, "item": DIM, "shop": 2}
ITEMS = History(
    {"seen_item": DIM, "seen_action": ACTION}, times="seen_time", categories="seen_category", max_length=LONGEST
)
SEARCHES = History({"searched": DIM}, max_length=LONGEST)
COMMON = {"dense_features": DENSE, "user_features": ["age"], "top": (6,)}
SMALL = {"width": 8, "heads": 2}

TOWERS: dict[str, Callable[..., UserTower]] = {
    "bst": lambda **o: BST(FEATURES, [ITEMS, SEARCHES], "item", **{**COMMON, **SMALL, "layers": 2, **o}),
    "bst dot": lambda **o: BST(
        FEATURES, [ITEMS, SEARCHES], "item", interaction="dot", time="now", positions="relative", causal=False,
        **{**COMMON, **SMALL, "layers": 2, **o},
    ),
    "bst relative": lambda **o: BST(
        FEATURES, [ITEMS, SEARCHES], "item", positions="relative", **{**COMMON, **SMALL, **o}
    ),
    "hstu": lambda **o: HSTU(FEATURES, [ITEMS, SEARCHES], "item", time="now", **{**COMMON, **SMALL, **o}),
    "sasrec": lambda **o: SASRec(FEATURES, [ITEMS, SEARCHES], "item", **{**COMMON, **SMALL, **o}),
    "sasrec events": lambda **o: SASRec(
        FEATURES, [ITEMS, SEARCHES], "item", every_event=True, positions="relative", **{**COMMON, **SMALL, **o}
    ),
    "sasrec hstu": lambda **o: SASRec(
        FEATURES, [ITEMS, SEARCHES], "item", every_event=True, positions="relative", block="hstu",
        **{**COMMON, **SMALL, **o},
    ),
    "sim hard": lambda **o: SIM(
        FEATURES, [ITEMS], "item", search="hard", keep=2, time="now", category="category", **{**COMMON, **SMALL, **o}
    ),
    "sim soft": lambda **o: SIM(FEATURES, [ITEMS, SEARCHES], "item", search="soft", keep=3, **{**COMMON, **SMALL, **o}),
    "sim whole": lambda **o: SIM(
        FEATURES, [ITEMS, SEARCHES], "item", keep=LONGEST, interaction="cross", **{**COMMON, **SMALL, **o}
    ),
    "din": lambda **o: JaggedDIN(FEATURES, [ITEMS, SEARCHES], "item", width=5, attention=(4,), **{**COMMON, **o}),
}  # fmt: skip

Batch = tuple[dict[str, Tensor], Tensor]


def make(name: str, **options: object) -> UserTower:
    """The tower with weights that are all random, biases and norms too, so that none is without effect."""
    torch.manual_seed(0)
    tower = TOWERS[name](**options)
    for weight in tower.parameters():
        weight.data += 0.2 * torch.randn_like(weight)
    return tower


def batch_of(lengths: list[int], rows_of: list[int], seed: int = 1, searches: list[int] | None = None) -> Batch:
    """Users with histories of these lengths, and `user_of` the rows (in that order)."""
    draw = torch.Generator().manual_seed(seed)
    events, rows, users = sum(lengths), len(rows_of), len(lengths)
    searches = list(reversed(lengths)) if searches is None else searches
    lengths_of_rows = torch.ones(rows, dtype=torch.int64)
    its = torch.tensor(lengths, dtype=torch.int64)
    time = torch.randint(0, 10_000_000, (events,), generator=draw)
    users_of_events = torch.arange(users).repeat_interleave(its)
    order = torch.argsort(users_of_events * 10_000_000 + time)
    vectors = {
        "seen_item": torch.randn(events, DIM, generator=draw),
        "seen_action": torch.randn(events, ACTION, generator=draw),
        "seen_time": time[order],
        "seen_category": torch.randint(0, 3, (events,), generator=draw),
        "searched": torch.randn(sum(searches), DIM, generator=draw),
        "age": torch.randn(users, 3, generator=draw),
        "item": torch.randn(rows, DIM, generator=draw),
        "shop": torch.randn(rows, 2, generator=draw),
        "now": torch.randint(10_000_000, 20_000_000, (rows,), generator=draw),
        "category": torch.randint(0, 3, (rows,), generator=draw),
        "now_lengths": lengths_of_rows,
        "category_lengths": lengths_of_rows,
        "user_of": torch.tensor(rows_of, dtype=torch.int64),
        "searched_lengths": torch.tensor(searches, dtype=torch.int64),
    }
    vectors |= {f"{name}_lengths": its for name in ITEMS.columns}
    return vectors, torch.randn(rows, DENSE, generator=draw)


def columns(tower: UserTower) -> list[str]:
    return [column for history in tower.histories for column in history.columns]


def expanded(tower: UserTower, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same batch with a user for each row. Differentiable."""
    user_of = vectors["user_of"]
    out = dict(vectors)
    for name in columns(tower):
        pieces = vectors[name].split(vectors[f"{name}_lengths"].tolist())
        out[name] = torch.cat([pieces[user] for user in user_of.tolist()] or [vectors[name][:0]])
        out[f"{name}_lengths"] = vectors[f"{name}_lengths"][user_of]
    out |= {name: vectors[name][user_of] for name in tower.user_widths}
    out["user_of"] = torch.arange(len(user_of))
    return out


def padded(tower: UserTower, vectors: dict[str, Tensor], dense: Tensor, garbage: float) -> Batch:
    """The same batch as a bucket pads it: more events, users without events, and rows of user 0."""

    def longer(tensor: Tensor, by: int, fill: float) -> Tensor:
        return torch.cat([tensor, torch.full((by, *tensor.shape[1:]), fill, dtype=tensor.dtype)])

    out: dict[str, Tensor] = {}
    for name, tensor in vectors.items():
        base = name.removesuffix("_lengths")
        if name in columns(tower):
            out[name] = longer(tensor, 5, garbage)
        elif base in columns(tower):
            out[name] = longer(tensor, 2, 0)
        elif name in tower.user_widths:
            out[name] = longer(tensor, 2, garbage)
        else:
            out[name] = longer(tensor, 3, 0)
    for name in ("now", "category"):
        out[f"{name}_lengths"] = longer(vectors[f"{name}_lengths"], 3, 1)
    return out, longer(dense, 3, garbage)


def gradients(tower: nn.Module, logits: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the weights and of those inputs that require a gradient, by name."""
    leaves = {f"weight {name}": weight for name, weight in tower.named_parameters()}
    leaves |= {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    found = torch.autograd.grad((logits * weights).sum(), list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
