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
import reprlib
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
Precision = Literal["fp32", "fp16", "int8"]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"  # of a model, as clients send it
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # one directory, no way out of it


def attention_output(layer: int) -> str:
    """The name of a layer's matrix in the attention graph; layers count from 0."""
    return f"attention_{layer}"


class BundleError(ValueError):
    """A bundle that must not be served: the message names the file and what is wrong with it."""


class Part(BaseModel):
    """Base of every piece of the manifest: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tensor(Part):
    """A graph input or output. A dynamic axis carries its letter ("B", "N"), a fixed one its size."""

    name: str
    dtype: Literal["int64", "float32"]
    shape: tuple[str | int, ...]


class File(Part):
    name: FileName
    sha256: Sha256
    size_bytes: int = Field(ge=0)


class Graph(Part):
    """The ONNX graph: its file, what goes in and out, and which operators it is made of."""

    file: FileName
    opset: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    operators: dict[str, int]
    optimisation: str = Field(description="what was done to the graph after export, in words")


class Limits(Part):
    max_tokens: int = Field(ge=1, description="longest input in tokens, special tokens included")
    vocab_size: int = Field(ge=1)


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
    size_bytes: int
    texts_per_s: float = Field(description="16-token texts a second of one core's time on the exporting machine, in batches of 8")
    baseline_texts_per_s: float = Field(description="the same of the fp32 graph")
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
    shape: tuple[int, ...] = Field(description="of one sequence; the graph's tensor has B in front")
    dtype: Literal["float32", "int64"] = "float32"

    @property
    def output(self) -> str:
        return f"new_{self.name}"


class Image(Part):
    """What a decoder of pixels draws: `width * height` tokens after a prompt, row by row from the upper left, each a grey level."""

    width: int = Field(ge=1)
    height: int = Field(ge=1)
    level_token_ids: tuple[int, ...] = Field(min_length=2, max_length=256, description="of the grey levels, black first, in even steps")
    prompts: tuple[str, ...] = Field(min_length=1, description="all that can be asked for")


class HeldOut(Part):
    """A text that the bits per byte are of."""

    name: str = Field(description="of its file or folder")
    documents: int = Field(ge=1)
    size_bytes: int = Field(ge=1)
    sha256: Sha256 = Field(description="of the documents, one after the other")


class Decoder(Part):
    """What only a decoder has."""

    states: tuple[StateTensor, ...]
    takes_positions: bool = Field(description="the graph has the input `positions`")
    n_positions: int | None = Field(None, ge=1, description="tokens of a sequence that the graph has positions for; any number if None")
    bos_token_id: int | None = Field(None, description="put before every prompt by the tokenizer's own template, if at all")
    eos_token_ids: tuple[int, ...] = ()
    chat_template: FileName | None = Field(None, description="a Jinja file of the bundle")
    exact: bool = Field(description="prompt, chunks and single steps, alone and in a batch, gave the same bits when exported")
    parameters: int | None = Field(None, description="trained numbers of the checkpoint, tied ones counted once")
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
    heads: int = Field(ge=1)
    effective: bool = Field(description="the layer forms no such matrix: it is how much of each token's value is in each token's answer")


class AttentionGraph(Part):
    """A second graph, for looking: what every layer attends to. Opened when somebody asks."""

    file: FileName
    layers: tuple[AttentionLayer, ...]
    max_tokens: int = Field(ge=1, description="longest text it takes")
    max_abs_error: float = Field(description="largest difference of a weight from the torch model's")


class EncoderDecoder(Part):
    """What only an encoder-decoder has. `Manifest.graph` is its step graph, `Limits.max_tokens` its longest source."""

    reader: Graph = Field(description="reads a source once; its outputs are the memory and the first state of the step graph")
    begin_token_id: int = Field(ge=0, description="the token before the first one that is written")
    end_token_id: int = Field(ge=0, description="ends what is written")
    max_output: int = Field(ge=1, description="tokens that are written at most, the end included")
    parameters: int = Field(description="trained numbers of the checkpoint")


class Manifest(Part):
    """The whole description of a bundle; see the module docstring for the files beside it."""

    format: Literal["attnserve.bundle/1"] = FORMAT
    name: str = Field(pattern=NAME)
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
    width: int = Field(description="D of an embedding, L of a classifier's logits, D_model of a decoder")
    pad_token_id: int = 0
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    id2label: dict[int, str] = {}
    score_activation: Literal["sigmoid", "softmax", "identity"] = "identity"
    created: str = Field(description="UTC, ISO 8601")
    tool: str = Field(description="attnserve and library versions that wrote the bundle")

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


class Golden(Part):
    """Inputs with the fp32 torch model's outputs, so that a server can prove itself on start.

    `outputs` holds one row an input: the unit vector of an encoder, the logits of a classifier (first row of a pair is `texts`, second
    `pairs`); token classifiers keep the logits of the first token.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None = None
    outputs: tuple[tuple[float, ...], ...]
    min_cosine: float | None = Field(None, description="encoder: a server whose row falls below this cosine must not start")
    max_abs_error: float | None = Field(None, description="classifiers: the same for the largest difference of a logit")


