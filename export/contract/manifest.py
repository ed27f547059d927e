"""The fields of `manifest.json`."""

import hashlib
import json
import math
from datetime import datetime
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, model_validator

from export.contract import names
from export.contract.names import LONGEST_ATTENTION
from export.contract.retrieval import MultiVector, Output, Role, RoleName, Sparse
from export.contract.tensors import (
    KINDS,
    MOST_PIXELS,
    SLOTS_BY,
    Count,
    FileName,
    Kind,
    ManifestPart,
    Sha256,
    Size,
    StateTensor,
    Tensor,
    Text,
    TokenId,
    Traits,
    slot_counts,
)

FORMAT: Literal["attnserve.bundle/1"] = "attnserve.bundle/1"
# A decoder whose precision is not rough keeps the answers of its weights; see `Answers`.
Precision = Literal["fp32", "fp16", "int8", "int4", "as-stored", "int8-rough", "int4-rough", "as-stored-rough"]
ROUGH = "-rough"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"  # allowed model names


def _moment(text: str) -> str:
    """Check that `text` is an ISO 8601 time with a time zone, not before 1970. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or moment.year < 1970:
        raise ValueError("the moment needs a time zone and a year from 1970 on")
    moment.timestamp()
    return text


Moment = Annotated[str, Field(max_length=64), AfterValidator(_moment)]


class File(ManifestPart):
    name: FileName
    sha256: Sha256
    size_bytes: int = Field(ge=0, le=2**62)


class Graph(ManifestPart):
    """An ONNX graph: its file, inputs, outputs and operators."""

    file: FileName
    opset: int = Field(ge=1, le=1000)
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    operators: dict[str, Size]
    optimisation: str = Field(description="what was done to the graph after export, in words")


class Limits(ManifestPart):
    max_tokens: Size = Field(description="longest input in tokens, special tokens included")
    vocab_size: Size


class Parity(ManifestPart):
    """The difference between the graph and the torch model, measured at export."""

    max_abs_error: float = Field(description="largest |onnxruntime - torch| over all outputs and all `shapes`")
    min_cosine: float = Field(
        description="lowest cosine between outputs of the graph and of the fp32 torch model. Encoders: of the vectors of a golden text. "
        "Rerankers and classifiers: of the vectors of one label's logits for all golden texts, minus their mean. Decoders: of the logits "
        "after a golden prompt, minus their mean"
    )
    shapes: tuple[tuple[int, int], ...] = Field(description="the (B, N) that were compared")
    tolerance: float | None = Field(
        description="limit of `max_abs_error`, relative to the largest absolute value of an output if that is above 1. None: no limit, as "
        "the precision has others: `min_cosine` of an encoder, `Decoder.answers` and `Decoder.bits_per_byte` of a decoder"
    )


class RecipeTrial(ManifestPart):
    """A recipe for quantising the graph to int8 that the export tried, and its results."""

    recipe: str
    min_cosine: float
    mean_cosine: float
    rank_correlation: float | None = Field(
        default=None,
        description="Spearman's correlation with torch of the similarities of all pairs of texts; of logits, the lowest of a label's "
        "over all texts. None in bundles of earlier versions",
    )
    size_bytes: Count
    texts_per_s: float = Field(ge=0, description="texts of 16 tokens per second of CPU time of one thread, in batches of 8")
    baseline_texts_per_s: float = Field(gt=0, description="`texts_per_s` of the fp32 graph")
    kept: bool


class WayFigures(ManifestPart):
    """How well one way to compare texts did, such as `dense-int8`; see `loadtest/evaluate/ways.py`."""

    way: str = Field(max_length=64)
    spaces: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")], ...] = Field(max_length=8, description="ids of the embedding spaces")
    figures: dict[Annotated[str, Field(max_length=64)], Annotated[float, Field(ge=-1, le=1)]] = Field(max_length=16)


class Evaluation(ManifestPart):
    """How well the bundle's vectors did in a task, measured by `attnserve evaluate`."""

    task: str = Field(max_length=256)
    task_sha256: Sha256 = Field(description="of the task's texts and judgements")
    licence: str | None = Field(None, max_length=256, description="of the task's texts; None: not known")
    queries: Count = Field(description="or pairs")
    documents: Count = Field(description="0: the task is pairs")
    ways: tuple[WayFigures, ...] = Field(min_length=1, max_length=64)
    created: Moment
    tool: str = Field(max_length=256)


