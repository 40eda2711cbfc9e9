"""The child's side of a server process: read options, report events, avoid long garbage collections.

The supervisor's side is child.py. This file imports only the standard library.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from contextlib import suppress
from typing import Any, BinaryIO

_reporting = threading.Lock()


def read_options() -> tuple[dict[str, Any], BinaryIO]:
    """The options in the first line of stdin, and a file with the supervisor's later lines. The file ends when the
    supervisor does."""
    lines = os.fdopen(os.dup(0), "rb")
    first = lines.readline()
    if not first:
        raise SystemExit("the supervisor ended before it sent the options")
    options: dict[str, Any] = json.loads(first)
    return options, lines


def report_event(event: str, **content: Any) -> None:
    """Write a line of JSON for the supervisor on stdout. Any thread may call it."""
    with _reporting, suppress(BrokenPipeError, ValueError):
        sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
        sys.stdout.flush()


def freeze_garbage_collector() -> None:
    """Exclude every object that exists now from garbage collection, mainly torch's modules. A collection that visits
    them pauses requests for a tenth of a second or more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
