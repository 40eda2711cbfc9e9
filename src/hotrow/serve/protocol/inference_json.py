"""The Open Inference Protocol's bodies, JSON alone or with tensors as bytes: into a Request, and out of an Answer.

A body is a JSON object; with the header `Inference-Header-Content-Length: n` only its first n bytes are, and the inputs
that carry `binary_data_size` follow, each at the end of the one before. Everything is a pure function of the body, the
model and the clock, so both forms and their errors are tested without a network.

**Recipes.** What the JSON part of a binary body says (names, shapes, where each tensor lies, what to answer) is worked
out once and kept under its very bytes: a client that sends 50 candidates sends the same header every time. A repeated
request then costs views and checks of its data: 30 against 230 µs for 26 features (2 cores of an AMD EPYC). Headers
with an id or inline data are not kept. At most `_KEPT` recipes of headers up to `_KEPT_BYTES` are; when full, all are
dropped.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hotrow.errors import choices
from hotrow.features import FeatureSpec
from hotrow.serve.protocol.backend import ModelInfo
from hotrow.serve.protocol.input_layout import Layout, Plan
from hotrow.serve.protocol.limits import Limits
from hotrow.serve.protocol.raw_columns import RawColumns
from hotrow.serve.protocol.request import POLICIES, Answer, Array, Ids, Request
from hotrow.serve.protocol.tensors import (
    BYTES,
    DTYPES,
    Declared,
    Elements,
    bad,
    declare,
    finite_number,
    from_bytes,
    from_list,
    shown,
)

OUTPUTS = ("probabilities", "logits")
PARAMETERS = ("deadline_ms", "timeout", "policy", "raw", "binary_data_output")

_KEPT, _KEPT_BYTES = 512, 16_384
_TOP = ("id", "inputs", "outputs", "parameters", "model_name", "model_version")
_LONGEST_DEADLINE = 3600.0
_LARGEST, _ONE = np.float32(88), np.float32(1)  # exp(88) is the last that float32 holds


class Output(NamedTuple):
    """An output that the client wants, as bytes or as JSON."""

    name: str
    binary: bool


@dataclass(frozen=True)
class Wishes:
    """What a client says beside its tensors."""

    id: str | None = None
    outputs: tuple[Output, ...] = (Output("probabilities", False), Output("logits", False))
    seconds: float | None = None  # from now to the deadline
    policy: str | None = None
    raw: bool = False


class ModelInputs:
    """One model version's way from tensors to a Request, and the recipes of its headers."""

    def __init__(self, info: ModelInfo, limits: Limits) -> None:
        self.info, self.limits = info, limits
        self.layout = Layout(info.signature, limits)
        self._json_bytes = limits.json_bytes
        self._raw: RawColumns | None = None
        self._recipes: dict[bytes, Recipe] = {}

    def read(self, body: bytes, header: int | None, version: str | None) -> tuple[Request, Wishes]:
        """The request in an HTTP body; `header` is the length of its JSON part, None when it is all JSON."""
        if header is None:
            header = len(body)
        if header > len(body):
            raise bad(f"the JSON part has {header} bytes by its header, but the body has {len(body)}; send it whole")
        if header > self._json_bytes:
            raise bad(
                f"{header} bytes of JSON are more than the limit json={self.limits.json}; send the tensors as bytes "
                "(the binary tensor data extension)",
                413,
            )
        text = body[:header]
        recipe = self._recipes.get(text)
        if recipe is None:
            recipe = Recipe.of(text, self)
            if recipe.repeats and header <= _KEPT_BYTES:
                if len(self._recipes) >= _KEPT:
                    self._recipes.clear()
                self._recipes[text] = recipe
        return self.request(recipe, recipe.elements(body[header:]), version), recipe.wishes

    def request(self, recipe: Recipe, elements: Sequence[Elements], version: str | None) -> Request:
        """The request of a recipe with these elements."""
        wishes = recipe.wishes
        deadline = None if wishes.seconds is None else time.monotonic() + wishes.seconds
        matrix: Array | None = None
        ids: Sequence[Ids] = ()
        if recipe.plan is None:
            rows, ids, dense, dense_shared = self.raw().columns(recipe.tensors, elements)
        else:
            plan = recipe.plan
            arrays: Sequence[Array] = elements  # type: ignore[assignment]
            if plan.whole:
                matrix = plan.matrix(arrays)
            else:
                ids = plan.ids(arrays)
            rows, dense, dense_shared = plan.rows, plan.dense_of(arrays), plan.dense_shared
        return Request(self.info.name, rows, ids, dense, dense_shared, version, deadline, wishes.policy, matrix)

    def plan(self, tensors: Sequence[Declared], wishes: Wishes) -> Plan | None:
        """The plan of these tensors, or None when they are raw columns."""
        if wishes.raw or any(tensor.datatype == BYTES for tensor in tensors):
            self.raw()
            return None
        return self.layout.plan(tensors)

    def raw(self) -> RawColumns:
        """The way of raw columns, when the model has one."""
        if self._raw is None:
            if self.info.features is None:
                raise bad(
                    f"model {self.info.name!r} was exported without a feature spec, so it takes no raw columns or "
                    "strings; send keys as INT64, or export it with features="
                )
            self._raw = RawColumns(FeatureSpec.from_json(self.info.features), self.info.signature, self.limits)
        return self._raw


