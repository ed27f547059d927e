"""The interface between export and service: one directory, the bundle, described by its `manifest.json`.

    NAME/
      manifest.json       all fields of `Manifest`
      model.onnx          the graph (and model.onnx.data if the weights are in a second file)
      tokenizer.json      the `tokenizers` file of the checkpoint, unchanged
      golden.json         texts with torch's outputs for them
      short.onnx          optional: a second graph for short texts, with the same weights
      attention.onnx      optional: a second graph that returns attention matrices, with the same weights
      gpu.onnx            optional: a second graph for GPUs, with weights of its own

The manifest has the sha256 of every other file. The fingerprint is the hash of these hashes and of the manifest's other fields, so it
changes if any byte of the bundle changes. `service` imports only this file of `export`, so it imports no library larger than pydantic.
"""

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import AttnserveError

FORMAT: Literal["attnserve.bundle/1"] = "attnserve.bundle/1"
MANIFEST = "manifest.json"
GRAPH = "model.onnx"
TOKENIZER = "tokenizer.json"
GOLDEN = "golden.json"
ATTENTION_GRAPH = "attention.onnx"
SHORT_GRAPH = "short.onnx"

# Tensor names of the graphs of encoders, rerankers and classifiers. B is the number of texts in a batch, N their padded length in tokens,
# D the width of a vector and L the number of labels.
INPUT_IDS = "input_ids"  # (B, N) int64
ATTENTION_MASK = "attention_mask"  # (B, N) int64, 1 = token, 0 = padding
TOKEN_TYPE_IDS = "token_type_ids"  # (B, N) int64, 1 = second text; only if the model reads pairs of texts and has token types
EMBEDDING = "sentence_embedding"  # (B, D) float32, unit length
POOLED = "pooled"  # (B, D) float32, EMBEDDING before normalisation
TOKEN_EMBEDDINGS = "token_embeddings"  # (B, N, D_model) float32, 0 at padding
LOGITS = "logits"  # (B, L) float32; (B, N, L) in a token classifier

# Tensor names of every decoder's step graph, used for both prefill and decode. M is the number of positions whose logits are requested, V
# the size of the vocabulary. A row's tokens are padded on the right, and padding leaves the row's state unchanged.
TOKENS = "tokens"  # (B, N) int64
LENGTHS = "lengths"  # (B,) int64, number of tokens of each row in this call, 0 to N
POSITIONS = "positions"  # (B,) int64, number of tokens of each row before this call; an input only if `Decoder.takes_positions`
WANTED = "wanted"  # (B, M) int64, the positions in this call whose logits are requested
STEP_LOGITS = "logits"  # (B, M, V) float32
# The input `state_LAYER_NAME` of each state tensor has the output `new_state_LAYER_NAME`; see `StateTensor`.

# Tensor names of the optional graph for GPUs of an encoder, reranker or classifier. The host packs the tokens of a batch: T is their number
# with padding at the end, E = B + 1, N the longest text in tokens. All sizes depend on the inputs' shapes only. Attention is the operator
# PackedMultiHeadAttention, which defines TOKEN_OFFSET and CU_SEQLENS.
GPU_GRAPH = "gpu.onnx"
POSITION_IDS = "position_ids"  # (T,) int32, the place of a token in its text; INPUT_IDS and TOKEN_TYPE_IDS are (T,) int32 too
TEXT_OF_TOKEN = "text_of_token"  # (T,) int32, the text whose vector the token contributes to; -1 = none, e.g. padding
POOLING_WEIGHT = "pooling_weight"  # (T,) float32, the token's weight in that vector
TEXTS = "texts"  # (B, 1) int32, the numbers 0 .. B - 1
TOKEN_OFFSET = "token_offset"  # (B, N) int32, the place of each packed token among B * N padded ones, then the places of padding
CU_SEQLENS = "cu_seqlens"  # (B + 1,) int32, the number of tokens in all texts before each text, and in all texts

# Tensor names of the optional graph for GPUs of a decoder: a decode step that draws the next token. It has the same states.
DRAWN = "drawn"  # (B,) int64, the next tokens; -1 where the graph cannot draw
TEMPERATURE = "temperature"  # (B,) float32, above 0
TOP_K = "top_k"  # (B,) int64, 0 = no limit
TOP_P = "top_p"  # (B,) float32, 1 = no limit
UNIFORM = "uniform"  # (B,) float32, a random number in [0, 1); TOP_K = 1 and UNIFORM = 0 draw the likeliest token

