"""The route `/v1/models` of OpenAI.

Source: the OpenAI API reference (Model), and vLLM for `max_model_len`. Additions: what the console and operators want to know of a model.
"""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from export.contract import AttentionLayer, Decoder, Evaluation, Image, Kind, Output, Precision
from service.catalog import Served
from service.dialects.openai.embeddings import ERRORS
from service.encoding.space import space_of
from service.http.routing import CatalogDep, JsonRoute

_FLOAT_BYTES = 4


class ModelMaps(BaseModel):
    max_tokens: int = Field(description="The longest text of `/v1/attention`.")
    layers: list[AttentionLayer]


class ModelState(BaseModel):
    bytes: int = Field(description="Of one sequence, after any number of tokens.")
    cache_bytes_per_token: int = Field(description="What a key-value cache of the same heads in fp32 would add with each token.")


class ModelObject(BaseModel):
    """OpenAI's fields, vLLM's `max_model_len`, then the fields that this service adds."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int = Field(description="Most tokens of an input, or of a decoder's prompt and completion.")
    kind: Kind
    attention: str = Field(description="The mechanism of the model's layers.")
    precision: Precision
    provider: str = Field(description="The execution provider of ONNX Runtime.")
    fingerprint: str = Field(description="64 hex digits that change when any byte of the bundle changes.")
    size_bytes: int = Field(description="Of the bundle.")
    width: int = Field(description="Components of a vector, labels of a classifier, or the width of a decoder.")
    labels: list[str]
    untrained: bool = Field(description="The weights were not trained for this attention, or are random.")
    chat_template: bool
    chat: bool = Field(description="The template writes who speaks, as those of models do that were trained on conversations.")
    outputs: list[Output] = Field(description="What an encoder gives for a text; empty for other kinds.")
    sparse_width: int | None = Field(description="The length of a sparse vector; null without them.")
    multivector_width: int | None = Field(description="The length of each token's vector; null without them.")
    embedding_spaces: dict[Output, str] = Field(description="The id of the space of each of `outputs`, as answers name it.")
    evaluations: list[Evaluation] = Field(description="How well the vectors did in tasks, as `attnserve evaluate --write` measured.")
    maps: ModelMaps | None = Field(description="Null if the bundle was exported without --maps.")
    pictures: Image | None = Field(description="Null if the model draws no pictures.")
    state: ModelState | None = Field(description="Null if the model is no decoder.")


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelObject]


router = APIRouter(route_class=JsonRoute, tags=["OpenAI"], responses=ERRORS)


@router.get("/v1/models", response_model=ModelList)
async def models(catalog: CatalogDep) -> Any:
    """Return the served models, aliases last."""
    catalog.find(None)  # raises NotReady while the models are being loaded
    return {"object": "list", "data": [_model(name, catalog.find(name)) for name in [*catalog.models, *catalog.settings.aliases]]}


@router.get("/v1/models/{model:path}", response_model=ModelObject)
async def model(model: str, catalog: CatalogDep) -> Any:
    """Return one served model, by name or alias."""
    return _model(model, catalog.find(model))


def _model(name: str, model: Served) -> dict[str, Any]:
    manifest = model.manifest
    decoder, graph = manifest.decoder, manifest.attention_graph
    image = None if decoder is None else decoder.image
    return {
        "id": name,
        "object": "model",
        "created": manifest.created_s,
        "owned_by": "attnserve",
        "max_model_len": manifest.limits.max_tokens,
        "kind": manifest.kind,
        "attention": manifest.source.attention,
        "precision": manifest.precision,
        "provider": model.provider,
        "fingerprint": manifest.fingerprint,
        "size_bytes": sum(file.size_bytes for file in manifest.files),
        "width": manifest.width,
        "labels": [label for _, label in sorted(manifest.id2label.items())],
        "untrained": manifest.source.untrained,
        "chat_template": decoder is not None and decoder.chat_template is not None,
        "chat": model.chat_prompts is not None and model.chat_prompts.tells_speakers,
        "outputs": manifest.outputs,
        "sparse_width": None if manifest.sparse is None else manifest.sparse.size,
        "multivector_width": None if manifest.multivector is None else manifest.multivector.width,
        "embedding_spaces": {each: space_of(manifest, manifest.tensor_of(each)) for each in manifest.outputs},
        "evaluations": [each.model_dump() for each in manifest.evaluations or ()],
        "maps": None if graph is None else graph.model_dump(include={"max_tokens": True, "layers": True}),
        "pictures": None if image is None else image.model_dump(),
        "state": None if decoder is None else {"bytes": decoder.state_bytes, "cache_bytes_per_token": _cache_bytes(decoder)},
    }


def _cache_bytes(decoder: Decoder) -> int:
    """Return the bytes of keys and values of one token, in fp32, of a decoder with softmax attention and the same heads.

    A layer's state of shape (H, D_k, D_v) stands for H keys of D_k and H values of D_v numbers. Other tensors of a state, such as those of
    convolutions, exist beside a cache too.
    """
    shapes = [state.shape for state in decoder.states if len(state.shape) == 3]
    return sum(heads * (d_k + d_v) * _FLOAT_BYTES for heads, d_k, d_v in shapes)
