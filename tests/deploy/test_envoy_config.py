"""Envoy takes deploy/envoy.yaml as it is, and leaves its clients time when its pod ends."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from proxies import DEPLOY, envoy_command, envoy_config, start_envoy
from towers import until

from hotrow.bench.serving.fleet_servers import steady_ports


def test_envoy_validates_the_file(secrets: Path, tmp_path: Path) -> None:
    import yaml

    command = envoy_command()
    (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(envoy_config(secrets)))
    done = subprocess.run(
        [*command, "-c", str(tmp_path / "envoy.yaml"), "--mode", "validate"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "eprecated" not in done.stderr


def test_pod_that_ends_asks_its_clients_to_leave_and_then_takes_none(secrets: Path) -> None:
    """The preStop hook of the proxy's pod, with this Envoy's port and no pause."""
    yaml = pytest.importorskip("yaml")
    (hook,) = (
        each["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "proxy.yaml").read_text())
        if each["kind"] == "Deployment"
    )
    nobody = [SimpleNamespace(http=port, grpc=port) for port in steady_ports(2)]
    with start_envoy(nobody, secrets, "--drain-time-s", "1") as proxy:
        proxy.wait_listening()
        client = proxy.client()
        assert "connection" not in client.ask("/nowhere", None)[2]
        script = hook[-1].replace("/9901", f"/{proxy.admin}").replace("sleep 25", "")
        assert f"/{proxy.admin}" in script and "sleep" not in script
        subprocess.run([*hook[:-1], script], check=True, timeout=30)
        until(
            lambda: client.ask("/nowhere", None)[2].get("connection") == "close", "the proxy to ask its client to leave"
        )

        def refused() -> bool:
            try:
                proxy.client().ask("/nowhere", None)
            except ConnectionRefusedError:
                return True
            return False

        until(refused, "the proxy to take no more connections")