# An encoder-decoder has two graphs. The reader maps INPUT_IDS and ATTENTION_MASK (B, N) to tensors `memory_*` (B, N, ..) and `state_*`
# (B, ..). The step graph maps PREVIOUS, ATTENTION_MASK, memory and state to logits (B, V), ATTENTION and `new_state_*`.
READER = "reader.onnx"
PREVIOUS = "previous"  # (B,) int64, the last generated token
ATTENTION = "attention"  # (B, N) float32, the attention over the source tokens; sums to 1

# The optional attention graph maps `input_ids` (1, N) of one text to one matrix (H, N, N) per layer, [head, query, key].
LONGEST_ATTENTION = 256  # longest text in tokens; there is a limit because each layer returns H N² numbers

Kind = Literal["encoder", "reranker", "classifier", "token_classifier", "decoder", "encoder_decoder"]
Pool = Literal["encoder", "generator"]
# A decoder whose precision is not rough keeps the answers of its weights; see `Answers`.
Precision = Literal["fp32", "fp16", "int8", "int4", "as-stored", "int8-rough", "int4-rough", "as-stored-rough"]
ROUGH = "-rough"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"  # allowed model names
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# The name has no slash, so that it cannot refer to a file outside the bundle.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]

# Upper limits, larger than any real model, so that a damaged or malicious bundle cannot cause huge allocations.
MOST_JSON_BYTES = 16 * 2**20  # limit for each of manifest.json and golden.json
MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_TEMPLATE_BYTES = 2**20
MOST_STATE_BYTES = 2**30  # largest state of one sequence, in bytes
SLOT_BLOCK = 64  # a graph adds the values of slots up in blocks of this many, so that the number of slots changes no bit
_SLOTS_BY = 256  # a graph takes multiples of this many slots, and fewer ones in multiples of its block
SLOTS = "S"  # the axis of slots in a graph; "S512" for tensors that have at most 512 where others have more
MOST_PIXELS = 1024  # largest width or height of an image
Size = Annotated[int, Field(ge=1, le=2**24)]  # e.g. of a vocabulary, a width, a length
Count = Annotated[int, Field(ge=0, le=2**62)]  # e.g. of parameters, bytes, documents
TokenId = Annotated[int, Field(ge=0, lt=2**24)]
Text = Annotated[str, Field(max_length=100_000)]


def _moment(text: str) -> str:
    """Check that `text` is an ISO 8601 time with a time zone, not before 1970. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or moment.year < 1970:
        raise ValueError("the moment needs a time zone and a year from 1970 on")
    moment.timestamp()
    return text


Moment = Annotated[str, Field(max_length=64), AfterValidator(_moment)]


@dataclass(frozen=True)
class Traits:
    """The properties that a kind of model has; `KINDS` contains them for each kind."""

    pool: Pool  # the pool of replicas that runs this kind in the deployment profile split
    texts: tuple[int, ...] = ()  # allowed numbers of texts per input; () if the model generates text
    output: str = LOGITS  # the graph output that is returned by default
    per_token: bool = False  # the output has a row for each token of an input
    has_labels: bool = False  # `Manifest.id2label` names the columns of the output
    ranks: bool = False  # the output is one score, which says how well a document matches a query
    golden_bound: Literal["min_cosine", "max_abs_error"] = "max_abs_error"  # the field of `Golden` whose limit a server checks at start
    part: Literal["decoder", "encoder_decoder"] | None = None  # the manifest field that only this kind has
    uses_gpu: bool = True  # False: models of this kind run on the CPU even if the service has a GPU


KINDS: dict[Kind, Traits] = {
    "encoder": Traits("encoder", texts=(1,), output=EMBEDDING, golden_bound="min_cosine"),
    "reranker": Traits("encoder", texts=(2,), has_labels=True, ranks=True),
    "classifier": Traits("encoder", texts=(1, 2), has_labels=True),
    "token_classifier": Traits("encoder", texts=(1,), has_labels=True, per_token=True),
    "decoder": Traits("generator", part="decoder"),
    "encoder_decoder": Traits("generator", part="encoder_decoder", uses_gpu=False),
}


def kinds_of(pool: Pool) -> tuple[Kind, ...]:
    """Return the kinds of model that a pool runs."""
    return tuple(kind for kind, traits in KINDS.items() if traits.pool == pool)


def attention_output(layer: int) -> str:
    """Return the name of the output of the attention graph that has the matrix of this layer. Layers count from 0."""
    return f"attention_{layer}"


class BundleError(AttnserveError, ValueError):
    """The error for a bundle that must not be served. The message names the file and the problem."""


class ManifestPart(BaseModel):
    """Base class of the manifest and its parts: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tensor(ManifestPart):
    """An input or output of a graph. A dynamic axis is given by its letter ("B", "N"), a fixed one by its size."""

    name: str = Field(max_length=255)
    dtype: Literal["int64", "int32", "float32"]
    shape: tuple[str | Size, ...] = Field(max_length=16)


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


