"""Loads a published checkpoint folder: the model, with all settings that the server needs.

It reads plain Hugging Face folders, sentence-transformers folders and static embeddings (`static.py`). The weights must be safetensors
(one file or shards), not pickles, which can run code when read. Every tensor of the model must be in the files. Every tensor in the files
must belong to the model or have a name that the family lists as unused. So a checkpoint that does not match its model raises an error
instead of giving wrong vectors.
"""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from models.checkpoints.families import ARCHITECTURES, FAMILIES, reformer
from models.checkpoints.families.family import Family, HeadConfig, Names
from models.checkpoints.own_encoder import ARCHITECTURE, OwnEncoderConfig, read_own, sentence_encoder
from models.checkpoints.search import STANFORD, Search, read_colbert, read_heads, read_query_table
from models.checkpoints.static import ARCHITECTURE as ARCHITECTURE_OF_STATIC
from models.checkpoints.static import StaticFiles, find_static, load_static
from models.checkpoints.weights import fill
from models.checkpoints.wordpiece import VOCABULARY, wordpiece_tokenizer
from models.encoder.heads import Dense, Headed, SentenceEncoder, SequenceClassifier, TokenClassifier, TokenMatrix
from models.encoder.model import Encoder, EncoderConfig
from models.encoder.pipeline import Pipeline, SpladePooling, filled, read_pipeline
from models.encoder.retrieval import SparseCode, Splade
from models.encoder.softmax import softmax_of
from models.encoder.static import StaticShape
from models.folders.folder import (
    MOST_TOKENIZER_BYTES,
    CheckpointError,
    JsonSettings,
    errors_of,
    present,
    read_settings,
    read_tensors,
    regular,
    rehearsed,
)

Kind = Literal["encoder", "reranker", "classifier", "token_classifier"]
ScoreActivation = Literal["sigmoid", "identity", "softmax"]

ATTENTION_OF_CHECKPOINTS = "softmax"
SWAPPABLE = ("softmax", "linear")  # mechanisms whose projections have the shapes of softmax attention, so that its trained weights fit
LANGUAGE_MODELS = ("ForMaskedLM", "ForPreTraining", "WithLMHead")  # ends of the names of architectures that predict tokens
UNLIMITED = 1_000_000  # token limit that stands for "no limit", above the number of positions of every published model

