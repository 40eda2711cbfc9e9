"""A tower's graph on disk: torch.export's archive, limited to contents that cannot run code when they are read.

`torch.export.save` writes a zip file with the graph as JSON, weights and constants as raw bytes, and example inputs.
Reading it back is unsafe. In torch 2.11 to 2.13, `torch.export.load` unpickles without restrictions: the example inputs
(if restricted unpickling fails), weights and constants marked `use_pickle`, and custom objects. It passes the
expressions of shapes to sympy, which evaluates text as Python. A node's target may be any function of torch, and the
description of the inputs may name a module to import. So:

- `pack` writes no weights (they are inputs of the graph, and are saved beside it as safetensors) and no example inputs;
- `check` first reads an archive with Python's zipfile and json, and raises for everything except a graph of ATen
  operators over plain tensors and containers. Only then does torch read it.

Stack traces, which contain paths of the exporting machine, are removed before writing.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram

import hotrow.nn.histories  # registers the operators of _OWN
import hotrow.nn.jagged  # noqa: F401
from hotrow.errors import RepositoryError

_OPERATORS = re.compile(r"torch\.ops\.(aten|prims|prim)\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+")
_OWN = frozenset(  # registered by hotrow.nn.jagged and hotrow.nn.histories
    f"torch.ops.hotrow.{name}.default" for name in ("jagged_attention", "local_activation", "most_similar")
)
_CONTROL = re.compile(r"torch\.ops\.higher_order\.(cond|while_loop|wrap_with_set_grad_enabled|wrap_with_autocast)")
_SYMBOLIC = re.compile(
    r"_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|pow|neg|eq|ne|lt|le|gt|ge|and_|or_|not_)"
    r"|torch\.sym_(max|min|not|float|int|ite|sum|sqrt)|math\.(ceil|floor|trunc)"
)
_REFUSED = re.compile(r"torch\.ops\.aten\.from_file\..*")  # reads any file of this machine
_FUNCTIONS = frozenset(
    [
        "Integer",
        "Add",
        "Mul",
        "Pow",
        "Max",
        "Min",
        "Mod",
        "PythonMod",
        "FloorDiv",
        "CleanDiv",
        "IntTrueDiv",
        "ModularIndexing",
        "Eq",
        "Ne",
        "true",
        "false",
        "oo",
    ]
)
_TOKEN = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*|\d+(?:\.\d+)?|\*\*|//|[-+*/(),<>=%])")
_SYMBOL = re.compile(r"[su]\d+|int_oo")
_WRITTEN_SYMBOL = re.compile(r"Symbol\('([su]\d+)'(?:, (?:positive|nonnegative|integer)=True)*\)")
_CONTAINERS = frozenset({"builtins.dict", "builtins.list", "builtins.tuple", None})
_CONSTANT = re.compile(r"tensor_\d+")
_META = frozenset({"archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id"})
_GRAPH, _WEIGHTS, _CONSTANTS, _EXAMPLES = (
    "models/model.json",
    "data/weights/model_weights_config.json",
    "data/constants/model_constants_config.json",
    "data/sample_inputs/model.pt",
)
MOST_BYTES = 1 << 30  # of an archive's contents, unpacked


def pack(program: ExportedProgram) -> bytes:
    """The archive of a graph. Requires: it has no weights of its own."""
    assert not program.state_dict
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for name in ("stack_trace", "from_node", "source_fn_stack", "nn_module_stack"):
                    node.meta.pop(name, None)
    program.example_inputs = None
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def unpack(data: bytes, where: object) -> ExportedProgram:
    """The graph of an archive that passes `check`. `where` is its name for errors."""
    clean = check(data, where)
    try:
        program = torch.export.load(io.BytesIO(clean))
    except Exception as error:
        raise RepositoryError(
            f"{where} cannot be read by torch {torch.__version__}: {error}; export the model again with this release"
        ) from None
    if not program.example_inputs:
        program.example_inputs = None
    return program


def check(data: bytes, where: object) -> bytes:
    """Raise if an archive has more than a graph of ATen operators; returns an archive with exactly the checked files.

    It is packed again because two zip readers may see different files in a forged archive.
    """
    clean = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > MOST_BYTES:
                raise _refuse(where, f"it unpacks to more than {MOST_BYTES:,} bytes")
            files = {entry.filename.partition("/")[2]: archive.read(entry) for entry in archive.infolist()}
            if len(files) != len(archive.infolist()):
                raise _refuse(where, "it has two files of one name")
        _check_files(files, where)
    except RepositoryError:
        raise
    except Exception as error:  # zipfile and json raise many kinds of errors
        raise RepositoryError(f"{where} is corrupt: {error!r}; export the model again") from None
    with zipfile.ZipFile(clean, "w") as archive:
        for name, contents in files.items():
            archive.writestr(f"archive/{name}", contents)
    return clean.getvalue()


def _check_files(files: dict[str, bytes], where: object) -> None:
    for name in files:
        inside = name.removeprefix("data/constants/")
        expected = name in _META or name in (_GRAPH, _WEIGHTS, _CONSTANTS, _EXAMPLES)
        if not expected and not (name != inside and _CONSTANT.fullmatch(inside)):
            raise _refuse(where, f"it has a file {name!r}")
    if files.get(_EXAMPLES):
        raise _refuse(where, "it has example inputs, which are pickled")
    if json.loads(files[_WEIGHTS])["config"]:
        raise _refuse(where, "it has weights of its own")
    for constant in json.loads(files[_CONSTANTS])["config"].values():
        if constant["use_pickle"] or not _CONSTANT.fullmatch(constant["path_name"]):
            raise _refuse(where, f"its constant {constant['path_name']!r} is pickled")
    for key, value in _walk(json.loads(files[_GRAPH])):
        _check_value(key, value, where)


def _check_value(key: str, value: Any, where: object) -> None:
    if key == "target" and isinstance(value, str) and not _is_operator(value):
        raise _refuse(where, f"it calls {value!r}")
    if key == "expr_str" and not _is_expression(value):
        raise _refuse(where, f"{value!r} is not the size of a tensor")
    if key == "range_constraints":
        for symbol in value:
            if not _is_expression(symbol):
                raise _refuse(where, f"{symbol!r} is not the size of a tensor")
    if key in ("in_spec", "out_spec"):
        kinds = [kind for name, kind in _walk(json.loads(value)) if name == "type"]
        if any(kind not in _CONTAINERS for kind in kinds):
            raise _refuse(where, f"its inputs are of types {sorted(map(str, kinds))}")
    if key in ("as_custom_obj", "as_script_object"):
        raise _refuse(where, "it has objects beside tensors")


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """All keys of all nested dicts, with their values."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            yield from _walk(item)
    elif isinstance(value, list):
        for item in value:
            yield from _walk(item)


