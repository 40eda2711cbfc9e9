"""The Open Inference Protocol's bodies, as JSON or as JSON and bytes: parses Requests, writes Answers.

A body is a JSON object. With the header `Inference-Header-Content-Length: n` only its first n bytes are JSON. The
inputs that have `binary_data_size` follow as bytes, in the order of the inputs. Everything is a pure function of the
body, the model and the clock, so the tests of both forms need no network.

**Parsed headers.** The JSON part of a binary body has names, shapes, the location of each tensor and the outputs
wanted. A client that always sends 50 candidates sends the same JSON every time, so the parsed result is cached with
these bytes as key. A repeated request then costs only views and checks of its data: 30 instead of 230 µs for 26
features (2 cores of an AMD EPYC). Headers with an id or inline data are not cached. The cache has at most
`_MAX_CACHED_HEADERS` entries of up to `_MAX_CACHED_HEADER_BYTES`; when it is full, it is emptied.
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
from hotrow.serve.protocol.embedding_outputs import EMBEDDINGS, FP16, FP32, EmbeddingOutput, EmbeddingOutputs
from hotrow.serve.protocol.histories import check_columns
from hotrow.serve.protocol.input_layout import InputPlan, Layout
from hotrow.serve.protocol.limits import JSON_BYTES, Limits
from hotrow.serve.protocol.lookup_plan import LookupPlan, plan_keys, plan_raw
from hotrow.serve.protocol.predictions import LOGITS, predictions, tower_outputs
from hotrow.serve.protocol.raw_columns import RawColumns
from hotrow.serve.protocol.request import POLICIES, Answer, Array, Ids, RefusedError, Request, Wanted
from hotrow.serve.protocol.tensors import (
    BYTES,
    DTYPES,
    DeclaredTensor,
    Elements,
    declare,
    finite_number,
    from_bytes,
    from_list,
    invalid,
    shown,
)

PARAMETERS = ("deadline_ms", "timeout", "policy", "raw", "binary_data_output", "embeddings_datatype", "routing_key")
DATATYPES = {"f": FP32, "e": FP16, "?": "BOOL"}  # of outputs, by numpy's characters

_MAX_CACHED_HEADERS, _MAX_CACHED_HEADER_BYTES = 512, 16_384
_TOP = ("id", "inputs", "outputs", "parameters", "model_name", "model_version")
_MAX_DEADLINE = 3600.0


class Output(NamedTuple):
    """A requested output, as bytes or as JSON."""

    name: str
    binary: bool


@dataclass(frozen=True)
class RequestOptions:
    """A request's id, requested outputs and parameters."""

    id: str | None = None
    outputs: tuple[Output, ...] = (Output("probabilities", False), Output("logits", False))
    seconds: float | None = None  # from now to the deadline
    policy: str | None = None
    raw: bool = False
    wanted: Wanted | None = None  # embedding outputs
    routing_key: str | None = None  # requests with the same one go to the same version during a canary