@dataclass(frozen=True)
class Recipe:
    """What a request's header says: its tensors, where their elements are, and the client's wishes."""

    tensors: tuple[Declared, ...]
    places: tuple[tuple[int, int] | None, ...]  # offset and size in the binary part; None: inline
    inline: tuple[Elements, ...]
    size: int  # of the binary part
    wishes: Wishes
    plan: Plan | None
    dtypes: tuple[Any, ...] | None  # of aligned numbers that all come as bytes: the quick way

    @property
    def repeats(self) -> bool:
        """Whether the same header may come again with other elements."""
        return self.wishes.id is None and not self.inline

    def elements(self, binary: bytes) -> list[Elements]:
        """Every tensor's elements, flat."""
        if len(binary) != self.size:
            raise bad(
                f"{len(binary)} bytes follow the JSON part, but the inputs' binary_data_size add up to {self.size}; "
                "make them agree, and set Inference-Header-Content-Length to the JSON's length"
            )
        if self.dtypes is not None:
            frombuffer = np.frombuffer
            return [frombuffer(binary, *how) for how in self.dtypes]
        inline = iter(self.inline)
        return [
            next(inline) if place is None else from_bytes(tensor, binary, *place)
            for tensor, place in zip(self.tensors, self.places, strict=True)
        ]

    @staticmethod
    def of(text: bytes, inputs: ModelInputs) -> Recipe:
        """The recipe of a header."""
        document = parse_json(text)
        for name in document:
            if name not in _TOP:
                raise bad(f"the request has the unknown field {shown(name)}; {choices(name, _TOP)}")
        given = document.get("inputs")
        if not isinstance(given, list) or not given:
            raise bad('the request has no "inputs"; give a list of tensors, each with name, datatype, shape and data')
        wishes = read_wishes(document.get("id"), document.get("parameters"), document.get("outputs"))
        tensors, places, inline, size = [], [], [], 0
        for entry in given:
            tensor, place, data = _input(entry, size)
            tensors.append(tensor)
            places.append(place)
            if place is None:
                inline.append(from_list(tensor, data))
            else:
                size += place[1]
        plan, quick = inputs.plan(tensors, wishes), _quick(tensors, places)
        if plan is not None and plan.plain and plan.columns and quick is not None:
            features = len(plan.columns)
            plan, quick = plan.in_one_block(), ((quick[0][0], features * plan.rows, 0), *quick[features:])
        return Recipe(tuple(tensors), tuple(places), tuple(inline), size, wishes, plan, quick)


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object, or the error that tells where it is none."""
    try:
        document = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise bad(f"the JSON is not UTF-8 at byte {error.start} ({error.reason}); encode it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise bad(
            f"the body is no JSON: line {error.lineno}, column {error.colno}: {error.msg} (tensors as bytes need the "
            "header Inference-Header-Content-Length)"
        ) from error
    except RecursionError as error:
        raise bad("the JSON is nested too deeply; tensors have at most two levels of lists") from error
    except ValueError as error:
        raise bad(f"the JSON holds a number that cannot be read ({error}); ids are int64") from error
    if not isinstance(document, dict):
        raise bad(f'the body is a JSON {type(document).__name__}; send an object with "inputs"')
    return document


def read_wishes(name: object, parameters: object, outputs: object) -> Wishes:
    """The client's wishes, checked."""
    if name is not None and (not isinstance(name, str) or len(name) > 1024):
        raise bad(f"id is {shown(name)}; give a string of at most 1024 characters")
    given = _parameters(parameters)
    policy, raw = given.get("policy"), given.get("raw", False)
    if policy is not None and policy not in POLICIES:
        raise bad(f"parameter policy is {shown(policy)}; {choices(policy, POLICIES)}")
    if not isinstance(raw, bool):
        raise bad(f"parameter raw is {shown(raw)}; give true or false")
    return Wishes(
        name or None, _outputs(outputs, given.get("binary_data_output") is True), _seconds(given), policy, raw
    )


