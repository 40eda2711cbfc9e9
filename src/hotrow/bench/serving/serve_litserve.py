"""The LitServe peer's API class. It is a separate module because LitServe's worker imports it by name.

LitServe takes the body's type from the annotation of `decode_request`, so this file must not use string annotations.
"""

from typing import Annotated

import litserve
from fastapi import Body, Response

from hotrow.bench.serving.serve_peers import Predictor

Bytes = Annotated[bytes, Body(media_type="application/octet-stream")]


class Api(litserve.LitAPI):  # type: ignore[misc, unused-ignore]
    """Takes and returns raw bytes; LitServe batches requests."""

    def __init__(self, path: str, batch: int, batch_timeout: float) -> None:
        super().__init__(max_batch_size=batch, batch_timeout=batch_timeout)
        self.path = path

    def setup(self, device: str) -> None:
        """In the worker."""
        self.predictor = Predictor(self.path)

    def decode_request(self, request: Bytes) -> bytes:
        """The body."""
        return request

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        """Joined by the predictor."""
        return inputs

    def predict(self, bodies: list[bytes]) -> list[bytes]:
        """One forward for all."""
        return self.predictor(bodies)

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        """`predict` returns one body for each request already."""
        return output

    def encode_response(self, output: bytes) -> Response:
        """Probabilities as bytes."""
        return Response(output, media_type="application/octet-stream")


def serve(port: int, path: str, batch: int, batch_timeout: float) -> None:
    """Serve until the process ends."""
    server = litserve.LitServer(Api(path, batch, batch_timeout), accelerator="cpu", workers_per_device=1, timeout=30)
    server.run(host="127.0.0.1", port=port, log_level="error", generate_client_file=False)