class RequestParser:
    """Parses Requests for one version of a model, and caches the parsed headers."""

    def __init__(self, info: ModelInfo, limits: Limits) -> None:
        self.info, self.limits = info, limits
        self.layout = Layout(info.signature, limits)
        self.embeddings = EmbeddingOutputs(info.signature, info.widths)
        self._json_bytes = limits.json_bytes
        self._raw_columns: RawColumns | None = None
        self._parsed_headers: dict[bytes, ParsedHeader] = {}

    def parse(self, body: bytes, header: int | None, version: str | None) -> tuple[Request, RequestOptions]:
        """The request in an HTTP body; `header` is the length of its JSON part, None if it is all JSON."""
        if header is None:
            header = len(body)
        if header > len(body):
            raise invalid(
                f"the JSON part has {header} bytes by its header, but the body has {len(body)}; send it whole"
            )
        if header > self._json_bytes:
            raise invalid(
                f"{header} bytes of JSON are more than the limit json={self.limits.json}; send the tensors as bytes "
                "(the binary tensor data extension)",
                413,
            )
        text = body[:header]
        parsed = self._parsed_headers.get(text)
        if parsed is None:
            parsed = ParsedHeader.parse(text, self)
            if parsed.repeats and header <= _MAX_CACHED_HEADER_BYTES:
                if len(self._parsed_headers) >= _MAX_CACHED_HEADERS:
                    self._parsed_headers.clear()
                self._parsed_headers[text] = parsed
        request = self.build(parsed, parsed.elements(body[header:]), version)
        if request.wanted is not None:
            self._check_json_numbers(request, parsed.options)
        return request, parsed.options

    def build(self, parsed: ParsedHeader, elements: Sequence[Elements], version: str | None) -> Request:
        """The request of a parsed header with these elements."""
        options = parsed.options
        deadline = None if options.seconds is None else time.monotonic() + options.seconds
        matrix: Array | None = None
        ids: Sequence[Ids] = ()
        if options.wanted is not None:
            return self._build_lookup(parsed, options.wanted, elements, version, deadline)
        assert not isinstance(parsed.plan, LookupPlan)
        if parsed.plan is None:
            rows, ids, dense, dense_shared = self.raw_columns().columns(parsed.tensors, elements)
        else:
            plan = parsed.plan
            arrays: Sequence[Array] = elements  # type: ignore[assignment]
            if plan.is_matrix:
                matrix = plan.matrix(arrays)
            else:
                ids = plan.ids(arrays)
            rows, dense, dense_shared = plan.rows, plan.dense_of(arrays), plan.dense_shared
        if matrix is None:
            check_columns(self.info.signature, ids)
        return Request(self.info.name, rows, ids, dense, dense_shared, version, deadline, options.policy, matrix)

    def _build_lookup(
        self,
        parsed: ParsedHeader,
        wanted: Wanted,
        elements: Sequence[Elements],
        version: str | None,
        deadline: float | None,
    ) -> Request:
        """The request of a header that wants embedding outputs, if its answer is within the limit."""
        plan = parsed.plan
        dense: Array | None = None
        dense_shared = False
        ids: Sequence[Ids]
        if isinstance(plan, LookupPlan):
            rows, ids = plan.ids(elements)
        elif plan is None:
            rows, ids, dense, dense_shared = self.raw_columns().columns(parsed.tensors, elements)
        else:
            arrays: Sequence[Array] = elements  # type: ignore[assignment]
            rows, ids, dense, dense_shared = plan.rows, plan.ids(arrays), plan.dense_of(arrays), plan.dense_shared
        if wanted.logits:
            check_columns(self.info.signature, ids)
        size = self.embeddings.answer_bytes(wanted, rows, ids)
        if size > self.limits.answer_bytes:
            raise invalid(
                f"the vectors of {rows} rows take {size} bytes; the limit is answer={self.limits.answer}: ask for "
                "fewer rows, for fewer features, or for FP16",
                413,
            )
        wanted = wanted._replace(bytes=size)
        name, policy = self.info.name, parsed.options.policy
        return Request(name, rows, ids, dense, dense_shared, version, deadline, policy, wanted=wanted)

    def _check_json_numbers(self, request: Request, options: RequestOptions) -> None:
        """Refuse an answer with so many numbers as JSON that it would delay other answers."""
        named = [self.embeddings.by_name.get(output.name) for output in options.outputs if not output.binary]
        numbers = sum(self.embeddings.elements(output, request.rows, request.ids) for output in named if output)
        if numbers * JSON_BYTES > self._json_bytes:
            raise invalid(
                f"the vectors of {request.rows} rows are {numbers} numbers; as JSON an answer has at most "
                f"{self._json_bytes // JSON_BYTES} (json={self.limits.json}): ask for them as bytes, with the output's "
                "parameter binary_data",
                413,
            )

    def plan(self, tensors: Sequence[DeclaredTensor], options: RequestOptions) -> InputPlan | LookupPlan | None:
        """The plan of these tensors, or None when they are raw columns for the tower."""
        raw = options.raw or any(tensor.datatype == BYTES for tensor in tensors)
        if options.wanted is not None and not options.wanted.logits:
            wanted = self.embeddings.features(options.wanted)
            if raw:
                return plan_raw(tensors, self.raw_columns().spec, self.info.signature, self.limits, wanted)
            return plan_keys(tensors, self.layout, self.limits, wanted)
        if raw:
            self.raw_columns()
            return None
        return self.layout.plan(tensors)

    def raw_columns(self) -> RawColumns:
        """The converter of raw columns, if the model has a feature spec."""
        if self._raw_columns is None:
            if self.info.features is None:
                raise invalid(
                    f"model {self.info.name!r} was exported without a feature spec, so it takes no raw columns or "
                    "strings; send keys as INT64, or export it with features="
                )
            self._raw_columns = RawColumns(FeatureSpec.from_json(self.info.features), self.info.signature, self.limits)
        return self._raw_columns


