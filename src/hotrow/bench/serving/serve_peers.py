"""The peers of `hotrow bench serve`: the same trained model in plain PyTorch, behind LitServe or Ray Serve.

Each is written as its own users would write it. The model is one `nn.Embedding` with the rows of all tables (one gather
for 26 features, the fastest form in plain PyTorch) and the DLRM tower. The server's own batching joins requests into
one forward. A body is the keys (int64 [rows, 26]) and then the dense features (float32 [rows, 13]) as raw bytes; an
answer is the probabilities (float32). Both servers support such binary bodies. Batches have at most 16 requests and
wait at most 2 ms; LitServe has one worker, Ray one replica. These settings were chosen, not tuned on this machine.

Started as `python -m hotrow.bench.serving.serve_peers litserve|ray PORT WEIGHTS`; it prints "ready" when it serves.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

FEATURES, DENSE, DIM = 26, 13, 16
BATCH, BATCH_TIMEOUT = 16, 0.002
ROW_BYTES = 8 * FEATURES + 4 * DENSE


class PlainDLRM(nn.Module):
    """DLRM over one embedding table, from a state dict."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.rows = nn.Embedding.from_pretrained(weights["rows"])
        self.first = nn.Buffer(weights["first"])  # the first row of each feature
        self.bottom = _mlp(weights, "bottom", last=True)
        self.top = _mlp(weights, "top", last=False)
        pairs = torch.tril_indices(FEATURES + 1, FEATURES + 1, -1)
        self.pairs = nn.Buffer(pairs[0] * (FEATURES + 1) + pairs[1])

    def forward(self, keys: Tensor, dense: Tensor) -> Tensor:
        """Logits."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom.unsqueeze(1), self.rows(keys + self.first)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([bottom, products], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def _mlp(weights: dict[str, Tensor], name: str, last: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last if `last`."""
    layers: list[nn.Module] = []
    count = sum(key.startswith(f"{name}.") and key.endswith(".weight") for key in weights)
    for number in range(count):
        weight = weights[f"{name}.{number}.weight"]
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": weights[f"{name}.{number}.bias"]})
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if last else layers[:-1]))


class Predictor:
    """The model as a function from request bodies to answer bodies."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.model = PlainDLRM(load_file(path)).eval()

    def __call__(self, bodies: list[bytes]) -> list[bytes]:
        """The answers to some requests, by one forward."""
        counts = [len(body) // ROW_BYTES for body in bodies]
        keys = [np.frombuffer(b, np.int64, n * FEATURES) for b, n in zip(bodies, counts, strict=True)]
        dense = [np.frombuffer(b, np.float32, -1, 8 * n * FEATURES) for b, n in zip(bodies, counts, strict=True)]
        with torch.inference_mode():
            logits = self.model(
                torch.from_numpy(np.concatenate(keys)).view(-1, FEATURES),
                torch.from_numpy(np.concatenate(dense)).view(-1, DENSE),
            )
            return [part.numpy().tobytes() for part in torch.sigmoid(logits).split(counts)]


def serve_litserve(port: int, path: str) -> None:
    """LitServe with batches."""
    from hotrow.bench.serving.serve_litserve import serve

    serve(port, path, BATCH, BATCH_TIMEOUT)


def serve_ray(port: int, path: str) -> None:
    """Ray Serve with @serve.batch."""
    import logging
    import signal

    import ray
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    class Replica:
        def __init__(self, path: str) -> None:
            self.predictor = Predictor(path)

        @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=BATCH_TIMEOUT)  # type: ignore[untyped-decorator, unused-ignore]
        async def predict(self, bodies: list[bytes]) -> list[bytes]:
            return self.predictor(bodies)

        async def __call__(self, request: Request) -> Response:
            return Response(await self.predict(await request.body()), media_type="application/octet-stream")

    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    deployment = serve.deployment(num_replicas=1, max_ongoing_requests=256, logging_config={"enable_access_log": False})
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"enable_access_log": False})
    serve.run(deployment(Replica).bind(path), route_prefix="/predict")
    print("ready", flush=True)
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    serve.shutdown()
    ray.shutdown()


def main(kind: str, port: str, path: str) -> None:
    """Run one peer."""
    {"litserve": serve_litserve, "ray": serve_ray}[kind](int(port), str(Path(path).resolve()))


if __name__ == "__main__":
    main(*sys.argv[1:])
