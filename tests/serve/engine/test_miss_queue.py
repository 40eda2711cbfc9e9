"""Rows that are only on SSD: requests with such rows wait for them, other requests do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import socket_of, with_backend
from plain_servable import write_version

from hotrow.serve.frontend.engine_client import EngineClient
from hotrow.serve.processes.engine_process import EngineProcess
from hotrow.serve.protocol.request import Answer, Ids, Request

ROWS = 60_000  # of 3 tables: far more than the budget


def start_tiny(start_engine: Callable[..., EngineProcess], tmp_path: Path, slow: float) -> EngineProcess:
    write_version(tmp_path / "repository", "ctr", 1, rows=ROWS, slow=slow)
    return start_engine(
        tmp_path / "repository", options={"dram": "4MiB", "ssd": str(tmp_path / "ssd")}, lanes=1, deadline=20.0
    )


def cold_keys(engine: EngineProcess, count: int) -> np.ndarray:
    version = engine.models.by_name["ctr"].current
    assert version is not None
    store = version.servable.embeddings.tables[0].store
    keys = torch.arange(ROWS)
    cold = keys[store.cold(keys)]
    assert len(cold) >= count, "all rows fit into the budget, so nothing is tested"
    return cold[:count].numpy()


def warm_request(engine: EngineProcess, **options: object) -> Request:
    """Keys without a row anywhere: never cold."""
    keys = np.arange(ROWS + 1, ROWS + 6)
    return Request("ctr", 5, (Ids(keys),) * 3, np.zeros((5, 4), np.float32), **options)  # type: ignore[arg-type]


def cold_request(keys: np.ndarray, **options: object) -> Request:
    others = np.arange(ROWS + 1, ROWS + 1 + len(keys))
    ids = (Ids(keys), Ids(others), Ids(others))
    return Request("ctr", len(keys), ids, np.zeros((len(keys), 4), np.float32), **options)  # type: ignore[arg-type]


def test_request_with_cold_rows_waits_for_them_when_there_is_time(
    tmp_path: Path, start_engine: Callable[..., EngineProcess]
) -> None:
    engine = start_tiny(start_engine, tmp_path, slow=0.0)
    keys = cold_keys(engine, 7)

    async def work(backend: EngineClient) -> Answer:
        return await backend.infer(cold_request(keys))

    answer = with_backend([socket_of(engine)], work)
    assert answer.late_rows == 0 and engine.misses.counts.cold == 1 and engine.misses.counts.spent == 0


@pytest.mark.parametrize("policy", ["initial", "default"])
def test_rows_that_come_too_late_are_answered_by_policy_and_counted(
    tmp_path: Path, start_engine: Callable[..., EngineProcess], policy: str
) -> None:
    engine = start_tiny(start_engine, tmp_path, slow=3.0)
    keys = cold_keys(engine, 7)

    async def work(backend: EngineClient) -> tuple[Answer, float]:
        begin = time.monotonic()
        answer = await backend.infer(cold_request(keys, policy=policy, deadline=begin + 1.0))
        return answer, time.monotonic() - begin

    answer, seconds = with_backend([socket_of(engine)], work)
    assert answer.late_rows == 7 and engine.misses.counts.spent == 1
    assert 0.4 < seconds < 2.0


def test_policy_wait_waits_past_the_deadline_and_answers_with_the_rows(
    tmp_path: Path, start_engine: Callable[..., EngineProcess]
) -> None:
    engine = start_tiny(start_engine, tmp_path, slow=1.0)
    keys = cold_keys(engine, 7)

    async def work(backend: EngineClient) -> tuple[Answer, float]:
        begin = time.monotonic()
        answer = await backend.infer(cold_request(keys, policy="wait", deadline=begin + 0.5))
        return answer, time.monotonic() - begin

    answer, seconds = with_backend([socket_of(engine)], work)
    assert answer.late_rows == 0 and seconds >= 1.0


def test_warm_requests_do_not_wait_behind_a_miss(tmp_path: Path, start_engine: Callable[..., EngineProcess]) -> None:
    engine = start_tiny(start_engine, tmp_path, slow=2.0)
    keys = cold_keys(engine, 7)

    async def work(backend: EngineClient) -> tuple[float, float]:
        begin = time.monotonic()
        slow = asyncio.create_task(backend.infer(cold_request(keys)))
        await asyncio.sleep(0.05)
        for _ in range(10):
            assert (await backend.infer(warm_request(engine))).late_rows == 0
        warm_seconds = time.monotonic() - begin
        await slow
        return warm_seconds, time.monotonic() - begin

    warm_seconds, slow = with_backend([socket_of(engine)], work)
    assert warm_seconds < 1.5 and slow >= 2.0