@dataclass(frozen=True)
class ParsedHeader:
    """The JSON part of a request: its tensors, where their elements are, and its options."""

    tensors: tuple[DeclaredTensor, ...]
    locations: tuple[tuple[int, int] | None, ...]  # offset and size in the binary part; None: inline
    inline: tuple[Elements, ...]
    size: int  # of the binary part
    options: RequestOptions
    plan: InputPlan | LookupPlan | None
    views: tuple[Any, ...] | None  # arguments of np.frombuffer, if all tensors are aligned numbers sent as bytes

    @property
    def repeats(self) -> bool:
        """Whether the same header may be sent again with other elements."""
        return self.options.id is None and self.options.routing_key is None and not self.inline

    def elements(self, binary: bytes) -> list[Elements]:
        """Every tensor's elements, flat."""
        if len(binary) != self.size:
            raise invalid(
                f"{len(binary)} bytes follow the JSON part, but the inputs' binary_data_size add up to {self.size}; "
                "make them agree, and set Inference-Header-Content-Length to the JSON's length"
            )
        if self.views is not None:
            frombuffer = np.frombuffer
            return [frombuffer(binary, *how) for how in self.views]
        inline = iter(self.inline)
        return [
            next(inline) if location is None else from_bytes(tensor, binary, *location)
            for tensor, location in zip(self.tensors, self.locations, strict=True)
        ]

    @staticmethod
    def parse(text: bytes, parser: RequestParser) -> ParsedHeader:
        """Parse a header."""
        document = parse_json(text)
        for name in document:
            if name not in _TOP:
                raise invalid(f"the request has the unknown field {shown(name)}; {choices(name, _TOP)}")
        given = document.get("inputs")
        if not isinstance(given, list) or not given:
            raise invalid(
                'the request has no "inputs"; give a list of tensors, each with name, datatype, shape and data'
            )
        options = read_request_options(
            document.get("id"), document.get("parameters"), document.get("outputs"), parser.embeddings
        )
        tensors, locations, inline, size = [], [], [], 0
        for entry in given:
            tensor, location, data = _input(entry, size)
            tensors.append(tensor)
            locations.append(location)
            if location is None:
                inline.append(from_list(tensor, data))
            else:
                size += location[1]
        plan, views = parser.plan(tensors, options), _views(tensors, locations)
        if isinstance(plan, InputPlan) and plan.one_id_per_row and plan.columns and views and options.wanted is None:
            features = len(plan.columns)
            plan, views = plan.as_one_array(), ((views[0][0], features * plan.rows, 0), *views[features:])
        return ParsedHeader(tuple(tensors), tuple(locations), tuple(inline), size, options, plan, views)


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object. An error names the line and column."""
    try:
        document = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise invalid(f"the JSON is not UTF-8 at byte {error.start} ({error.reason}); encode it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise invalid(
            f"the body is no JSON: line {error.lineno}, column {error.colno}: {error.msg} (tensors as bytes need the "
            "header Inference-Header-Content-Length)"
        ) from error
    except RecursionError as error:
        raise invalid("the JSON is nested too deeply; tensors have at most two levels of lists") from error
    except ValueError as error:
        raise invalid(f"the JSON holds a number that cannot be read ({error}); ids are int64") from error
    if not isinstance(document, dict):
        raise invalid(f'the body is a JSON {type(document).__name__}; send an object with "inputs"')
    return document


def read_request_options(
    name: object, parameters: object, outputs: object, embeddings: EmbeddingOutputs
) -> RequestOptions:
    """The request's options, checked. `embeddings` are the outputs that the model has beside the tower's."""
    if name is not None and (not isinstance(name, str) or len(name) > 1024):
        raise invalid(f"id is {shown(name)}; give a string of at most 1024 characters")
    given = _parameters(parameters)
    policy, raw = given.get("policy"), given.get("raw", False)
    if policy is not None and policy not in POLICIES:
        raise invalid(f"parameter policy is {shown(policy)}; {choices(policy, POLICIES)}")
    if not isinstance(raw, bool):
        raise invalid(f"parameter raw is {shown(raw)}; give true or false")
    datatype = given.get("embeddings_datatype")
    if datatype not in (None, FP32, FP16):
        raise invalid(f"parameter embeddings_datatype is {shown(datatype)}; {choices(datatype, (FP32, FP16))}")
    key = given.get("routing_key")
    if key is not None and (not isinstance(key, str) or not 0 < len(key) <= 1024):
        raise invalid(f"parameter routing_key is {shown(key)}; give a string of 1 to 1024 characters")
    named, wanted = _outputs(outputs, given.get("binary_data_output") is True, embeddings, datatype == FP16)
    return RequestOptions(name or None, named, _seconds(given), policy, raw, wanted, key)


def _parameters(parameters: object) -> Mapping[str, Any]:
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise invalid(f'"parameters" is {shown(parameters)}; give an object')
    for name in parameters:
        if name not in PARAMETERS and not name.startswith("triton_"):
            raise invalid(f"the request has the unknown parameter {shown(name)}; {choices(name, PARAMETERS)}")
    return parameters


def _seconds(given: Mapping[str, Any]) -> float | None:
    """Seconds to the deadline: deadline_ms, or Triton's timeout in microseconds (0: the server's default)."""
    for name, unit in (("deadline_ms", 1e-3), ("timeout", 1e-6)):
        value = given.get(name)
        if value is None or (name == "timeout" and value == 0):
            continue
        if not finite_number(value) or not 0 < value * unit <= _MAX_DEADLINE:
            raise invalid(f"parameter {name} is {shown(value)}; give a number above 0 that is at most an hour")
        return float(value) * unit
    return None


def _outputs(
    outputs: object, binary: bool, embeddings: EmbeddingOutputs, half: bool
) -> tuple[tuple[Output, ...], Wanted | None]:
    of_tower = tower_outputs(embeddings.signature)
    if outputs is None or outputs == []:
        return tuple(Output(name, binary) for name in of_tower), None
    if not isinstance(outputs, list):
        raise invalid(f'"outputs" is {shown(outputs)}; give a list of objects with "name"')
    named: dict[str, Output] = {}
    vectors: dict[str, EmbeddingOutput] = {}
    datatypes: set[str] = set()
    for entry in outputs:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("parameters", {}), Mapping):
            raise invalid(f'an output is {shown(entry)}; give an object with "name" and "parameters"')
        name, options = entry.get("name"), entry.get("parameters", {})
        if not isinstance(name, str) or (name not in of_tower and name not in embeddings.by_name):
            raise _no_output(name, embeddings)
        if name in embeddings.by_name:
            vectors[name] = embeddings.by_name[name]
            datatypes |= _datatype(vectors[name], options)
        for option in options:
            if option != "binary_data" and (option != "datatype" or name not in vectors):
                raise invalid(f"output {name!r} has the parameter {shown(option)}; only binary_data is known")
        named[name] = Output(name, bool(options.get("binary_data", binary)))
    if len(datatypes) > 1:
        raise invalid("embedding outputs of one request have the datatypes FP32 and FP16; ask for one of them")
    if not vectors:
        return tuple(named.values()), None
    numbers = tuple(output.number for output in vectors.values())
    wanted = Wanted(numbers, len(named) > len(vectors), datatypes == {FP16} or (half and not datatypes))
    return tuple(named.values()), wanted


def _no_output(name: object, embeddings: EmbeddingOutputs) -> RefusedError:
    if isinstance(name, str) and name.partition(".")[0] == EMBEDDINGS and not embeddings.by_name:
        return invalid("this version answers no lookups: its servable does not say how wide its vectors are")
    known = [*tower_outputs(embeddings.signature), *embeddings.by_name]
    return invalid(f"there is no output {shown(name)}; {choices(name, known)}")


def _datatype(output: EmbeddingOutput, options: Mapping[str, Any]) -> set[str]:
    """The datatype that an output's parameters ask for; empty if they name none, or for a mask."""
    datatype = options.get("datatype")
    known = ("BOOL",) if output.is_mask else (FP32, FP16)
    if datatype is not None and datatype not in known:
        raise invalid(f"output {output.name!r} has the datatype {shown(datatype)}; {choices(datatype, known)}")
    return set() if datatype is None or output.is_mask else {datatype}