SCORE_ACTIVATIONS: dict[str, ScoreActivation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "identity",
}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded model, in eval mode, with the settings of its folder."""

    kind: Kind
    model: Headed  # SentenceEncoder, SequenceClassifier, TokenClassifier or StaticEncoder
    config: EncoderConfig | reformer.ReformerShape | StaticShape
    architecture: str  # the name in config.json, e.g. "BertModel"
    folder: Path
    tokenizer_file: Path
    max_tokens: int  # longest input, special tokens included
    pooling: str | None  # a name in POOLINGS or "none"; None in classifiers
    normalized: bool  # True if the checkpoint's own pipeline ends in a normalisation
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # one of the keys of `prompts`
    id2label: dict[int, str] = field(default_factory=dict)
    pad_token_id: int = 0
    uses_token_types: bool = False  # whether token_type_ids mark the second text of a pair
    untrained: bool = False  # True if the weights are random or were trained with another attention
    score_activation: ScoreActivation = "identity"
    adds_special_tokens: bool = True  # False: the tokenizer's special tokens are not added to a text
    weights_folder: Path | None = None  # folder of the weights, if it is not that of the tokenizer
    search: Search = field(default_factory=Search)
    softmax_tokens: int | None = None  # texts of up to so many tokens are computed by `short_form`; None: no text is

    def short_form(self) -> "Checkpoint | None":
        """Return the checkpoint for its short texts: the same weights with softmax attention to all tokens. None if it has no such form."""
        if self.softmax_tokens is None:
            return None
        assert isinstance(self.model, SentenceEncoder)
        with errors_of(self.folder / "config.json"):
            encoder = softmax_of(self.model.encoder, self.softmax_tokens)
        model = copy.copy(self.model)
        model._modules = {**self.model._modules, "encoder": encoder}
        return replace(self, model=model, config=encoder.config, max_tokens=self.softmax_tokens, softmax_tokens=None)


@rehearsed
def load_checkpoint(
    folder: Path,
    *,
    attention: str = "softmax",
    dtype: torch.dtype = torch.float32,
    settings: JsonSettings | None = None,
    scratch: Path | None = None,
    sparse: bool = False,
) -> Checkpoint:
    """Load the model in `folder`. If `attention` is not "softmax", layers of that mechanism replace the checkpoint's softmax attention and
    get its trained projections of q, k, v and the output. `settings` is the config.json of `folder`, if the caller has already read it.
    `settings` is ignored if the model is in a subfolder. If the tokenizer is only a vocab.txt, its tokenizer.json is written to `scratch`.
    `sparse`: a masked language model makes sparse vectors, although its folder does not say so.

    Raises CheckpointError if anything in the folder is missing, unexpected or unsupported.
    """
    folder = Path(folder)
    pipeline = read_pipeline(folder, sparse=sparse)
    file = pipeline.transformer / "config.json"
    if settings is None or settings.file != file:
        settings = read_settings(file, required=False)
    if (files := find_static(folder, pipeline, settings)) is not None:
        return _of_static(folder, files, pipeline, attention, dtype)
    if not settings.values:
        read_settings(file)  # raises the reason: the file is missing, or has no settings
    architecture = settings.need("architectures")[0]
    if architecture == ARCHITECTURE:
        return _of_our_own(folder, read_own(settings), pipeline, attention, dtype)
    if architecture in reformer.ARCHITECTURES:
        return _of_reformer(folder, settings, pipeline, attention, dtype)
    stanford = architecture == STANFORD
    if architecture not in ARCHITECTURES and not stanford:
        raise CheckpointError(
            f"{settings.file}: architecture {architecture!r} is not supported; supported: "
            f"{', '.join((*ARCHITECTURES, *reformer.ARCHITECTURES, ARCHITECTURE))}"
        )
    family, task = ARCHITECTURES["BertModel" if stanford else architecture]
    tensors = read_tensors(pipeline.transformer)
    if stanford:
        pipeline = _of_stanford(pipeline, tensors)
    pipeline = replace(pipeline, pooling=_pooling(task, architecture, pipeline))
    config = _encoder_config(family, settings, attention)
    id2label = {} if task == "encoder" else _labels(settings)
    prompting = read_settings(folder / ("artifact.metadata" if stanford else "config_sentence_transformers.json"), required=False)
    prompts, default_prompt = _prompts(prompting)
    tokenizer_file = _tokenizer_file(pipeline, scratch)
    weights, matrix, search = read_heads(pipeline, tokenizer_file) if task == "encoder" else (None, None, Search())
    if pipeline.query_table is not None:
        search = read_query_table(pipeline.query_table, tokenizer_file, config.vocab_size)
    if pipeline.matrix:
        matrix, search = TokenMatrix(pipeline.matrix), read_colbert(pipeline, prompting, prompts, tokenizer_file, stanford)
        prompts = search.prompts

    encoder = Encoder(config, dtype=dtype)
    model, head_names = _build(encoder, family, task, settings, pipeline, n_labels=len(id2label))
    if isinstance(model, SentenceEncoder):
        model.multivector = matrix
        model.sparse = model.sparse or weights
    model = model.to(dtype).eval()
    fill(model, tensors, family, head_names, with_masked_head=pipeline.splade is not None)
    return Checkpoint(
        kind="reranker" if task == "classifier" and len(id2label) == 1 else task,
        model=model,
        config=config,
        architecture=architecture,
        folder=folder,
        tokenizer_file=tokenizer_file,
        search=search,
        weights_folder=pipeline.transformer,
        max_tokens=_max_tokens(config.n_positions, pipeline),
        pooling=pipeline.pooling,
        normalized=task == "encoder" and pipeline.normalized,
        prompts=prompts,
        default_prompt=default_prompt,
        id2label=id2label,
        pad_token_id=settings.get("pad_token_id", family.pad_token_id),
        uses_token_types=family.reads_token_types and config.n_token_types > 1,
        untrained=attention != ATTENTION_OF_CHECKPOINTS,
        score_activation=_score_activation(task, settings, prompting, n_labels=len(id2label)),
    )


def _of_our_own(folder: Path, own: OwnEncoderConfig, pipeline: Pipeline, attention: str, dtype: torch.dtype) -> Checkpoint:
    """Load a folder that `save_encoder` wrote."""
    if attention not in (ATTENTION_OF_CHECKPOINTS, own.config.attention):
        raise CheckpointError(
            f"{folder}: attention={attention!r} cannot replace the encoder's {own.config.attention}; change the encoder's config"
        )
    model, tokenizer_file = sentence_encoder(own, read_tensors(folder), dtype=dtype), _tokenizer_file(pipeline)
    model.sparse, model.multivector, search = read_heads(pipeline, tokenizer_file)
    return Checkpoint(
        kind="encoder",
        model=model.to(dtype),
        config=own.config,
        architecture=ARCHITECTURE,
        folder=folder,
        tokenizer_file=tokenizer_file,
        search=search,
        max_tokens=own.config.n_positions,
        pooling=own.pooling,
        normalized=own.normalized,
        untrained=own.untrained,
        softmax_tokens=own.softmax_tokens,
    )


def _of_reformer(folder: Path, settings: JsonSettings, pipeline: Pipeline, attention: str, dtype: torch.dtype) -> Checkpoint:
    """Load a Reformer as a sentence encoder. A Reformer has reversible blocks, so `Encoder` cannot represent it."""
    if attention != ATTENTION_OF_CHECKPOINTS:
        raise CheckpointError(f"{settings.file}: attention={attention!r} cannot replace the checkpoint's lsh; leave `attention` out")
    encoder = reformer.ReformerEncoder(reformer.load_reformer(pipeline.transformer, dtype=dtype, logits=False))
    _check_widths(encoder.config.d_model, pipeline)
    architecture = settings.need("architectures")[0]
    pooling = _pooling("encoder", architecture, pipeline)
    assert pooling is not None, "an encoder has one"
    prompts, default_prompt = _prompts(read_settings(folder / "config_sentence_transformers.json", required=False))
    return Checkpoint(
        kind="encoder",
        model=SentenceEncoder(encoder, pooling=pooling, dense=pipeline.dense, normalized=pipeline.normalized).to(dtype).eval(),
        config=encoder.config,
        architecture=architecture,
        folder=folder,
        tokenizer_file=_tokenizer_file(pipeline),
        max_tokens=_max_tokens(encoder.config.n_positions, pipeline),
        pooling=pooling,
        normalized=pipeline.normalized,
        prompts=prompts,
        default_prompt=default_prompt,
        pad_token_id=settings.get("pad_token_id", 0),
    )


def _of_static(folder: Path, files: StaticFiles, pipeline: Pipeline, attention: str, dtype: torch.dtype) -> Checkpoint:
    """Load a table of token vectors."""
    if attention != ATTENTION_OF_CHECKPOINTS:
        raise CheckpointError(f"{folder}: attention={attention!r} cannot be given to static embeddings, which have none; leave it out")
    model = load_static(files, pipeline, dtype=dtype)
    _check_widths(model.encoder.config.d_model, pipeline)
    prompts, default_prompt = _prompts(read_settings(folder / "config_sentence_transformers.json", required=False))
    return Checkpoint(
        kind="encoder",
        model=model,
        config=model.encoder.config,
        architecture=ARCHITECTURE_OF_STATIC,
        folder=folder,
        tokenizer_file=files.tokenizer,
        max_tokens=files.max_tokens,
        pooling="mean",
        normalized=model.normalized,
        prompts=prompts,
        default_prompt=default_prompt,
        adds_special_tokens=False,
        weights_folder=files.weights.parent,
    )


# Reading config.json


def _encoder_config(family: Family, settings: JsonSettings, attention: str) -> EncoderConfig:
    if attention not in SWAPPABLE:
        raise CheckpointError(
            f"attention={attention!r} cannot use the weights of the checkpoint, whose projections are those of "
            f"{ATTENTION_OF_CHECKPOINTS} attention; choose one of {', '.join(SWAPPABLE)}"
        )
    with errors_of(settings.file):
        config = family.encoder_config(settings)
        if config.attention == ATTENTION_OF_CHECKPOINTS:
            return replace(config, attention=attention)
    if attention != ATTENTION_OF_CHECKPOINTS:
        raise CheckpointError(
            f"{settings.file}: attention={attention!r} cannot replace the checkpoint's {config.attention}; leave `attention` out"
        )
    return config


def _pooling(task: str, architecture: str, pipeline: Pipeline) -> str | None:
    """Return the pooling of an encoder: the one that its pipeline names, otherwise mean, as in sentence-transformers. Return None for a
    classifier, whose head does the pooling.

    Raises CheckpointError if a classifier's pipeline has a pooling, or if a language model's has none: nothing says that its token vectors
    were trained to be averaged.
    """
    if task == "encoder":
        if pipeline.pooling is None and architecture.endswith(LANGUAGE_MODELS):
            raise CheckpointError(
                f"{pipeline.transformer}: {architecture} predicts tokens, and nothing says what for. If it is a SPLADE model, give "
                "--sparse; if it is one for embeddings, save it with sentence-transformers, which adds the modules.json that names its "
                "pooling"
            )
        return pipeline.pooling or "mean"
    if pipeline.pooling not in (None, "none"):
        raise CheckpointError(
            f"{pipeline.transformer}: modules.json has a Pooling module, but {architecture} has a head that computes scores; "
            "remove the Pooling module, or save the model as an encoder"
        )
    return None


def _labels(settings: JsonSettings) -> dict[int, str]:
    """Return the label names by number. If config.json has no names, they are "LABEL_0", "LABEL_1", .., as in transformers."""
    n_labels = settings.get("num_labels", 2)
    names = settings.get("id2label", {str(i): f"LABEL_{i}" for i in range(n_labels)})
    labels = {int(i): names[i] for i in sorted(names, key=int)}
    if not labels or list(labels) != list(range(len(labels))):
        raise CheckpointError(f"{settings.file}: labels have the numbers {list(labels)!s:.80}, which must be 0, 1, 2, ..; correct id2label")
    return labels


def _score_activation(task: str, settings: JsonSettings, prompting: JsonSettings, *, n_labels: int) -> ScoreActivation:
    """Return the name of the function from logits to scores. The settings are searched for it in the same order as by CrossEncoder of
    sentence-transformers.
    """
    if task == "encoder":
        return "identity"
    if task == "token_classifier":
        return "softmax"
    named = (
        prompting.get("activation_fn", None)
        or settings.get("sentence_transformers", {}).get("activation_fn")
        or settings.get("sbert_ce_default_activation_function", None)
    )
    if named is not None:
        return JsonSettings({"activation_fn": named}, settings.file).pick("activation_fn", named, SCORE_ACTIVATIONS)
    problem = settings.get("problem_type", "single_label_classification")
    if n_labels == 1 or problem == "multi_label_classification":
        return "sigmoid"
    return "identity" if problem == "regression" else "softmax"


def _prompts(prompting: JsonSettings) -> tuple[dict[str, str], str | None]:
    prompts = {name: text or "" for name, text in prompting.get("prompts", {}).items()}
    default = prompting.get("default_prompt_name", None)
    if default is not None and default not in prompts:
        raise CheckpointError(f"{prompting.file}: default_prompt_name={default!r} is not one of the prompts {list(prompts)}; correct it")
    return prompts, default


# The tokenizer


def _tokenizer_file(pipeline: Pipeline, scratch: Path | None = None) -> Path:
    file = pipeline.transformer / "tokenizer.json"
    if not present(file) and scratch is not None and present(pipeline.transformer / VOCABULARY):
        file = scratch / "tokenizer.json"
        wordpiece_tokenizer(pipeline.transformer).save(str(file))
    if not present(file):
        raise CheckpointError(f"{file} is missing; write it with AutoTokenizer.from_pretrained(...).save_pretrained(...)")
    regular(file, most_bytes=MOST_TOKENIZER_BYTES)
    if pipeline.settings.get("do_lower_case", False) and not _lower_cases(file):
        asked = f"{pipeline.settings.file} sets do_lower_case"
        raise CheckpointError(f"{asked}, which {file.name} does not do; add a Lowercase normalizer to it")
    return file


def _lower_cases(tokenizer_file: Path) -> bool:
    normalizer = read_settings(tokenizer_file, most_bytes=MOST_TOKENIZER_BYTES).values.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    return any(step.get("type") == "Lowercase" or step.get("lowercase") for step in steps)


def _max_tokens(n_positions: int, pipeline: Pipeline) -> int:
    """Return the longest input in tokens: the smaller of the model's number of positions and `max_seq_length` of the pipeline or, if
    that is missing, `model_max_length` of the tokenizer.
    """
    tokenizer = read_settings(pipeline.transformer / "tokenizer_config.json", required=False)
    limit = pipeline.settings.get("max_seq_length", tokenizer.get("model_max_length", UNLIMITED))
    return int(min(n_positions, limit))


# Building the model


def _build(
    encoder: Encoder, family: Family, task: str, settings: JsonSettings, pipeline: Pipeline, *, n_labels: int
) -> tuple[Headed, Names]:
    """Return the model before its weights are loaded, and the names of its head's modules in the checkpoint."""
    if task == "encoder":
        _check_widths(encoder.config.d_model, pipeline)
        dense, normalized = pipeline.dense, pipeline.normalized
        assert pipeline.pooling is not None, "an encoder has one"
        sparse: Splade | SparseCode | None
        sparse, names = (pipeline.code, {}) if pipeline.splade is None else _splade(encoder.config, family, settings, pipeline.splade)
        return SentenceEncoder(encoder, pooling=pipeline.pooling, dense=dense, normalized=normalized, sparse=sparse), names
    if task == "classifier":
        head = family.sequence_head(settings)
        transform = _transform(encoder.config, head)
        model = SequenceClassifier(encoder, n_labels=n_labels, pooling=head.pooling, transform=transform)
        return model, family.sequence_names
    token_head = family.token_head(settings)
    of_tokens = None if token_head is None else _transform(encoder.config, token_head)
    return TokenClassifier(encoder, n_labels=n_labels, transform=of_tokens), family.token_names


