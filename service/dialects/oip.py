"""Open Inference Protocol v2 (KServe, Triton): `/v2`, `/v2/health/...`, `/v2/models/...`, with the binary tensor extension both ways.

Source: the protocol's REST specification and Triton's `extension_binary_data`. A model offers text and its graph's own tensors:

    encoder, token classifier   text                      or  input_ids, attention_mask
    reranker                    text, text_pair           or  input_ids, attention_mask
    classifier                  text [, text_pair]        or  input_ids, attention_mask

Ids are not offered where the graph reads token types: without them it would take a pair for one text, and answer wrongly.

Different from the protocol: without `outputs` only the first output is sent, because each further one is a run of its own; and a model has
one version, "1" (what changes with its bytes is the bundle's fingerprint). A name may hold slashes, plain or percent-encoded: what is
served under exactly that name comes first, then NAME/versions/1. A name that ends in /ready or /infer needs an alias.
"""

from collections.abc import Iterator, Sequence
from importlib.metadata import version as version_of
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Path, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from starlette.convertors import Convertor, register_url_convertor

from export import contract
from service.call import Call
from service.catalog import Answer, Catalog, Model
from service.dialects import Dialect
from service.dialects.openai import as_cut
from service.errors import InvalidRequest, ModelNotFound, NeverFits, ServiceError
from service.routing import CallDep, CatalogDep, JsonRoute, json_response, read
from service.runtime import Array
from service.tokenization import Encoded, Input, Side

VERSION = "1"
TEXT, TEXT_PAIR = "text", "text_pair"
JSON_LENGTH_HEADER = "inference-header-content-length"

_DATATYPES = {"int64": "INT64", "float32": "FP32"}
_MAX_PADDED_NUMBERS = 32 * 1024 * 1024  # of a token-level output: one long row among many short ones must not cost gigabytes of zeros


# The wire ------------------------------------------------------------------------------------------------------------------------------


class Given(BaseModel):
    """What a client sends: "7" and true are no numbers."""

    model_config = ConfigDict(strict=True)


class RequestParameters(Given):
    """Others are ignored."""

    binary_data_output: bool | None = Field(None, description="Send every output as bytes after the JSON.")
    truncate: bool | Side | None = Field(None, description="right or true, left, none or false; the service's setting without it.")
    prompt_name: str | None = Field(None, max_length=256, description="A prompt of the checkpoint, put before each text.")


class InputParameters(Given):
    binary_data_size: int | None = Field(
        None, ge=0, lt=2**40, description="The data is so many bytes after the JSON, in the inputs' order."
    )


class OutputParameters(Given):
    binary_data: bool | None = Field(
        None, description="Send this output as bytes after the JSON, or not, whatever the request says of all."
    )


class InputTensor(Given):
    name: str = Field(max_length=256)
    datatype: str = Field(max_length=16, description="BYTES for text, INT64 for ids.")
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=8)
    data: list[Any] | None = Field(None, description="Row-major, flat or nested by the shape.")
    parameters: InputParameters = Field(default_factory=InputParameters.model_construct)


class WantedOutput(Given):
    name: str = Field(max_length=256)
    parameters: OutputParameters = Field(default_factory=OutputParameters.model_construct)


class InferRequest(Given):
    """Unknown keys are ignored."""

    id: str | None = Field(None, max_length=1024, description="Comes back with the answer.")
    parameters: RequestParameters = Field(default_factory=RequestParameters.model_construct)
    inputs: list[InputTensor] = Field(min_length=1, max_length=8)
    outputs: list[WantedOutput] | None = Field(None, max_length=8, description="Each is a run of its own; the model's first without it.")


class OutputTensor(BaseModel):
    name: str
    datatype: Literal["FP32"]
    shape: list[int]
    data: list[float] = Field([], description="Flat, row-major; missing where the output is binary.")
    parameters: dict[str, int] = Field({}, description="binary_data_size, where the output is binary.")


class InferResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class TensorMetadata(BaseModel):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    ready: bool


class ModelReady(BaseModel):
    name: str
    ready: bool


class ErrorResponse(BaseModel):
    error: str


_STATUS = {422: 400, 424: 400}


def render(error: ServiceError) -> tuple[int, Any]:
    return _STATUS.get(error.status, error.status), {"error": error.message}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse} for status in statuses}


DIALECT = Dialect("oip", ("/v2",), render)
router = APIRouter(route_class=JsonRoute, tags=["Open Inference Protocol"], responses=errors(401, 500, 503))
ModelPath = Annotated[str, Path(description="NAME or NAME/versions/1")]


# Server and readiness ---------------------------------------------------------------------------------------------------------------------


