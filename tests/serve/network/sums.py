"""A model whose logits are sums of its ids: a byte that is lost, doubled or moved in transit changes them.

It has four features, `a` to `d`, and no dense one. Row r answers (a[r] + 3 b[r] + 5 c[r] + the checksum of all of d)
modulo 2^20, which float32 holds exactly. `d` may be jagged, so a request of one row can be as large as one likes.
"""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import grpc
import numpy as np
from fuzz import binary, entries, http_request, text
from in_process import InProcessBackend, Running, columns
from raw_http import Reply, chunked

from hotrow.serve.frontend.grpc_messages import SERVICE, build
from hotrow.serve.protocol.backend import ModelInfo
from hotrow.serve.protocol.request import Answer, Request, Signature

PATH = "/v2/models/sums/infer"
NAMES = ("a", "b", "c", "d")
MESSAGES = build()


class Sums(InProcessBackend):
    """A backend with only this model."""

    def __init__(self) -> None:
        info = ModelInfo("sums", "1", Signature(NAMES, frozenset(), 0), ("1",), None, {})
        super().__init__({"sums": (None, info)})  # type: ignore[dict-item]

    async def infer(self, request: Request) -> Answer:
        a, b, c, d = (ids.values for ids in columns(request))
        return Answer(_added(a, b, c, d), request.model, "1")


def _added(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        whole = a + 3 * b + 5 * c + zlib.crc32(np.ascontiguousarray(d))
    return (whole & 0xFFFFF).astype(np.float32)


def drawn(rows: int, seed: int = 0, top: int = 1 << 20, ids: int | None = None) -> dict[str, np.ndarray]:
    """Tensors of so many rows, ids below `top`; with `ids`, `d` is jagged and has so many in all."""
    draw = np.random.default_rng((seed, rows))
    found = {name: draw.integers(0, top, rows) for name in NAMES}
    if ids is not None:
        found["d"] = draw.integers(0, top, ids)
        found["d.offsets"] = np.sort(np.append(draw.integers(0, ids + 1, rows - 1), [0, ids]))
    return found


def expected(tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of these tensors."""
    return _added(*(tensors[name] for name in NAMES))


def request(
    form: str, tensors: dict[str, np.ndarray], sizes: Any = None, pad: int | None = None, extra: str = ""
) -> bytes:
    """A whole HTTP request: `form` is "json" or "binary", "gzip" or "deflate" before it packs it. With `sizes` it is
    sent in chunks of these; with `pad` spaces make the body, before it is packed, exactly so long."""
    if form.endswith("json"):
        body, header = text(tensors), None
    else:
        body, header = binary(tensors)
    if pad is not None:
        spaces = b" " * (pad - len(body))
        assert len(body) + len(spaces) == pad, f"the body has {len(body)} bytes already"
        end = len(body) if header is None else header
        body, header = body[:end] + spaces + body[end:], header and header + len(spaces)
    if form.startswith(("gzip", "deflate")):
        encoding = form.split()[0]
        body = gzip.compress(body, 1) if encoding == "gzip" else zlib.compress(body, 1)
        extra += f"Content-Encoding: {encoding}\r\n"
    whole = http_request(body, header, extra, PATH)
    if sizes is None:
        return whole
    head = whole[: len(whole) - len(body)].replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    return head + chunked(body, sizes)


def logits(reply: Reply) -> np.ndarray:
    """The logits of an answer, whichever form it has."""
    assert reply.status == 200, (reply.status, reply.body[:300])
    body, document = reply.body, reply.json()
    if reply.headers.get("content-encoding"):
        raise AssertionError("unpack the answer first")
    at = int(reply.headers.get("inference-header-content-length", 0))
    for output in document["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size", 0)
        if output["name"] == "logits":
            values = output["data"] if "data" in output else np.frombuffer(body, "<f4", size // 4, at)
            return np.array(values, np.float32).reshape(output["shape"])
        at += size
    raise AssertionError(f"there are no logits in {json.dumps(document)[:200]}")


def message(tensors: dict[str, np.ndarray], model: str = "sums", pad: int | None = None) -> bytes:
    """A ModelInferRequest; with `pad` a parameter makes it exactly so long."""
    made = MESSAGES["ModelInferRequest"](model_name=model)
    for entry, array in zip(entries(tensors), tensors.values(), strict=True):
        made.inputs.add(**entry)
        made.raw_input_contents.append(array.tobytes())
    if pad is not None:
        length = pad - made.ByteSize()
        for _ in range(4):  # the lengths of lengths depend on the text's length
            made.parameters["triton_pad"].string_param = "x" * length
            length += pad - made.ByteSize()
        assert made.ByteSize() == pad, "no text gives this length"
    whole: bytes = made.SerializeToString()
    return whole


def over_grpc(running: Running, data: bytes, method: str = "ModelInfer", metadata: Any = None) -> np.ndarray:
    """The logits that a serialized ModelInferRequest is answered with."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(running.address("grpc"), options) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}")
        answer = MESSAGES["ModelInferResponse"].FromString(call(data, timeout=60, metadata=metadata))
    names = [output.name for output in answer.outputs]
    return np.frombuffer(answer.raw_output_contents[names.index("logits")], "<f4")