class DecoderGolden(Part):
    """Prompts with the fp32 torch model's answers, so that a server can prove itself on start.

    Logits must be as near as `max_abs_error`. On another kind of processor the last bits differ, and with them a choice between two tokens
    that are nearly as likely: so a token of a continuation must, given all before it, have a logit within `max_abs_error` of the largest.
    """

    prompts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...] = Field(description="of each prompt, as the bundle's tokenizer gives them")
    continuations: tuple[tuple[int, ...], ...] = Field(description="the likeliest tokens after each prompt, one after the other")
    top_token_ids: tuple[tuple[int, ...], ...] = Field(description="the likeliest after each prompt, the first of them first")
    top_logits: tuple[tuple[float, ...], ...] = Field(description="of these tokens")
    max_abs_error: float = Field(description="a server with a logit further off must not start")


class EncoderDecoderGolden(Part):
    """Sources with what the torch model writes for each, likeliest token by likeliest token, and its logits on the way.

    A server feeds the same tokens and must give logits as near as `max_abs_error`.
    """

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...] = Field(description="of each text, as the bundle's tokenizer gives them")
    outputs: tuple[tuple[int, ...], ...] = Field(description="tokens up to and with the end, or as many as fit")
    logits: tuple[tuple[tuple[float, ...], ...], ...] = Field(description="[text][step]: of `top_token_ids` there")
    top_token_ids: tuple[tuple[tuple[int, ...], ...], ...] = Field(description="[text][step]: the likeliest, the one written first")
    max_abs_error: float = Field(description="a server with a logit further off must not start")


def no_attention_graph(manifest: Manifest) -> str:
    """How a sentence goes on that says why there are no matrices to look at, and how to get them."""
    command = f"`attnserve export --checkpoint {manifest.source.checkpoint} --out BUNDLE --name {manifest.name} --maps`"
    return f"was exported without its attention graph, which gives what layers attend to: {command} adds it"


def verify(bundle: Path) -> Manifest:
    """The manifest of a bundle whose every byte is as exported. BundleError names the first file that is missing or differs."""
    manifest = read_manifest(bundle)
    for file in manifest.files:
        path = bundle / file.name
        if not path.is_file():
            raise BundleError(f"{path} is missing. Export the bundle again.")
        if (size := path.stat().st_size) != file.size_bytes:
            raise BundleError(f"{path} has {size} bytes where the manifest says {file.size_bytes}. Export the bundle again.")
        if (digest := sha256(path)) != file.sha256:
            raise BundleError(
                f"{path} was changed after export: sha256 {digest[:12]}…, expected {file.sha256[:12]}…. Export the bundle again."
            )
    return manifest


def read_manifest(bundle: Path) -> Manifest:
    """The manifest, the files it names not yet looked at. BundleError when it is missing, does not parse or was changed."""
    path = bundle / MANIFEST
    if not path.is_file():
        raise BundleError(
            f"{bundle} is not a bundle: it has no {MANIFEST}. Make one with `attnserve export --checkpoint DIR --out {bundle}`."
        )
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if isinstance(content, dict):
            content.pop("fingerprint", None)
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise BundleError(f"{path} cannot be read: {_sentence(error)}. Export the bundle again.") from error
    except ValueError as error:
        raise BundleError(f"{path} cannot be read: {error}. Export the bundle again.") from error
    if text != dump(manifest):
        raise BundleError(f"{path} was changed after export: its text does not match its fingerprint. Export the bundle again.")
    return manifest


def _sentence(error: ValidationError) -> str:
    """The first field at fault, and what is wrong with it."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"])) or "the whole"
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
    return Golden.model_validate_json((bundle / GOLDEN).read_bytes())


def read_decoder_golden(bundle: Path) -> DecoderGolden:
    return DecoderGolden.model_validate_json((bundle / GOLDEN).read_bytes())


def read_encoder_decoder_golden(bundle: Path) -> EncoderDecoderGolden:
    return EncoderDecoderGolden.model_validate_json((bundle / GOLDEN).read_bytes())


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
