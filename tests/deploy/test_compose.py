"""deploy/compose.yaml and the Dockerfile: valid, consistent with each other and with HotRow's commands."""

from __future__ import annotations

import re
import subprocess
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hotrow_commands import given, options, port

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "HOTROW_IMAGE" in service["image"]]


def test_compose_file_is_valid_by_the_schema() -> None:
    if find_spec("check_jsonschema") is None:
        pytest.skip("there is no check-jsonschema")
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.compose-spec",
        str(DEPLOY / "compose.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_networks_volumes_secrets_and_configs_are_declared_and_used() -> None:
    for kind in ("networks", "secrets", "configs"):
        used = {
            each if isinstance(each, str) else each["source"] for one in SERVICES.values() for each in one.get(kind, [])
        }
        assert used == COMPOSE[kind].keys(), kind
    mounted = {
        volume.split(":")[0] for one in SERVICES.values() for volume in one.get("volumes", []) if volume[0] != "$"
    }
    assert mounted == COMPOSE["volumes"].keys()
    for one in SERVICES.values():
        assert set(one.get("depends_on", {})) <= SERVICES.keys()
    for config in COMPOSE["configs"].values():
        assert (DEPLOY / config["file"]).exists()


def test_secrets_are_what_the_script_writes(secrets: Path) -> None:
    named = {each["file"].removeprefix("./secrets/") for each in COMPOSE["secrets"].values()}
    written = {str(path.relative_to(secrets)) for path in secrets.rglob("*") if path.is_file()}
    assert named == written - {"ca.key"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets.rglob("*"))


def test_certificate_of_the_row_servers_is_for_their_names(secrets: Path) -> None:
    for name, good in (("rows-0", True), ("rows-1", True), ("rows-2", False)):
        command = ["openssl", "verify", "-CAfile", "rows/ca.crt", "-verify_hostname", name, "rows/tls.crt"]
        done = subprocess.run(command, cwd=secrets, capture_output=True, text=True)
        assert (done.returncode == 0) is good, done.stdout + done.stderr


def test_only_the_proxy_is_published_and_on_loopback() -> None:
    published = {name: one["ports"] for name, one in SERVICES.items() if "ports" in one}
    assert published == {"proxy": ["127.0.0.1:8443:8443"]}
    assert all(COMPOSE["networks"][name]["internal"] for one in OURS for name in SERVICES[one]["networks"])


@pytest.mark.parametrize("name", OURS)
def test_health_check_asks_a_port_that_the_command_opens(name: str) -> None:
    service = SERVICES[name]
    words = given(service["command"])
    opened = port(words["--metrics"]) if service["command"][0] == "rows" else int(words.get("--http", 8000))
    (program,) = (word for word in service["healthcheck"]["test"] if "urlopen" in word)
    assert f"http://127.0.0.1:{opened}/" in program
    compile(program, "health check", "exec")


@pytest.mark.parametrize("name", OURS)
def test_command_has_the_options_that_it_is_given(name: str) -> None:
    options([re.sub(r"\$\{\w+:-([^}]*)}", r"\1", word) for word in SERVICES[name]["command"]])


def test_cluster_file_names_the_row_servers_with_their_shards() -> None:
    cluster = tomllib.loads((DEPLOY / "compose.toml").read_text())
    expected = {server: each["shards"] for each in cluster["range"] for server in each["servers"]}
    started = {}
    for name, service in SERVICES.items():
        if service["command"][0] == "rows":
            words = given(service["command"])
            started[f"{name}:{port(words['--listen'])}"] = words["--shards"]
    assert started == expected


def test_stopping_leaves_time_to_drain() -> None:
    towers = SERVICES["towers"]
    assert int(towers["stop_grace_period"].removesuffix("s")) > int(
        given(towers["command"])["--drain"].removesuffix("s")
    )


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, with continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_image_copies_what_the_wheel_is_built_from_and_nothing_is_ignored() -> None:
    copied = {word for name, rest in instructions() if name == "COPY" for word in rest.split()[:-1]}
    assert all((DEPLOY.parent / word).exists() for word in copied)
    lines = [line for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert {line[1:] for line in lines if line[0] == "!"} == copied
    assert not [word for word in copied for line in lines[1:] if line[0] != "!" and fnmatch(word, line)]
    pyproject = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    needed = {
        pyproject["project"]["readme"],
        *pyproject["project"]["license-files"],
        "CMakeLists.txt",
        "pyproject.toml",
    }
    assert needed | {"src", "core"} == copied


def test_image_runs_hotrow_as_the_user_of_the_manifests() -> None:
    last = dict(instructions())
    user = last["USER"]
    assert last["ENTRYPOINT"] == '["hotrow"]' and user.split(":")[0].isdigit() and not user.startswith("0")
    assert f"--uid {user.split(':')[0]} " in (DEPLOY / "Dockerfile").read_text()
    assert SERVICES["proxy"]["user"] == user  # it reads the same folder of secrets
    pods = re.findall(r"runAsUser: (\d+)", "".join(path.read_text() for path in (DEPLOY / "kubernetes").glob("*.yaml")))
    assert set(pods) == {user.split(":")[0]}


def test_image_installs_extras_and_a_torch_that_the_package_has() -> None:
    from packaging.requirements import Requirement

    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    text = (DEPLOY / "Dockerfile").read_text()
    extras = re.search(r"\$\{wheel}\[([\w,]+)]", text)
    torch = re.search(r'TORCH="torch==([\d.]+)"', text)
    assert extras is not None and set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    (asked,) = (Requirement(each) for each in project["dependencies"] if each.startswith("torch"))
    assert torch is not None and torch[1] in asked.specifier
