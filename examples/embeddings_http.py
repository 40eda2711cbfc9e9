"""Look up the rows of a served model over HTTP, as a server of another make would: with no import of hotrow.

    hotrow serve repository/
    python examples/embeddings_http.py http://127.0.0.1:8000 ctr

The request is JSON. The vectors come as bytes behind the answer's JSON (the protocol's binary tensor data extension).
"""

from __future__ import annotations

import json
import sys
import urllib.request

import numpy as np


def main(address: str, model: str) -> None:
    body = {
        "inputs": [
            {"name": "user", "datatype": "INT64", "shape": [2], "data": [7, 8]},
            {"name": "item", "datatype": "INT64", "shape": [2], "data": [2, 3]},
        ],
        "outputs": [
            {"name": f"embeddings.{feature}", "parameters": {"binary_data": True}} for feature in ("user", "item")
        ],
    }
    request = urllib.request.Request(f"{address}/v2/models/{model}/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=10) as reply:
        data, length = reply.read(), int(reply.headers["Inference-Header-Content-Length"])
    answer, at = json.loads(data[:length]), length
    for output in answer["outputs"]:
        size = output["parameters"]["binary_data_size"]
        vectors = np.frombuffer(data[at : at + size], np.float32).reshape(output["shape"])
        at += size
        print(output["name"], vectors.shape, vectors[0, :3])
    print("publication", answer["parameters"]["publication"])


if __name__ == "__main__":
    main(*sys.argv[1:])