def _parameters(parameters: object) -> Mapping[str, Any]:
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise bad(f'"parameters" is {shown(parameters)}; give an object')
    for name in parameters:
        if name not in PARAMETERS and not name.startswith("triton_"):
            raise bad(f"the request has the unknown parameter {shown(name)}; {choices(name, PARAMETERS)}")
    return parameters


def _seconds(given: Mapping[str, Any]) -> float | None:
    """How long the client waits: deadline_ms, or Triton's timeout in microseconds (0: as the server likes)."""
    for name, unit in (("deadline_ms", 1e-3), ("timeout", 1e-6)):
        value = given.get(name)
        if value is None or (name == "timeout" and value == 0):
            continue
        if not finite_number(value) or not 0 < value * unit <= _LONGEST_DEADLINE:
            raise bad(f"parameter {name} is {shown(value)}; give a number above 0 that is at most an hour")
        return float(value) * unit
    return None


def _outputs(outputs: object, binary: bool) -> tuple[Output, ...]:
    if outputs is None or outputs == []:
        return tuple(Output(name, binary) for name in OUTPUTS)
    if not isinstance(outputs, list):
        raise bad(f'"outputs" is {shown(outputs)}; give a list of objects with "name"')
    wanted: dict[str, Output] = {}
    for entry in outputs:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("parameters", {}), Mapping):
            raise bad(f'an output is {shown(entry)}; give an object with "name" and "parameters"')
        name, options = entry.get("name"), entry.get("parameters", {})
        if not isinstance(name, str) or name not in OUTPUTS:
            raise bad(f"there is no output {shown(name)}; {choices(name, OUTPUTS)}")
        for option in options:
            if option != "binary_data":
                raise bad(f"output {name!r} has the parameter {shown(option)}; only binary_data is known")
        wanted[name] = Output(name, bool(options.get("binary_data", binary)))
    return tuple(wanted.values())