class CheckpointSource(ManifestPart):
    """The checkpoint from which the weights were loaded."""

    architecture: str
    checkpoint: str = Field(description="name of the checkpoint folder")
    weights_sha256: Sha256
    attention: str
    untrained: bool = Field(description="the weights were not trained for this attention: it was replaced at export, or they are random")


Holds = Literal["sums", "sums_in_last_column", "count"]


class StateTensor(ManifestPart):
    """One tensor of a decoder's state for one sequence. Its size is constant, and it is initialised with zeros."""

    name: str = Field(pattern=r"^state_[0-9]+_[A-Za-z0-9_]+$", description="the graph's input; the output has the prefix `new_`")
    shape: tuple[Size, ...] = Field(max_length=16, description="shape for one sequence; the graph's tensor has the batch axis B before it")
    dtype: Literal["float32", "int64"] = "float32"
    holds: Holds | None = Field(
        None,
        description="condition that its numbers satisfy after at least one token. sums: all are above 0. sums_in_last_column: in the last "
        "column of each head, none is below 0 and at least one is above 0. count: whole numbers from 1 to the number of tokens. None: no "
        "condition, except that all numbers are finite",
    )
    slots: bool = Field(
        False,
        description="its shape is (heads, S slots, width), and the token at position t is in slot t + 1 until none is left. A call "
        "writes only the slots of its tokens, so its output may be the memory of its input. It may be cut to one of "
        "`Decoder.slot_counts` slots that has all slots in use",
    )

    @model_validator(mode="after")
    def _has_columns(self) -> Self:
        if self.slots and (len(self.shape) != 3 or self.shape[1] % SLOT_BLOCK):
            raise ValueError(f"{self.name} of shape {self.shape} has no axis of slots, a multiple of {SLOT_BLOCK}, between two others")
        if self.holds == "sums_in_last_column" and len(self.shape) < 2:
            raise ValueError(f"{self.name} of shape {self.shape} has no columns, and holds={self.holds} is true of the last of several")
        return self

    @property
    def output(self) -> str:
        return f"new_{self.name}"

    def shape_at(self, position: int) -> tuple[int, ...]:
        """Return the shape of the tensor cut to the slots that a sequence of `position` tokens uses."""
        if not self.slots:
            return self.shape
        heads, slots, width = self.shape
        return heads, min(position + 1, slots), width


def slot_counts(most: int, block: int = SLOT_BLOCK) -> tuple[int, ...]:
    """Return the numbers of slots, up to `most`, that a call of a graph with this block can have.

    onnxruntime's sums over 7, 11, 15 or 19 blocks have other bits than those over more of them, so larger numbers are multiples of 256.
    """
    counts = (*range(block, _SLOTS_BY, block), *range(_SLOTS_BY, most, _SLOTS_BY), most)
    return tuple(sorted({count for count in counts if 0 < count <= most}))


class Interface(NamedTuple):
    """The input and output tensors of a graph."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def int64(name: str, *shape: str | int) -> Tensor:
    return Tensor(name=name, dtype="int64", shape=shape)


def int32(name: str, *shape: str | int) -> Tensor:
    return Tensor(name=name, dtype="int32", shape=shape)


def float32(name: str, *shape: str | int) -> Tensor:
    return Tensor(name=name, dtype="float32", shape=shape)


SOURCE = (int64(INPUT_IDS, "B", "N"), int64(ATTENTION_MASK, "B", "N"))  # inputs of encoders' graphs and readers


def encoder_interface(kind: Kind, width: int, d_model: str | int, *, typed: bool) -> Interface:
    """Return the inputs and outputs of the graph of an encoder, reranker or classifier.

    `width` is the length of a vector or the number of labels. With `typed`, token types are an input.
    """
    inputs, traits = (*SOURCE, int64(TOKEN_TYPE_IDS, "B", "N")) if typed else SOURCE, KINDS[kind]
    if traits.output == LOGITS:
        return Interface(inputs, (float32(LOGITS, "B", *["N"] * traits.per_token, width),))
    vectors = (float32(EMBEDDING, "B", width), float32(POOLED, "B", width), float32(TOKEN_EMBEDDINGS, "B", "N", d_model))
    return Interface(inputs, vectors)


def packed_interface(kind: Kind, width: int, *, typed: bool) -> Interface:
    """Return the inputs and outputs of the graph for GPUs of an encoder, reranker or classifier; arguments as in `encoder_interface`."""
    inputs = [int32(name, "T") for name in (INPUT_IDS, POSITION_IDS, TEXT_OF_TOKEN)]
    inputs += float32(POOLING_WEIGHT, "T"), int32(TEXTS, "B", 1), int32(TOKEN_OFFSET, "B", "N"), int32(CU_SEQLENS, "E")
    inputs += [int32(TOKEN_TYPE_IDS, "T")] * typed
    outputs = (LOGITS,) if KINDS[kind].output == LOGITS else (EMBEDDING, POOLED)
    return Interface(tuple(inputs), tuple(float32(name, "B", width) for name in outputs))


def decoder_interface(states: Sequence[StateTensor], vocab_size: int, *, takes_positions: bool) -> Interface:
    numbers = (int64(TOKENS, "B", "N"), int64(LENGTHS, "B"), *[int64(POSITIONS, "B")] * takes_positions, int64(WANTED, "B", "M"))
    before, after = (
        [Tensor(name=name, dtype=state.dtype, shape=("B", *axes)) for name, state, axes in zip(names, states, _axes(states), strict=True)]
        for names in ([state.name for state in states], [state.output for state in states])
    )
    return Interface((*numbers, *before), (float32(STEP_LOGITS, "B", "M", vocab_size), *after))


def has_slots(tensor: Tensor) -> bool:
    """Whether an input or output of a decoder's graph has an axis of slots."""
    return any(isinstance(axis, str) and axis.startswith(SLOTS) for axis in tensor.shape)