class CheckpointSource(ManifestPart):
    """The checkpoint from which the weights were loaded."""

    architecture: str
    checkpoint: str = Field(description="name of the checkpoint folder")
    weights_sha256: Sha256
    attention: str
    untrained: bool = Field(description="the weights were not trained for this attention: it was replaced at export, or they are random")


class Image(ManifestPart):
    """The images of a pixel decoder: `width * height` tokens after a prompt, row by row from the upper left. Each token is a grey level."""

    width: int = Field(ge=1, le=MOST_PIXELS)
    height: int = Field(ge=1, le=MOST_PIXELS)
    level_token_ids: tuple[TokenId, ...] = Field(min_length=2, max_length=256, description="ids of grey levels, black first, equal steps")
    prompts: tuple[Text, ...] = Field(min_length=1, max_length=10_000, description="all prompts that a request may contain")


class HeldOut(ManifestPart):
    """The text on which bits per byte were measured."""

    name: str = Field(description="name of the text's file or folder")
    documents: Count
    size_bytes: Count
    sha256: Sha256 = Field(description="hash of the concatenated documents")


class AnswerFigures(ManifestPart):
    """How near a decoder's answers are to those of its weights in fp32, or the limits of these figures."""

    same: Count = Field(description="number of prompts whose answer begins with the same tokens; as a limit, the least number")
    mean_kl: float = Field(ge=0, description="mean Kullback-Leibler divergence from fp32, in nats for each token of the answers")
    logit_error: float = Field(ge=0, description="largest difference of a logit before any token of the answers")


class Answers(ManifestPart):
    """A comparison of a decoder with its weights in fp32, which answer prompts greedily: questions in its chat template, or the golden
    prompts if it has none."""

    prompts: Count
    first_tokens: Count = Field(description="an answer that has as many of fp32's first tokens, or all, begins with the same tokens")
    tokens: Count = Field(description="number of tokens of all answers")
    measured: AnswerFigures
    limits: AnswerFigures | None = Field(description="None: the precision is rough, so the export does not limit the figures")

    @property
    def within_limits(self) -> bool:
        got, limits = self.measured, self.limits
        return limits is None or (got.same >= limits.same and got.mean_kl <= limits.mean_kl and got.logit_error <= limits.logit_error)

    @property
    def in_words(self) -> str:
        got, limits = self.measured, self.limits
        least, most_kl, most_error = ("", "", "")
        if limits is not None:
            least, most_kl, most_error = (
                f" (at least {limits.same})",
                f" (at most {limits.mean_kl:g})",
                f" (at most {limits.logit_error:g})",
            )
        return (
            f"{got.same} of {self.prompts} begin with the same {self.first_tokens} tokens as in fp32{least}, mean KL divergence "
            f"{got.mean_kl:.2g} nats a token{most_kl}, worst logit error {got.logit_error:.2g}{most_error}"
        )


class Decoder(ManifestPart):
    """The fields of a manifest that only decoders have."""

    states: tuple[StateTensor, ...] = Field(min_length=1)
    takes_positions: bool = Field(description="the graph has the input `positions`")
    n_positions: Size | None = Field(None, description="largest number of tokens of a sequence; None: no limit")
    bos_token_id: TokenId | None = Field(None, description="token that the tokenizer puts before every prompt, if any")
    eos_token_ids: tuple[TokenId, ...] = ()
    chat_template: FileName | None = Field(None, description="name of a Jinja file of the bundle")
    window: Size | None = Field(None, description="tokens to which every layer attends, exact up to it; None: no window")
    first_kept: Size | None = Field(None, description="how many of the `window` tokens are the first ones of the sequence")
    slot_block: Size | None = Field(
        None, description="values of slots are added up in blocks of this many; None: 256, as in older manifests"
    )
    max_call_tokens: Size | None = Field(None, description="most tokens of a row in one call of the graph; None: no limit")
    exact: bool = Field(description="at export, prompts gave the same bits whole, in chunks and token by token, alone and in a batch")
    parameters: Count | None = Field(None, description="number of the checkpoint's parameters; tied ones count once")
    bits_per_byte: float | None = Field(None, description="of this graph on the text `held_out`, or on the golden passages if that is None")
    fp32_bits_per_byte: float | None = Field(None, description="`bits_per_byte` of the fp32 graph")
    held_out: HeldOut | None = None
    answers: Answers | None = Field(None, description="None in fp32, and in bundles of earlier versions")
    image: Image | None = Field(None, description="the images that it generates, if its tokens are pixels")

    @model_validator(mode="after")
    def _has_whole_blocks(self) -> Self:
        block = self.slot_block or SLOTS_BY
        uneven = [state.name for state in self.states if state.slots and (state.shape[1] % block or SLOTS_BY % block)]
        if uneven:
            raise ValueError(f"slot_block={block} must divide {SLOTS_BY} and the slots of {uneven[0]}; export the bundle again")
        return self

    @property
    def slot_counts(self) -> tuple[int, ...]:
        """The numbers of slots that a call can have, ascending. The last is that of the whole state; there are none without slots."""
        return slot_counts(max((state.shape[1] for state in self.states if state.slots), default=0), self.slot_block or SLOTS_BY)

    @property
    def sums_up(self) -> bool:
        """Whether a state sums up the tokens that have left a window, so that they are not forgotten."""
        return any(not state.slots and state.holds != "count" for state in self.states)

    @property
    def state_bytes(self) -> int:
        """The size of one sequence's state in bytes, however long the sequence is; slots that are not used yet take no memory."""
        return self.state_bytes_at(None)

    def state_bytes_at(self, position: int | None) -> int:
        """The size in bytes of the state of a sequence of `position` tokens; None: its largest size."""
        sizes = {"float32": 4, "float16": 2, "int64": 8}
        shapes = [(state.shape if position is None else state.shape_at(position), sizes[state.dtype]) for state in self.states]
        return sum(math.prod(shape) * size for shape, size in shapes)


