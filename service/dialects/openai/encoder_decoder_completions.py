"""The route `/v1/completions` for an encoder-decoder: the prompt is the source text, and the generated text is the completion.

The completion is the most likely output. It is found greedily or, with `num_beams` or `n`, by a beam search that ranks outputs
by the mean log-probability of their tokens. The `n` best outputs of the beam are returned. `logprobs` adds the log-probabilities
of each token and of the likeliest tokens in its position. `attention` adds the attention weights from output tokens to source
tokens. All other fields that would change the output are errors.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from service.call import Call
from service.catalog import Catalog
from service.dialects import generation
from service.dialects.answer_size import AnswerSize, check_size
from service.dialects.openai.completion_logprobs import Columns, CompletionChunks
from service.dialects.openai.completion_schemas import CompletionRequest
from service.dialects.resuming import AnswerStart
from service.encoder_decoder.request import EncoderDecoderRequest
from service.errors import BatchTooLarge, InvalidRequest
from service.generation.model import Generator
from service.generation.request import Attention, Delta, Sampling
from service.generation.run import Run
from service.generation.runs import Runs
from service.http import sse
from service.http.answers import Elements, json_answer
from service.runtime.lanes import Lane
from service.settings import Settings

MOST_WEIGHTS = 2**20  # maximum number of attention weights in an answer
_TAKEN = {"model", "prompt", "max_tokens", "n", "num_beams", "stream", "stream_options", "user", "seed", "skip_special_tokens"}
_TAKEN |= {"logprobs", "attention"}  # these two fields add details and do not change the output


async def complete(
    body: CompletionRequest, prompts: Sequence[list[int]], model: Generator, call: Call, catalog: Catalog, *, most_runs: int
) -> Any:
    """Return the whole answer or a stream. All outputs of a beam search are sent together, at the end of the search.

    `most_runs` is the maximum number of choices, for all prompts together.
    """
    _check(body, model)
    if len(prompts) * body.n > most_runs:
        raise BatchTooLarge(f"{len(prompts)} prompts with n={body.n} are more than {most_runs} completions: send them in parts", param="n")
    asked = [
        EncoderDecoderRequest(
            prompt=tuple(prompt),
            sampling=Sampling(seed=0, temperature=0.0),
            max_tokens=body.max_tokens,
            n=body.n,
            beams=body.num_beams or body.n,
            attention=body.attention,
            top_logprobs=body.logprobs,
            skip_special_tokens=body.skip_special_tokens,
            lane=Lane.INTERACTIVE if call.lane is None else call.lane,
            deadline=call.deadline,
            client=call.client,
        )
        for prompt in prompts
    ]
    if body.attention:
        both = model.manifest.encoder_decoder
        assert both is not None
        weights = sum(len(prompt) for prompt in prompts) * body.n * min(body.max_tokens, both.max_output)
        if weights > MOST_WEIGHTS:
            raise InvalidRequest(
                f"attention could have {weights} weights and the most is {MOST_WEIGHTS}: send fewer prompts", param="attention"
            )
    _check_size(body, sum(map(len, prompts)), model, catalog.settings, n=len(prompts) * body.n)
    runs = await Runs.submit(model, asked, call, n=body.n, prompt_field="prompt", stream=body.stream)
    answer = _BeamAnswer(body, model, runs, AnswerStart.new("cmpl-", None, len(prompts)))
    if body.stream:
        return await sse.stream(runs, answer, call, catalog.settings)
    choices = []
    for index, delta in enumerate(await runs.all()):
        choices.append(answer.choice(index, delta))
        await asyncio.sleep(0)
    return json_answer(answer.answer(choices), call.headers)


def _check_size(body: CompletionRequest, source_tokens: int, model: Generator, settings: Settings, *, n: int) -> None:
    """Raise NeverFits if the answer could exceed `max_answer_bytes`. Attention weights have a separate limit."""
    both = model.manifest.encoder_decoder
    assert both is not None
    size, tokens = AnswerSize(model.vocabulary), min(body.max_tokens, both.max_output)
    each = size.text(tokens) + size.completion_logprobs(tokens, body.logprobs)
    if body.attention:
        each += size.text(tokens) + -(-size.text(source_tokens * body.n) // n)
    check_size(each, n, settings, fields={"max_tokens": True, "n": body.n > 1}, streamable=False)


def _check(body: CompletionRequest, model: Generator) -> None:
    """Raise InvalidRequest if the request asks for too many outputs, or sets a field that has no effect on an encoder-decoder (such as the
    sampling fields, since the service searches for the most likely text and does not sample)."""
    for name in sorted(body.model_fields_set - _TAKEN):
        value, default = getattr(body, name), type(body).model_fields[name].default
        if value != default and not (name == "temperature" and value == 0):  # the API's defaults are accepted
            raise InvalidRequest(f"{name} has no effect on model {model.name}, which writes the likeliest text: leave it out", param=name)
    if body.max_tokens == 0:
        raise InvalidRequest("max_tokens=0: there would be nothing to answer", param="max_tokens")
    if body.num_beams is not None and body.n > body.num_beams:
        raise InvalidRequest(f"n={body.n} is more than num_beams={body.num_beams}: a beam has no more outputs", param="n")
    if body.n > (most := 8):
        raise InvalidRequest(f"n={body.n} and the most is {most} outputs of a beam", param="n")
    generation.check_streaming(body.stream, body.stream_options)


class _BeamAnswer(CompletionChunks):
    """Builds the answer of an encoder-decoder, as a whole or as a stream, with attention weights if requested."""

    def choice(self, index: int, delta: Delta, columns: Columns | None = None) -> dict[str, Any]:
        """Return the JSON that a delta adds to a choice. With the last delta, it includes the attention weights."""
        choice = super().choice(index, delta, columns)
        if self.body.attention and delta.finish_reason is not None:
            choice["attention"] = self._matrix(self.runs.runs[index])
        return choice

    def _matrix(self, run: Run) -> dict[str, Any]:
        prompt = run.request.prompt
        # A run that has no token at the request's deadline has no weights.
        attention = run.attention or Attention((), np.zeros((0, len(prompt)), np.float32))
        weights = Elements()
        for row in attention.weights.astype(np.float64).round(4):
            weights.add(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
        return {
            "source": [generation.token_text(token, self.model) for token in prompt],
            "tokens": [generation.token_text(token, self.model) for token in attention.token_ids],
            "weights": weights,
        }