def _of_stanford(pipeline: Pipeline, tensors: dict[str, Tensor]) -> Pipeline:
    """Return the pipeline of a folder of Stanford ColBERT, with the projection that is taken out of its `tensors`."""
    if (weight := tensors.pop("linear.weight", None)) is None:
        raise CheckpointError(f"{pipeline.transformer} has no linear.weight, which makes the token vectors of {STANFORD}; copy it again")
    dense = Dense(weight.shape[1], weight.shape[0], activation="identity", bias=False)
    return replace(pipeline, pooling="none", matrix=(filled(dense, {"linear.weight": weight}, pipeline.transformer),))


def _splade(config: EncoderConfig, family: Family, settings: JsonSettings, how: SpladePooling) -> tuple[Splade, Names]:
    architecture, head = settings.need("architectures")[0], family.masked_head
    if head is None or not architecture.endswith("ForMaskedLM"):
        having = ", ".join(f"{name}ForMaskedLM" for name, each in FAMILIES.items() if each.masked_head is not None)
        raise CheckpointError(f"{settings.file}: sparse vectors cannot be read from {architecture!r}, but from {having}; use one of these")
    transform = _transform(config, HeadConfig(activation=head.activation(settings), norm=True))
    return Splade(transform, nn.Linear(config.d_model, config.vocab_size), pooling=how.pooling, logs=how.logs), head.names


def _check_widths(d_model: int, pipeline: Pipeline) -> None:
    width = d_model
    for dense in pipeline.dense + pipeline.matrix:
        if dense.linear.in_features != width:
            raise CheckpointError(f"a Dense module takes in_features={dense.linear.in_features}, but gets vectors of {width}")
        width = dense.linear.out_features


def _transform(config: EncoderConfig, head: HeadConfig) -> Dense:
    norm = nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.norm_bias) if head.norm else None
    return Dense(config.d_model, config.d_model, activation=head.activation, bias=head.bias, norm=norm)
