"""Look up the rows of a served model, and predict with it, by hotrow.client.

hotrow serve repository/
python examples/embeddings_client.py http://127.0.0.1:8000 ctr      # or grpc://127.0.0.1:8001
"""

from __future__ import annotations

import sys

from hotrow.client import Client


def main(address: str, model: str) -> None:
    with Client(address, timeout=10) as client:
        answer = client.embeddings(model, {"user": [7, 8], "item": [2, 3]})
        for feature, vectors in answer.arrays.items():
            print(feature, vectors.shape, vectors[0, :3])
        print("publication", answer.publication)
        inputs = {"user": 7, "item": [2, 3], "site": 3, "dense": [[0.0] * 4]}  # one user and site for both items
        print("probabilities", client.predict(model, inputs)["probabilities"])


if __name__ == "__main__":
    main(*sys.argv[1:])