@router.get("/v2", response_model=ServerMetadata)
async def server() -> Any:
    """What this server is."""
    return {"name": "attnserve", "version": version_of("attnserve"), "extensions": ["binary_tensor_data"]}


@router.get("/v2/health/live", response_model=Live)
async def live() -> Any:
    """200 as soon as the process answers at all."""
    return {"live": True}


@router.get("/v2/health/ready", response_model=Ready, responses={503: {"model": Ready}})
async def ready(call: CallDep, catalog: CatalogDep) -> Any:
    """200 when every model is warm and its last run succeeded, 503 otherwise."""
    is_ready = await catalog.ready()
    return json_response({"ready": is_ready}, call, 200 if is_ready else 503)


@router.get(
    "/v2/models/{model:path}/ready", response_model=ModelReady, responses={**errors(404), 503: {"model": ModelReady | ErrorResponse}}
)
async def model_ready(model: ModelPath, call: CallDep, catalog: CatalogDep) -> Any:
    """The same for one model."""
    found = find(catalog, model)
    await catalog.ready()  # gives a model whose last run failed the chance to recover
    return json_response({"name": found.name, "ready": found.engine.healthy}, call, 200 if found.engine.healthy else 503)


# Models ------------------------------------------------------------------------------------------------------------------------------


class _Name(Convertor[str]):
    """A name in a path, and not what the protocol puts after one."""

    regex = ".*(?<!/ready)(?<!/infer)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("name", _Name())


@router.get("/v2/models/{model:name}", response_model=ModelMetadata, responses=errors(404))
async def model_metadata(model: ModelPath, call: CallDep, catalog: CatalogDep) -> Any:
    """The tensors that a model takes and gives; -1 is a free axis."""
    found = find(catalog, model)
    outputs = [
        {"name": tensor.name, "datatype": _DATATYPES[tensor.dtype], "shape": [_axis(axis) for axis in tensor.shape]}
        for tensor in found.manifest.graph.outputs
    ]
    inputs = {name: _INPUTS[name] for way in _ways(found) for name in way}
    content = {"name": found.name, "versions": [VERSION], "platform": "onnx_onnxv1", "inputs": [*inputs.values()], "outputs": outputs}
    return json_response(content, call)


def find(catalog: Catalog, path: str) -> Model:
    """The model at `NAME` or `NAME/versions/1`. ModelNotFound, NotReady."""
    name, marker, version = path.rpartition("/versions/")
    if not marker or path in catalog.models or path in catalog.settings.aliases:
        return catalog.get(path)
    model = catalog.get(name)
    if version != VERSION:
        raise ModelNotFound(f"model {name} has no version {version!r}, only {VERSION!r}", param="model")
    return model


_INPUTS: dict[str, dict[str, Any]] = {
    TEXT: {"name": TEXT, "datatype": "BYTES", "shape": [-1]},
    TEXT_PAIR: {"name": TEXT_PAIR, "datatype": "BYTES", "shape": [-1]},
    contract.INPUT_IDS: {"name": contract.INPUT_IDS, "datatype": "INT64", "shape": [-1, -1]},
    contract.ATTENTION_MASK: {"name": contract.ATTENTION_MASK, "datatype": "INT64", "shape": [-1, -1]},
}
_BY_IDS = (contract.INPUT_IDS, contract.ATTENTION_MASK)


def _ways(model: Model) -> list[tuple[str, ...]]:
    """The sets of input tensors that this model can be asked with."""
    ways: list[tuple[str, ...]] = []
    if model.manifest.kind != "reranker":
        ways.append((TEXT,))
    if model.manifest.kind in ("reranker", "classifier"):
        ways.append((TEXT, TEXT_PAIR))
    if all(tensor.name != contract.TOKEN_TYPE_IDS for tensor in model.manifest.graph.inputs):
        ways.append(_BY_IDS)
    return ways


def _axis(axis: str | int) -> int:
    return axis if isinstance(axis, int) else -1


