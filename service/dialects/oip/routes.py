"""The Open Inference Protocol v2 (KServe, Triton): `/v2`, `/v2/health/..`, `/v2/models/..`, with binary tensors in both
directions.

Source: the protocol's REST specification and Triton's `extension_binary_data`. Every model has one version, "1". Text generators
have metadata and readiness here, but no inference. A model's name in a path may contain slashes, plain or percent-encoded. A
path is first compared with the served names, then read as NAME/versions/1. A model whose name ends in /ready, /infer, /config or
/stats can be reached only by an alias. Of Triton's extensions, model configuration is supported. For statistics, use /metrics.
"""

from collections.abc import Iterable, Sequence
from importlib.metadata import version as version_of
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Request, Response
from starlette.convertors import PathConvertor, register_url_convertor

from export import contract
from service.call import JSON_LENGTH_HEADER, NUMBER_BYTES, Call
from service.catalog import Catalog, Served
from service.dialects.input_types import as_role
from service.dialects.oip.schemas import (
    InferRequest,
    InferResponse,
    Live,
    ModelConfig,
    ModelMetadata,
    ModelReady,
    OipErrorResponse,
    Ready,
    ServerMetadata,
    WantedOutput,
)
from service.dialects.oip.tensors import INPUTS, inputs_of, split, stacked, ways_of
from service.dialects.openai.embeddings import as_cut
from service.encoding.model import Model
from service.encoding.request import EncodeRequest
from service.errors import InvalidRequest, ModelNotFound, RouteNotFound, ServiceError, WrongKind
from service.http.dialect import Dialect
from service.http.fields import schema_of
from service.http.routing import CallDep, CatalogDep, JsonRoute, json_response
from service.runtime.onnx import Array

VERSION = "1"
_DATATYPES = {"int64": "INT64", "float32": "FP32"}
_STATUS = {422: 400, 424: 400}


def render(error: ServiceError) -> tuple[int, Any]:
    return _STATUS.get(error.status, error.status), {"error": error.message}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": OipErrorResponse} for status in statuses}


DIALECT = Dialect("oip", ("/v2",), render)
router = APIRouter(route_class=JsonRoute, tags=["Open Inference Protocol"], responses=errors(401, 500, 503))
ModelPath = Annotated[str, Path(description="NAME or NAME/versions/1")]


# Server and readiness ---------------------------------------------------------------------------------------------------------------------


@router.get("/v2", response_model=ServerMetadata)
async def server() -> Any:
    """Return the name, version and extensions of this server."""
    return {"name": "attnserve", "version": version_of("attnserve"), "extensions": ["binary_tensor_data", "model_configuration"]}


@router.get("/v2/health/live", response_model=Live)
async def live() -> Any:
    """Return 200 as soon as the process can answer requests."""
    return {"live": True}


@router.get("/v2/health/ready", response_model=Ready, responses={503: {"model": Ready}})
async def ready(call: CallDep, catalog: CatalogDep) -> Any:
    """Return 200 if every model is ready and its most recent run succeeded, else 503."""
    is_ready = await catalog.ready()
    return json_response({"ready": is_ready}, call, 200 if is_ready else 503)


@router.get(
    "/v2/models/{model:path}/ready", response_model=ModelReady, responses={**errors(404), 503: {"model": ModelReady | OipErrorResponse}}
)
async def model_ready(model: ModelPath, call: CallDep, catalog: CatalogDep) -> Any:
    """Return 200 if this model is ready and its most recent run succeeded, else 503."""
    found = find(catalog, model)
    is_ready = await catalog.answers(found)
    return json_response({"name": found.name, "ready": is_ready}, call, 200 if is_ready else 503)


# Models ------------------------------------------------------------------------------------------------------------------------------


class _Name(PathConvertor):
    """Matches a model's name in a path, but no path that ends in a suffix of the protocol, such as `/ready`."""

    regex = ".*(?<!/ready)(?<!/infer)(?<!/config)(?<!/stats)"


register_url_convertor("name", _Name())


