"""`/info` of the text-embeddings-inference dialect: a model and the limits of its requests."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from export.contract import Kind, Precision
from service.catalog import Catalog, Model
from service.encoding.selftest import SelfTest
from service.overload.encoder import EncoderLimits
from service.runtime.budget import CpuBudget

_DTYPES: dict[Precision, Literal["float32", "float16", "int8"]] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}


class Pooling(BaseModel):
    pooling: str


class Labels(BaseModel):
    id2label: dict[str, str]
    label2id: dict[str, int]


class EmbeddingType(BaseModel):
    embedding: Pooling


class ClassifierType(BaseModel):
    classifier: Labels


class RerankerType(BaseModel):
    reranker: Labels


class TokenClassifierType(BaseModel):
    """Ours: text-embeddings-inference serves no such model."""

    token_classifier: Labels


ModelType = EmbeddingType | ClassifierType | RerankerType | TokenClassifierType


class CacheState(BaseModel):
    vectors: int
    size_bytes: int
    max_bytes: int


class Info(BaseModel):
    """What text-embeddings-inference says of itself, then what we say beyond it."""

    model_config = ConfigDict(protected_namespaces=())

    model_id: str
    model_sha: str | None = Field(description="sha256 of the checkpoint's weights.")
    model_dtype: Literal["float32", "float16", "int8"]
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int = Field(
        description="There is no such limit here: requests are admitted by their tokens. This is how many inputs of full length the queue "
        "holds; of shorter ones it holds more. The limit itself is `engine.max_queue_tokens`."
    )
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None = Field(description="Always null: batches are bounded by their tokens alone.")
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None

    kind: Kind
    precision: Precision
    fingerprint: str = Field(description="64 hex digits that change when any byte of the bundle changes.")
    dimensions: int = Field(description="Numbers of a vector, or labels of a classifier.")
    prompts: list[str] = Field(description="What `prompt_name` may be.")
    provider: str = Field(description="The execution provider of ONNX Runtime.")
    self_test: SelfTest = Field(description="How close this process came to the golden outputs of the bundle when it started.")
    budget: CpuBudget = Field(description="How the CPUs of this process are shared out.")
    cache: CacheState
    engine: EncoderLimits
    models: list[str] = Field(description="All served models; `?model=` asks about another one.")
    providers: dict[str, str] = Field(description="Where each of them computes; a decoder is none of this dialect's, and is told here.")


def describe(model: Model, catalog: Catalog) -> Info:
    manifest, limits, settings = model.manifest, model.engine.limits, catalog.settings
    return Info(
        model_id=model.name,
        model_sha=manifest.source.weights_sha256,
        model_dtype=_DTYPES[manifest.precision],
        served_model_name=model.name,
        model_type=_type(model),
        max_concurrent_requests=max(limits.max_queue_tokens // manifest.limits.max_tokens, 1),
        max_input_length=manifest.limits.max_tokens,
        max_batch_tokens=limits.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=settings.max_client_batch,
        auto_truncate=settings.auto_truncate,
        tokenization_workers=catalog.budget.tokenizer_threads,
        version=version("attnserve"),
        sha=None,
        docker_label=None,
        kind=manifest.kind,
        precision=manifest.precision,
        fingerprint=manifest.fingerprint,
        dimensions=manifest.width,
        prompts=sorted(manifest.prompts),
        provider=model.provider,
        self_test=model.selftest,
        budget=catalog.budget,
        cache=CacheState(vectors=len(catalog.cache), size_bytes=catalog.cache.size_bytes, max_bytes=catalog.cache.max_bytes),
        engine=limits,
        models=list(catalog.models),
        providers={name: each.provider for name, each in catalog.models.items()},
    )


_LABELLED: dict[Kind, Callable[[Labels], ModelType]] = {
    "reranker": lambda labels: RerankerType(reranker=labels),
    "classifier": lambda labels: ClassifierType(classifier=labels),
    "token_classifier": lambda labels: TokenClassifierType(token_classifier=labels),
}


def _type(model: Model) -> ModelType:
    manifest = model.manifest
    if not manifest.traits.has_labels:
        return EmbeddingType(embedding=Pooling(pooling=manifest.pooling or ""))
    labels = Labels(
        id2label={str(index): label for index, label in manifest.id2label.items()},
        label2id={label: index for index, label in manifest.id2label.items()},
    )
    return _LABELLED[manifest.kind](labels)
