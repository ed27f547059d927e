"""The kinds of models, upper limits of what a manifest may say, and the tensors of graphs and states."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from export.contract.names import EMBEDDING, LOGITS
from service.errors import AttnserveError

Kind = Literal["encoder", "reranker", "classifier", "token_classifier", "decoder", "encoder_decoder"]
Pool = Literal["encoder", "generator"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# The name has no slash, so that it cannot refer to a file outside the bundle.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=255)]

# Upper limits, larger than any real model, so that a damaged or malicious bundle cannot cause huge allocations.
MOST_JSON_BYTES = 16 * 2**20  # limit for each of manifest.json and golden.json
MOST_TOKENIZER_BYTES = 64 * 2**20
MOST_TEMPLATE_BYTES = 2**20
MOST_STATE_BYTES = 2**30  # largest state of one sequence, in bytes
SLOT_BLOCK = 64  # a graph adds the values of slots up in blocks of this many, so that the number of slots changes no bit
SLOTS_BY = 256  # a graph takes multiples of this many slots, and fewer ones in multiples of its block
SLOTS = "S"  # the axis of slots in a graph; "S512" for tensors that have at most 512 where others have more
MOST_PIXELS = 1024  # largest width or height of an image
Size = Annotated[int, Field(ge=1, le=2**24)]  # e.g. of a vocabulary, a width, a length
Count = Annotated[int, Field(ge=0, le=2**62)]  # e.g. of parameters, bytes, documents
TokenId = Annotated[int, Field(ge=0, lt=2**24)]
Text = Annotated[str, Field(max_length=100_000)]


@dataclass(frozen=True)
class Traits:
    """The properties that a kind of model has; `KINDS` contains them for each kind."""

    pool: Pool  # the pool of replicas that runs this kind in the deployment profile split
    texts: tuple[int, ...] = ()  # allowed numbers of texts per input; () if the model generates text
    output: str = LOGITS  # the graph output that is returned by default
    gives_vectors: bool = False  # the manifest says which vectors it gives; the others give labels or text
    per_token: bool = False  # the output has a row for each token of an input
    has_labels: bool = False  # `Manifest.id2label` names the columns of the output
    ranks: bool = False  # the output is one score, which says how well a document matches a query
    golden_bound: Literal["min_cosine", "max_abs_error"] = "max_abs_error"  # the field of `Golden` whose limit a server checks at start
    part: Literal["decoder", "encoder_decoder"] | None = None  # the manifest field that only this kind has
    uses_gpu: bool = True  # False: models of this kind run on the CPU even if the service has a GPU


KINDS: dict[Kind, Traits] = {
    "encoder": Traits("encoder", texts=(1,), output=EMBEDDING, gives_vectors=True, golden_bound="min_cosine"),
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
    counts = (*range(block, SLOTS_BY, block), *range(SLOTS_BY, most, SLOTS_BY), most)
    return tuple(sorted({count for count in counts if 0 < count <= most}))