@router.get("/v2/models/{model:name}", response_model=ModelMetadata, responses=errors(404))
async def model_metadata(model: ModelPath, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a model's input and output tensors; -1 is a variable size. A text generator's tensors are those of one decode step."""
    found = find(catalog, model)
    inputs, outputs = _tensors(found)
    content = {"name": found.name, "versions": [VERSION], "platform": "onnx_onnxv1", "inputs": inputs, "outputs": outputs}
    return json_response(content, call)


@router.get("/v2/models/{model:path}/config", response_model=ModelConfig, responses=errors(404))
async def model_config(model: ModelPath, call: CallDep, catalog: CatalogDep) -> Any:
    """Return a model's tensors and batching as Triton's model configuration, an extension of the protocol."""
    found = find(catalog, model)
    inputs, outputs = _tensors(found)
    content = {
        "name": found.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": catalog.settings.max_client_batch if ways_of(found) else 0,
        "input": [_configured(tensor, "FORMAT_NONE") for tensor in inputs],
        "output": [_configured(tensor, None) for tensor in outputs],
        "dynamic_batching": {},
    }
    return json_response(content, call)


def _configured(tensor: dict[str, Any], format_: str | None) -> dict[str, Any]:
    """Return a tensor's entry in the model configuration. The batch axis is left out, since `max_batch_size` replaces it."""
    kind = "STRING" if tensor["datatype"] == "BYTES" else tensor["datatype"]
    named = {"name": tensor["name"], "data_type": f"TYPE_{kind}", "dims": tensor["shape"][1:] or [1]}
    return named if format_ is None else {**named, "format": format_}


@router.get("/v2/models/stats", response_model=OipErrorResponse, status_code=404, responses=errors(400))
@router.get("/v2/models/{model:path}/stats", response_model=OipErrorResponse, status_code=404)
async def model_stats(catalog: CatalogDep, model: str = "") -> Any:
    """Always return 404: Triton's statistics extension is not supported."""
    which = f" of model {find(catalog, model).name}" if model else ""
    raise RouteNotFound(f"statistics{which} are at GET /metrics, in Prometheus's form; here are metadata, /config, /ready and /infer")


def _tensors(found: Served) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    graph = found.manifest.graph
    inputs = [*{name: INPUTS[name] for way in ways_of(found) for name in way}.values()]
    return inputs or [_metadata(tensor) for tensor in graph.inputs], [_metadata(tensor) for tensor in graph.outputs]


def _metadata(tensor: contract.Tensor) -> dict[str, Any]:
    shape = [axis if isinstance(axis, int) else -1 for axis in tensor.shape]
    return {"name": tensor.name, "datatype": _DATATYPES[tensor.dtype], "shape": shape}


def find(catalog: Catalog, path: str) -> Served:
    """Return the model at `NAME` or `NAME/versions/1`. Raises ModelNotFound or NotReady."""
    if not path:
        raise ModelNotFound("The model `` does not exist: the path of a model ends with its name", param="model")
    name, marker, version = path.rpartition("/versions/")
    if not marker or path in catalog.models or path in catalog.settings.aliases:
        return catalog.find(path)
    model = catalog.find(name)
    if version != VERSION:
        raise ModelNotFound(f"model {name} has no version {version!r}, only {VERSION!r}", param="model")
    return model


# Inference -----------------------------------------------------------------------------------------------------------------------------


_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": schema_of(InferRequest)},
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
    """Run a model on text or token ids. A row of ids ends at the first zero of its attention mask. Outputs with a vector per token are
    padded with zeros.

    If the request names no `outputs`, all outputs of the model are sent.
    """
    served = find(catalog, model)
    if not ways_of(served):
        raise WrongKind(f"model {served.name} is of kind {served.manifest.kind}: ask it at POST /v1/completions", param="model")
    found = catalog.get(served.name)
    asked, tail = split(await request.body(), request.headers.get(JSON_LENGTH_HEADER))
    wanted = asked.outputs or [WantedOutput(name=tensor.name) for tensor in found.manifest.graph.outputs]
    _check_outputs(found, wanted)
    inputs = inputs_of(found, asked.inputs, tail)
    call.item_errors = False  # a tensor cannot contain errors
    cut = as_cut(asked.parameters.truncate, found)
    queries, prompt = as_role(found, len(inputs), prompt_name=asked.parameters.prompt_name)
    asked_for = EncodeRequest(
        inputs=inputs,
        outputs=tuple([output.name for output in wanted]),
        cut=cut,
        queries=queries,
        prompt=prompt,
        padded=True,
        bytes_by_output={output.name: 4 if _binary(asked, output) else NUMBER_BYTES for output in wanted},
    )
    answer = await found.answer(asked_for, call)
    return _sent(found, asked, zip(wanted, stacked(found, asked_for.outputs, answer), strict=True), call)


def _sent(model: Model, asked: InferRequest, arrays: Iterable[tuple[WantedOutput, Array]], call: Call) -> Response:
    """Return a response with the arrays in JSON. Arrays that the request asks for in binary form are sent as bytes after the JSON."""
    outputs: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for output, array in arrays:
        entry: dict[str, Any] = {"name": output.name, "datatype": "FP32", "shape": list(array.shape)}
        if _binary(asked, output):
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


def _binary(asked: InferRequest, output: WantedOutput) -> bool:
    """Return whether this output is sent as bytes after the JSON."""
    choice = output.parameters.binary_data
    return bool(asked.parameters.binary_data_output if choice is None else choice)


def _check_outputs(model: Model, wanted: Sequence[WantedOutput]) -> None:
    known = [tensor.name for tensor in model.manifest.graph.outputs]
    names = [output.name for output in wanted]
    if unknown := [name for name in names if name not in known]:
        raise InvalidRequest(f"model {model.name} has no output {unknown[0]!r}; it has: {', '.join(known)}", param="outputs")
    if len(set(names)) < len(names):
        raise InvalidRequest("an output is asked for twice", param="outputs")