def _input(entry: object, offset: int) -> tuple[DeclaredTensor, tuple[int, int] | None, object]:
    """An input's declaration, its location in the binary part (or None), and its inline data."""
    if not isinstance(entry, dict):
        raise invalid(f"an input is {shown(entry)}; give an object with name, datatype, shape and data")
    tensor = declare(entry.get("name"), entry.get("datatype"), entry.get("shape"))
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise invalid(f"input {shown(tensor.name)} has parameters {shown(parameters)}; give an object")
    for name in parameters:
        if name != "binary_data_size":
            raise invalid(f"input {shown(tensor.name)} has the parameter {shown(name)}; only binary_data_size is known")
    size = parameters.get("binary_data_size")
    if size is None:
        if "data" not in entry:
            raise invalid(f'input {shown(tensor.name)} has no data; give "data", or binary_data_size and its bytes')
        return tensor, None, entry["data"]
    if type(size) is not int or not 0 <= size < 1 << 40:
        raise invalid(f"input {shown(tensor.name)} has binary_data_size {shown(size)}; give its number of bytes")
    if "data" in entry:
        raise invalid(f"input {shown(tensor.name)} has both data and binary_data_size; send one of them")
    return tensor, (offset, size), None


def _views(tensors: Sequence[DeclaredTensor], locations: Sequence[tuple[int, int] | None]) -> tuple[Any, ...] | None:
    """np.frombuffer's arguments for every tensor, if all are sent as bytes, are aligned and have the right length."""
    found = []
    for tensor, location in zip(tensors, locations, strict=True):
        dtype = DTYPES.get(tensor.datatype)
        if (
            location is None
            or dtype is None
            or location[0] % dtype.itemsize
            or location[1] != tensor.size * dtype.itemsize
        ):
            return None
        if location[1] == 0:
            return None  # numpy refuses an offset at the very end
        found.append((dtype, tensor.size, location[0]))
    return tuple(found)


