"""Crews of two and three ranks, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crew import Crew


@pytest.fixture(scope="session")
def crews() -> Iterator[dict[int, Crew]]:
    made: dict[int, Crew] = {world: Crew(world) for world in (2, 3)}
    yield made
    for crew in made.values():
        crew.close()


@pytest.fixture(params=[2, 3])
def crew(request: pytest.FixtureRequest, crews: dict[int, Crew]) -> Crew:
    return crews[request.param]
