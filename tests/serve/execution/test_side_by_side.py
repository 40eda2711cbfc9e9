"""With rows in DRAM, batches of histories and multi-hot features run side by side: no lock over lookup or tower."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from serve.execution.jagged_models import FORMS, export, make_batch

import hotrow as hr
from hotrow.serve.execution.towers import TowerOptions, Towers
from hotrow.serve.graph.tower import OriginalTower
from hotrow.serve.graph.tower_graph import TowerGraph
from hotrow.table import Lookup

LANES = 3


def meet(barrier: threading.Barrier, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which first waits until all lanes are in it. A lock around it would break the barrier."""

    def met(*args: Any, **options: Any) -> Any:
        barrier.wait(30)
        return function(*args, **options)

    return met


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {form: export(form, tmp_path_factory.mktemp(form)) for form in FORMS}


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_lanes_are_in_lookup_and_tower_at_the_same_time(
    form: str, buckets: bool, exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def towers(original: OriginalTower) -> Towers:
        options = TowerOptions(compile=False, cache=tmp_path / "artifacts")
        return Towers(TowerGraph(original.program), original.weights, original.device, options)

    with hr.Engine(exported[form], towers=towers if buckets else None) as engine:
        batches = [make_batch(form, 4 + n, n) for n in range(LANES)]
        expected = [engine.logits(batch) for batch in batches]
        barrier = threading.Barrier(LANES)
        monkeypatch.setattr(Lookup, "gather", meet(barrier, Lookup.gather))
        graph, run = (TowerGraph, "run_all") if buckets else (OriginalTower, "run_part")
        monkeypatch.setattr(graph, run, meet(barrier, getattr(graph, run)))
        with ThreadPoolExecutor(LANES) as threads:
            got = list(threads.map(engine.logits, batches))
        assert not barrier.broken
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
