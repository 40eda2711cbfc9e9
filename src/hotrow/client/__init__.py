"""A client of `hotrow serve`: predictions, and the looked-up vectors of rows, over HTTP or gRPC.

    from hotrow.client import Client

    with Client("http://127.0.0.1:8000") as client:
        vectors = client.embeddings("ctr", {"user": [7, 8], "item": [101, 102]})
        vectors["user"], vectors.publication              # float32 [2, dim], the publication that they are of
        client.predict("ctr", {"user": [7], "item": [101, 102], "dense": [[0.5, 1.0]]})["probabilities"]

Files in reading order:

    client.py       Client: requests, retries within a timeout
    answer.py       Answer and ClientError
    tensors.py      Python values to tensors, and outputs back to arrays
    http_calls.py   requests over HTTP with binary tensors, by the standard library
    grpc_calls.py   the same over gRPC, if grpcio is installed

Any thread may use one Client. It imports nothing of the server but the table of gRPC messages.
"""

from hotrow.client.answer import Answer, ClientError
from hotrow.client.client import Client

__all__ = ["Answer", "Client", "ClientError"]
