"""SIM over 10,000 events: a search for each of 500 candidates, then attention to the 100 events that it found.

Exported towers in hr.Engine, from the keys of a request to its logits, without a user cache.

    search/hard          events of the candidate's category, beside attention to all 10,000 events ("full")
    search/hard/bar      the same beside 1.3 times the same engine with 100 events, all of which candidates read
    search/soft, /bar    events of the largest inner product

Each candidate's logit must be that of the same engine with just the events that the search should find.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

import hotrow as hr
from hotrow.bench.harness import Result, alternate, lower
from hotrow.bench.sequences.served_tower import Request, check_equal, export
from hotrow.bench.sequences.workload import DIM, HEADS, cores, device, scaled

EVENTS, KEEP, CHECKED, BAR = 10_000, 100, 3, 1.3
WARMUP, REPEATS = 2, 15


def tower(kind: str) -> hr.models.SIM:
    """SIM by "hard" or "soft" search, or "full": all events are kept."""
    categories, category = ("seen_category", "item_category") if kind == "hard" else (None, None)
    history = hr.models.History(["seen"], times="seen_time", categories=categories, max_length=scaled(EVENTS, 50))
    return hr.models.SIM(
        ["item"], [history], "item", DIM, time="now", category=category, search="hard" if kind == "hard" else "soft",
        keep=scaled(EVENTS, 50) if kind == "full" else scaled(KEEP, 5), width=DIM, heads=HEADS,
    )  # fmt: skip


def results() -> Iterator[Result | str]:
    """The figures of this group."""
    before = torch.get_num_threads(), hr.threads()
    try:
        torch.set_num_threads(cores())
        hr.set_threads(cores())
        with tempfile.TemporaryDirectory(prefix="hotrow-bench-") as folder, ExitStack() as stack:
            engines = {}
            for kind in ("hard", "soft", "full"):
                yield f"sequences/search: exporting the tower of {kind} search"
                path = export(tower(kind), Path(folder) / kind)
                engines[kind] = stack.enter_context(hr.Engine(path, device=device()))
            yield from _measured(engines)
    finally:
        torch.set_num_threads(before[0])
        hr.set_threads(before[1])


def _measured(engines: dict[str, hr.Engine]) -> Iterator[Result | str]:
    keep = scaled(KEEP, 5)
    long, short = Request.drawn(scaled(EVENTS, 50), 1), Request.drawn(keep, 1, categories=1)
    for kind in ("hard", "soft"):
        yield f"sequences/search: checking {kind} search"
        check(kind, engines[kind], long, keep)
    yield "sequences/search: in turns"
    sides = [(engines[kind], one.batch(engines[kind])) for kind in ("hard", "soft") for one in (long, short)]
    sides.append((engines["full"], long.batch(engines["full"])))
    steps = [lambda i, e=engine, b=batch: e.logits(b) for engine, batch in sides]  # type: ignore[misc]
    hard, hard_short, soft, soft_short, full = alternate(steps, WARMUP, REPEATS)
    for kind, ours, few in (("hard", hard, hard_short), ("soft", soft, soft_short)):
        name, milliseconds = f"sequences/search/{kind}", ours.median * 1e3
        yield lower(name, "ms", milliseconds, "full", full.median * 1e3, ours.spread)
        yield lower(f"{name}/bar", "ms", milliseconds, "1.3 x 100 events", BAR * few.median * 1e3, ours.spread)


def check(kind: str, engine: hr.Engine, request: Request, keep: int) -> None:
    """Compare some candidates with the same engine over the events that the search should find."""
    logits = engine.logits(request.batch(engine))
    vectors = engine.lookup(request.only(0, torch.arange(len(request.events["seen"]))).batch(engine))["seen"][0].cpu()
    for row in range(0, request.rows, max(1, request.rows // CHECKED)):
        found = _found(kind, engine, request, row, vectors, keep)
        alone = engine.logits(request.only(row, found).batch(engine))
        check_equal(f"{kind} search", logits[row : row + 1], alone)


def _found(kind: str, engine: hr.Engine, request: Request, row: int, events: Tensor, keep: int) -> Tensor:
    if kind == "hard":
        same = request.events["seen_category"] == request.candidates["item_category"][row]
        return same.nonzero().squeeze(1)[-keep:]
    item = engine.lookup(request.only(row, torch.arange(1)).batch(engine))["item"][0].cpu()
    return (events @ item).topk(min(keep, len(events))).indices.sort().values
