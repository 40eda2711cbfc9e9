"""A failed exchange names the rank that failed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore  # type: ignore[attr-defined]

import hotrow as hr
from hotrow.parallel.health import Health


def test_every_exchange_that_fails_names_the_rank() -> None:
    """The route and the training thread may fail at once, and the one that did not look first may end the run."""
    store = HashStore()
    here, there = (Health(store, rank, 2, 4.0, lambda: 1) for rank in (0, 1))
    there.report_failure(hr.DataError("clicks.csv has no line 7"))
    with ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(lambda name: here.explain(name, RuntimeError("closed")), ("route", "rows")))
    for error in errors:
        assert "rank 0 stops, because rank 1 failed: DataError: clicks.csv has no line 7" in str(error)
    for health in (here, there):
        health.close()
