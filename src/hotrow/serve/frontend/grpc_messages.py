"""The messages of inference.GRPCInferenceService, built at run time from one table of names and field numbers.

The service is the Open Inference Protocol's, as used by Triton's clients. There is no generated code and no .proto file
in the repository: MESSAGES lists each message in a line or two, and protobuf builds the classes from it. They have
their own descriptor pool, so that names do not clash if the process also imports a client's generated modules.

A field is `name=number type`; `*` repeats it, `map` maps strings to the type, and fields in ( ) are a oneof. Types are
protobuf's scalars, or messages of this table. Fields that the server does not read (such as a config's other parts) are
left out: protobuf keeps and ignores unknown fields.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

MESSAGES = """
ServerLiveRequest:
ServerLiveResponse: live=1 bool
ServerReadyRequest:
ServerReadyResponse: ready=1 bool
ModelReadyRequest: name=1 string, version=2 string
ModelReadyResponse: ready=1 bool
ServerMetadataRequest:
ServerMetadataResponse: name=1 string, version=2 string, extensions=3 *string
ModelMetadataRequest: name=1 string, version=2 string
TensorMetadata: name=1 string, datatype=2 string, shape=3 *int64
ModelMetadataResponse: name=1 string, versions=2 *string, platform=3 string, inputs=4 *TensorMetadata,
    outputs=5 *TensorMetadata
InferParameter: (bool_param=1 bool, int64_param=2 int64, string_param=3 string, double_param=4 double,
    uint64_param=5 uint64)
InferTensorContents: bool_contents=1 *bool, int_contents=2 *int32, int64_contents=3 *int64, uint_contents=4 *uint32,
    uint64_contents=5 *uint64, fp32_contents=6 *float, fp64_contents=7 *double, bytes_contents=8 *bytes
InferInputTensor: name=1 string, datatype=2 string, shape=3 *int64, parameters=4 map InferParameter,
    contents=5 InferTensorContents
InferRequestedOutputTensor: name=1 string, parameters=2 map InferParameter
ModelInferRequest: model_name=1 string, model_version=2 string, id=3 string, parameters=4 map InferParameter,
    inputs=5 *InferInputTensor, outputs=6 *InferRequestedOutputTensor, raw_input_contents=7 *bytes
InferOutputTensor: name=1 string, datatype=2 string, shape=3 *int64, parameters=4 map InferParameter,
    contents=5 InferTensorContents
ModelInferResponse: model_name=1 string, model_version=2 string, id=3 string, parameters=4 map InferParameter,
    outputs=5 *InferOutputTensor, raw_output_contents=6 *bytes
ModelStreamInferResponse: error_message=1 string, infer_response=2 ModelInferResponse
ModelConfigRequest: name=1 string, version=2 string
ModelParameter: string_value=1 string
ModelInput: name=1 string, data_type=2 DataType, dims=4 *int64, optional=8 bool
ModelOutput: name=1 string, data_type=2 DataType, dims=3 *int64
ModelConfig: name=1 string, platform=2 string, backend=17 string, max_batch_size=4 int32, input=5 *ModelInput,
    output=6 *ModelOutput, parameters=14 map ModelParameter
ModelConfigResponse: config=1 ModelConfig
ModelStatisticsRequest: name=1 string, version=2 string
StatisticDuration: count=1 uint64, ns=2 uint64
InferStatistics: success=1 StatisticDuration, fail=2 StatisticDuration, queue=3 StatisticDuration,
    compute_input=4 StatisticDuration, compute_infer=5 StatisticDuration, compute_output=6 StatisticDuration,
    cache_hit=7 StatisticDuration, cache_miss=8 StatisticDuration
InferBatchStatistics: batch_size=1 uint64, compute_input=2 StatisticDuration, compute_infer=3 StatisticDuration,
    compute_output=4 StatisticDuration
ModelStatistics: name=1 string, version=2 string, last_inference=3 uint64, inference_count=4 uint64,
    execution_count=5 uint64, inference_stats=6 InferStatistics, batch_stats=7 *InferBatchStatistics
