"""The route `/info` of the text-embeddings-inference dialect, which returns a model's properties and the limits of its
requests."""

from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, Field

from export.contract import Kind, Output, Precision
from service.catalog import Catalog
from service.encoding.model import Model
from service.encoding.queue import EncoderLimits
from service.encoding.selftest import SelfTest
from service.runtime.budget import CpuBudget

_DTYPES: dict[Precision, Literal["float32", "float16", "int8"]] = {
    **{"fp32": "float32", "fp16": "float16", "int8": "int8"},
    # Of decoders; products are of 8-bit integers.
    **{"int4": "int8", "as-stored": "int8", "int8-rough": "int8", "int4-rough": "int8", "as-stored-rough": "int8"},
}


class Pooling(BaseModel):
    pooling: str


class Labels(BaseModel):
    id2label: dict[str, str]
    label2id: dict[str, int]


class CacheState(BaseModel):
    vectors: int
    size_bytes: int
    max_bytes: int


class Info(BaseModel, protected_namespaces=()):
    """The fields of text-embeddings-inference's `/info`, then the fields that this service adds."""

    model_id: str
    model_sha: str | None = Field(description="sha256 of the checkpoint's weights.")
    model_dtype: Literal["float32", "float16", "int8"]
    served_model_name: str
    model_type: dict[Literal["embedding", "classifier", "reranker", "token_classifier"], Pooling | Labels] = Field(
        description="One entry. text-embeddings-inference has no token_classifier."
    )
    max_concurrent_requests: int = Field(
        description="How many inputs of full length the queue holds; of shorter ones it holds more. The actual limit is in tokens: "
        "`engine.max_queue_tokens`."
    )
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None = Field(description="Always null: only the number of tokens limits a batch.")
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None

    kind: Kind
    precision: Precision
    fingerprint: str = Field(description="64 hex digits that change when any byte of the bundle changes.")
    dimensions: int = Field(description="The number of components of a vector, or of labels of a classifier.")
    outputs: list[Output] = Field(description="What an encoder gives for a text; empty for other kinds.")
    prompts: list[str] = Field(description="The values of `prompt_name`.")
    provider: str = Field(description="The execution provider of ONNX Runtime.")
    self_test: SelfTest = Field(description="Differences from the bundle's golden outputs, measured when this process started.")
    budget: CpuBudget = Field(description="How many CPUs each part of this process uses.")
    cache: CacheState
    engine: EncoderLimits
    models: list[str] = Field(description="All served models; `?model=` selects one.")
    providers: dict[str, str] = Field(description="The execution provider of each served model, decoders included.")


def describe(model: Model, catalog: Catalog) -> dict[str, Any]:
    """Return the content of an `Info` answer for `model`. The route validates it with the response model."""
    manifest, limits, settings, cache = model.manifest, model.engine.limits, catalog.settings, catalog.cache
    labels = {
        "id2label": {str(index): label for index, label in manifest.id2label.items()},
        "label2id": {label: index for index, label in manifest.id2label.items()},
    }
    return {
        "model_id": model.name,
        "model_sha": manifest.source.weights_sha256,
        "model_dtype": _DTYPES[manifest.precision],
        "served_model_name": model.name,
        "model_type": {manifest.kind: labels} if manifest.traits.has_labels else {"embedding": {"pooling": manifest.pooling or ""}},
        "max_concurrent_requests": max(limits.max_queue_tokens // manifest.limits.max_tokens, 1),
        "max_input_length": manifest.limits.max_tokens,
        "max_batch_tokens": limits.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_client_batch,
        "auto_truncate": settings.auto_truncate,
        "tokenization_workers": catalog.budget.tokenizer_threads,
        "version": version("attnserve"),
        "sha": None,
        "docker_label": None,
        "kind": manifest.kind,
        "precision": manifest.precision,
        "fingerprint": manifest.fingerprint,
        "dimensions": manifest.width,
        "outputs": manifest.outputs,
        "prompts": sorted(manifest.prompts),
        "provider": model.provider,
        "self_test": model.selftest,
        "budget": catalog.budget,
        "cache": {"vectors": len(cache), "size_bytes": cache.size, "max_bytes": cache.most},
        "engine": limits,
        "models": list(catalog.models),
        "providers": {name: each.provider for name, each in catalog.models.items()},
    }
