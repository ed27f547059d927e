"""The reference: computes the answer to a request token by token, without slots, batches, prefill pieces, stores or other processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from service.generation.request import FinishReason, GenerationRequest, TokenLogprob
from service.generation.sampling.grammar import Grammars
from service.generation.sampling.sampler import Edits, Sampler
from service.generation.text import TextStream, Vocabulary
from tests.service.generation.fake_steps import EOS, VOCAB_SIZE, FakeSteps, byte_tokenizer


@dataclass(frozen=True)
class Outcome:
    """A whole completion."""

    ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Tokenizer:
    """The parts of a model's tokenizer that all engines share. They are never changed."""

    vocabulary: Vocabulary
    grammars: Grammars


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        file = byte_tokenizer(Path(folder) / "tokenizer.json")
        return Tokenizer(Vocabulary(file), Grammars(file, (EOS,)))


@cache
def _steps() -> FakeSteps:
    return FakeSteps()


def tensors(ids: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the state tensors after these tokens."""
    S = np.zeros((2, 4), np.float32)
    for token in ids:
        S = np.float32(0.75) * S + embedded(token)
    return S, np.array([len(ids)], np.int64)


def embedded(token: int) -> NDArray[np.float32]:
    """Return what one token adds to the state."""
    added: NDArray[np.float32] = _steps().embedding[token]
    return added


def logits(S: NDArray[np.float32]) -> NDArray[np.float32]:
    return _steps().logits(S)


def outcome(request: GenerationRequest, before: Sequence[int] = ()) -> Outcome:
    """Return the completion of a request whose `start` is the state after the tokens `before`."""
    if not request.max_tokens:
        return Outcome((), "", (), "length")
    S, n = tensors((*before, *request.prompt))
    seen = np.zeros(VOCAB_SIZE, np.bool_)
    seen[list(before)] = True
    sampler = Sampler(VOCAB_SIZE, 1)
    edits = Edits.of(request.sampling, VOCAB_SIZE, request.prompt, (), None, np.packbits(seen, bitorder="little"))
    sampler.put(0, request.sampling, edits, position=int(n[0]), top_logprobs=request.top_logprobs)
    matcher = None if request.grammar is None else tokenizer().grammars.matcher(request.grammar)
    text = TextStream(
        tokenizer().vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
    )
    ends = {*(() if request.ignore_eos else (EOS,)), *request.stop_token_ids}
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    said = ""
    while True:
        masks = {}
        if matcher is not None:
            masks[0] = np.zeros(-(-VOCAB_SIZE // 32), np.int32)
            matcher.mask(masks[0])
        drawn = sampler.draw(logits(S)[None], masks=masks, banned=[tuple(ends) if len(ids) < request.min_tokens else ()])
        assert not drawn.failures, "the requests of a simulation can always go on"
        token = int(drawn.token_ids[0])
        ids.append(token)
        logprobs += drawn.logprobs.values()
        stop_reason: str | int | None = None
        finish: FinishReason | None = None
        if token in ends:
            finish, stop_reason = "stop", token if token in request.stop_token_ids else None
        else:
            said += text.push(token, may_stop=len(ids) > request.min_tokens)
            if matcher is not None:
                matcher.advance(token)
            if text.stopped is not None:
                finish, stop_reason = "stop", text.stopped
            elif matcher is not None and matcher.finished:
                finish = "stop"
            elif len(ids) >= request.max_tokens:
                finish = "length"
        if finish is not None:
            if text.stopped is None:
                said += text.finish()
            return Outcome(tuple(ids), said, tuple(logprobs), finish, stop_reason)
        S = np.float32(0.75) * S + embedded(token)
