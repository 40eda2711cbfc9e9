"""Limits: the resources of a front end that one client, and all clients together, may use.

Every number that a client chooses (a body's length, a shape, a header, a count of connections) is checked against a
limit before memory is allocated for it. Limits are options of `hotrow serve`: each has a name, a default for a machine
of a few GiB, and an error that names it.

`ids` limits the ids of a request after shared features are repeated for each row. A history of a million ids that is
sent once for 100,000 candidates is a small body, but 10^11 ids. `answer` limits the vectors that a request asks for
(embedding_outputs.py), which may be much larger than its keys.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from hotrow.errors import OptionError
from hotrow.units import parse_size

_SIZES = ("body", "json", "headers", "buffered", "answer", "answers")
MOST_ANSWERS = 192 << 20  # below what an engine keeps for a front end that does not read (processes/engine_socket.py)
JSON_BYTES = 32  # of `json` for each number of an answer in JSON: about what its text and its Python object take


@dataclass(frozen=True)
class Limits:
    """The limits of one front end.

    >>> Limits(body="1MiB").body_bytes
    1048576
    >>> Limits(rows=0)
    Traceback (most recent call last):
    hotrow.errors.OptionError: rows=0; give a number above 0
    """

    body: str | int = "64MiB"  # one request, after decompression
    json: str | int = "32MiB"  # the JSON part of it: JSON takes up to 20 times its length in memory
    headers: str | int = "32KiB"  # the request line and all headers
    buffered: str | int = "1GiB"  # bodies that are being read or answered, all connections together
    answer: str | int = "32MiB"  # the vectors of one answer
    answers: str | int = "128MiB"  # the vectors of all answers that engines are computing for this front end
    rows: int = 131_072  # candidates of a request
    ids: int = 16_777_216  # ids of a request, with shared ones counted for each row, but once for a user part
    connections: int = 4096
    in_flight: int = 4096  # requests that wait for an answer
    read_seconds: float = 30.0  # from a request's first byte to its last
    idle_seconds: float = 300.0  # between two requests of a connection
    answer_seconds: float = 60.0  # for a client to read its answer

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _SIZES:
                parse_size(value, field.name)
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise OptionError(f"{field.name}={value!r}; give a number above 0")
        if not self.answer_bytes <= self.answers_bytes <= MOST_ANSWERS:
            raise OptionError(
                f"answer={self.answer!r} and answers={self.answers!r}; give answer at most as much as answers, and "
                f"answers at most {MOST_ANSWERS >> 20}MiB"
            )

    @cached_property
    def body_bytes(self) -> int:
        """Bytes of a body."""
        return parse_size(self.body, "body")

    @cached_property
    def json_bytes(self) -> int:
        """Bytes of a body's JSON."""
        return parse_size(self.json, "json")

    @cached_property
    def header_bytes(self) -> int:
        """Bytes of a request's headers."""
        return parse_size(self.headers, "headers")

    @cached_property
    def buffered_bytes(self) -> int:
        """Bytes of all bodies."""
        return parse_size(self.buffered, "buffered")

    @cached_property
    def answer_bytes(self) -> int:
        """Bytes of one answer's vectors."""
        return parse_size(self.answer, "answer")

    @cached_property
    def answers_bytes(self) -> int:
        """Bytes of the vectors of all answers that are being computed."""
        return parse_size(self.answers, "answers")