def _axes(states: Sequence[StateTensor]) -> list[tuple[str | int, ...]]:
    most = max((state.shape[1] for state in states if state.slots), default=0)
    slots = {state.name: SLOTS if state.shape[1] == most else f"{SLOTS}{state.shape[1]}" for state in states if state.slots}
    return [(state.shape[0], slots[state.name], state.shape[2]) if state.slots else state.shape for state in states]


def sampling_interface(states: Sequence[StateTensor], *, takes_positions: bool) -> Interface:
    """Return the inputs and outputs of a decoder's graph for GPUs: one token of each row, without the axis N, and how to draw the next."""
    inputs = (int64(TOKENS, "B"), float32(TEMPERATURE, "B"), int64(TOP_K, "B"), float32(TOP_P, "B"), float32(UNIFORM, "B"))
    step = decoder_interface(states, 1, takes_positions=takes_positions)
    kept = tuple(tensor for tensor in step.inputs if tensor.name == POSITIONS or tensor.name.startswith("state_"))
    return Interface((*inputs, *kept), (int64(DRAWN, "B"), *step.outputs[1:]))


def step_interface(remembered: Sequence[Tensor], vocab_size: int) -> Interface:
    """Return the inputs and outputs of an encoder-decoder's step graph. `remembered` are the outputs of its reader graph."""
    new = [tensor.model_copy(update={"name": f"new_{tensor.name}"}) for tensor in remembered if not tensor.name.startswith("memory_")]
    outputs = (float32(STEP_LOGITS, "B", vocab_size), float32(ATTENTION, "B", "N"), *new)
    return Interface((int64(PREVIOUS, "B"), SOURCE[1], *remembered), outputs)


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
        block = self.slot_block or _SLOTS_BY
        uneven = [state.name for state in self.states if state.slots and (state.shape[1] % block or _SLOTS_BY % block)]
        if uneven:
            raise ValueError(f"slot_block={block} must divide {_SLOTS_BY} and the slots of {uneven[0]}; export the bundle again")
        return self

    @property
    def slot_counts(self) -> tuple[int, ...]:
        """The numbers of slots that a call can have, ascending. The last is that of the whole state; there are none without slots."""
        return slot_counts(max((state.shape[1] for state in self.states if state.slots), default=0), self.slot_block or _SLOTS_BY)

    @property
    def sums_up(self) -> bool:
        """Whether a state sums up the tokens that have left a window, so that they are not forgotten."""
        return any(not state.slots and state.holds != "count" for state in self.states)

    @property
    def state_bytes(self) -> int:
        """The size of one sequence's state in bytes. It does not depend on the length of the sequence, except that slots which are not
        used yet take no memory."""
        return self.state_bytes_at(None)

    def state_bytes_at(self, position: int | None) -> int:
        """The size in bytes of the state of a sequence of `position` tokens; None: its largest size."""
        sizes = {"float32": 4, "float16": 2, "int64": 8}
        shapes = [(state.shape if position is None else state.shape_at(position), sizes[state.dtype]) for state in self.states]
        return sum(math.prod(shape) * size for shape, size in shapes)


PoolingByWeights = Literal["cls", "last", "mean", "mean_sqrt_len"]
POOLING_WEIGHTS: tuple[PoolingByWeights, ...] = get_args(PoolingByWeights)  # poolings that are a weighted sum of token vectors