PoolingByWeights = Literal["cls", "last", "mean", "mean_sqrt_len"]
POOLING_WEIGHTS: tuple[PoolingByWeights, ...] = get_args(PoolingByWeights)  # poolings that are a weighted sum of token vectors


class GpuGraph(ManifestPart):
    """A second graph, for GPUs, with weights in float16: packed texts, or a decode step that draws the next tokens. Measured at export on a
    CPU.
    """

    graph: Graph
    pooling: PoolingByWeights | None = Field(None, description="how the host weights an encoder's tokens; None for a decoder")
    min_cosine: float = Field(description="lowest cosine between outputs of this graph and of the fp32 torch model, as in `Parity`")
    largest: float = Field(description="largest absolute value inside the model for the golden texts; float16 ends at 65,504")


class ShortGraph(ManifestPart):
    """A second graph, with the inputs and outputs of the first, that computes every text of at most `max_tokens` tokens."""

    graph: Graph
    attention: str = Field(description="name of the mechanism of its layers")
    max_tokens: Size = Field(description="longest text in tokens, special tokens included")
    parity: Parity


class AttentionLayer(ManifestPart):
    """One layer of the attention graph."""

    attention: str = Field(description="name of the layer's mechanism")
    heads: Size
    effective: bool = Field(description="the layer computes no attention matrix; this has the share of each token's value in each output")


class AttentionGraph(ManifestPart):
    """A second graph that returns each layer's attention weights. The service opens it at the first request for attention."""

    file: FileName
    layers: tuple[AttentionLayer, ...] = Field(min_length=1)
    max_tokens: int = Field(ge=1, le=LONGEST_ATTENTION, description="longest text in tokens")
    max_abs_error: float = Field(description="largest difference of a weight from the torch model's")


class EncoderDecoderFields(ManifestPart):
    """The fields that only encoder-decoders have. `Manifest.graph` is the step graph, `Limits.max_tokens` the longest source in tokens."""

    reader: Graph = Field(description="reads a source once; its outputs are the memory and the first state of the step graph")
    begin_token_id: TokenId = Field(description="input of the first step, when no token is generated")
    end_token_id: TokenId = Field(description="token that ends an output")
    max_output: Size = Field(description="largest number of output tokens, the end token included")
    parameters: Count = Field(description="number of the checkpoint's parameters")


