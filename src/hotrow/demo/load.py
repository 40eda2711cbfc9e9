"""The demo's load generator: a process of its own that asks a server for the clicks of users on candidates.

    python demo/load.py ADDRESS requests.json out.jsonl SECONDS RATE

Run as a file: it needs nothing of the package, whose import takes longer than its work. It sends the bodies of
requests.json in turn, at a steady rate whatever the answers take (a request that is due is sent as soon as the one
before is answered, and its time counts from when it was due), and writes a line an answer: when, milliseconds, version,
publication and freshness where the server names them, or the error.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from pathlib import Path
from typing import Any


def load(address: str, bodies: list[str], out: str, seconds: float, rate: float) -> None:
    """Ask until the time is up."""
    host, _, port = address.partition(":")
    line = http.client.HTTPConnection(host, int(port), timeout=10)
    begin = time.monotonic()
    with open(out, "a", buffering=1) as file:
        number = 0
        while (due := begin + number / rate) < begin + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            said = ask(line, bodies[number % len(bodies)])
            file.write(json.dumps({"at": time.time(), "ms": (time.monotonic() - due) * 1000, **said}) + "\n")
            number += 1


def ask(line: http.client.HTTPConnection, body: str) -> dict[str, Any]:
    """One request."""
    try:
        line.request("POST", "/v2/models/ctr/infer", body, {"Content-Type": "application/json"})
        answer = line.getresponse()
        words = json.loads(answer.read())
        if answer.status != 200:
            return {"error": f"{answer.status}: {words}"}
        says = words.get("parameters", {})
        return {
            "version": words.get("model_version"),
            "publication": says.get("publication"),
            "freshness_ms": says.get("freshness_ms"),
        }
    except (OSError, http.client.HTTPException, ValueError) as error:
        line.close()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    load(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