class GpuGraph(ManifestPart):
    """A second graph, for GPUs, with weights in float16: packed texts for an encoder, reranker or classifier, and a decode step that draws
    the next tokens for a decoder.

    Its numbers were measured at export on a CPU, with PackedMultiHeadAttention, which no CPU has, computed by other operators.
    """

    graph: Graph
    pooling: PoolingByWeights | None = Field(None, description="how the host weights an encoder's tokens; None for a decoder")
    min_cosine: float = Field(description="lowest cosine between outputs of this graph and of the fp32 torch model, as in `Parity`")
    largest: float = Field(description="largest absolute value inside the model for the golden texts; float16 ends at 65,504")


class ShortGraph(ManifestPart):
    """A second graph, with the inputs and outputs of the first, that computes every text of at most `max_tokens` tokens. `Manifest.graph`
    computes longer texts only. A text's own length decides, never that of its batch.
    """

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
    """A second graph that returns each layer's attention weights, as the graph that computes the text's vector has them. The service opens
    it at the first request for attention.
    """

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
    pooling: str | None = None
    normalized: bool = Field(False, description="the checkpoint's own pipeline ends in a normalisation")
    width: Size = Field(description="D of an embedding, L of a classifier, D_model of a decoder, V of an encoder-decoder")
    pad_token_id: TokenId = 0
    prompts: Annotated[dict[Annotated[str, Field(max_length=256)], Text], Field(max_length=1_000)] = {}
    default_prompt: str | None = None
    id2label: dict[int, Annotated[str, Field(max_length=1_000)]] = {}
    score_activation: Literal["sigmoid", "softmax", "identity"] = "identity"
    created: Moment = Field(description="UTC, ISO 8601")
    tool: str = Field(description="attnserve and library versions that wrote the bundle")

    @property
    def traits(self) -> Traits:
        """The properties of the model's kind."""
        return KINDS[self.kind]

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
        """Return the names of optional fields that are None, for pydantic's argument `exclude`. The fingerprint does not include them, so
        a new optional field does not change the fingerprint of older bundles."""
        absent: dict[str, Any] = {name: True for name in _OPTIONAL if getattr(self, name) is None}
        if self.decoder is not None:
            absent["decoder"] = {name: True for name, value in self.decoder if value is None and name not in _ALWAYS_OF_DECODERS}
            unset = {at: {name for name in ("holds", "slots") if not getattr(state, name)} for at, state in enumerate(self.decoder.states)}
            absent["decoder"]["states"] = {at: names for at, names in unset.items() if names}
        if unranked := [at for at, trial in enumerate(self.trials) if trial.rank_correlation is None]:
            absent["trials"] = {at: {"rank_correlation"} for at in unranked}
        return absent


# Fields of a manifest that are left out if they are None.
_OPTIONAL = ("decoder", "encoder_decoder", "short_graph", "attention_graph", "gpu_graph")
# Fields of `Decoder` that are written even if they are None, because they were when the first bundles were exported.
_ALWAYS_OF_DECODERS = frozenset({"bos_token_id", "chat_template", "parameters", "bits_per_byte", "fp32_bits_per_byte"})

MOST_GOLDEN = 1_000  # largest number of golden texts; limited because every start of a server computes them all
MOST_CONTINUED = 1_000  # largest number of golden tokens after a prompt; every start of a server computes a step for each
Tokens = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=100_000)]


def _same_lengths(**lists: tuple[Any, ...]) -> None:
    if len(set(map(len, lists.values()))) > 1:
        raise ValueError(" and ".join(f"{name} has {len(each)}" for name, each in lists.items()) + " entries; they must have equally many")


class Golden(ManifestPart):
    """Inputs with the fp32 torch model's outputs, which a server compares with its own outputs at start.

    `outputs` has one row per input: the unit vector of an encoder, or the logits of a classifier (those of the first token in a token
    classifier). The first text of a pair is in `texts`, the second in `pairs`.
    """

    texts: tuple[Text, ...] = Field(min_length=1, max_length=MOST_GOLDEN)
    pairs: tuple[Text, ...] | None = None
    outputs: tuple[tuple[float, ...], ...]
    min_cosine: float | None = Field(None, ge=0.5, le=1, description="encoders: a server does not start if a row's cosine is lower")
    max_abs_error: float | None = Field(None, ge=0, le=1000, description="others: a server does not start if a logit differs by more")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _same_lengths(texts=self.texts, outputs=self.outputs, **({} if self.pairs is None else {"pairs": self.pairs}))
        if self.min_cosine is None and self.max_abs_error is None:
            raise ValueError("one of min_cosine and max_abs_error is needed")
        if len(widths := {len(row) for row in self.outputs}) > 1:
            raise ValueError(f"outputs has rows of {min(widths)} to {max(widths)} numbers, but they must have one width")
        return self


