"""Train, export, serve, and keep the server fresh while training goes on.

    python examples/train_to_serve.py

Needs the extra `serve`. The server listens on a free port of 127.0.0.1 and is stopped at the end.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import hotrow as hr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(server: subprocess.Popen[bytes], address: str) -> None:
    """Poll the readiness endpoint, as a load balancer does."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/v2/health/ready", timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the server ended with exit code {server.returncode}")


def ask(address: str, user: int) -> tuple[float, int]:
    """The probability that a user clicks on an item, and the number of the publication that answered."""
    inputs: list[dict[str, Any]] = [
        {"name": name, "datatype": "INT64", "shape": [1, 1], "data": [value]}
        for name, value in (("user", user), ("item", 2), ("site", 3))
    ]
    inputs.append({"name": "dense", "datatype": "FP32", "shape": [1, 4], "data": [0.0] * 4})
    request = urllib.request.Request(f"{address}/v2/models/ctr/infer", json.dumps({"inputs": inputs}).encode())
    with urllib.request.urlopen(request, timeout=10) as reply:
        answer = json.load(reply)
    return answer["outputs"][0]["data"][0], answer["parameters"]["publication"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bus = f"dir:{folder / 'bus'}"
        embeddings = hr.EmbeddingCollection([hr.Table(table, dim=16) for table in ("user", "item", "site")])
        tower = hr.models.DLRM(embeddings.features, dense_features=4, bottom=(32,), top=(64, 32))
        trainer = hr.Trainer(
            hr.Recommender(embeddings, tower),
            checkpoints=folder / "checkpoints",
            publish=hr.Publish(bus, every_steps=20),
        )
        trainer.fit(hr.data.synthetic(examples=options.examples, keys=100_000, batch_size=1024))
        hr.export(trainer.model, folder / "repository" / "ctr")

        port = free_port()
        command = [sys.executable, "-m", "hotrow", "serve", str(folder / "repository"), "--bus", f"ctr={bus}"]
        server = subprocess.Popen([*command, "--http", str(port), "--grpc", str(free_port()), "--metrics", "0"])
        try:
            address = f"http://127.0.0.1:{port}"
            wait_until_ready(server, address)
            before, first = ask(address, user=7)
            print(f"publication {first}: {before:.4f}")

            more = hr.data.synthetic(examples=options.examples, keys=100_000, batch_size=1024, offset=options.examples)
            trainer.fit(more)  # the server follows the bus meanwhile
            deadline = time.monotonic() + 30
            after, number = ask(address, user=7)
            while number == first and time.monotonic() < deadline:
                time.sleep(0.1)
                after, number = ask(address, user=7)
            print(f"publication {number}: {after:.4f}")
            assert number > first
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
