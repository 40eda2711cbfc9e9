"""`hotrow serve --user-cache` as a command: a user with many candidates over HTTP and gRPC, and the metrics page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from served import Served
from test_user_server import inputs_of
from user_models import ask, batch_of, exported, user_trainer

import hotrow as hr
from hotrow.client import Client
from hotrow.errors import OptionError
from hotrow.serve.processes.serve_options import ServeOptions

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("served") / "repository", user_trainer().model)


@pytest.fixture
def served(repository: Path) -> Iterator[Served]:
    running = Served(repository, "--user-cache", "1MiB", "--no-compile", "--grpc", "0", loader=None)
    yield running
    running.end()


def test_500_candidates_of_one_user_over_both_protocols(repository: Path, served: Served) -> None:
    one = ask(7, rows=500, events=11)
    with hr.Engine(repository / "ctr") as engine:
        expected = engine.predict(batch_of([one])).numpy()
    grpc = re.search(r"grpc\s+\S*?(127\.0\.0\.1:\d+)", served.text())
    assert grpc is not None, served.text()
    for address in (f"http://127.0.0.1:{served.ports['http']}", f"grpc://{grpc[1]}"):
        with Client(address) as client:
            found = client.predict("ctr", inputs_of(one), deadline=30.0)["probabilities"]
            assert float(np.abs(found - expected).max()) <= 1e-6
    figures = {}
    while not figures.get("hotrow_user_cache_hits_total"):  # engines send their figures once a second
        page = served.get("/metrics", "metrics")
        figures = {name: float(value) for name, value in re.findall(r"^(hotrow_user\w*)\{[^}]*\} (\S+)$", page, re.M)}
    assert figures["hotrow_user_cache_bytes"] > 0 and figures["hotrow_users_encoded_total"] >= 1


def test_a_wrong_size_is_refused_before_a_process_starts(repository: Path) -> None:
    with pytest.raises(OptionError, match="user_cache"):
        ServeOptions(str(repository), user_cache="a lot")