def output_arrays(answer: Answer, names: Sequence[str]) -> list[Array]:
    """The arrays of these outputs: float32, and of embedding outputs as the engine sent them."""
    if answer.vectors:
        return _with_vectors(answer, names)
    logits = np.ascontiguousarray(answer.logits, dtype=np.float32)
    return [logits if name == LOGITS else predictions(logits, answer.kinds) for name in names]


def _with_vectors(answer: Answer, names: Sequence[str]) -> list[Array]:
    vectors = iter(answer.vectors)
    return [
        answer.logits
        if name == LOGITS
        else predictions(answer.logits, answer.kinds)
        if name in ("probabilities", "predictions")
        else next(vectors)
        for name in names
    ]


def answer_parameters(answer: Answer) -> dict[str, Any]:
    """An answer's parameters in the protocol."""
    return {
        "publication": answer.publication,
        "late_rows": answer.late_rows,
        "compiled": answer.compiled,
        **answer.parameters,
    }


def write_answer(answer: Answer, options: RequestOptions) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON part if tensors follow it."""
    arrays = output_arrays(answer, [output.name for output in options.outputs])
    described, tail = [], []
    for (name, binary), array in zip(options.outputs, arrays, strict=True):
        shape = ",".join(map(str, array.shape))
        if binary:
            data = array.tobytes()
            tail.append(data)
            elements = f'"parameters":{{"binary_data_size":{len(data)}}}'
        else:
            elements = f'"data":{_to_json(_numbers(array))}'
        described.append(
            f'{{"name":{_json_string(name)},"datatype":"{DATATYPES[array.dtype.char]}","shape":[{shape}],{elements}}}'
        )
    name = "" if options.id is None else f'"id":{_to_json(options.id)},'
    text = (
        f'{{"model_name":{_json_string(answer.model)},"model_version":{_json_string(answer.version)},{name}'
        f'"parameters":{_parameters_text(answer)},"outputs":[{",".join(described)}]}}'
    ).encode()
    return (b"".join([text, *tail]), len(text)) if tail else (text, None)


def _parameters_text(answer: Answer) -> str:
    """answer_parameters as JSON. The usual three are formatted here: a JSON encoder call costs more."""
    if answer.parameters:
        return _to_json(answer_parameters(answer))
    compiled = "true" if answer.compiled else "false"
    return f'{{"publication":{int(answer.publication)},"late_rows":{int(answer.late_rows)},"compiled":{compiled}}}'


def _numbers(array: Array) -> list[float | None]:
    """The numbers as a list; JSON has no NaN or infinity, so these become null."""
    flat: list[float | None] = array.reshape(-1).tolist()
    return flat if np.isfinite(array).all() else [x if finite_number(x) else None for x in flat]


_to_json = json.JSONEncoder(separators=(",", ":")).encode
_json_string = functools.lru_cache(256)(_to_json)
