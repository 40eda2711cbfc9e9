"""A thousand mutated requests get an answer each and leave the front end as it was; `make soak` sends 100,000."""

from __future__ import annotations

import gc
import os
import time

import psutil
import pytest
from fuzz import http_request, run_grpc, run_http, valid_bodies
from in_process import Running
from test_bad_input import exchange


def healthy(running: Running) -> None:
    for body, header in valid_bodies():
        status, answer = exchange(running, http_request(body, header))
        assert status == 200, answer
    service, http = running.frontend.service, running.frontend._http
    until = time.monotonic() + 10
    while (service.door.inside or http.held) and time.monotonic() < until:  # let go of after the client has its answer
        time.sleep(0.01)
    assert service.door.inside == 0 and http.held == 0


def test_mutated_requests_are_refused_clearly(running: Running) -> None:
    healthy(running)
    over_http = run_http(running.address("http"), 800, seed=1)
    over_grpc = run_grpc(running.address("grpc"), 200, seed=1)
    assert over_http["400"] > 100 and over_http["200"] > 20, over_http
    assert over_grpc["INVALID_ARGUMENT"] > 10 and over_grpc["OK"] > 5, over_grpc
    healthy(running)


@pytest.mark.soak
def test_a_hundred_thousand_mutations_do_not_grow_the_process(running: Running) -> None:
    seed = int(os.environ.get("HOTROW_FUZZ_SEED", "2"))
    run_http(running.address("http"), 5_000, seed)
    gc.collect()
    before = psutil.Process().memory_info().rss
    print(run_http(running.address("http"), 85_000, seed + 1), run_grpc(running.address("grpc"), 10_000, seed + 1))
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 64 << 20
    healthy(running)
