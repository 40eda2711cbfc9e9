"""Long histories: jagged layers beside plain torch on the same input, in turns; and the AUC that they bring.

HOTROW_BENCH_ONLY=attention,jagged measures these groups alone. HOTROW_BENCH_SCALE scales the users of a batch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

from hotrow.bench.harness import Result
from hotrow.errors import OptionError, choices

GROUPS = {  # the name after the slash, and its module below hotrow.bench.sequences
    "accuracy": "accuracy",
    "attention": "attention",
    "jagged": "encoder",
    "user_once": "user_once",
    "search": "two_stage_search",
    "server": "user_server",
}
ONLY = "HOTROW_BENCH_ONLY"


def results() -> Iterator[Result | str]:
    """The benchmark's figures."""
    for name in wanted():
        yield from importlib.import_module(f"hotrow.bench.sequences.{GROUPS[name]}").results()


def wanted() -> list[str]:
    """The groups of HOTROW_BENCH_ONLY, or all."""
    names = [name for name in os.environ.get(ONLY, "").split(",") if name] or list(GROUPS)
    for name in names:
        if name not in GROUPS:
            raise OptionError(f"{ONLY} has {name!r}; {choices(name, GROUPS)}")
    return names