class DecoderGolden(ManifestPart):
    """Prompts with the fp32 torch model's logits and continuations, which a server checks at start.

    Logits may differ by at most `max_abs_error`. Another processor rounds differently and may choose another of two almost equally likely
    tokens. So each token of a continuation, given all before it, need only have a logit within `max_abs_error` of the largest logit.
    """

    prompts: tuple[Text, ...] = Field(min_length=1, max_length=MOST_GOLDEN)
    token_ids: tuple[Tokens, ...] = Field(description="token ids of each prompt, from the bundle's tokenizer")
    continuations: tuple[Annotated[tuple[TokenId, ...], Field(max_length=MOST_CONTINUED)], ...] = Field(
        description="the tokens that greedy decoding generates after each prompt"
    )
    top_token_ids: tuple[Tokens, ...] = Field(description="the likeliest next tokens after each prompt, the likeliest first")
    top_logits: tuple[tuple[float, ...], ...] = Field(description="logits of `top_token_ids`")
    max_abs_error: float = Field(ge=0, le=1000, description="a server does not start if one of its logits differs by more")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _same_lengths(
            prompts=self.prompts,
            token_ids=self.token_ids,
            continuations=self.continuations,
            top_token_ids=self.top_token_ids,
            top_logits=self.top_logits,
        )
        for ids, logits in zip(self.top_token_ids, self.top_logits, strict=True):
            _same_lengths(top_token_ids=ids, top_logits=logits)
        return self


class EncoderDecoderGolden(ManifestPart):
    """Source texts with the torch model's greedy outputs and their logits, which a server checks at start.

    The server feeds the same output tokens, and its logits may differ by at most `max_abs_error`.
    """

    texts: tuple[Text, ...] = Field(min_length=1, max_length=MOST_GOLDEN)
    token_ids: tuple[Tokens, ...] = Field(description="token ids of each text, from the bundle's tokenizer")
    outputs: tuple[Tokens, ...] = Field(description="generated tokens, up to the end token (included) or the longest output")
    logits: tuple[tuple[tuple[float, ...], ...], ...] = Field(description="[text][step]: logits of the tokens in `top_token_ids`")
    top_token_ids: tuple[tuple[Tokens, ...], ...] = Field(description="[text][step]: the likeliest tokens, the likeliest first")
    max_abs_error: float = Field(ge=0, le=1000, description="a server does not start if one of its logits differs by more")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        rows = {"outputs": self.outputs, "logits": self.logits, "top_token_ids": self.top_token_ids}
        _same_lengths(texts=self.texts, token_ids=self.token_ids, **rows)
        for output, logits, top in zip(*rows.values(), strict=True):
            _same_lengths(outputs=output, logits=logits, top_token_ids=top)
            for step, ids in zip(logits, top, strict=True):
                _same_lengths(logits=step, top_token_ids=ids)
        return self


def no_attention_graph(manifest: Manifest) -> str:
    """Return the end of an error message. It says that the bundle has no attention graph and names the command that adds one."""
    command = f"`attnserve export --checkpoint {manifest.source.checkpoint} --out BUNDLE --name {manifest.name} --maps`"
    return f"was exported without its attention graph, which gives what layers attend to: {command} adds it"


def verify(bundle: Path) -> Manifest:
    """Return the manifest after checking all files. Raises BundleError for the first file that is missing, unknown or changed."""
    manifest = read_manifest(bundle)
    for file in manifest.files:
        path = regular(bundle, file.name)
        if (size := path.stat().st_size) != file.size_bytes:
            raise BundleError(f"{path} has {size} bytes, but the manifest has {file.size_bytes}. Export the bundle again.")
        if (digest := sha256(path)) != file.sha256:
            raise BundleError(
                f"{path} was changed after export: sha256 {digest[:12]}…, expected {file.sha256[:12]}…. Export the bundle again."
            )
    # Unlisted files are an error, because an ONNX graph could read any file in the folder as its weights.
    if unknown := sorted(set(os.listdir(bundle)) - {file.name for file in manifest.files} - {MANIFEST}):
        raise BundleError(f"{bundle} has {unknown[0]!r}, which its manifest does not list: remove it, or export the bundle again.")
    return manifest


def regular(bundle: Path, name: str, *, most_bytes: int | None = None) -> Path:
    """Return the path of a file in the bundle. Raises BundleError if it is missing, too large, not regular, or a link to a file outside."""
    path = bundle / name
    try:
        found = path.resolve(strict=True)
        about = found.stat()
        if not found.is_relative_to(bundle.resolve(strict=True)):
            raise BundleError(f"{path} is a link to a place outside the bundle, which is not followed. Copy the bundle with its files.")
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{path} is missing. Export the bundle again.") from None
    except (OSError, RuntimeError, ValueError) as error:  # e.g. a link to itself, or a name that is too long
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from None
    if not stat.S_ISREG(about.st_mode):
        raise BundleError(f"{path} is not a regular file. Export the bundle again.")
    if most_bytes is not None and about.st_size > most_bytes:
        raise BundleError(f"{path} has {about.st_size} bytes; the limit is {most_bytes}. Export the bundle again.")
    return path


