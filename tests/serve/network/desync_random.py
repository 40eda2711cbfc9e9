"""Cases like those of desync_cases.py, drawn from a seed: most of a stream is valid, some of it is not."""

from __future__ import annotations

import random

from desync_cases import EITHER, SMUGGLED, Case

_LINES = [b"GET /v2/a HTTP/1.1", b"POST /v2/a HTTP/1.1", b"HEAD /v2/a HTTP/1.1", b"PUT /v2/a HTTP/1.0", b"GET /v2/a"]
_PAIRS = [  # headers and a body that belong together
    (b"", b""), (b"Content-Length: 3\r\n", b"abc"), (b"Content-Length: 0\r\n", b""),
    (b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n\r\n"),
    (b"Content-Length: 38\r\n", SMUGGLED), (b"Connection: keep-alive\r\n", b""),
    (b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 38\r\n", SMUGGLED),
]  # fmt: skip
_NAMES = [
    b"Content-Length",
    b"Transfer-Encoding",
    b"Connection",
    b"Upgrade",
    b"Expect",
    b"Host",
    b"X",
    b"content-length",
]
_VALUES = [
    b"0", b"3", b"5", b"3, 3", b"+3", b"03", b"chunked", b"identity", b"chunked, chunked", b"xchunked", b"close",
    b"keep-alive", b"Upgrade", b"h2c", b"100-continue", b"h", b"", b"a\r\n b", b"a\nb", b"a\rb", b"\0", b"3;a",
]  # fmt: skip
_BODIES = [
    b"", b"abc", b"abcde", b"0\r\n\r\n", b"3;x=y\r\nabc\r\n0\r\nX: y\r\n\r\n", b"3\nabc\n0\n\n",
    b"3 \r\nabc\r\n0\r\n\r\n", b"\r\n", b"5\r\nabc\r\n0\r\n\r\n", b"fffffffffffffffff\r\nabc",
]  # fmt: skip
_ENDS, _COLONS = [b"\n", b"\r", b"\r\r\n", b" \r\n"], [b":", b" :", b":\t", b""]


def drawn_case(seed: int) -> Case:
    """One to four requests, most of them as they should be."""
    draw = random.Random(seed)

    def mostly(usual: bytes, others: list[bytes], share: float = 0.02) -> bytes:
        return draw.choice(others) if draw.random() < share else usual

    parts = []
    for _ in range(draw.choice((1, 1, 2, 3, 4))):
        lines, body = draw.choice(_PAIRS)
        parts += [draw.choice(_LINES[:4] if draw.random() < 0.9 else _LINES), mostly(b"\r\n", _ENDS)]
        parts += [mostly(b"Host: h\r\n", [b""]), lines]
        for _ in range(draw.choice((0, 0, 0, 1, 2))):
            name = draw.choice(_NAMES[:2] if draw.random() < 0.5 else _NAMES)
            parts += [name, mostly(b": ", _COLONS, 0.1), draw.choice(_VALUES), mostly(b"\r\n", _ENDS)]
        parts += [mostly(b"\r\n", _ENDS), mostly(body, _BODIES, 0.1)]
    return Case(f"seed {seed}", b"".join(parts), EITHER)