# Inference -----------------------------------------------------------------------------------------------------------------------------


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema without references, for the one body that FastAPI cannot see in a signature."""
    if isinstance(node, list):
        return [_inlined(each, definitions) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(each, definitions) for key, each in node.items() if key != "$defs"}


_SCHEMA = InferRequest.model_json_schema()
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _inlined(_SCHEMA, _SCHEMA["$defs"])},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    },
    "parameters": [
        {
            "name": JSON_LENGTH_HEADER,
            "in": "header",
            "required": False,
            "description": "Bytes of JSON at the start of the body, where tensors follow it as bytes.",
            "schema": {"type": "integer", "minimum": 0},
        }
    ],
}


@router.post("/v2/models/{model:path}/infer", response_model=InferResponse, responses=errors(400, 404, 413, 429, 504), openapi_extra=_BODY)
async def infer(model: ModelPath, request: Request, call: CallDep, catalog: CatalogDep) -> Any:
    """Run a model on text or on token ids. Rows of ids end where their attention mask does; token-level outputs are padded with zeros."""
    found = find(catalog, model)
    asked, tail = _split(await request.body(), request.headers.get(JSON_LENGTH_HEADER))
    wanted = asked.outputs or [WantedOutput(name=found.output)]
    _check_outputs(found, wanted)
    inputs = _inputs(found, asked.inputs, tail)
    call.item_errors = False  # a tensor has no room for them
    cut = as_cut(asked.parameters.truncate, found)
    prompt = found.texts.prompt(asked.parameters.prompt_name) if asked.parameters.prompt_name else None
    answers = [await found.answer(inputs, call, output=output.name, cut=cut, prompt=prompt) for output in wanted]
    return _sent(found, asked, {output.name: _stacked(answer) for output, answer in zip(wanted, answers, strict=True)}, call)


def _sent(model: Model, asked: InferRequest, arrays: dict[str, Array], call: Call) -> Response:
    """The arrays as JSON, or those that are wanted so as bytes after it."""
    choices = {output.name: output.parameters.binary_data for output in asked.outputs or ()}
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for name, array in arrays.items():
        choice = choices.get(name)
        entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": list(array.shape)}
        if asked.parameters.binary_data_output if choice is None else choice:
            blobs.append(array.astype("<f4", copy=False).tobytes())
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = array.reshape(-1)
        outputs.append(entry)
    content = {"model_name": model.name, "model_version": VERSION, "outputs": outputs, **({} if asked.id is None else {"id": asked.id})}
    if not blobs:
        return json_response(content, call)
    head = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {**call.headers, JSON_LENGTH_HEADER: str(len(head))}
    return Response(b"".join([head, *blobs]), headers=headers, media_type="application/octet-stream")


def _check_outputs(model: Model, wanted: Sequence[WantedOutput]) -> None:
    known = [tensor.name for tensor in model.manifest.graph.outputs]
    names = [output.name for output in wanted]
    if unknown := [name for name in names if name not in known]:
        raise InvalidRequest(f"model {model.name} has no output {unknown[0]!r}; it has: {', '.join(known)}", param="outputs")
    if len(set(names)) < len(names):
        raise InvalidRequest("an output is asked for twice", param="outputs")


def _stacked(answer: Answer) -> Array:
    """(B, D), or (B, N, D) with N the longest row."""
    rows = [
        row[: len(item.ids)] if row.ndim == 2 else row
        for row, item in zip(answer.rows, answer.encoded, strict=True)
        if not isinstance(row, ServiceError) and isinstance(item, Encoded)
    ]
    if rows[0].ndim == 1:
        return np.stack(rows)
    shape = len(rows), max(map(len, rows)), rows[0].shape[1]
    if prod(shape) > _MAX_PADDED_NUMBERS:
        raise NeverFits(
            f"an output of shape {list(shape)} is over {_MAX_PADDED_NUMBERS} numbers: send the inputs in parts, like lengths together"
        )
    padded: Array = np.zeros(shape, np.float32)
    for at, row in enumerate(rows):
        padded[at, : len(row)] = row
    return padded


# Tensors in ----------------------------------------------------------------------------------------------------------------------------


def _split(body: bytes, json_length: str | None) -> tuple[InferRequest, bytes]:
    """The JSON of a body, and the bytes after it."""
    if json_length is None:
        return read(InferRequest, body), b""
    if not (json_length.isascii() and json_length.isdigit() and len(json_length) < 16 and int(json_length) <= len(body)):
        raise InvalidRequest(f"{JSON_LENGTH_HEADER}={json_length[:40]!r} is not a number of bytes within the body's {len(body)}")
    at = int(json_length)
    return read(InferRequest, body[:at]), body[at:]


def _inputs(model: Model, tensors: Sequence[InputTensor], tail: bytes) -> list[Input]:
    """What the tensors mean, one input a row."""
    blobs = _blobs(tensors, tail)
    given = {tensor.name: (tensor, blob) for tensor, blob in zip(tensors, blobs, strict=True)}
    ways = _ways(model)
    if len(given) < len(tensors) or set(given) not in [set(way) for way in ways]:
        names = ", ".join(tensor.name for tensor in tensors)
        raise InvalidRequest(
            f"model {model.name} takes {' or '.join(' with '.join(way) for way in ways)}. Given: {names[:200]}", param="inputs"
        )
    if contract.INPUT_IDS in given:
        return _rows(_numbers(*given[contract.INPUT_IDS]), _numbers(*given[contract.ATTENTION_MASK]))
    texts = _texts(*given[TEXT])
    if TEXT_PAIR not in given:
        return list(texts)
    pairs = _texts(*given[TEXT_PAIR])
    if len(pairs) != len(texts):
        raise InvalidRequest(f"`{TEXT}` has {len(texts)} rows and `{TEXT_PAIR}` {len(pairs)}", param="inputs")
    return list(zip(texts, pairs, strict=True))


def _blobs(tensors: Sequence[InputTensor], tail: bytes) -> list[bytes | None]:
    """The bytes of each tensor that came as bytes."""
    blobs: list[bytes | None] = []
    at = 0
    for tensor in tensors:
        size = tensor.parameters.binary_data_size
        if (size is None) == (tensor.data is None):
            raise InvalidRequest(f"`{tensor.name}` needs either `data` or `parameters.binary_data_size`, and not both", param="inputs")
        blobs.append(None if size is None else tail[at : at + size])
        at += size or 0
    if at != len(tail):
        raise InvalidRequest(
            f"the inputs claim {at} bytes after the JSON and there are {len(tail)}; see {JSON_LENGTH_HEADER}", param="inputs"
        )
    return blobs


def _texts(tensor: InputTensor, blob: bytes | None) -> list[str]:
    _check_tensor(tensor, "BYTES", "[n] or [n, 1]", fits=len(tensor.shape) == 1 or tensor.shape[1:] == [1])
    texts = _elements(tensor) if blob is None else list(_strings(tensor.name, blob))
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"`{tensor.name}` holds something other than strings", param="inputs")
    _check_count(tensor, len(texts))
    return texts


def _numbers(tensor: InputTensor, blob: bytes | None) -> NDArray[np.int64]:
    _check_tensor(tensor, "INT64", "[rows, tokens], both at least 1", fits=len(tensor.shape) == 2 and all(tensor.shape))
    if blob is not None:
        if len(blob) % 8:
            raise InvalidRequest(f"`{tensor.name}` has {len(blob)} bytes, which is no number of INT64", param="inputs")
        flat: NDArray[np.int64] = np.frombuffer(blob, "<i8").astype(np.int64, copy=False)
    else:
        elements = _elements(tensor)
        if not all(type(element) is int and -(2**63) <= element < 2**63 for element in elements):
            raise InvalidRequest(f"`{tensor.name}` holds something other than INT64 numbers", param="inputs")
        flat = np.array(elements, np.int64)
    _check_count(tensor, len(flat))
    return flat.reshape(tensor.shape)


def _rows(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> list[Input]:
    """The ids of each row up to the end of its mask, which must be ones and then zeros."""
    if ids.shape != mask.shape:
        raise InvalidRequest(f"input_ids is {list(ids.shape)} and attention_mask {list(mask.shape)}: they must agree", param="inputs")
    lengths = (mask == 1).sum(axis=1)
    wrong = (mask != (np.arange(mask.shape[1]) < lengths[:, None])).any(axis=1) | (lengths == 0)
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidRequest(
            f"attention_mask row {row} is not ones followed by zeros: pad on the right, and give each row at least one token",
            param="inputs",
        )
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


def _check_tensor(tensor: InputTensor, datatype: str, shapes: str, *, fits: bool) -> None:
    if tensor.datatype != datatype:
        raise InvalidRequest(f"`{tensor.name}` is of datatype {datatype}. Given: {tensor.datatype}", param="inputs")
    if not fits:
        raise InvalidRequest(f"`{tensor.name}` has the shape {shapes}. Given: {tensor.shape}", param="inputs")


def _check_count(tensor: InputTensor, count: int) -> None:
    if count != prod(tensor.shape):
        raise InvalidRequest(f"`{tensor.name}` of shape {tensor.shape} has {prod(tensor.shape)} elements. Given: {count}", param="inputs")


def _elements(tensor: InputTensor) -> list[Any]:
    """JSON data in row-major order; it may come flat, or as a list of rows."""
    data = tensor.data or []
    if not any(isinstance(row, list) for row in data):
        return data
    if len(tensor.shape) != 2 or [len(row) if isinstance(row, list) else -1 for row in data] != [tensor.shape[1]] * tensor.shape[0]:
        raise InvalidRequest(f"the nesting of `{tensor.name}` is not that of its shape {tensor.shape}", param="inputs")
    return [element for row in data for element in row]


def _strings(name: str, blob: bytes) -> Iterator[str]:
    """BYTES elements: four bytes of length, little-endian, then so many bytes, which must be UTF-8."""
    at = 0
    while at < len(blob):
        start = at + 4
        at = start + int.from_bytes(blob[at:start], "little")
        if start > len(blob) or at > len(blob):
            raise InvalidRequest(f"`{name}` ends in the middle of an element", param="inputs")
        try:
            yield blob[start:at].decode()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"`{name}` is not UTF-8: {error.reason}", param="inputs") from None
