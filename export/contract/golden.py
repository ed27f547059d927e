"""The content of golden.json: inputs with torch's outputs, which a server computes again at start."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from export.contract.tensors import ManifestPart, Text, TokenId

MOST_GOLDEN = 1_000  # largest number of golden texts; limited because every start of a server computes them all
MOST_GOLDEN_WEIGHTS = 1_024  # of a golden sparse vector; of more, the largest are kept
MOST_CONTINUED = 1_000  # largest number of golden tokens after a prompt; every start of a server computes a step for each
Tokens = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=100_000)]


def _same_lengths(**lists: tuple[Any, ...]) -> None:
    if len(set(map(len, lists.values()))) > 1:
        raise ValueError(" and ".join(f"{name} has {len(each)}" for name, each in lists.items()) + " entries; they must have equally many")


class GoldenSparse(ManifestPart):
    """A sparse vector."""

    indices: tuple[TokenId, ...] = Field(max_length=MOST_GOLDEN_WEIGHTS)
    weights: tuple[float, ...]
    cut: bool = Field(default=False, description="it has more weights, all smaller")


class Golden(ManifestPart):
    """Inputs with the fp32 torch model's outputs, which a server compares with its own at start. `outputs` has one row per input: the unit
    vector of an encoder, or the logits of a classifier (of the first token in a token classifier). It is empty for an encoder without a
    vector of a text. `pairs`: the second texts. `sparse`: the sparse vector of each text. `matrices`: of the first texts, the vectors of
    all tokens.
    """

    texts: tuple[Text, ...] = Field(min_length=1, max_length=MOST_GOLDEN)
    pairs: tuple[Text, ...] | None = None
    outputs: tuple[tuple[float, ...], ...]
    sparse: tuple[GoldenSparse, ...] | None = None
    matrices: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    min_cosine: float | None = Field(
        None, ge=0.5, le=1, description="encoders: a server does not start if a cosine is lower, of a text's vectors or of a token's"
    )
    max_abs_error: float | None = Field(None, ge=0, le=1000, description="others: a server does not start if a logit differs by more")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        given = {"pairs": self.pairs, "sparse": self.sparse, "outputs": self.outputs or None}
        _same_lengths(texts=self.texts, **{name: rows for name, rows in given.items() if rows is not None})
        for row in self.sparse or ():
            _same_lengths(indices=row.indices, weights=row.weights)
        if self.min_cosine is None and self.max_abs_error is None:
            raise ValueError("one of min_cosine and max_abs_error is needed")
        if len(widths := {len(row) for row in self.outputs}) > 1:
            raise ValueError(f"outputs has rows of {min(widths)} to {max(widths)} numbers, but they must have one width")
        return self


class DecoderGolden(ManifestPart):
    """Prompts with the fp32 torch model's logits and continuations, which a server checks at start: logits within `max_abs_error`, and each
    token of a continuation, given all before it, with a logit within `max_abs_error` of the largest.
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
    """Source texts with the torch model's greedy outputs and their logits, which a server checks at start by feeding the same output
    tokens.
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
