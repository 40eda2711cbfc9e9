"""A web page in a browser on the server's machine can send requests, but it cannot load or unload models.

A browser says which page sends a request (Origin) and which name the page's address has (Host). A page of evil.example
can have that name resolved to 127.0.0.1 (DNS rebinding), so the browser takes our server for the page's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fuzz import binary, http_request
from in_process import Running, small_backend
from raw_http import Reply, client, good

UNLOAD, LOAD = "/v2/repository/models/ctr/unload", "/v2/repository/models/ctr/load"
TOKEN = "0123456789abcdef0123"
OWN_HOSTS = (
    "localhost:{port}",
    "LOCALHOST:{port}",
    "127.0.0.1:{port}",
    "[::1]:{port}",
    "localhost",
    "localhost.:{port}",
)
OTHER_HOSTS = (
    "evil.example", "evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example:{port}",
    "192.0.2.1:{port}", "localhost@evil.example", "evil.example#localhost", "localhost:{port}:80",
    "localhost/evil.example", "2130706433", "",
)  # fmt: skip
OTHER_ORIGINS = (
    "null", "http://evil.example", "https://localhost:{port}", "http://localhost:3000", "http://localhost",
    "http://127.0.0.1:{port}", "http://localhost:{port}.evil.example", "http://localhost:{port}/", "file://", "",
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running(small_backend()) as running:
        yield running


def send(
    running: Running, host: str, origin: str | None = None, path: str = UNLOAD, method: str = "POST", extra: str = ""
) -> Reply:
    """What a browser at such an address sends."""
    port = running.frontend.ports["http"]
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Length: 0"]
    lines += [] if origin is None else [f"Origin: {origin}"]
    data = ("\r\n".join(lines) + f"\r\n{extra}\r\n").replace("{port}", str(port))
    with client(running) as connection:
        return connection.roundtrip(data.encode())


def in_service(running: Running) -> bool:
    return "ctr" in running.backend.models()


@pytest.mark.parametrize("path", [UNLOAD, LOAD])
@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_a_name_that_is_not_loopback_changes_nothing(server: Running, host: str, path: str) -> None:
    for origin in (None, f"http://{host}"):
        reply = send(server, host, origin, path)
        assert reply.status in (400, 403) and reply.error(), reply
        assert in_service(server)
    if host == "evil.example":
        assert reply.status == 403 and "evil.example" in reply.error() and "token" in reply.error()


@pytest.mark.parametrize("path", [UNLOAD, LOAD])
@pytest.mark.parametrize("origin", OTHER_ORIGINS)
def test_a_page_of_another_origin_changes_nothing(server: Running, origin: str, path: str) -> None:
    reply = send(server, "localhost:{port}", origin, path)
    assert reply.status == 403 and "token" in reply.error(), reply
    assert in_service(server)


@pytest.mark.parametrize("with_origin", [False, True], ids=["program", "own page"])
@pytest.mark.parametrize("host", OWN_HOSTS)
def test_programs_and_our_own_pages_may(server: Running, host: str, with_origin: bool) -> None:
    origin = f"http://{host}" if with_origin else None
    assert send(server, host, origin).status == 200 and not in_service(server)
    assert send(server, host, origin, LOAD).status == 200 and in_service(server)


def test_two_headers_of_a_kind_change_nothing(server: Running) -> None:
    for extra in ("Origin: http://localhost:{port}\r\nOrigin: http://evil.example\r\n", "Host: evil.example\r\n"):
        assert send(server, "localhost:{port}", extra=extra).status in (400, 403)
        assert send(server, "localhost:{port}", "http://evil.example", extra=extra).status in (400, 403)
    absolute = send(server, "localhost:{port}", "http://evil.example", f"http://localhost:{{port}}{UNLOAD}")
    assert absolute.status == 403 and in_service(server)


def test_a_link_or_a_picture_changes_nothing(server: Running) -> None:
    """A browser sends no Origin with these, and only GET."""
    for method in ("GET", "OPTIONS", "PUT", "DELETE"):
        assert send(server, "localhost:{port}", method=method).status == 405
    assert in_service(server)


@pytest.mark.parametrize("path", [UNLOAD, "/v2/models/ctr/infer", "/v2/repository/index", "/v2"])
def test_a_preflight_allows_nothing(server: Running, path: str) -> None:
    preflight_headers = "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization\r\n"
    for origin in ("http://evil.example", "http://localhost:{port}", "null"):
        reply = send(server, "localhost:{port}", origin, path, "OPTIONS", preflight_headers)
        assert reply.status >= 400 and not allows(reply), reply


def test_a_page_may_ask_but_its_browser_shows_it_no_answer(server: Running) -> None:
    """Inference changes nothing, so it is answered; without CORS headers the page cannot read the answer."""
    for origin in ("http://evil.example", "null", "http://localhost:1"):
        with client(server) as connection:
            reply = connection.roundtrip(http_request(*binary(good()), f"Origin: {origin}\r\n"))
            assert reply.status == 200 and not allows(reply)
            reply = connection.roundtrip(
                f"GET /v2/models/ctr HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n\r\n".encode()
            )
            assert reply.status == 200 and not allows(reply)
        with client(server, "metrics") as connection:
            reply = connection.roundtrip(
                f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nOrigin: {origin}\r\n\r\n".encode()
            )
            assert reply.status == 200 and not allows(reply)


def allows(reply: Reply) -> list[str]:
    """Headers that open an answer to other origins."""
    return [name for name in reply.headers if name.startswith("access-control-")]


def test_with_a_token_the_token_decides() -> None:
    """A server behind a proxy has other names, and its pages another origin; another page has no token."""
    with Running(small_backend(), token=TOKEN) as running:
        for host, origin in (("evil.example", None), ("localhost:{port}", "http://evil.example"), ("localhost", None)):
            assert send(running, host, origin).status == 401 and in_service(running)
            bearer = f"Authorization: Bearer {TOKEN}\r\n"
            assert send(running, host, origin, extra=bearer).status == 200 and not in_service(running)
            assert send(running, host, origin, LOAD, extra=bearer).status == 200 and in_service(running)


def test_a_page_cannot_speak_to_the_grpc_port(server: Running) -> None:
    """gRPC is HTTP/2 without TLS, which no browser speaks; what it sends there is no call."""
    lines = ["POST /inference.GRPCInferenceService/RepositoryModelUnload HTTP/1.1\r\nHost: localhost\r\n"]
    body = b"\0\0\0\0\5\x12\3ctr"
    lines += ["Content-Type: application/grpc\r\n", f"Content-Length: {len(body)}\r\n\r\n"]
    with client(server, "grpc") as connection:
        connection.send("".join(lines).encode() + body)
        while connection.has_more():  # frames of HTTP/2, and the end
            connection._data = b""
    assert in_service(server)