def _input(entry: object, offset: int) -> tuple[Declared, tuple[int, int] | None, object]:
    """An input's declaration, its place in the binary part (or None), and its inline data."""
    if not isinstance(entry, dict):
        raise bad(f"an input is {shown(entry)}; give an object with name, datatype, shape and data")
    tensor = declare(entry.get("name"), entry.get("datatype"), entry.get("shape"))
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise bad(f"input {shown(tensor.name)} has parameters {shown(parameters)}; give an object")
    for name in parameters:
        if name != "binary_data_size":
            raise bad(f"input {shown(tensor.name)} has the parameter {shown(name)}; only binary_data_size is known")
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in entry:
            raise bad(f'input {shown(tensor.name)} has no data; give "data", or binary_data_size and its bytes')
        return tensor, None, entry["data"]
    if type(size) is not int or not 0 <= size < 1 << 40:
        raise bad(f"input {shown(tensor.name)} has binary_data_size {shown(size)}; give its number of bytes")
    if "data" in entry:
        raise bad(f"input {shown(tensor.name)} has both data and binary_data_size; send one of them")
    return tensor, (offset, size), None


def _quick(tensors: Sequence[Declared], places: Sequence[tuple[int, int] | None]) -> tuple[Any, ...] | None:
    """np.frombuffer's arguments for every tensor, when all are bytes, aligned and as long as their shapes say."""
    found = []
    for tensor, place in zip(tensors, places, strict=True):
        dtype = DTYPES.get(tensor.datatype)
        if place is None or dtype is None or place[0] % dtype.itemsize or place[1] != tensor.size * dtype.itemsize:
            return None
        if place[1] == 0:
            return None  # numpy refuses an offset at the very end
        found.append((dtype, tensor.size, place[0]))
    return tuple(found)


def outputs_of(answer: Answer, names: Sequence[str]) -> list[Array]:
    """The arrays of these outputs, float32."""
    logits = np.ascontiguousarray(answer.logits, dtype=np.float32)
    return [logits if name == "logits" else sigmoid(logits) for name in names]


def sigmoid(logits: Array) -> Array:
    """Probabilities, without overflow and with small ones exact to rounding."""
    found = np.negative(logits)
    np.minimum(found, _LARGEST, out=found)
    np.exp(found, out=found)
    found += _ONE
    return np.reciprocal(found, out=found)


def answer_parameters(answer: Answer) -> dict[str, Any]:
    """What an answer says of itself."""
    return {
        "publication": answer.publication,
        "late_rows": answer.late_rows,
        "compiled": answer.compiled,
        **answer.parameters,
    }


def write(answer: Answer, wishes: Wishes) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON part when tensors follow it."""
    arrays = outputs_of(answer, [output.name for output in wishes.outputs])
    described, tail = [], []
    for (name, binary), array in zip(wishes.outputs, arrays, strict=True):
        shape = ",".join(map(str, array.shape))
        if binary:
            data = array.tobytes()
            tail.append(data)
            elements = f'"parameters":{{"binary_data_size":{len(data)}}}'
        else:
            elements = f'"data":{_dump(_numbers(array))}'
        described.append(f'{{"name":"{name}","datatype":"FP32","shape":[{shape}],{elements}}}')
    name = "" if wishes.id is None else f'"id":{_dump(wishes.id)},'
    text = (
        f'{{"model_name":{_quoted(answer.model)},"model_version":{_quoted(answer.version)},{name}'
        f'"parameters":{_parameters_text(answer)},"outputs":[{",".join(described)}]}}'
    ).encode()
    return (b"".join([text, *tail]), len(text)) if tail else (text, None)


def _parameters_text(answer: Answer) -> str:
    """answer_parameters as JSON; an encoder is made for every dump, so that the usual three are written without one."""
    if answer.parameters:
        return _dump(answer_parameters(answer))
    compiled = "true" if answer.compiled else "false"
    return f'{{"publication":{int(answer.publication)},"late_rows":{int(answer.late_rows)},"compiled":{compiled}}}'


def _numbers(array: Array) -> list[float | None]:
    """A list of the numbers; one that is not finite has no JSON and becomes null."""
    flat: list[float | None] = array.reshape(-1).tolist()
    return flat if np.isfinite(array).all() else [x if finite_number(x) else None for x in flat]


_dump = json.JSONEncoder(separators=(",", ":")).encode
_quoted = functools.lru_cache(256)(_dump)