class Manifest(ManifestPart):
    """The complete description of a bundle. The module's docstring lists the bundle's other files."""

    format: Literal["attnserve.bundle/1"] = FORMAT
    name: str = Field(pattern=NAME, max_length=256)
    kind: Kind
    precision: Precision
    files: tuple[File, ...]
    graph: Graph
    limits: Limits
    source: CheckpointSource
    parity: Parity
    trials: tuple[RecipeTrial, ...] = ()
    decoder: Decoder | None = None
    encoder_decoder: EncoderDecoderFields | None = None
    short_graph: ShortGraph | None = None
    attention_graph: AttentionGraph | None = None
    gpu_graph: GpuGraph | None = None
    sparse: Sparse | None = Field(None, description="the encoder has sparse vectors")
    multivector: MultiVector | None = Field(None, description="the encoder has one vector per token")
    roles: dict[RoleName, Role] | None = Field(None, description="how queries and documents are written; None: both alike")
    evaluations: tuple[Evaluation, ...] | None = Field(None, max_length=100, description="one of each task, added after the export")
    pooling: str | None = Field(None, description='how an encoder makes one vector of a text; "none": it makes none')
    normalized: bool = Field(False, description="the checkpoint's own pipeline ends in a normalisation")
    width: Size = Field(
        description="D of an embedding (without one: of a token's or a sparse vector), L of a classifier, D_model of a decoder, V of an "
        "encoder-decoder"
    )
    pad_token_id: TokenId = 0
    prompts: dict[Annotated[str, Field(max_length=256)], Text] = Field({}, max_length=1_000)
    default_prompt: str | None = None
    id2label: dict[int, Annotated[str, Field(max_length=1_000)]] = Field({})
    score_activation: Literal["sigmoid", "softmax", "identity"] = "identity"
    created: Moment = Field(description="UTC, ISO 8601")
    tool: str = Field(description="attnserve and library versions that wrote the bundle")

    @property
    def traits(self) -> Traits:
        """The properties of the model's kind."""
        return KINDS[self.kind]

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What an encoder gives for a text; nothing for other kinds."""
        if not self.traits.gives_vectors:
            return ()
        there: dict[Output, bool] = {
            "dense": self.pooling != "none",
            "sparse": self.sparse is not None,
            "multivector": self.multivector is not None,
            "tokens": True,
        }
        return tuple(name for name, has in there.items() if has)

    def tensor_of(self, output: Output) -> str:
        """Return the graph's output for one of `outputs`."""
        by_token = self.sparse is not None and self.sparse.by_token
        return {
            "dense": names.EMBEDDING,
            "sparse": names.TOKEN_WEIGHTS if by_token else names.SPARSE,
            "multivector": names.MULTIVECTOR,
            "tokens": names.TOKEN_EMBEDDINGS,
        }[output]

    @property
    def default_tensor(self) -> str:
        """The graph's output that a request gets that asks for none."""
        return self.tensor_of(self.outputs[0]) if self.outputs else self.traits.output

    def graph_of(self, tokens: int) -> Graph:
        """Return the graph that computes a text of so many tokens."""
        short = self.short_graph
        return self.graph if short is None or tokens > short.max_tokens else short.graph

    @property
    def created_s(self) -> int:
        """The time of export, in seconds since 1970."""
        return int(datetime.fromisoformat(self.created).timestamp())

    @property
    def fingerprint(self) -> str:
        """64 hex digits that change when any byte of the bundle changes."""
        return hashlib.sha256(self.model_dump_json(exclude=self._absent).encode()).hexdigest()

    @property
    def _absent(self) -> dict[str, Any]:
        """Return the optional fields that are None, for pydantic's `exclude`, so that new fields change no older fingerprint."""
        absent: dict[str, Any] = {name: True for name in _OPTIONAL if getattr(self, name) is None}
        if self.decoder is not None:
            absent["decoder"] = {name: True for name, value in self.decoder if value is None and name not in _ALWAYS_OF_DECODERS}
            unset = {at: {name for name in ("holds", "slots") if not getattr(state, name)} for at, state in enumerate(self.decoder.states)}
            absent["decoder"]["states"] = {at: names for at, names in unset.items() if names}
        if unranked := [at for at, trial in enumerate(self.trials) if trial.rank_correlation is None]:
            absent["trials"] = {at: {"rank_correlation"} for at in unranked}
        return absent


# Fields of a manifest that are left out if they are None.
_OPTIONAL = ("decoder", "encoder_decoder", "short_graph", "attention_graph", "gpu_graph", "sparse", "multivector", "roles", "evaluations")
# Fields of `Decoder` that are written even if they are None, because they were when the first bundles were exported.
_ALWAYS_OF_DECODERS = frozenset({"bos_token_id", "chat_template", "parameters", "bits_per_byte", "fp32_bits_per_byte"})


def dump(manifest: Manifest) -> str:
    """Return the manifest as JSON, fingerprint first. Equal manifests give equal bytes."""
    return (
        json.dumps(
            {"fingerprint": manifest.fingerprint, **manifest.model_dump(mode="json", exclude=manifest._absent)},
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


def no_attention_graph(manifest: Manifest) -> str:
    """Return the end of an error message. It says that the bundle has no attention graph and names the command that adds one."""
    command = f"`attnserve export --checkpoint {manifest.source.checkpoint} --out BUNDLE --name {manifest.name} --maps`"
    return f"was exported without its attention graph, which gives what layers attend to: {command} adds it"
