"""The hello and the welcome: both sides prove the token, and refuse what does not fit, whatever a peer sends."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_servers import TOKEN

import hotrow as hr
from hotrow.errors import OptionError
from hotrow.tiers.rows import handshake
from hotrow.tiers.rows.handshake import (
    CHALLENGE,
    ERROR,
    HEADER,
    LONGEST,
    MAGIC,
    WELCOME,
    HandshakeError,
    Model,
    Welcome,
    fingerprint,
    greet,
    make_hello,
    make_welcome,
    read_hello,
    read_welcome,
    token_key,
)

MODEL = Model("ctr", 3, "f" * 32)
NONCE = b"c" * 32
KEYS = [None, token_key(TOKEN)]


@pytest.mark.parametrize("key", KEYS, ids=["no token", "token"])
def test_both_sides_learn_what_the_other_said(key: bytes | None) -> None:
    hello = make_hello(MODEL, NONCE, key)
    wanted, nonce = read_hello(NONCE, hello.text, key)
    assert (wanted, nonce) == (MODEL, hello.nonce)
    welcome = Welcome(0, 512, "/run/rows.sock")
    assert read_welcome(make_welcome(welcome, nonce, NONCE, key), nonce, NONCE, key) == welcome


@pytest.mark.parametrize(("client", "server"), [(TOKEN, "x" * 16), (None, TOKEN), (TOKEN, None)])
def test_another_token_or_none_is_refused_by_both(client: str | None, server: str | None) -> None:
    mine, other = token_key(client), token_key(server)
    with pytest.raises(HandshakeError, match="give both the same --token-file"):
        read_hello(NONCE, make_hello(MODEL, NONCE, mine).text, other)
    welcome = make_welcome(Welcome(0, 1024, ""), "n", NONCE, other)
    with pytest.raises(HandshakeError, match="give both sides the same --token-file"):
        read_welcome(welcome, "n", NONCE, mine)


def test_a_proof_is_for_one_challenge_one_nonce_and_one_text() -> None:
    key = token_key(TOKEN)
    hello = make_hello(MODEL, NONCE, key)
    with pytest.raises(HandshakeError):
        read_hello(b"d" * 32, hello.text, key)  # replayed
    fields = json.loads(hello.text)
    for name, value in {"model": json.dumps(["feed", 3, "f" * 32]), "nonce": "0" * 32, "proof": ""}.items():
        with pytest.raises(HandshakeError):
            read_hello(NONCE, json.dumps({**fields, name: value}).encode(), key)
    welcome = make_welcome(Welcome(0, 512, ""), "n", NONCE, key)
    other = {**json.loads(welcome), "body": json.dumps([512, 1024, ""])}
    for text, nonce, challenge in [
        (welcome, "m", NONCE),
        (welcome, "n", b"d" * 32),
        (json.dumps(other).encode(), "n", NONCE),
    ]:
        with pytest.raises(HandshakeError):
            read_welcome(text, nonce, challenge, key)
    reflected = {"body": fields["model"], "proof": fields["proof"]}  # a client's proof is none of a server
    with pytest.raises(HandshakeError):
        read_welcome(json.dumps(reflected).encode(), hello.nonce, NONCE, key)


def test_another_protocol_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL", 2)
    text = make_hello(MODEL, NONCE, None).text
    monkeypatch.undo()
    with pytest.raises(HandshakeError, match=r"protocol 2 and this row server .* protocol 1; install one version"):
        read_hello(NONCE, text, None)


def test_a_short_token_is_refused_with_the_cure() -> None:
    with pytest.raises(OptionError, match="openssl rand -hex 32"):
        token_key("short")


def test_a_fingerprint_is_of_all_that_decides_an_unseen_rows_values() -> None:
    tables = [hr.Table("user", 4), hr.Table("item", 8)]
    found = fingerprint(tables, 3)
    assert found == fingerprint([hr.Table("user", 4, {"u": "mean"}), hr.Table("item", 8)], 3)
    others = [
        fingerprint(tables, 4),
        fingerprint(tables[::-1], 3),
        fingerprint(tables[:1], 3),
        fingerprint([hr.Table("users", 4), tables[1]], 3),
        fingerprint([hr.Table("user", 5), tables[1]], 3),
        fingerprint([hr.Table("user", 4, initial=hr.Initial.zeros()), tables[1]], 3),
    ]
    assert len({found, *others}) == 7


STRANGE = [
    b"",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"5",
    b"{}",
    b"[" * 4000,
    b'{"protocol": Infinity, "hotrow": "", "model": "[1,2,3]", "nonce": "", "proof": ""}',
    b'{"protocol": NaN, "hotrow": "", "model": "[1,2,3]", "nonce": "", "proof": ""}',
    b'{"protocol": 1, "hotrow": "", "model": "[1,1e999,3]", "nonce": "", "proof": ""}',
    b'{"protocol": 1, "hotrow": "", "model": "[1,2]", "nonce": "", "proof": ""}',
    b'{"protocol": 1, "hotrow": "", "model": "[1,[],3]", "nonce": "", "proof": ""}',
    b'{"protocol": 1, "hotrow": "", "model": "[1,2,3]", "nonce": "\\ud800", "proof": ""}',
    b'{"protocol": 1, "hotrow": "", "model": "[1,2,3]", "nonce": "", "proof": "\\ud800"}',
    b'{"protocol": 1, "hotrow": "", "model": "[\\"\\ud800\\",2,3]", "nonce": "", "proof": ""}',
    b'{"protocol": 1, "hotrow": "", "model": ' + b'"[' + b"[" * 3000 + b'", "nonce": "", "proof": ""}',
    b'{"protocol": ' + b"1" * 3900 + b', "hotrow": "", "model": "[1,2,3]", "nonce": "", "proof": ""}',
]


@pytest.mark.parametrize("key", KEYS, ids=["no token", "token"])
@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_a_hello_that_is_none_is_refused_by_name(text: bytes, key: bytes | None) -> None:
    with pytest.raises(HandshakeError):
        read_hello(NONCE, text, key)


@pytest.mark.parametrize(
    "text",
    [
        *STRANGE,
        b'{"body": "[0, 1024]", "proof": ""}',
        b'{"body": "[Infinity, 1024, 0]", "proof": ""}',
        b'{"body": "[\\"a\\", 1024, 0]", "proof": ""}',
        b'{"body": "[0, 2048, 0]", "proof": ""}',
        b'{"body": "[512, 512, 0]", "proof": ""}',
        b'{"body": "[0, 1024, 0]", "proof": "\\ud800"}',
    ],
)
def test_a_welcome_that_is_none_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(HandshakeError):
        read_welcome(text, "n", NONCE, None)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("protocol", "hotrow", "model", "nonce", "proof", "body")


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), json_values | json_values.map(json.dumps)))
def test_any_json_is_a_hello_or_refused_by_name(fields: dict[str, Any]) -> None:
    text = json.dumps(fields).encode()
    for key in KEYS:
        for read in (lambda key: read_hello(NONCE, text, key), lambda key: read_welcome(text, "n", NONCE, key)):
            try:
                read(key)
            except HandshakeError as error:
                str(error).encode()  # it is sent


def answered(*frames: bytes) -> Exception:
    """What `greet` says to a server that sends these bytes and closes."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with ours, theirs, pytest.raises(HandshakeError) as refused:
        for frame in frames:  # all of it fits the socket's buffer
            theirs.sendall(frame)
        theirs.shutdown(socket.SHUT_WR)
        greet(ours, MODEL, None)
    return refused.value


def frame(kind: int, payload: bytes = b"", size: int | None = None, magic: int = MAGIC) -> bytes:
    return HEADER.pack(magic, kind, 0, 0, len(payload) if size is None else size, 0, 0) + payload


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"], "does not speak the protocol of row servers"),
        ([], "closed the connection"),
        ([frame(CHALLENGE, size=LONGEST + 1)], "does not speak the protocol"),
        ([frame(CHALLENGE, magic=7)], "does not speak the protocol"),
        ([frame(WELCOME)], "is no challenge; is it a row server?"),
        ([frame(CHALLENGE, NONCE), frame(CHALLENGE, NONCE)], "is no welcome; is it a row server?"),
        ([frame(CHALLENGE, NONCE), frame(ERROR, b"go away \xff")], "go away"),
        ([frame(CHALLENGE, NONCE), frame(WELCOME, b"{}")], "welcome cannot be read; is it a row server?"),
        ([frame(CHALLENGE, NONCE), frame(WELCOME, b"{}", 10)], "closed the connection"),
    ],
)
def test_a_server_that_is_no_row_server_is_told_apart(frames: list[bytes], said: str) -> None:
    assert said in str(answered(*frames))
