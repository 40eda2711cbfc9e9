"""The demo's load generator: a process that sends a server requests to rank candidates for users.

    python demo/load.py ADDRESS requests.json out.jsonl SECONDS RATE

It runs as a file and imports only the standard library, because importing the package takes longer than its work. It
sends the bodies of requests.json in turn at a steady rate, one request at a time. A request that becomes due before the
previous one is answered is sent right after that answer, and its latency counts from when it was due. Each reply is a
line of the output: time, milliseconds, version, publication and freshness if the server reports them, or the error.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from pathlib import Path
from typing import Any


def load(address: str, bodies: list[str], out: str, seconds: float, rate: float) -> None:
    """Send requests until the time is up."""
    host, _, port = address.partition(":")
    line = http.client.HTTPConnection(host, int(port), timeout=10)
    begin = time.monotonic()
    with open(out, "a", buffering=1) as file:
        number = 0
        while (due := begin + number / rate) < begin + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            reply = send(line, bodies[number % len(bodies)])
            file.write(json.dumps({"at": time.time(), "ms": (time.monotonic() - due) * 1000, **reply}) + "\n")
            number += 1


def send(line: http.client.HTTPConnection, body: str) -> dict[str, Any]:
    """Send one request; returns the fields of its reply."""
    try:
        line.request("POST", "/v2/models/ctr/infer", body, {"Content-Type": "application/json"})
        response = line.getresponse()
        body_json = json.loads(response.read())
        if response.status != 200:
            return {"error": f"{response.status}: {body_json}"}
        parameters = body_json.get("parameters", {})
        return {
            "version": body_json.get("model_version"),
            "publication": parameters.get("publication"),
            "freshness_ms": parameters.get("freshness_ms"),
        }
    except (OSError, http.client.HTTPException, ValueError) as error:
        line.close()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    load(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
