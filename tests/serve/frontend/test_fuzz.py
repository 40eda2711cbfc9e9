"""A thousand mutated requests get an answer each and leave the front end as it was. network/test_soak.py sends a
million to a real server."""

from __future__ import annotations

from fuzz import http_request, run_grpc, run_http, valid_bodies
from in_process import Running
from raw_http import exchange, until_released


def healthy(running: Running) -> None:
    for body, header in valid_bodies():
        status, answer = exchange(running, http_request(body, header))
        assert status == 200, answer
    until_released(running)


def test_mutated_requests_are_refused_clearly(running: Running) -> None:
    healthy(running)
    over_http = run_http(running.address("http"), 800, seed=1)
    over_grpc = run_grpc(running.address("grpc"), 200, seed=1)
    assert over_http["400"] > 100 and over_http["200"] > 20, over_http
    assert over_grpc["INVALID_ARGUMENT"] > 10 and over_grpc["OK"] > 5, over_grpc
    healthy(running)
