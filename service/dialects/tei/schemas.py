"""The wire of the text-embeddings-inference dialect: its bodies, its answers, its errors.

Types are strict, as that server's are: `"true"` is no boolean and `5.0` no integer. Unknown keys are ignored, as there. `model` is ours,
since it serves one model and we serve several. Names begin with Tei because the OpenAPI document has one namespace for all dialects.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.dialects import accepted
from service.http.fields import Body
from service.http.routing import Many

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Inputs = str | Many[TokenId] | Many[str | Many[TokenId]]
Sequence = Annotated[list[str], Field(min_length=1, max_length=2)]
ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class TeiRequest(Body):
    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, max_length=256, description="Name or alias of a served model; the first of the needed kind without it.")


class TeiTruncation(Body):
    model_config = ConfigDict(strict=True)

    truncate: bool | None = Field(default=None, description="Whether to cut an input that is too long; the service's setting without it.")
    truncation_direction: Literal["Left", "Right", "left", "right"] = Field(default="Right", description="The end that loses tokens.")


PromptName = Annotated[str | None, Field(max_length=256, description="A prompt of the checkpoint, put before each text.")]
RawScores = Annotated[bool, Field(description="Logits instead of scores.")]


class TeiEmbedAllRequest(TeiRequest, TeiTruncation):
    others = accepted.TEI_EMBED_ALL

    inputs: Inputs = Field(
        description="A text, one text as token ids (special tokens included), or a list of texts and token id lists.",
        examples=["What is Deep Learning?"],
    )
    prompt_name: PromptName = None


class TeiEmbedRequest(TeiEmbedAllRequest):
    others = accepted.TEI_EMBED

    normalize: bool = Field(True, description="False sends the vector as it was pooled.")
    dimensions: int | None = Field(None, ge=1, le=65_536, description="Keep this many dimensions, then bring the vector back to length 1.")


class TeiRerankRequest(TeiRequest, TeiTruncation):
    others = accepted.TEI_RERANK

    query: str
    texts: Many[str] = Field(min_length=1)
    raw_scores: RawScores = False
    return_text: bool = False


class PipelineParameters(Body):
    """What huggingface_hub sends beside the text, where its pipelines take it."""

    model_config = ConfigDict(strict=True)

    others = accepted.PIPELINE

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: int | None = Field(None, ge=1, le=1_000_000, description="The best labels alone.")


class TeiPredictRequest(TeiRequest, TeiTruncation):
    others = accepted.TEI_PREDICT

    inputs: str | Sequence | Annotated[Many[Sequence], Field(min_length=1)] = Field(
        description="A text, a pair `[a, b]`, or a batch `[[a], [a, b], ...]`. A bare list of two texts is a pair, not a batch.",
        examples=["What is Deep Learning?"],
    )
    raw_scores: RawScores = False
    parameters: PipelineParameters | None = Field(
        None, description="As huggingface_hub's InferenceClient sends them; the answer is then a list for each text, also for a single one."
    )


class SimilarityInputs(Body):
    model_config = ConfigDict(strict=True)

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
    text: str | None = Field(None, description="Only where `return_text` asked for it.")


class TeiPrediction(BaseModel):
    score: float
    label: str


class TeiToken(BaseModel):
    id: int
    text: str
    special: bool
    start: int | None = Field(description="First byte in the UTF-8 of prompt and text together; null where the tokenizer added the token.")
    stop: int | None = Field(description="The byte after the last.")


class TeiError(BaseModel):
    error: str
    error_type: ErrorType
