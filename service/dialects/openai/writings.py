"""`/v1/completions` of an encoder-decoder: the prompt is a source, and what is written from it is the completion.

The likeliest output, found greedily or, with `num_beams`, by a beam ranked by the mean log-probability of a token; `n` of the beam's
outputs, best first. `logprobs` asks for the log-probability of each token and of the likeliest in its place, `attention` for what it was
written from. All other fields that would change the output are refused.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from service.call import Call
from service.catalog import Catalog
from service.dialects import generation
from service.dialects.answer_size import AnswerSize, check_size
from service.dialects.openai.chunks import Chunks
from service.dialects.openai.completion_logprobs import Logprobs
from service.dialects.openai.completion_schemas import CompletionRequest
from service.errors import BatchTooLarge, InvalidRequest
from service.generation.request import Delta, Sampling
from service.generation.runs import Run, Runs
from service.http import sse
from service.http.answers import Elements, json_answer
from service.runtime.lanes import Lane
from service.seq2seq.model import WritingModel
from service.seq2seq.request import WritingRequest
from service.settings import Settings

MOST_WEIGHTS = 2**20  # numbers of all attention matrices of an answer
_TAKEN = {"model", "prompt", "max_tokens", "n", "num_beams", "stream", "stream_options", "user", "seed", "skip_special_tokens"}
_TAKEN |= {"logprobs", "attention"}  # these describe the same output in more detail


async def complete(
    body: CompletionRequest, prompts: Sequence[list[int]], model: WritingModel, call: Call, catalog: Catalog, *, most_runs: int
) -> Any:
    """The answer, or the stream of it. A beam's outputs come at its end, all at once."""
    _check(body, model)
    if len(prompts) * body.n > most_runs:
        raise BatchTooLarge(f"{len(prompts)} prompts with n={body.n} are more than {most_runs} completions: send them in parts", param="n")
    asked = [
        WritingRequest(
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
    answer = _BeamAnswer(body, model, runs)
    if body.stream:
        return await sse.stream(runs, answer, call, catalog.settings)
    choices = []
    for index, delta in enumerate(await runs.all()):
        choices.append(answer.choice(index, delta))
        await asyncio.sleep(0)
    return json_answer({**answer.head, "choices": choices, "usage": generation.usage_of(runs)}, call.headers)


def _check_size(body: CompletionRequest, source_tokens: int, model: WritingModel, settings: Settings, *, n: int) -> None:
    """Check the size of the answer. Attention has a limit of its own."""
    both = model.manifest.encoder_decoder
    assert both is not None
    size, tokens = AnswerSize(model.vocabulary), min(body.max_tokens, both.max_output)
    each = size.text(tokens) + size.completion_logprobs(tokens, body.logprobs)
    if body.attention:
        each += size.text(tokens) + -(-size.text(source_tokens * body.n) // n)
    check_size(each, n, settings, fields="max_tokens, n" if body.n > 1 else "max_tokens", streamable=False)


def _check(body: CompletionRequest, model: WritingModel) -> None:
    """Check that the request asks for no sampling: beam search returns the most likely text."""
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


class _BeamAnswer(Chunks):
    """Choices from deltas; also the script of the stream."""

    def __init__(self, body: CompletionRequest, model: WritingModel, runs: Runs) -> None:
        self._body = body
        self._logprobs = [Logprobs(model, skip_special_tokens=body.skip_special_tokens) for _ in runs.runs]
        super().__init__(model, runs, body.stream_options, id_prefix="cmpl-", object_="text_completion")

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """What this delta adds; with the last one comes the attention."""
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": None if self._body.logprobs is None else self._logprobs[index].columns(delta.logprobs).json(),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._body.attention and delta.finish_reason is not None:
            choice["attention"] = self._matrix(self.runs.runs[index])
        return choice

    def _matrix(self, run: Run) -> dict[str, Any]:
        assert run.attention is not None
        return {
            "source": [generation.token_text(token, self.model) for token in run.request.prompt],
            "tokens": [generation.token_text(token, self.model) for token in run.attention.token_ids],
            "weights": _rounded(run.attention.weights),
        }

    def opening(self) -> bytes:
        return b""

    def pieces(self, pieces: Sequence[tuple[int, Delta]]) -> bytes:
        return b"".join(self.chunk([self.choice(index, delta)]) for index, delta in pieces if generation.worth_sending(delta))


def _rounded(weights: NDArray[np.float32]) -> Elements:
    """A list of rows."""
    made = Elements()
    for row in weights.astype(np.float64).round(4):
        made.add(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))
    return made
