"""A request of one user with 500 candidates over a history of 1,024 events: the history encoded once, or for each.

Exported two-part towers (width 64, 4 heads, 2 layers) in hr.Engine, from the keys of a request to its logits.

    user_once            the history once, beside the same engine with the history repeated for each candidate; the
                         peer takes candidates in chunks of the size that is fastest of CHUNKS
    user_once/cached     the encoding from the user cache, beside the same without a cache
    user_once/hstu       the same for HSTU, with biases of position and time; the others are BST

All ways must give the same logits.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import hotrow as hr
from hotrow.bench.harness import Result, alternate, lower
from hotrow.bench.sequences.served_tower import Request, check_equal, export
from hotrow.bench.sequences.workload import DIM, HEADS, LAYERS, cores, device, scaled

EVENTS, CHUNKS, CACHE = 1024, (1, 4, 16, 64), "256MiB"
IN_A_ROW = 8  # requests of a step of `cached`
WARMUP, REPEATS, EXPANDED_REPEATS = 2, 15, 3


def towers() -> dict[str, Callable[[], nn.Module]]:
    """The towers by the names of their rows."""
    history = hr.models.History(["seen"], max_length=EVENTS)
    timed = hr.models.History(["seen"], times="seen_time", max_length=EVENTS)
    return {
        "": lambda: hr.models.BST(["item"], [history], "item", DIM, width=DIM, heads=HEADS, layers=LAYERS),
        "/hstu": lambda: hr.models.HSTU(
            ["item"], [timed], "item", DIM, time="now", width=DIM, heads=HEADS, layers=LAYERS
        ),
    }


def results() -> Iterator[Result | str]:
    """The figures of this group."""
    before = torch.get_num_threads(), hr.threads()
    try:
        torch.set_num_threads(cores())
        hr.set_threads(cores())
        for name, make in towers().items():
            with tempfile.TemporaryDirectory(prefix="hotrow-bench-") as folder:
                yield f"sequences/user_once{name}: exporting"
                path = export(make(), Path(folder) / "ctr")
                with (
                    hr.Engine(path, device=device()) as plain,
                    hr.Engine(path, device=device(), user_cache=CACHE) as cached,
                ):
                    yield from _measured(f"sequences/user_once{name}", plain, cached)
    finally:
        torch.set_num_threads(before[0])
        hr.set_threads(before[1])


def _measured(name: str, plain: hr.Engine, cached: hr.Engine) -> Iterator[Result | str]:
    request = Request.drawn(scaled(EVENTS, 8), 1)
    once = request.batch(plain)
    expected = plain.logits(once)
    check_equal("a cached user", cached.logits(once), expected)
    check_equal("a cached user", cached.logits(once), expected)
    ways = [_in_a_row(cached, once), _in_a_row(plain, once)]
    hit, miss = alternate(ways, WARMUP, REPEATS)
    each = 1e3 / IN_A_ROW
    yield lower(f"{name}/cached", "ms", hit.median * each, "no cache", miss.median * each, hit.spread)
    chunk, fastest = 0, math.inf
    for size in CHUNKS:
        yield f"{name}: expanded, {size} candidates at once"
        some = request.expanded(plain, size)[: max(1, 64 // size)]
        took = alternate([lambda i, b=some: _logits(plain, b)], 1, 2)[0].median  # type: ignore[misc]
        took /= sum([batch.size for batch in some])
        if took < fastest:
            chunk, fastest = size, took
    batches = request.expanded(plain, chunk)
    check_equal("repeated histories", _logits(plain, batches), expected)
    yield f"{name}: in turns, the peer with {chunk} candidates at once"
    ours, peer = alternate([lambda i: plain.logits(once), lambda i: _logits(plain, batches)], 1, EXPANDED_REPEATS)
    yield lower(name, "ms", ours.median * 1e3, "expanded", peer.median * 1e3, ours.spread)


def _in_a_row(engine: hr.Engine, batch: hr.KeyedBatch) -> Callable[[int], None]:
    """A busy server's step: requests one after another, so that threads are not woken for each."""

    def step(i: int) -> None:
        for _ in range(IN_A_ROW):
            engine.logits(batch)

    return step


def _logits(engine: hr.Engine, batches: list[hr.KeyedBatch]) -> Tensor:
    return torch.cat([engine.logits(batch) for batch in batches])
