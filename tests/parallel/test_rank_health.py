"""A failed exchange names the rank that failed."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore  # type: ignore[attr-defined]

import hotrow as hr
from hotrow.parallel.health import Health
from hotrow.parallel.job_token import SealedStore, job_key


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


def test_a_rank_whose_heartbeat_is_overwritten_is_still_named() -> None:
    store, key = HashStore(), job_key("the token of this job")
    here, there = (Health(SealedStore(store, key), rank, 2, 4.0, lambda: 1) for rank in (0, 1))
    here._learn_places()
    there.close()
    store.set("hotrow/beat/1", "00" + b'{"beats": 7}'.hex())
    words = str(here.explain("rows", RuntimeError("timed out")))
    assert f"rank 1 (process {os.getpid()} on " in words and "died or was stopped" in words
    here.close()
