"""Request bodies, answers and errors of the text-embeddings-inference (TEI) dialect.

As in TEI, types are strict (`"true"` is no boolean and `5.0` no integer) and unknown keys are ignored. The field `model` is not
in TEI, which serves only one model. Class names begin with Tei because the schemas of all dialects are in one OpenAPI
document, where names must differ.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from service.http.fields import EMPTY, Body, Unsupported, unsupported_fields
from service.http.routing import Many

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Inputs = str | Many[TokenId] | Many[str | Many[TokenId]]
Sequence = Annotated[list[str], Field(min_length=1, max_length=2)]
ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class TeiRequest(Body, strict=True):
    model: str | None = Field(None, max_length=256, description="Name or alias of a served model. Default: the first of a suitable kind.")


class TeiTruncation(Body, strict=True):
    truncate: bool | None = Field(default=None, description="Truncate inputs that are too long. Default: the setting `auto_truncate`.")
    truncation_direction: Literal["Left", "Right", "left", "right"] = Field(default="Right", description="The end that loses tokens.")


PromptName = Annotated[
    str | None, Field(max_length=256, description="The name of a prompt of the checkpoint, which is put before each text.")
]
_OPTIONS = frozenset(("options",))
_TEI = unsupported_fields("stream parameters")
_FLOATS: Unsupported = unsupported_fields(encoding_format=(EMPTY, "float"))
# Parameters of huggingface_hub's tasks with labels that no model here has.
LABELS = unsupported_fields("candidate_labels hypothesis_template multi_label aggregation_strategy ignore_labels stride")
RawScores = Annotated[bool, Field(description="Logits instead of scores.")]


class TeiEmbedAllRequest(TeiRequest, TeiTruncation):
    ignored = _OPTIONS
    unsupported = unsupported_fields(_TEI, _FLOATS, "normalize dimensions")

    inputs: Inputs = Field(
        description="A text, one text as token ids (special tokens included), or a list of texts and token id lists.",
        examples=["What is Deep Learning?"],
    )
    prompt_name: PromptName = None


class TeiEmbedRequest(TeiEmbedAllRequest):
    unsupported = unsupported_fields(_TEI, _FLOATS)

    normalize: bool = Field(True, description="False: the pooled vector, without normalisation.")
    dimensions: int | None = Field(None, ge=1, le=65_536, description="Keep this many dimensions, then renormalise.")


class TeiRerankRequest(TeiRequest, TeiTruncation):
    ignored = _OPTIONS
    unsupported = _TEI

    query: str
    texts: Many[str] = Field(min_length=1)
    raw_scores: RawScores = False
    return_text: bool = False
    top_n: int | None = Field(None, ge=0, lt=2**31, description="Send only this many of the best. Default, and with 0: all.")


class PipelineParameters(Body, strict=True):
    """The field `parameters` of a body, as huggingface_hub's pipelines send it."""

    unsupported = unsupported_fields(LABELS, "max_length", truncation=(True,))

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: int | None = Field(None, ge=1, le=1_000_000, description="Send only this many of the best labels.")


class TeiPredictRequest(TeiRequest, TeiTruncation):
    ignored = _OPTIONS
    unsupported = unsupported_fields("stream")

    inputs: str | Sequence | Annotated[Many[Sequence], Field(min_length=1)] = Field(
        description="A text, a pair `[a, b]`, or a batch `[[a], [a, b], ...]`. A bare list of two texts is a pair, not a batch.",
        examples=["What is Deep Learning?"],
    )
    raw_scores: RawScores = False
    parameters: PipelineParameters | None = Field(
        None, description="Sent by huggingface_hub's InferenceClient. The answer is then a list of lists, also for a single text."
    )


class SimilarityInputs(Body, strict=True):
    source_sentence: str
    sentences: Many[str] = Field(min_length=1)


class SimilarityParameters(TeiTruncation):
    prompt_name: PromptName = None


class TeiSimilarityRequest(TeiRequest):
    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None


class TeiTokenizeRequest(TeiRequest):
    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: PromptName = None


class TeiDecodeRequest(TeiRequest):
    ids: list[TokenId] | list[list[TokenId]]
    skip_special_tokens: bool = True


# Answers -------------------------------------------------------------------------------------------------------------------------------


class TeiRank(BaseModel):
    index: int
    score: float
    text: str | None = Field(None, description="Only if `return_text` is true.")


class TeiWeight(BaseModel):
    index: int
    value: float


class TeiPrediction(BaseModel):
    score: float
    label: str


class TeiToken(BaseModel):
    id: int
    text: str
    special: bool
    start: int | None = Field(
        description="The first byte of the token in the UTF-8 of prompt and text; null if the tokenizer added the token."
    )
    stop: int | None = Field(description="The byte after the last one.")


class TeiError(BaseModel):
    error: str
    error_type: ErrorType


ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": TeiError} for status in (400, 401, 404, 413, 422, 424, 429, 500, 503, 504)}
