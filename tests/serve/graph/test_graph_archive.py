"""A tower's archive: reading it runs no code."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_model

import hotrow as hr
from hotrow.serve.graph import graph_archive
from hotrow.serve.graph.tower import trace
from hotrow.serve.graph.tower_inputs import TowerInputs

GRAPH, CONSTANTS, WEIGHTS = (
    "models/model.json",
    "data/constants/model_constants_config.json",
    "data/weights/model_weights_config.json",
)


@pytest.fixture(scope="module")
def packed() -> bytes:
    model = make_model("dlrm")
    return graph_archive.pack(trace(model.tower, TowerInputs.of(model.embeddings, 3)).program)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def changed(data: bytes, **contents: Callable[[bytes], bytes] | bytes) -> bytes:
    """The archive with some files replaced or added; `contents` are by path, with '/' for '__'."""
    new = {name.replace("__", "/"): value for name, value in contents.items()}
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as target:
        top = old.namelist()[0].partition("/")[0]
        for entry in old.namelist():
            value = new.pop(entry.partition("/")[2], None)
            target.writestr(entry, value if isinstance(value, bytes) else (value or bytes)(old.read(entry)))
        for name, value in new.items():
            assert isinstance(value, bytes)
            target.writestr(f"{top}/{name}", value)
    return out.getvalue()


def in_json(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return json.dumps(value).encode()

    return apply


def target(name: str) -> Callable[[bytes], bytes]:
    return in_json(lambda graph: graph["graph_module"]["graph"]["nodes"][0].update(target=name))


def size(text: str) -> Callable[[bytes], bytes]:
    def change(graph: Any) -> None:
        values = graph["graph_module"]["graph"]["tensor_values"]
        sizes = [s for value in values.values() for s in value["sizes"] if "as_expr" in s]
        sizes[0]["as_expr"]["expr_str"] = text

    return in_json(change)


def test_what_we_write_is_read(packed: bytes) -> None:
    graph_archive.check(packed, "tower.pt2")
    program = graph_archive.unpack(packed, "tower.pt2")
    assert not program.state_dict
    with zipfile.ZipFile(io.BytesIO(packed)) as inside:
        pickled = [name for name in inside.namelist() if b"\x80\x02" in inside.read(name)[:2]]
        assert not pickled


def test_whatever_could_run_is_refused_before_torch_sees_it(packed: bytes, tmp_path: Path) -> None:
    sign = tmp_path / "it ran"
    evil = pickle.dumps(Evil(sign))
    evaluated = f"__import__('pathlib').Path({str(sign)!r}).touch()"
    spec = json.dumps([1, {"type": "collections.defaultdict", "context": ["os", "system"], "children_spec": []}])
    attacks: dict[str, dict[str, Any]] = {
        "example inputs": {"data__sample_inputs__model.pt": evil},
        "old weights": {"data__weights__model.pt": evil},
        "an object": {"data__constants__custom_obj_0": evil},
        "anything else": {"extra__notes.txt": b"hello"},
        "a pickled constant": {
            "data__constants__model_constants_config.json": in_json(
                lambda c: next(iter(c["config"].values())).update(use_pickle=True)
            )
        },
        "a constant elsewhere": {
            "data__constants__model_constants_config.json": in_json(
                lambda c: next(iter(c["config"].values())).update(path_name="opaque_obj_0")
            )
        },
        "weights": {
            "data__weights__model_weights_config.json": in_json(lambda c: c["config"].update(w={"use_pickle": True}))
        },
        "a function of torch": {"models__model.json": target("torch.load")},
        "a file of this machine": {"models__model.json": target("torch.ops.aten.from_file.default")},
        "a function of Python": {"models__model.json": target("_operator.methodcaller")},
        "an expression": {"models__model.json": size(evaluated)},
        "an attribute": {"models__model.json": size("s0.__class__")},
        "a range": {"models__model.json": in_json(lambda g: g["range_constraints"].update({evaluated: {}}))},
        "an import": {
            "models__model.json": in_json(
                lambda g: g["graph_module"]["module_call_graph"][0]["signature"].update(in_spec=spec)
            )
        },
        "no JSON": {"models__model.json": b"{"},
        "deep JSON": {"models__model.json": b"[" * 100_000},
    }
    for name, contents in attacks.items():
        with pytest.raises(hr.RepositoryError) as refused:
            graph_archive.unpack(changed(packed, **contents), "ctr/1/tower.pt2")
        assert "ctr/1/tower.pt2" in str(refused.value), name
    assert not sign.exists()


def test_no_archive_at_all_is_refused(packed: bytes) -> None:
    for data in (b"", b"PK", packed[:-100], packed[: len(packed) // 2], b"\x00" * 1000):
        with pytest.raises(hr.RepositoryError, match="corrupt"):
            graph_archive.unpack(data, "tower.pt2")


def test_random_damage_is_an_error_or_harmless(packed: bytes) -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(60):
        data = bytearray(packed)
        for at in torch.randint(0, len(data), (3,), generator=draw).tolist():
            data[at] = int(torch.randint(0, 256, (1,), generator=draw))
        with suppress(hr.RepositoryError):
            graph_archive.check(bytes(data), "tower.pt2")
