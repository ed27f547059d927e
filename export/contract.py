"""What crosses from export to service: one directory, the bundle, described by its `manifest.json`.

    NAME/
      manifest.json       everything below, as `Manifest`
      model.onnx          the graph (and model.onnx.data when the weights are stored beside it)
      tokenizer.json      the `tokenizers` file of the checkpoint, unchanged
      golden.json         texts with the outputs that torch gave for them
      attention.onnx      optional: a second graph that gives attention matrices, over the same weights

Every file but the manifest is named in it with its sha256; the fingerprint is the hash of those hashes and of the manifest's own words,
so one changed byte anywhere changes it. Nothing heavier than pydantic is imported here: `service` sees of `export` this file alone.
"""

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import AttnserveError

FORMAT: Literal["attnserve.bundle/1"] = "attnserve.bundle/1"
MANIFEST = "manifest.json"
GRAPH = "model.onnx"
TOKENIZER = "tokenizer.json"
GOLDEN = "golden.json"
ATTENTION_GRAPH = "attention.onnx"

# Tensor names of every encoder-like graph. B is the batch, N the padded length in tokens, D the output width, L the number of labels.
INPUT_IDS = "input_ids"  # (B, N) int64
ATTENTION_MASK = "attention_mask"  # (B, N) int64, 1 = token, 0 = padding
TOKEN_TYPE_IDS = "token_type_ids"  # (B, N) int64, only in graphs that read pairs of texts and whose model has types
EMBEDDING = "sentence_embedding"  # (B, D) float32, unit length
POOLED = "pooled"  # (B, D) float32, the same before normalisation
TOKEN_EMBEDDINGS = "token_embeddings"  # (B, N, D_model) float32, 0 at padding
LOGITS = "logits"  # (B, L) float32; (B, N, L) in a token classifier

# Tensor names of every decoder's step graph, which is prefill and decode at once. M is the number of positions whose logits are wanted,
# V the vocabulary. A row's tokens stand at the left; what lies beyond its length leaves its state as it was.
TOKENS = "tokens"  # (B, N) int64
LENGTHS = "lengths"  # (B,) int64, tokens of the row in this call, 0 to N
POSITIONS = "positions"  # (B,) int64, tokens of the row before this call; only in graphs that need to know
WANTED = "wanted"  # (B, M) int64, which of the N positions logits are asked of
STEP_LOGITS = "logits"  # (B, M, V) float32
# Each state tensor goes in as `state_LAYER_NAME` and comes out as `new_state_LAYER_NAME`; see `StateTensor`.

# An encoder-decoder has two graphs. The reader takes INPUT_IDS and ATTENTION_MASK (B, N), and gives tensors `memory_*` (B, N, ..) and
# `state_*` (B, ..). The step graph takes PREVIOUS, ATTENTION_MASK, memory and state, and gives logits (B, V), ATTENTION and `new_state_*`.
READER = "reader.onnx"
PREVIOUS = "previous"  # (B,) int64, the token written before this one
ATTENTION = "attention"  # (B, N) float32, what of the source the token is written from; sums to 1

# The attention graph, where there is one, has `input_ids` (1, N) of one text and, for each layer, a matrix (H, N, N), [head, query, key].
LONGEST_ATTENTION = 256  # tokens of its text: a layer's matrices are H N² numbers

Kind = Literal["encoder", "reranker", "classifier", "token_classifier", "decoder", "encoder_decoder"]
Pool = Literal["encoder", "generator"]
Precision = Literal["fp32", "fp16", "int8"]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"  # of a model, as clients send it
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]  # one directory, no way out of it

# No model is as large as this; a bundle that claims more is broken, and its sizes are not to be allocated.
MOST_JSON_BYTES = 16 * 2**20  # of manifest.json and golden.json, which are read whole
MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_TEMPLATE_BYTES = 2**20
MOST_STATE_BYTES = 2**30  # of one sequence
MOST_PIXELS = 1024  # of an image's side
Size = Annotated[int, Field(ge=1, le=2**24)]  # of a vocabulary, a width, a length
Count = Annotated[int, Field(ge=0, le=2**62)]  # of parameters, bytes, documents
TokenId = Annotated[int, Field(ge=0, lt=2**24)]
Text = Annotated[str, Field(max_length=100_000)]


