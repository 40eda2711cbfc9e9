"""The manifests of deploy/kubernetes: valid by Kubernetes' schemas, and consistent with one another and with HotRow."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hotrow_commands import given, options, port

from hotrow.serve.protocol.metrics import TABLE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"
KUSTOMIZATION = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
OBJECTS = [each for name in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((DEPLOY / name).read_text())]
WORKLOADS = [each for each in OBJECTS if each["kind"] in ("StatefulSet", "Deployment")]
OLDEST = "1.30"  # the first with `sleep` in preStop
SHARDS = 1024


def name_of(each: Mapping[str, Any]) -> str:
    return f"{each['kind']}-{each['metadata']['name']}"


def find(kind: str, name: str) -> Any:
    (found,) = (each for each in OBJECTS if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def pod_of(workload: Mapping[str, Any]) -> Any:
    return workload["spec"]["template"]["spec"]


def container_of(workload: Mapping[str, Any]) -> Any:
    (container,) = pod_of(workload)["containers"]
    return container


def ports_of(workload: Mapping[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(workload)["ports"]}


def selected(labels: Mapping[str, str]) -> list[Any]:
    """The workloads whose pods have these labels."""
    return [each for each in WORKLOADS if labels.items() <= each["spec"]["template"]["metadata"]["labels"].items()]


def rows_command(pod: str) -> list[str]:
    """What the container of a row server runs: its shell script, with a `hotrow` that prints its arguments."""
    container = container_of(find("StatefulSet", "rows"))
    (script,) = container["args"]
    env = {each["name"]: each["value"] for each in container["env"]} | {"HOSTNAME": pod, "PATH": os.environ["PATH"]}
    printing = script.replace("exec hotrow", "printf '%s\\n'")
    assert printing != script
    done = subprocess.run([*container["command"], printing], env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def command_of(workload: Mapping[str, Any]) -> list[str]:
    """The words after `hotrow`."""
    if workload["metadata"]["name"] == "rows":
        return rows_command("rows-0")
    return list(container_of(workload)["args"])


OURS = [each for each in WORKLOADS if container_of(each)["image"] == "hotrow"]


@pytest.mark.parametrize("version", [OLDEST, "newest"])
@pytest.mark.parametrize("each", OBJECTS, ids=name_of)
def test_object_is_valid_by_the_schema(each: Any, version: str) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    schemas.validate(each, schemas.latest_version() if version == "newest" else version, strict=True)


def test_kustomize_renders_every_object(tmp_path: Path) -> None:
    command = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]
    if shutil.which(command[0]) is None:
        pytest.skip("there is no kubectl and no kustomize")
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run([*command, str(DEPLOY)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert len(rendered) == len(OBJECTS) + len(KUSTOMIZATION["configMapGenerator"])
    maps = {each["metadata"]["name"] for each in rendered if each["kind"] == "ConfigMap"}
    mounted = set(re.findall(r"configMap:\n\s+name: (\S+)", done.stdout))
    assert mounted == maps and all(re.search(r"-[a-z0-9]{10}$", name) for name in maps)
    assert "image: hotrow\n" not in done.stdout


@pytest.mark.parametrize("each", [each for each in OBJECTS if each["kind"] != "Namespace"], ids=name_of)
def test_selectors_and_references_lead_somewhere(each: Any) -> None:
    spec = each["spec"]
    match each["kind"]:
        case "Service":
            (workload,) = selected(spec["selector"])
            assert {port["targetPort"] for port in spec["ports"]} <= ports_of(workload).keys()
        case "PodDisruptionBudget":
            assert len(selected(spec["selector"]["matchLabels"])) == 1
        case "HorizontalPodAutoscaler":
            target = find(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
            assert "replicas" not in target["spec"], "an apply would undo the autoscaler's number"
        case "NetworkPolicy":
            _check_policy(spec)
        case "StatefulSet" | "Deployment":
            assert selected(spec["selector"]["matchLabels"]) == [each]
            _check_workload(each)
        case kind:
            assert kind == "PersistentVolumeClaim"


def _check_policy(spec: Mapping[str, Any]) -> None:
    for rule in spec.get("ingress", []):
        (workload,) = selected(spec["podSelector"]["matchLabels"])
        assert {port["port"] for port in rule["ports"]} <= ports_of(workload).keys()
        for peer in rule.get("from", []):
            assert "namespaceSelector" in peer or len(selected(peer["podSelector"]["matchLabels"])) == 1


def _check_workload(workload: Mapping[str, Any]) -> None:
    container, pod, ports = container_of(workload), pod_of(workload), ports_of(workload)
    annotations = workload["spec"]["template"]["metadata"]["annotations"]
    assert int(annotations["prometheus.io/port"]) in ports.values()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    claims = [each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", [])]
    assert sorted(each["name"] for each in container["volumeMounts"]) == sorted(
        [each["name"] for each in pod["volumes"]] + claims
    )
    for volume in pod["volumes"]:
        if claim := volume.get("persistentVolumeClaim"):
            find("PersistentVolumeClaim", claim["claimName"])
        if config := volume.get("configMap"):
            assert config["name"] in [each["name"] for each in KUSTOMIZATION["configMapGenerator"]]
    if workload["kind"] == "StatefulSet":
        assert find("Service", workload["spec"]["serviceName"])["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_pod_is_restricted_disruptable_and_isolated(workload: Any) -> None:
    pod, container = pod_of(workload), container_of(workload)
    assert (
        pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    )
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert (
        container["resources"]["requests"].keys() == {"cpu", "memory"} and "memory" in container["resources"]["limits"]
    )
    labels = workload["spec"]["template"]["metadata"]["labels"].items()
    for kind, at in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        matching = [
            each
            for each in OBJECTS
            if each["kind"] == kind and each["spec"][at] and each["spec"][at]["matchLabels"].items() <= labels
        ]
        assert len(matching) == 1, kind


@pytest.mark.parametrize("workload", OURS, ids=name_of)
def test_command_opens_the_ports_of_its_container(workload: Any) -> None:
    words = command_of(workload)
    given_options, ports = given(words), ports_of(workload)
    if words[0] == "rows":
        assert ports == {"rows": port(given_options["--listen"]), "metrics": port(given_options["--metrics"])}
    else:
        defaults = {"http": 8000, "grpc": 8001, "metrics": 8002}
        assert ports == {name: int(given_options.get(f"--{name}", value)) for name, value in defaults.items()}
        assert given_options["--host"] == "0.0.0.0"


@pytest.mark.parametrize("workload", OURS, ids=name_of)
def test_command_has_the_options_that_it_is_given(workload: Any) -> None:
    options(command_of(workload))


@pytest.mark.parametrize("workload", OURS, ids=name_of)
def test_files_that_a_command_reads_are_mounted(workload: Any, secrets: Path) -> None:
    container, pod = container_of(workload), pod_of(workload)
    volumes = {each["name"]: each for each in pod["volumes"]}
    words = command_of(workload)
    paths = [Path(word) for word in (words[1], *given(words).values()) if word.startswith("/")]
    for path in paths:
        (mount,) = (each for each in container["volumeMounts"] if path.is_relative_to(each["mountPath"]))
        volume = volumes.get(mount["name"], {})
        if secret := volume.get("secret"):
            assert secret["defaultMode"] & 0o007 == 0  # read_secret refuses a file that everybody can read
            assert (secrets / secret["secretName"] / path.name).exists(), "make-secrets.sh writes no such file"
            assert path.name in [item["path"] for item in secret.get("items", [{"path": path.name}])]
        elif config := volume.get("configMap"):
            (files,) = (each["files"] for each in KUSTOMIZATION["configMapGenerator"] if each["name"] == config["name"])
            assert path.name in [Path(file).name for file in files]


def test_termination_leaves_time_to_drain() -> None:
    towers = find("Deployment", "towers")
    drain = given(container_of(towers)["args"])["--drain"]
    pause = container_of(towers)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod_of(towers)["terminationGracePeriodSeconds"] > pause + int(drain.removesuffix("s"))


def test_lanes_and_threads_are_the_cores_that_are_requested() -> None:
    container = container_of(find("Deployment", "towers"))
    words = given(container["args"])
    assert int(words["--lanes"]) * int(words["--threads"]) == int(container["resources"]["requests"]["cpu"])


def test_each_row_server_gets_the_shards_that_the_cluster_file_expects_of_it() -> None:
    stateful, service = find("StatefulSet", "rows"), find("Service", "rows")
    cluster = tomllib.loads((DEPLOY / "kubernetes" / "cluster.toml").read_text())
    started = {f"rows-{n}": given(rows_command(f"rows-{n}"))["--shards"] for n in range(stateful["spec"]["replicas"])}
    expected = {}
    for each in cluster["range"]:
        for server in each["servers"]:
            pod, _, rest = server.partition(".")
            assert rest == f"{stateful['spec']['serviceName']}:{service['spec']['ports'][0]['port']}"
            expected[pod] = each["shards"]
    assert started == expected
    bounds = sorted(tuple(map(int, each["shards"].split(":"))) for each in cluster["range"])
    assert [first for first, _ in bounds] + [SHARDS] == [0] + [last for _, last in bounds]
    assert all(len(each["servers"]) > 1 for each in cluster["range"]), "a range without a replica"


def test_a_pod_more_changes_no_other_pods_shards() -> None:
    assert given(rows_command("rows-13"))["--shards"] == "512:1024"
    assert given(rows_command("rows-4"))["--shards"] == given(rows_command("rows-0"))["--shards"] == "0:512"


def test_autoscaler_uses_a_metric_that_the_server_exports_and_the_adapter_offers() -> None:
    metrics = find("HorizontalPodAutoscaler", "towers")["spec"]["metrics"]
    (name,) = (each["pods"]["metric"]["name"] for each in metrics if each["type"] == "Pods")
    assert TABLE[name].kind == "gauge" and not TABLE[name].labels
    (rule,) = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert rule["seriesQuery"].startswith(name + "{") and rule["name"]["as"] == name


def test_envoy_finds_the_tower_servers_by_their_service() -> None:
    service, config = find("Service", "towers"), (DEPLOY / "envoy.yaml").read_text()
    found = re.findall(r"address: (\w+), port_value: (\d+) } }", config)
    ports = {str(each["port"]) for each in service["spec"]["ports"]}
    assert {number for host, number in found if host == service["metadata"]["name"]} == ports
    listening = {
        int(number) for host, number in re.findall(r"address: ([\d.]+), port_value: (\d+)", config) if host == "0.0.0.0"
    }
    assert listening == set(ports_of(find("Deployment", "proxy")).values())


def test_shell_scripts_have_no_syntax_error() -> None:
    for workload in WORKLOADS:
        container = container_of(workload)
        hook = container["lifecycle"]["preStop"].get("exec", {}).get("command", [])
        for words in (hook, [*container.get("command", []), *container.get("args", [])]):
            if words and words[0] in ("/bin/sh", "/bin/bash"):
                subprocess.run([words[0], "-n", "-c", words[-1]], check=True)
                assert shlex.split(words[-1])
