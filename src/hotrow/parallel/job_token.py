"""The job token: one secret that all ranks of a job have, so that they recognise each other.

    token = read_job_token(None)                 # HOTROW_JOB_TOKEN, which launchers set
    store = SealedStore(store, job_key(token))   # entries that only ranks of this job can write

A rank proves that it has the token by HMACs over fresh random numbers (sockets.py); the token itself is never sent.
docs/decisions/0010-job-token.md has the states and what a stranger can do in each.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from datetime import timedelta
from typing import Any

from hotrow.credentials import read_secret
from hotrow.errors import OptionError, RankError

TOKEN_VARIABLE = "HOTROW_JOB_TOKEN"
TRUSTED_VARIABLE = "HOTROW_TRUSTED_NETWORK"
SHORTEST = 16
MAKE_ONE = "make one with `openssl rand -hex 32 > job.token; chmod 600 job.token`, and give every machine the same file"
_PROOF_BYTES = 32
_OPEN, _SEALED = b"\0", b"\1"


def new_job_token() -> str:
    """A random token, for a launcher that starts all ranks itself."""
    return secrets.token_hex(32)


def read_job_token(token_file: str | None) -> str | None:
    """The token of `token_file`, else of the environment, else None."""
    if token_file is not None:
        token, where = read_secret(token_file, "token_file="), f"token_file={token_file!r}"
    else:
        token, where = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
        if not token:
            return None
    if len(token) < SHORTEST:
        raise OptionError(f"{where}: a job token has at least {SHORTEST} characters, this one {len(token)}; {MAKE_ONE}")
    return token


def job_key(token: str) -> bytes:
    """The key for proofs."""
    return hashlib.sha256(b"hotrow job token\0" + token.encode()).digest()


def prove(key: bytes, *parts: bytes) -> bytes:
    """A proof of having the key, over these parts."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


def is_proof(proof: bytes, key: bytes, *parts: bytes) -> bool:
    """Whether `proof` proves having the key."""
    return hmac.compare_digest(proof, prove(key, *parts))


class ForgedEntryError(RankError):
    """An entry of the store was not written with this job's token."""


class SealedStore:
    """The store at which ranks meet. With a key, an entry carries a proof over its name and value, and one without it
    is an error. A stranger who reaches the store can read or remove entries, but never write one that is used.

    `context` names the job's attempt, so that entries of an earlier one are not valid in this one.
    """

    def __init__(self, store: Any, key: bytes | None, context: str = "") -> None:
        self._store, self._key, self._context = store, key, context

    def clone(self) -> SealedStore:
        """The same store, for another thread."""
        store = self._store.clone() if hasattr(self._store, "clone") else self._store
        return SealedStore(store, self._key, self._context)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` waits for an entry."""
        self._store.set_timeout(timeout)

    def check(self, names: list[str]) -> bool:
        """Whether all these entries exist."""
        return bool(self._store.check(names))

    def set(self, name: str, value: str) -> None:
        """Write an entry."""
        data = value.encode()
        sealed = _OPEN + data if self._key is None else _SEALED + self._proof(name, data) + data
        self._store.set(name, sealed.hex())  # the stores of some releases take text only

    def get(self, name: str) -> bytes:
        """Read an entry; waits until it exists. Raises ForgedEntryError for one without a valid proof."""
        try:
            entry = bytes.fromhex(bytes(self._store.get(name)).decode())
        except ValueError:
            raise self._forged(name, "no rank writes such an entry") from None
        if self._key is None:
            if entry[:1] != _OPEN:
                raise self._forged(name, "its writer has a job token and this rank has none")
            return entry[1:]
        if entry[:1] != _SEALED:
            raise self._forged(name, "its writer has no job token and this rank has one")
        proof, data = entry[1 : 1 + _PROOF_BYTES], entry[1 + _PROOF_BYTES :]
        if not hmac.compare_digest(proof, self._proof(name, data)):
            raise self._forged(name, "its writer has another job token")
        return data

    def _proof(self, name: str, data: bytes) -> bytes:
        assert self._key is not None
        return prove(self._key, b"entry", self._context.encode(), name.encode(), data)

    @staticmethod
    def _forged(name: str, why: str) -> ForgedEntryError:
        return ForgedEntryError(
            f"the entry {name!r} of the store at which ranks meet is not from this job: {why}; start all ranks with "
            "the same job token, and keep strangers away from the store's port"
        )