def _moment(text: str) -> str:
    """ISO 8601 with a time zone, since the epoch. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None or moment.year < 1970:
        raise ValueError("the moment needs a time zone and a year from 1970 on")
    moment.timestamp()
    return text


Moment = Annotated[str, Field(max_length=64), AfterValidator(_moment)]


@dataclass(frozen=True)
class Traits:
    """What follows from the kind of a model; `KINDS` has one for each kind."""

    pool: Pool  # the replicas of profile split that compute it
    texts: tuple[int, ...] = ()  # numbers of texts that one input can have; none if inputs are prompts
    output: str = LOGITS  # of the graph: the answer, unless a request names another output
    per_token: bool = False  # the output has a row for each token of an input
    has_labels: bool = False  # `Manifest.id2label` names each number of a row
    ranks: bool = False  # a row is one number: how well a document fits a query
    golden_bound: Literal["min_cosine", "max_abs_error"] = "max_abs_error"  # by which a server compares its outputs with the golden ones
    part: Literal["decoder", "encoder_decoder"] | None = None  # of the manifest, which only this kind has; selects the engine
    uses_gpu: bool = True  # False: the engine computes on the CPU, whatever the provider


KINDS: dict[Kind, Traits] = {
    "encoder": Traits("encoder", texts=(1,), output=EMBEDDING, golden_bound="min_cosine"),
    "reranker": Traits("encoder", texts=(2,), has_labels=True, ranks=True),
    "classifier": Traits("encoder", texts=(1, 2), has_labels=True),
    "token_classifier": Traits("encoder", texts=(1,), has_labels=True, per_token=True),
    "decoder": Traits("generator", part="decoder"),
    "encoder_decoder": Traits("generator", part="encoder_decoder", uses_gpu=False),
}


def kinds_of(pool: Pool) -> tuple[Kind, ...]:
    """The kinds of model that a pool computes."""
    return tuple(kind for kind, traits in KINDS.items() if traits.pool == pool)


def attention_output(layer: int) -> str:
    """The name of a layer's matrix in the attention graph; layers count from 0."""
    return f"attention_{layer}"


class BundleError(AttnserveError, ValueError):
    """A bundle that must not be served: the message names the file and what is wrong with it."""


