"""The canary: which requests go to it, and what happens when it cannot answer them.

A request that names no version goes to the canary if a hash of its routing key is below the canary's share. So retries
of a request land on the same version, on every front end and server, without any state. The routing key is the first of
these that the client gives: the header (gRPC: metadata) `routing-key`, the parameter `routing_key`, the request's id;
else the bytes of the request. The hash covers the model and the canary's version too, so each canary gets other users,
and raising its share keeps those that it has.

The stable version answers instead, and `hotrow_canary_fallback_total` counts it, if the canary is not loaded, if the
request does not fit a canary that takes other inputs, or if the canary fails. A request that the engine sheds (429) or
whose deadline has passed is not tried again: the stable version would only add to the overload.

Everything runs on the front end's event loop.
"""

from __future__ import annotations

import hashlib
import time
import zlib
from collections.abc import Callable

from hotrow.serve.protocol.backend import Backend, ModelInfo
from hotrow.serve.protocol.inference_json import RequestOptions
from hotrow.serve.protocol.metrics import Counts
from hotrow.serve.protocol.request import Answer, RefusedError, Request

HEADER = "routing-key"
NOT_LOADED, FAILED, INPUTS = "not loaded", "failed", "inputs"


def routing_key(header: str | None, options: RequestOptions, content: Callable[[], bytes]) -> str:
    """The key that decides about a request's version. `content` is called only if the client gave no key."""
    for given in (header, options.routing_key, options.id):
        if given:
            return given
    return f"\0{zlib.crc32(content()):08x}"


def is_chosen(model: str, version: str, share: float, key: str) -> bool:
    """Whether the request with this routing key goes to the canary.

    >>> sum(is_chosen("ctr", "4", 0.05, f"user-{n}") for n in range(10_000)) / 10_000
    0.0492
    """
    text = f"{model}\0{version}\0{key}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") < share * 2**64


def is_available(info: ModelInfo, counts: Counts) -> bool:
    """Whether an engine has the canary loaded; counts a fallback if none has. Requires: the model has a canary."""
    assert info.canary is not None
    version = info.canary[0]
    if version in info.versions:
        return True
    count_fallback(counts, info.name, version, NOT_LOADED)
    return False


async def answer(backend: Backend, trial: Request, stable: Request, counts: Counts) -> Answer:
    """The canary's answer to `trial`, or the stable version's to the same request, `stable`."""
    try:
        return await backend.infer(trial)
    except RefusedError as error:
        late = stable.deadline is not None and stable.deadline <= time.monotonic()
        if error.status in (429, 504) or late:
            raise
        count_fallback(counts, trial.model, str(trial.version), NOT_LOADED if error.status in (404, 503) else FAILED)
    return await backend.infer(stable)


def count_fallback(counts: Counts, model: str, version: str, why: str) -> None:
    """The stable version answers a request of the canary."""
    counts.add("hotrow_canary_fallback_total", model, version, why)
