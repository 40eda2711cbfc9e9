"""The LitServe peer's API: a module of its own, because LitServe sends it to a worker by its name.

LitServe takes the body's type from the annotation of `decode_request`, so annotations are objects here, not strings.
"""

from typing import Annotated

import litserve
from fastapi import Body, Response

from hotrow.bench.serving.serve_peers import Predictor

Bytes = Annotated[bytes, Body(media_type="application/octet-stream")]


class Api(litserve.LitAPI):  # type: ignore[misc, unused-ignore]
    """Bytes in, bytes out, batches in between."""

    def __init__(self, path: str, batch: int, patience: float) -> None:
        super().__init__(max_batch_size=batch, batch_timeout=patience)
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
        """They are apart already."""
        return output

    def encode_response(self, output: bytes) -> Response:
        """Probabilities as bytes."""
        return Response(output, media_type="application/octet-stream")


def serve(port: int, path: str, batch: int, patience: float) -> None:
    """Until it is ended."""
    server = litserve.LitServer(Api(path, batch, patience), accelerator="cpu", workers_per_device=1, timeout=30)
    server.run(host="127.0.0.1", port=port, log_level="error", generate_client_file=False)