class Part(BaseModel):
    """Base of every piece of the manifest: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tensor(Part):
    """A graph input or output. A dynamic axis carries its letter ("B", "N"), a fixed one its size."""

    name: str = Field(max_length=255)
    dtype: Literal["int64", "float32"]
    shape: tuple[str | Size, ...] = Field(max_length=16)


class File(Part):
    name: FileName
    sha256: Sha256
    size_bytes: int = Field(ge=0, le=2**62)


class Graph(Part):
    """The ONNX graph: its file, what goes in and out, and which operators it is made of."""

    file: FileName
    opset: int = Field(ge=1, le=1000)
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    operators: dict[str, Size]
    optimisation: str = Field(description="what was done to the graph after export, in words")


class Limits(Part):
    max_tokens: Size = Field(description="longest input in tokens, special tokens included")
    vocab_size: Size


class Parity(Part):
    """How far the graph is from the torch model, measured at export."""

    max_abs_error: float = Field(description="largest |onnxruntime - torch| over all outputs and all shapes below, texts of unequal length")
    min_cosine: float = Field(
        description="lowest cosine to the fp32 torch model on the golden texts: of an encoder's vectors; in classifiers of a label's "
        "logits over all texts, less their mean, as one vector; of a decoder's logits after each golden prompt, less their mean"
    )
    shapes: tuple[tuple[int, int], ...] = Field(description="the (B, N) that were compared")
    tolerance: float = Field(description="what was allowed of it, times the largest value of an output where that is above 1")


class Trial(Part):
    """One way of making the graph smaller that was tried, and what came of it."""

    recipe: str
    min_cosine: float
    mean_cosine: float
    size_bytes: Count
    texts_per_s: float = Field(ge=0, description="16-token texts a second of one core's time on the exporting machine, in batches of 8")
    baseline_texts_per_s: float = Field(gt=0, description="the same of the fp32 graph")
    kept: bool


class Source(Part):
    """Where the weights come from."""

    architecture: str
    checkpoint: str = Field(description="name of the checkpoint folder")
    weights_sha256: Sha256
    attention: str
    untrained: bool = Field(description="the weights have not been trained for this attention: it was swapped at export, or they are drawn")


class StateTensor(Part):
    """One tensor of what a decoder remembers of a sequence: its size never grows, and zeros are its beginning."""

    name: str = Field(pattern=r"^state_[0-9]+_[A-Za-z0-9_]+$", description="the graph input; the output is called new_ and this")
    shape: tuple[Size, ...] = Field(max_length=16, description="of one sequence; the graph's tensor has B in front")
    dtype: Literal["float32", "int64"] = "float32"

    @property
    def output(self) -> str:
        return f"new_{self.name}"


class Image(Part):
    """What a decoder of pixels draws: `width * height` tokens after a prompt, row by row from the upper left, each a grey level."""

    width: int = Field(ge=1, le=MOST_PIXELS)
    height: int = Field(ge=1, le=MOST_PIXELS)
    level_token_ids: tuple[TokenId, ...] = Field(min_length=2, max_length=256, description="of the grey levels, black first, in even steps")
    prompts: tuple[Text, ...] = Field(min_length=1, max_length=10_000, description="all that can be asked for")


class HeldOut(Part):
    """A text that the bits per byte are of."""

    name: str = Field(description="of its file or folder")
    documents: Count
    size_bytes: Count
    sha256: Sha256 = Field(description="of the documents, one after the other")


class Decoder(Part):
    """What only a decoder has."""

    states: tuple[StateTensor, ...] = Field(min_length=1)
    takes_positions: bool = Field(description="the graph has the input `positions`")
    n_positions: Size | None = Field(None, description="tokens of a sequence that the graph has positions for; any number if None")
    bos_token_id: TokenId | None = Field(None, description="put before every prompt by the tokenizer's own template, if at all")
    eos_token_ids: tuple[TokenId, ...] = ()
    chat_template: FileName | None = Field(None, description="a Jinja file of the bundle")
    exact: bool = Field(description="prompt, chunks and single steps, alone and in a batch, gave the same bits when exported")
    parameters: Count | None = Field(None, description="trained numbers of the checkpoint, tied ones counted once")
    bits_per_byte: float | None = Field(None, description="of the held-out text, as this graph predicts it; of the golden passages if None")
    fp32_bits_per_byte: float | None = Field(None, description="the same of the fp32 graph")
    held_out: HeldOut | None = None
    image: Image | None = Field(None, description="what it draws, where its tokens are pixels")

    @property
    def state_bytes(self) -> int:
        """What one sequence takes, however long it is."""
        sizes = {"float32": 4, "int64": 8}
        return sum(math.prod(state.shape) * sizes[state.dtype] for state in self.states)


class AttentionLayer(Part):
    """One layer of the attention graph."""

    attention: str = Field(description="of which kind")
    heads: Size
    effective: bool = Field(description="the layer forms no such matrix: it is how much of each token's value is in each token's answer")


class AttentionGraph(Part):
    """A second graph, for looking: what every layer attends to. Opened when somebody asks."""

    file: FileName
    layers: tuple[AttentionLayer, ...] = Field(min_length=1)
    max_tokens: int = Field(ge=1, le=LONGEST_ATTENTION, description="longest text it takes")
    max_abs_error: float = Field(description="largest difference of a weight from the torch model's")


class EncoderDecoder(Part):
    """What only an encoder-decoder has. `Manifest.graph` is its step graph, `Limits.max_tokens` its longest source."""

    reader: Graph = Field(description="reads a source once; its outputs are the memory and the first state of the step graph")
    begin_token_id: TokenId = Field(description="the token before the first one that is written")
    end_token_id: TokenId = Field(description="ends what is written")
    max_output: Size = Field(description="tokens that are written at most, the end included")
    parameters: Count = Field(description="trained numbers of the checkpoint")


class Manifest(Part):
    """The whole description of a bundle; see the module docstring for the files beside it."""

    format: Literal["attnserve.bundle/1"] = FORMAT
    name: str = Field(pattern=NAME, max_length=256)
    kind: Kind
    precision: Precision
    files: tuple[File, ...]
    graph: Graph
    limits: Limits
    source: Source
    parity: Parity
    trials: tuple[Trial, ...] = ()
    decoder: Decoder | None = None
    encoder_decoder: EncoderDecoder | None = None
    attention_graph: AttentionGraph | None = None
    pooling: str | None = None
    normalized: bool = Field(False, description="the checkpoint's own pipeline ends in a normalisation")
    width: Size = Field(description="D of an embedding, L of a classifier's logits, D_model of a decoder")
    pad_token_id: TokenId = 0
    prompts: Annotated[dict[Annotated[str, Field(max_length=256)], Text], Field(max_length=1_000)] = {}
    default_prompt: str | None = None
    id2label: dict[int, Annotated[str, Field(max_length=1_000)]] = {}
    score_activation: Literal["sigmoid", "softmax", "identity"] = "identity"
    created: Moment = Field(description="UTC, ISO 8601")
    tool: str = Field(description="attnserve and library versions that wrote the bundle")

    @property
    def traits(self) -> Traits:
        """What follows from the kind."""
        return KINDS[self.kind]

    @property
    def created_s(self) -> int:
        """The same in seconds since 1970."""
        return int(datetime.fromisoformat(self.created).timestamp())

    @property
    def fingerprint(self) -> str:
        """64 hex digits that change when any byte of the bundle changes."""
        return hashlib.sha256(self.model_dump_json(exclude=self._absent).encode()).hexdigest()

    @property
    def _absent(self) -> dict[str, Any]:
        """A part that came later and that this bundle does not have is not among its words, or older bundles would seem changed."""
        absent: dict[str, Any] = {name: True for name in ("decoder", "encoder_decoder", "attention_graph") if getattr(self, name) is None}
        if self.decoder is not None:
            absent["decoder"] = {name for name in ("image", "held_out", "n_positions") if getattr(self.decoder, name) is None}
        return absent


MOST_GOLDEN = 1_000  # texts; every start runs them
MOST_CONTINUED = 1_000  # tokens after a text, each a step of the decoder
Tokens = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=100_000)]


def _same_lengths(**lists: tuple[Any, ...]) -> None:
    if len(set(map(len, lists.values()))) > 1:
        raise ValueError(" and ".join(f"{name} has {len(each)}" for name, each in lists.items()) + " entries, and they must have as many")


class Golden(Part):
    """Inputs with the fp32 torch model's outputs, so that a server can prove itself on start.

    `outputs` holds one row an input: the unit vector of an encoder, the logits of a classifier (first row of a pair is `texts`, second
    `pairs`); token classifiers keep the logits of the first token.
    """

    texts: tuple[Text, ...] = Field(min_length=1, max_length=MOST_GOLDEN)
    pairs: tuple[Text, ...] | None = None
    outputs: tuple[tuple[float, ...], ...]
    min_cosine: float | None = Field(None, ge=0.5, le=1, description="encoder: a server whose row falls below this cosine must not start")
    max_abs_error: float | None = Field(None, ge=0, le=1000, description="classifiers: the same for the largest difference of a logit")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _same_lengths(texts=self.texts, outputs=self.outputs, **({} if self.pairs is None else {"pairs": self.pairs}))
        if self.min_cosine is None and self.max_abs_error is None:
            raise ValueError("one of min_cosine and max_abs_error is needed")
        if len(widths := {len(row) for row in self.outputs}) > 1:
            raise ValueError(f"outputs has rows of {min(widths)} to {max(widths)} numbers, and they must be of one width")
        return self


class DecoderGolden(Part):
    """Prompts with the fp32 torch model's answers, so that a server can prove itself on start.

    Logits must be as near as `max_abs_error`. On another kind of processor the last bits differ, and with them a choice between two tokens
    that are nearly as likely: so a token of a continuation must, given all before it, have a logit within `max_abs_error` of the largest.
    """

    prompts: tuple[Text, ...] = Field(min_length=1, max_length=MOST_GOLDEN)
    token_ids: tuple[Tokens, ...] = Field(description="of each prompt, as the bundle's tokenizer gives them")
    continuations: tuple[Annotated[tuple[TokenId, ...], Field(max_length=MOST_CONTINUED)], ...] = Field(
        description="the likeliest tokens after each prompt, one after the other"
    )
    top_token_ids: tuple[Tokens, ...] = Field(description="the likeliest after each prompt, the first of them first")
    top_logits: tuple[tuple[float, ...], ...] = Field(description="of these tokens")
    max_abs_error: float = Field(ge=0, le=1000, description="a server with a logit further off must not start")

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


class EncoderDecoderGolden(Part):
    """Sources with what the torch model writes for each, likeliest token by likeliest token, and its logits on the way.

    A server feeds the same tokens and must give logits as near as `max_abs_error`.
    """

    texts: tuple[Text, ...] = Field(min_length=1, max_length=MOST_GOLDEN)
    token_ids: tuple[Tokens, ...] = Field(description="of each text, as the bundle's tokenizer gives them")
    outputs: tuple[Tokens, ...] = Field(description="tokens up to and with the end, or as many as fit")
    logits: tuple[tuple[tuple[float, ...], ...], ...] = Field(description="[text][step]: of `top_token_ids` there")
    top_token_ids: tuple[tuple[Tokens, ...], ...] = Field(description="[text][step]: the likeliest, the one written first")
    max_abs_error: float = Field(ge=0, le=1000, description="a server with a logit further off must not start")

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
    """How a sentence goes on that says why there are no matrices to look at, and how to get them."""
    command = f"`attnserve export --checkpoint {manifest.source.checkpoint} --out BUNDLE --name {manifest.name} --maps`"
    return f"was exported without its attention graph, which gives what layers attend to: {command} adds it"


def verify(bundle: Path) -> Manifest:
    """The manifest of a bundle whose every byte is as exported. BundleError names the first file that is missing, unknown or differs."""
    manifest = read_manifest(bundle)
    for file in manifest.files:
        path = regular(bundle, file.name)
        if (size := path.stat().st_size) != file.size_bytes:
            raise BundleError(f"{path} has {size} bytes where the manifest says {file.size_bytes}. Export the bundle again.")
        if (digest := sha256(path)) != file.sha256:
            raise BundleError(
                f"{path} was changed after export: sha256 {digest[:12]}…, expected {file.sha256[:12]}…. Export the bundle again."
            )
    # A graph can name any file beside it as its weights.
    if unknown := sorted(set(os.listdir(bundle)) - {file.name for file in manifest.files} - {MANIFEST}):
        raise BundleError(f"{bundle} has {unknown[0]!r}, which its manifest does not list: take it out, or export the bundle again.")
    return manifest


def regular(bundle: Path, name: str, *, most_bytes: int | None = None) -> Path:
    """The path of a file of the bundle. BundleError for one that is missing, too large, no regular file, or elsewhere behind a link."""
    path = bundle / name
    try:
        found = path.resolve(strict=True)
        about = found.stat()
        if not found.is_relative_to(bundle.resolve(strict=True)):
            raise BundleError(f"{path} is a link out of the bundle, which is not followed. Copy the bundle with its files.")
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{path} is missing. Export the bundle again.") from None
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, a name too long
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from None
    if not stat.S_ISREG(about.st_mode):
        raise BundleError(f"{path} is no regular file. Export the bundle again.")
    if most_bytes is not None and about.st_size > most_bytes:
        raise BundleError(f"{path} has {about.st_size} bytes, and {most_bytes} are the most. Export the bundle again.")
    return path


def read_text(bundle: Path, name: str, *, most_bytes: int = MOST_JSON_BYTES) -> str:
    """Of a file of the bundle. BundleError as `regular`, and for what is no UTF-8."""
    path = regular(bundle, name, most_bytes=most_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from error


def read_manifest(bundle: Path) -> Manifest:
    """The manifest, the files it names not yet looked at. BundleError when it is missing, does not parse, was changed or contradicts
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
    """What a manifest says in one place and denies in another: each would be a bundle that starts and then cannot answer."""
    decoder, traits = manifest.decoder, manifest.traits
    for name, part in (("decoder", decoder), ("encoder_decoder", manifest.encoder_decoder)):
        if (part is not None) != (traits.part == name):
            yield f"kind is {manifest.kind} and `{name}` is {'absent' if part is None else 'there'}"
            return
    yield from _contradictions_of_files(manifest)
    yield from _contradictions_of_tokens(manifest)
    wanted_inputs, wanted_outputs = _interface(manifest)
    for way, found, wanted in (("inputs", manifest.graph.inputs, wanted_inputs), ("outputs", manifest.graph.outputs, wanted_outputs)):
        if found != wanted:
            yield f"the graph of this kind has the {way} {_shapes(wanted)}, and graph.{way} are {_shapes(found)}"
    labels = manifest.id2label
    if traits.has_labels and (len(labels) != manifest.width or set(labels) != set(range(len(labels)))):
        yield f"width is {manifest.width} and id2label names {len(labels)} labels, where each of 0 to {manifest.width - 1} needs one"
    if traits.ranks and manifest.width != 1:
        yield f"a {manifest.kind} has one label, and width is {manifest.width}"
    if manifest.default_prompt is not None and manifest.default_prompt not in manifest.prompts:
        yield f"default_prompt={manifest.default_prompt!r:.80} is not one of the prompts"
    if decoder is not None and decoder.state_bytes > MOST_STATE_BYTES:
        yield f"a sequence has a state of {decoder.state_bytes} bytes, and {MOST_STATE_BYTES} are the most"