def read_text(bundle: Path, name: str, *, most_bytes: int = MOST_JSON_BYTES) -> str:
    """Return the text of a file in the bundle. Raises BundleError as `regular` does, and for text that is not UTF-8."""
    path = regular(bundle, name, most_bytes=most_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from error


def read_manifest(bundle: Path) -> Manifest:
    """Return the manifest without checking the other files. Raises BundleError if it is missing, invalid, changed or contradicts
    itself."""
    path = bundle / MANIFEST
    if not os.path.exists(path):  # noqa: PTH110  # also False for a path that no file can have
        raise BundleError(
            f"{bundle} is not a bundle: it has no {MANIFEST}. Make one with `attnserve export --checkpoint DIR --out {bundle}`."
        )
    text = read_text(bundle, MANIFEST)
    try:
        content = json.loads(text)
        if isinstance(content, dict):
            content.pop("fingerprint", None)
        manifest = Manifest.model_validate(content)
        written = dump(manifest)
    except ValidationError as error:
        raise BundleError(f"{path} cannot be read: {_sentence(error)}. Export the bundle again.") from error
    except RecursionError:
        raise BundleError(f"{path} cannot be read: it is nested too deeply. Export the bundle again.") from None
    except ValueError as error:
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from error
    if text != written:
        raise BundleError(f"{path} was changed after export: its text does not match its fingerprint. Export the bundle again.")
    if (problem := next(_contradictions(manifest), None)) is not None:
        raise BundleError(f"{path} contradicts itself: {_printable(problem)}. Export the bundle again.")
    return manifest


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions between fields of a manifest. With any of them, a server could start but not answer requests."""
    decoder, traits = manifest.decoder, manifest.traits
    for name, part in (("decoder", decoder), ("encoder_decoder", manifest.encoder_decoder)):
        if (part is not None) != (traits.part == name):
            yield f"kind is {manifest.kind} and `{name}` is {'absent' if part is None else 'there'}"
            return
    yield from _contradictions_of_files(manifest)
    yield from _contradictions_of_tokens(manifest)
    for way, wanted in _interface(manifest)._asdict().items():
        if (found := getattr(manifest.graph, way)) != wanted:
            yield f"the graph of this kind has the {way} {_shapes(wanted)}, and graph.{way} are {_shapes(found)}"
    if manifest.short_graph is not None:
        yield from _contradictions_of_short_texts(manifest, manifest.short_graph)
    if manifest.gpu_graph is not None:
        for way, wanted in _gpu_interface(manifest)._asdict().items():
            if (found := getattr(manifest.gpu_graph.graph, way)) != wanted:
                yield f"the graph for GPUs has the {way} {_shapes(wanted)}, and gpu_graph.graph.{way} are {_shapes(found)}"
        if (manifest.gpu_graph.pooling is None) != (decoder is not None):
            yield f"kind is {manifest.kind} and gpu_graph.pooling is {manifest.gpu_graph.pooling}"
    labels = manifest.id2label
    if traits.has_labels and (len(labels) != manifest.width or set(labels) != set(range(len(labels)))):
        yield f"width is {manifest.width} and id2label names {len(labels)} labels, where each of 0 to {manifest.width - 1} needs one"
    if traits.ranks and manifest.width != 1:
        yield f"a {manifest.kind} has one label, and width is {manifest.width}"
    if manifest.default_prompt is not None and manifest.default_prompt not in manifest.prompts:
        yield f"default_prompt={manifest.default_prompt!r:.80} is not one of the prompts"
    if decoder is not None and decoder.state_bytes > MOST_STATE_BYTES:
        yield f"a sequence has a state of {decoder.state_bytes} bytes, and {MOST_STATE_BYTES} are the most"


def _contradictions_of_short_texts(manifest: Manifest, short: ShortGraph) -> Iterator[str]:
    if manifest.traits.pool != "encoder" or manifest.gpu_graph is not None:
        yield f"short_graph is for an encoder without a graph for GPUs, and kind is {manifest.kind}"
    for way in Interface._fields:
        if (found := getattr(short.graph, way)) != (wanted := getattr(manifest.graph, way)):
            yield f"both graphs need the {way} {_shapes(wanted)}, and short_graph.graph.{way} are {_shapes(found)}"
    if short.max_tokens >= (longest := manifest.limits.max_tokens):
        yield f"short_graph.max_tokens={short.max_tokens} must be below limits.max_tokens={longest}"
    if (maps := manifest.attention_graph) is not None and maps.max_tokens > short.max_tokens:
        yield f"attention_graph.max_tokens={maps.max_tokens} exceeds short_graph.max_tokens={short.max_tokens}, which it is of"


def _contradictions_of_files(manifest: Manifest) -> Iterator[str]:
    decoder, both, maps = manifest.decoder, manifest.encoder_decoder, manifest.attention_graph
    names = [file.name for file in manifest.files]
    needed = [manifest.graph.file, TOKENIZER, GOLDEN]
    needed += [both.reader.file] if both is not None else []
    needed += [maps.file] if maps is not None else []
    needed += [manifest.short_graph.graph.file] if manifest.short_graph is not None else []
    needed += [manifest.gpu_graph.graph.file] if manifest.gpu_graph is not None else []
    needed += [decoder.chat_template] if decoder is not None and decoder.chat_template is not None else []
    if missing := [name for name in needed if name not in names]:
        yield f"files does not list {missing[0]}, which would be served unchecked"
    if len(set(names)) < len(names) or MANIFEST in names:
        yield f"files lists {MANIFEST if MANIFEST in names else next(name for name in names if names.count(name) > 1)}, or a name twice"


def _contradictions_of_tokens(manifest: Manifest) -> Iterator[str]:
    decoder, both, vocab_size = manifest.decoder, manifest.encoder_decoder, manifest.limits.vocab_size
    ids = {"pad_token_id": manifest.pad_token_id}
    if decoder is not None:
        ids |= {f"eos_token_ids.{at}": token for at, token in enumerate(decoder.eos_token_ids)}
        ids |= {} if decoder.bos_token_id is None else {"bos_token_id": decoder.bos_token_id}
        levels = () if decoder.image is None else decoder.image.level_token_ids
        ids |= {f"level_token_ids.{at}": token for at, token in enumerate(levels)}
        if len(set(levels)) < len(levels):
            yield "level_token_ids has a token twice"
    if both is not None:
        ids |= {"begin_token_id": both.begin_token_id, "end_token_id": both.end_token_id}
    for name, token in ids.items():
        if token >= vocab_size:
            yield f"{name}={token} is not in the vocabulary, 0 to {vocab_size - 1}"


def _interface(manifest: Manifest) -> Interface:
    """Return the inputs and outputs that the served graph must have. For an encoder-decoder this is the step graph, whose inputs follow
    from the outputs of its reader graph."""
    decoder, both, graph, vocab_size = manifest.decoder, manifest.encoder_decoder, manifest.graph, manifest.limits.vocab_size
    if decoder is not None:
        return decoder_interface(decoder.states, vocab_size, takes_positions=decoder.takes_positions)
    if both is not None:
        return step_interface(both.reader.outputs, vocab_size)
    d_model = next((tensor.shape[-1] for tensor in graph.outputs[2:] if tensor.shape), "D")
    return encoder_interface(manifest.kind, manifest.width, d_model, typed=any(tensor.name == TOKEN_TYPE_IDS for tensor in graph.inputs))


def _gpu_interface(manifest: Manifest) -> Interface:
    """Return the inputs and outputs that the graph for GPUs must have."""
    if manifest.decoder is not None:
        return sampling_interface(manifest.decoder.states, takes_positions=manifest.decoder.takes_positions)
    typed = any(tensor.name == TOKEN_TYPE_IDS for tensor in manifest.graph.inputs)
    return packed_interface(manifest.kind, manifest.width, typed=typed)


def _shapes(tensors: tuple[Tensor, ...]) -> str:
    told = [f"{tensor.name} ({', '.join(map(str, tensor.shape))})" for tensor in tensors[:6]]
    return ", ".join(told)[:300] + (", .." if len(tensors) > 6 else "") or "none"


def _printable(text: str) -> str:
    """Escape control characters and line breaks, because names in a manifest come from the bundle's author."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _sentence(error: ValidationError) -> str:
    """Describe the first invalid field in one sentence."""
    first = error.errors()[0]
    field = _printable(".".join(map(str, first["loc"]))) or "the whole"
    if first["type"] == "missing":
        return f"{field} is missing"
    return f"{field}={reprlib.repr(first['input'])} is not accepted: {first['msg']}"


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


G = TypeVar("G", bound=ManifestPart)


def read_golden(bundle: Path, kind: type[G]) -> G:
    """Read golden.json as an object of the class `kind`. Raises BundleError if it is invalid or empty, or if its lists differ in length."""
    try:
        return kind.model_validate_json(read_text(bundle, GOLDEN))
    except ValidationError as error:
        raise BundleError(f"{bundle / GOLDEN} cannot be read: {_sentence(error)}. Export the bundle again.") from error


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