ModelStatisticsResponse: model_stats=1 *ModelStatistics
ModelRepositoryParameter: (bool_param=1 bool, int64_param=2 int64, string_param=3 string, bytes_param=4 bytes)
RepositoryIndexRequest: repository_name=1 string, ready=2 bool
ModelIndex: name=1 string, version=2 string, state=3 string, reason=4 string
RepositoryIndexResponse: models=1 *ModelIndex
RepositoryModelLoadRequest: repository_name=1 string, model_name=2 string, parameters=3 map ModelRepositoryParameter
RepositoryModelLoadResponse:
RepositoryModelUnloadRequest: repository_name=1 string, model_name=2 string, parameters=3 map ModelRepositoryParameter
RepositoryModelUnloadResponse:
"""

DATA_TYPES = [
    "TYPE_INVALID",
    "TYPE_BOOL",
    "TYPE_UINT8",
    "TYPE_UINT16",
    "TYPE_UINT32",
    "TYPE_UINT64",
    "TYPE_INT8",
    "TYPE_INT16",
    "TYPE_INT32",
    "TYPE_INT64",
    "TYPE_FP16",
    "TYPE_FP32",
    "TYPE_FP64",
    "TYPE_STRING",
    "TYPE_BF16",
]

# Method → request and response; ModelStreamInfer streams both.
METHODS = {
    "ServerLive": ("ServerLiveRequest", "ServerLiveResponse"),
    "ServerReady": ("ServerReadyRequest", "ServerReadyResponse"),
    "ModelReady": ("ModelReadyRequest", "ModelReadyResponse"),
    "ServerMetadata": ("ServerMetadataRequest", "ServerMetadataResponse"),
    "ModelMetadata": ("ModelMetadataRequest", "ModelMetadataResponse"),
    "ModelInfer": ("ModelInferRequest", "ModelInferResponse"),
    "ModelStreamInfer": ("ModelInferRequest", "ModelStreamInferResponse"),
    "ModelConfig": ("ModelConfigRequest", "ModelConfigResponse"),
    "ModelStatistics": ("ModelStatisticsRequest", "ModelStatisticsResponse"),
    "RepositoryIndex": ("RepositoryIndexRequest", "RepositoryIndexResponse"),
    "RepositoryModelLoad": ("RepositoryModelLoadRequest", "RepositoryModelLoadResponse"),
    "RepositoryModelUnload": ("RepositoryModelUnloadRequest", "RepositoryModelUnloadResponse"),
}

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
    "uint64": _Field.TYPE_UINT64,
}


def build() -> dict[str, Any]:
    """The message classes, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="hotrow/inference.proto", package=PACKAGE, syntax="proto3")
    types = file.enum_type.add(name="DataType")
    for number, name in enumerate(DATA_TYPES):
        types.value.add(name=name, number=number)
    lines = MESSAGES.replace("\n    ", " ").strip().splitlines()
    for line in lines:
        name, _, fields = line.partition(":")
        _add_fields(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindFileByName(file.name)
    return {name: message_factory.GetMessageClass(message) for name, message in found.message_types_by_name.items()}


def _add_fields(message: Any, fields: str) -> None:
    choice = fields.strip().startswith("(")
    if choice:
        message.oneof_decl.add(name="parameter_choice")
    for text in fields.strip(" ()").split(","):
        if not text.strip():
            continue
        naming, _, kind = text.strip().partition(" ")
        name, _, number = naming.partition("=")
        field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
        if choice:
            field.oneof_index = 0
        if kind.startswith("map "):
            _make_map(message, field, kind.removeprefix("map "))
            continue
        if kind.startswith("*"):
            field.label = _Field.LABEL_REPEATED
        _set_type(field, kind.lstrip("*"))


def _make_map(message: Any, field: Any, kind: str) -> None:
    """A map is a repeated message of key and value, nested and marked."""
    entry = message.nested_type.add(name="".join(part.title() for part in field.name.split("_")) + "Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    _set_type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), kind)
    field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind == "DataType" else _Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{kind}"