def _contradictions_of_files(manifest: Manifest) -> Iterator[str]:
    decoder, both, maps = manifest.decoder, manifest.encoder_decoder, manifest.attention_graph
    names = [file.name for file in manifest.files]
    needed = [manifest.graph.file, TOKENIZER, GOLDEN]
    needed += [both.reader.file] if both is not None else []
    needed += [maps.file] if maps is not None else []
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


def _interface(manifest: Manifest) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The inputs and outputs of the served graph, by the kind; of the step graph of an encoder-decoder, by its reader."""
    decoder, both, width = manifest.decoder, manifest.encoder_decoder, manifest.width
    inputs: list[Tensor]
    if decoder is not None:
        axes: dict[str, tuple[str, ...]] = {TOKENS: ("B", "N"), LENGTHS: ("B",), POSITIONS: ("B",), WANTED: ("B", "M")}
        inputs = [_int64(name, *shape) for name, shape in axes.items() if name != POSITIONS or decoder.takes_positions]
        inputs += [Tensor(name=state.name, dtype=state.dtype, shape=("B", *state.shape)) for state in decoder.states]
        new = [Tensor(name=state.output, dtype=state.dtype, shape=("B", *state.shape)) for state in decoder.states]
        return tuple(inputs), (_float32(STEP_LOGITS, "B", "M", manifest.limits.vocab_size), *new)
    if both is not None:
        made = both.reader.outputs
        states = [tensor for tensor in made if not tensor.name.startswith("memory_")]
        new = [tensor.model_copy(update={"name": f"new_{tensor.name}"}) for tensor in states]
        logits, attention = _float32(STEP_LOGITS, "B", manifest.limits.vocab_size), _float32(ATTENTION, "B", "N")
        return (_int64(PREVIOUS, "B"), _int64(ATTENTION_MASK, "B", "N"), *made), (logits, attention, *new)
    typed = any(tensor.name == TOKEN_TYPE_IDS for tensor in manifest.graph.inputs)
    inputs = [_int64(name, "B", "N") for name in (INPUT_IDS, ATTENTION_MASK, *([TOKEN_TYPE_IDS] if typed else []))]
    if manifest.traits.output == LOGITS:
        per_token = ("N",) if manifest.traits.per_token else ()
        return tuple(inputs), (_float32(LOGITS, "B", *per_token, width),)
    d_model = next((tensor.shape[-1] for tensor in manifest.graph.outputs[2:] if tensor.shape), "D")
    vectors = _float32(EMBEDDING, "B", width), _float32(POOLED, "B", width)
    return tuple(inputs), (*vectors, _float32(TOKEN_EMBEDDINGS, "B", "N", d_model))


def _int64(name: str, *shape: str | int) -> Tensor:
    return Tensor(name=name, dtype="int64", shape=shape)


def _float32(name: str, *shape: str | int) -> Tensor:
    return Tensor(name=name, dtype="float32", shape=shape)


def _shapes(tensors: tuple[Tensor, ...]) -> str:
    told = [f"{tensor.name} ({', '.join(map(str, tensor.shape))})" for tensor in tensors[:6]]
    return ", ".join(told)[:300] + (", .." if len(tensors) > 6 else "") or "none"


def _printable(text: str) -> str:
    """In one line, with control characters escaped, since the author of a bundle chooses the names in its manifest."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _sentence(error: ValidationError) -> str:
    """The first field at fault, and what is wrong with it."""
    first = error.errors()[0]
    field = _printable(".".join(map(str, first["loc"]))) or "the whole"
    if first["type"] == "missing":
        return f"{field} is missing"
    return f"{field}={reprlib.repr(first['input'])} is not accepted: {first['msg']}"


def dump(manifest: Manifest) -> str:
    """The one text form of a manifest, fingerprint first, so that the file can be compared byte for byte."""
    return (
        json.dumps(
            {"fingerprint": manifest.fingerprint, **manifest.model_dump(mode="json", exclude=manifest._absent)},
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


def read_golden(bundle: Path) -> Golden:
    return _golden(bundle, Golden)


def read_decoder_golden(bundle: Path) -> DecoderGolden:
    return _golden(bundle, DecoderGolden)


def read_encoder_decoder_golden(bundle: Path) -> EncoderDecoderGolden:
    return _golden(bundle, EncoderDecoderGolden)


G = TypeVar("G", bound=Part)


def _golden(bundle: Path, kind: type[G]) -> G:
    """BundleError for what does not parse, is empty or does not fit together."""
    try:
        return kind.model_validate_json(read_text(bundle, GOLDEN))
    except ValidationError as error:
        raise BundleError(f"{bundle / GOLDEN} cannot be read: {_sentence(error)}. Export the bundle again.") from error


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
