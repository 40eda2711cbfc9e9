"""The hello of a connection to a row server: what the client serves, and proofs that both sides have the token.

    server → client   challenge: 32 random bytes
    client → server   hello: JSON with the model, its version, a fingerprint of its tables, a nonce, and a proof
    server → client   welcome: JSON with the server's shards, its local socket, and a proof; or an error with the reason

A proof is an HMAC over the challenge, the nonce and the sender's text. The token is never sent. Without a token proofs
are empty, and a server that has one refuses them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import hotrow
from hotrow.errors import HotRowError, OptionError
from hotrow.table_definition import Table
from hotrow.tiers.host.store import SHARDS

PROTOCOL = 1
MAGIC = 0x31525248  # "HRR1"
HEADER = struct.Struct("<IHHQQqq")  # magic, kind, error, id, bytes, publication, oldest
CHALLENGE, HELLO, WELCOME, ERROR = 1, 2, 3, 6
LONGEST = 64 << 10  # bytes of a welcome or an error
LEAST_TOKEN = 16  # characters
# In the reason of a refusal: the client waits longer, or knows that this server cannot have the version.
LOADING, NOT_LOADED = "is being loaded", "does not load:"
# What reading a peer's JSON may raise: it may be nested deeply, and have infinite numbers and halves of characters.
UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


class HandshakeError(HotRowError):
    """A row server and a client do not fit together, or one of them lacks the token."""


class Model(NamedTuple):
    """What a client wants to read: a model's version, with a fingerprint of its tables."""

    name: str
    version: int
    fingerprint: str


@dataclass(frozen=True)
class Welcome:
    """What a server says of itself: its shards, from begin to before end, and the socket for clients on its machine."""

    begin: int
    end: int
    local: str


def fingerprint(tables: Sequence[Table], seed: int) -> str:
    """A digest of what both sides must agree on, or unseen keys would read other values.

    >>> fingerprint([Table("user", dim=4)], 0) == fingerprint([Table("user", dim=8)], 0)
    False
    """
    text = json.dumps([seed, [[t.name, t.dim, t.initial.to_dict()] for t in tables]])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def token_key(token: str | None) -> bytes | None:
    """The key for proofs; None without a token."""
    if token is None:
        return None
    if len(token) < LEAST_TOKEN:
        raise OptionError(
            f"a token of row servers has at least {LEAST_TOKEN} characters, this one {len(token)}; make one with "
            "`openssl rand -hex 32 > rows.token; chmod 600 rows.token`"
        )
    return hashlib.sha256(b"hotrow rows token\0" + token.encode()).digest()


def prove(key: bytes | None, *parts: bytes) -> str:
    """A proof of having the key, over these parts."""
    if key is None:
        return ""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)
    return mac.hexdigest()


# --- the client's side ---


class Hello(NamedTuple):
    """A client's hello and the nonce in it."""

    text: bytes
    nonce: str


def make_hello(model: Model, challenge: bytes, key: bytes | None) -> Hello:
    """The client's hello."""
    nonce = secrets.token_hex(16)
    body = json.dumps([model.name, model.version, model.fingerprint])
    proof = prove(key, b"client", challenge, nonce.encode(), body.encode())
    fields = {"protocol": PROTOCOL, "hotrow": hotrow.__version__, "model": body, "nonce": nonce, "proof": proof}
    return Hello(json.dumps(fields).encode(), nonce)


def read_welcome(text: bytes, nonce: str, challenge: bytes, key: bytes | None) -> Welcome:
    """Check a server's welcome."""
    try:
        fields = json.loads(text)
        body, proof = str(fields["body"]).encode(), str(fields["proof"]).encode()
        begin, end, local = json.loads(body)
        welcome = Welcome(int(begin), int(end), str(local))
    except UNREADABLE:
        raise HandshakeError("the server's welcome cannot be read; is it a row server?") from None
    if not hmac.compare_digest(proof, prove(key, b"server", challenge, nonce.encode(), body).encode()):
        raise HandshakeError("the server has another token; give both sides the same --token-file")
    if not 0 <= welcome.begin < welcome.end <= SHARDS:
        raise HandshakeError(f"the server says that it has the shards {welcome.begin}:{welcome.end} of 0:{SHARDS}")
    return welcome


def greet(connection: socket.socket, model: Model, key: bytes | None) -> Welcome:
    """Prove the token over a blocking connection and read the welcome. The connection's timeout applies."""
    kind, challenge = _receive(connection)
    if kind != CHALLENGE:
        raise HandshakeError("the server's first frame is no challenge; is it a row server?")
    hello = make_hello(model, challenge, key)
    connection.sendall(HEADER.pack(MAGIC, HELLO, 0, 1, len(hello.text), 0, 0) + hello.text)
    kind, text = _receive(connection)
    if kind == ERROR:
        raise HandshakeError(text.decode(errors="replace"))
    if kind != WELCOME:
        raise HandshakeError("the server's second frame is no welcome; is it a row server?")
    return read_welcome(text, hello.nonce, challenge, key)


def _receive(connection: socket.socket) -> tuple[int, bytes]:
    magic, kind, _, _, size, _, _ = HEADER.unpack(receive_bytes(connection, HEADER.size, "server"))
    if magic != MAGIC or size > LONGEST:
        raise HandshakeError("the peer does not speak the protocol of row servers")
    return kind, receive_bytes(connection, size, "server")


def receive_bytes(connection: socket.socket, count: int, peer: str) -> bytes:
    """So many bytes of a blocking connection."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise HandshakeError(f"the {peer} closed the connection")
        data += part
    return data


# --- the server's side ---


def read_hello(challenge: bytes, text: bytes, key: bytes | None) -> tuple[Model, str]:
    """Check a client's hello; returns the model that it wants and its nonce."""
    try:
        fields: dict[str, Any] = json.loads(text)
        protocol, version = int(fields["protocol"]), str(fields["hotrow"])
        body, nonce, proof = str(fields["model"]).encode(), str(fields["nonce"]), str(fields["proof"]).encode()
        expected = prove(key, b"client", challenge, nonce.encode(), body).encode()
        name, number, digest = json.loads(body)
        model = Model(str(name), int(number), str(digest))
    except UNREADABLE:
        raise HandshakeError("the hello cannot be read; is the client a HotRow tower server?") from None
    if not hmac.compare_digest(proof, expected):
        raise HandshakeError("the client has another token than this row server; give both the same --token-file")
    if protocol != PROTOCOL:
        raise HandshakeError(
            f"the client (HotRow {version}) speaks protocol {protocol} and this row server (HotRow "
            f"{hotrow.__version__}) protocol {PROTOCOL}; install one version on both"
        )
    return model, nonce


def make_welcome(welcome: Welcome, nonce: str, challenge: bytes, key: bytes | None) -> bytes:
    """The server's welcome."""
    body = json.dumps([welcome.begin, welcome.end, welcome.local])
    proof = prove(key, b"server", challenge, nonce.encode(), body.encode())
    return json.dumps({"body": body, "proof": proof}).encode()
