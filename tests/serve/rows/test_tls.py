"""TLS between tower servers and row servers."""

from __future__ import annotations

import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from row_servers import TOKEN, Rows, connected, over, port_of, same_bits, servers_of, until, where
from small_models import make_batch

import hotrow as hr
from hotrow.errors import OptionError, StorageError

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


def certificate(folder: Path, name: str, *names: str) -> dict[str, str]:
    """A certificate that signs itself, with these subject alternative names; as options of a row server."""
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", f"subjectAltName={','.join(names)}"]
    subprocess.run(command, check=True, capture_output=True)
    return {"tls_cert": str(cert), "tls_key": str(key)}


def test_rows_over_tls_have_the_same_bits(tmp_path: Path, repository: Path, rows: Rows) -> None:
    made = certificate(tmp_path, "rows", "IP:127.0.0.1", "DNS:localhost")
    server = rows.start(repository, token=TOKEN, **made)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    options = {"local": "off", "ca": made["tls_cert"], "token_file": str(tmp_path / "token")}
    for host in ("127.0.0.1", "localhost"):
        address = where(server, **options).replace("127.0.0.1", host, 1)
        with over(repository / "ctr", address) as engine, hr.Engine(repository / "ctr") as plain:
            for seed, count in enumerate((1, 40, 3000)):  # the last is larger than a TLS record and a turn
                drawn = make_batch(count, seed, 5000)
                assert same_bits(engine.logits(drawn), plain.logits(drawn))
            assert servers_of(engine).figures()["late"] == 0


def test_a_certificate_of_a_stranger_or_for_another_host_is_refused(
    tmp_path: Path, repository: Path, rows: Rows
) -> None:
    made, other = certificate(tmp_path, "rows", "IP:127.0.0.1"), certificate(tmp_path, "other", "IP:127.0.0.1")
    elsewhere = certificate(tmp_path, "elsewhere", "IP:10.1.2.3")
    for options, authorities, why in (
        (made, other, "certificate is refused"),
        (elsewhere, elsewhere, "certificate is refused: IP address mismatch"),
    ):
        server = rows.start(repository, **options)
        address = where(server, local="off", ca=authorities["tls_cert"])
        with connected(repository / "ctr" / "1", address) as servers:
            until(lambda s=servers, w=why: w in s.describe_problems(), why)  # type: ignore[misc]
            with pytest.raises(StorageError, match="no row server has the shards"):
                servers.wait_until_complete(0.1)


def test_a_client_without_tls_is_never_answered(tmp_path: Path, repository: Path, rows: Rows) -> None:
    server = rows.start(repository, **certificate(tmp_path, "rows", "IP:127.0.0.1"))
    with connected(repository / "ctr" / "1", where(server, local="off")) as servers:
        until(lambda: "timed out" in servers.describe_problems(), "the handshake to time out")
    with socket.create_connection(("127.0.0.1", port_of(server))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")  # the server says in TLS that this is none, and closes
        plain.settimeout(30)
        with suppress(ConnectionResetError):
            while plain.recv(1024):
                pass


def test_wrong_files_are_errors_at_the_start(tmp_path: Path, repository: Path, rows: Rows) -> None:
    made, other = certificate(tmp_path, "rows", "IP:127.0.0.1"), certificate(tmp_path, "other", "IP:127.0.0.1")
    with pytest.raises(OptionError, match="give both, or neither"):
        rows.start(repository, tls_cert=made["tls_cert"])
    with pytest.raises(OptionError, match="there is no file"):
        rows.start(repository, tls_cert=made["tls_cert"], tls_key=str(tmp_path / "none"))
    for wrong in ({**made, "tls_key": other["tls_key"]}, {**made, "tls_cert": made["tls_key"]}):
        with pytest.raises(OptionError, match=r"(rows|other)\.(crt|key)"):
            rows.start(repository, **wrong)
        rows.running.clear()
    with pytest.raises(OptionError, match=r"ca=.*there is no such file"):
        over(repository / "ctr", f"127.0.0.1:1?ca={tmp_path / 'none'}")