def _is_operator(target: str) -> bool:
    """
    >>> _is_operator("torch.ops.aten.linear.default"), _is_operator("torch.hub.load"), _is_operator("os.system")
    (True, False, False)
    """
    known = _OPERATORS.fullmatch(target) or _CONTROL.fullmatch(target) or _SYMBOLIC.fullmatch(target)
    return (bool(known) and not _REFUSED.fullmatch(target)) or target in _OWN


def _is_expression(text: Any) -> bool:
    """
    >>> _is_expression("Mul(Integer(2), Symbol('s37', positive=True, integer=True))"), _is_expression("2*s0 + 1")
    (True, True)
    >>> _is_expression("().__class__"), _is_expression("exec('')"), _is_expression("Symbol('os')")
    (False, False, False)
    """
    if not isinstance(text, str) or len(text) > 10_000:
        return False
    text = _WRITTEN_SYMBOL.sub(r"\1", text)
    at = 0
    while at < len(text.rstrip()):
        token = _TOKEN.match(text, at)
        if token is None:
            return False
        name = token[1]
        if (name[0].isalpha() or name[0] == "_") and name not in _FUNCTIONS and not _SYMBOL.fullmatch(name):
            return False
        at = token.end()
    return True


def _refuse(where: object, why: str) -> RepositoryError:
    return RepositoryError(
        f"{where} is not a tower that HotRow exported: {why}. None of it was run; export the model again"
    )
