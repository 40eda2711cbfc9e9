"""Undocumented interfaces of other projects: each use is listed and exists in this release; a missing one warns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hotrow
from hotrow import undocumented
from hotrow.bench.gpu.device_clock import idle
from hotrow.undocumented import ChangedError, allowed_range, find, is_tested, is_within, look_up

SOURCES = Path(hotrow.__file__).parent
LISTED = Path(__file__).parents[1] / "docs/decisions/0006-private-interfaces.md"
# Documented, although they begin with an underscore: of tuples, of os, and librdkafka's errors of its own.
DOCUMENTED = {"_replace", "_exit", "_PARTITION_EOF", "_MAX_POLL_EXCEEDED", "_AUTO_OFFSET_RESET"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undocumented, "_warned", set())


def test_a_missing_part_is_warned_of_once_with_what_was_found_and_tested() -> None:
    with pytest.warns(UserWarning) as told:
        assert [find("torch._C._aoti:gone", "The slow way is taken") for _ in range(3)] == [None] * 3
    assert [str(one.message) for one in told] == [
        f"torch {torch.__version__} has no torch._C._aoti.gone; HotRow was tested with torch{allowed_range('torch')}. "
        "The slow way is taken"
    ]
    with pytest.raises(ChangedError, match=r"has no torch\.gone\.for_good; HotRow was tested with torch<"):
        look_up("torch.gone:for_good")


@pytest.mark.parametrize(
    ("version", "bounds", "within"),
    [
        ("2.11", "<2.14,>=2.11", True),
        ("2.10.9", "<2.14,>=2.11", False),
        ("2.13.7+cu130", "<2.14,>=2.11", True),
        ("2.14", "<2.14,>=2.11", False),
        ("2.14.0.dev20261101", "<2.14,>=2.11", False),
        ("3.6.0", ">=3.6,!=3.6.1", True),
        ("3.6.1", ">=3.6,!=3.6.1", False),
        ("1.2", "==1.2.0", True),
        ("nobody knows", "", True),
        ("nobody knows", ">=1", False),
    ],
)
def test_a_version_is_in_a_range_as_pip_means_it(version: str, bounds: str, within: bool) -> None:
    assert is_within(version, bounds) == within


def test_the_range_that_was_tested_is_the_one_that_pip_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"<2\.\d+,>=2\.\d+", allowed_range("torch")) and is_tested("torch")
    assert re.fullmatch(r"<3\.\d+,>=3\.\d+", allowed_range("triton")), "not that of tritonclient"
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert not is_tested("torch")


# --- the list -------------------------------------------------------------------------------------------------------


def uses() -> Iterator[tuple[str, str]]:
    """Private names of others in src/hotrow, and where they are: attributes and modules that begin with an underscore
    and that HotRow does not define."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")}
    nodes = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    ours = {"_core"}
    for _, node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            ours.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            ours.add(node.id if isinstance(node, ast.Name) else node.attr)
    in_f_strings = {id(part) for _, node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for path, node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_f_strings:
            names = re.split(r"[.:]", node.value) if re.fullmatch(r"[\w.]+:[\w.]+|_[a-z]\w+", node.value) else []
        for name in names:
            if re.match(r"_[A-Za-z]", name) and name not in ours | DOCUMENTED:
                yield name, f"{path.relative_to(SOURCES)}:{node.lineno}"


def test_every_private_name_of_another_project_is_in_the_table() -> None:
    listed = set(re.findall(r"\b_\w+", LISTED.read_text()))
    suffixes = {"_mask", "_view", "_contents"}  # of names of features, types and fields
    assert [f"{where}: {name}" for name, where in uses() if name not in listed | suffixes] == [], (
        f"use what is documented, or add a row to {LISTED.name}"
    )


def looked_up() -> set[str]:
    """The names that src/hotrow gives to `find` and `look_up`."""
    calls = [node for path in SOURCES.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in ("find", "look_up")
        if call.args and isinstance(call.args[0], ast.Constant) and ":" in str(call.args[0].value)
    }


def test_what_is_looked_up_is_there() -> None:
    names = looked_up()
    assert len(names) >= 8
    for name in names:
        assert look_up(name) is not None
        assert name.rpartition(":")[2].rpartition(".")[2] in LISTED.read_text() or name in LISTED.read_text()
    stubs = Path(torch._C.__file__).with_name("_C") / "__init__.pyi"
    assert "def _cuda_getCurrentRawStream(device:" in stubs.read_text()  # a CPU build has only its declaration


# --- C --------------------------------------------------------------------------------------------------------------


def test_the_c_interface_of_artifacts_is_as_native_calls_it() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime/interface.h"
    plain = re.sub(r"//.*", "", header.read_text())
    declared = dict(re.findall(r"AOTIRuntimeError (AOTInductorModelContainer\w+)\(([^)]*)\);", plain))
    kinds = {
        name: [" ".join(part.split()[:-1]) for part in re.sub(r"\s*\*\s*", "* ", arguments).split(",")]
        for name, arguments in declared.items()
    }
    container = "AOTInductorModelContainerHandle"
    assert kinds["AOTInductorModelContainerCreateWithDevice"] == [
        f"{container}*", "size_t", "const char*", "const char*",
    ]  # fmt: skip
    assert kinds["AOTInductorModelContainerRun"] == [
        container, "AtenTensorHandle*", "size_t", "AtenTensorHandle*", "size_t",
        "AOTInductorStreamHandle", "AOTIProxyExecutorHandle",
    ]  # fmt: skip
    assert kinds["AOTInductorModelContainerGetNumOutputs"] == [container, "size_t*"]
    assert kinds["AOTInductorModelContainerDelete"] == [container]


def test_a_card_that_cannot_idle_is_measured_with_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "_sleep")
    with pytest.warns(UserWarning, match="has no torch.cuda._sleep; HotRow was tested .* GPU times include"):
        idle(10)
