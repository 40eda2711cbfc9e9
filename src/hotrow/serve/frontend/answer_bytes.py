"""AnswerBytes: bounds the memory of a front end's large answers, those with looked-up vectors.

A request's keys are small and its vectors may be 32 MiB. Their bytes are known before the request goes to an engine.
They are taken then, and given back when the answer has left for the client, or the request has failed. So a client that
reads slowly, or sends many lookups at once, cannot make the front end or an engine's socket hold more than the limit.

Everything runs on the event loop.
"""

from __future__ import annotations

from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.request import RefusedError

_RETRY_SECONDS = 0.1


class AnswerBytes:
    """The bytes of vectors that are computed or sent now."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = 0

    def take(self, size: int) -> None:
        """Count an answer's bytes. Raises 429 if there is no room for them."""
        if self.held + size > self.limits.answers_bytes:
            raise RefusedError(
                429,
                f"{self.held} bytes of vectors are being computed or sent, and these are {size}; the limit is "
                f"answers={self.limits.answers}: retry later",
                _RETRY_SECONDS,
            )
        self.held += size

    def give(self, size: int) -> None:
        """Forget bytes that were taken."""
        self.held -= size
