"""Values that the answers with generated text share: ids, warnings, and upper bounds on an answer's size before it is generated.

For a bound, every token counts as the longest token of the vocabulary. The k most likely tokens of a position are all different, so they
count as the k longest tokens of the vocabulary.
"""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from service.errors import NeverFits
from service.generation.model import Generator
from service.generation.request import GenerationRequest
from service.generation.text import Vocabulary
from service.settings import Settings

_NUMBER = 26  # most bytes of a log-probability in JSON, with its separator
_CHAT_ENTRY = len('{"token":,"bytes":[],"logprob":,"top_logprobs":[]},') + _NUMBER
_PROMPT_ENTRY = len('"1234567890":{"decoded_token":,"logprob":,"rank":1234567},') + _NUMBER
_TGI_ENTRY = len('{"id":1234567,"text":,"logprob":,"special":false},') + _NUMBER
_OFFSET = 10
_AROUND = 512  # most bytes of a choice in JSON, without its text and log-probabilities


@lru_cache(maxsize=64)
def system_fingerprint(model: Generator) -> str:
    """Return OpenAI's `system_fingerprint`, which changes if any byte of the bundle changes."""
    return f"fp_{model.manifest.fingerprint[:12]}"


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def derived_id(prefix: str, of: str) -> str:
    """Return an id of 128 bits that is derived from `of` by a hash, so that equal `of` give equal ids."""
    return f"{prefix}{blake2b(of.encode(), digest_size=16).hexdigest()}"


def unix_time() -> int:
    """Return the current Unix time in seconds, for the field `created`."""
    return int(time.time())


def sequence_tokens(request: GenerationRequest, generated: int) -> int:
    """Return the length of a sequence: the tokens of the state at which it began, of its prompt, and those generated so far."""
    return (0 if request.start is None else request.start.position) + len(request.prompt) + generated


def window_warnings(model: Generator, tokens: int) -> dict[str, list[str]]:
    """Return the field `warnings` of an answer whose longest sequence has `tokens` tokens. There is none if the model attends to all."""
    decoder = model.manifest.decoder
    if decoder is None or decoder.window is None or tokens <= decoder.window:
        return {}
    first = decoder.first_kept or 0
    between = "may miss details of what stands between, which is summed up" if decoder.sums_up else "may ignore what stands between"
    said = (
        f"the text has {tokens} tokens and the model attends in full to {decoder.window} of them, the first {first} and the last "
        f"{decoder.window - first}: the answer {between}"
    )
    return {"warnings": [said]}


def token_text(token_id: int, model: Generator) -> str:
    """Return a single token as text. Bytes that are not a whole character become U+FFFD."""
    return model.vocabulary[token_id].decode(errors="replace")


# The size of an answer -------------------------------------------------------------------------------------------------------------------


def most_tokens(model: Generator, max_tokens: int, prompt_tokens: int) -> int:
    """Return how many tokens a completion can have: `max_tokens`, or fewer if the model has a limited number of positions."""
    n_positions = None if model.manifest.decoder is None else model.manifest.decoder.n_positions
    return max_tokens if n_positions is None else max(0, min(max_tokens, n_positions - prompt_tokens + 1))


@dataclass(frozen=True)
class AnswerSize:
    """Computes upper bounds on the size of an answer's parts, in bytes. `vocabulary`: the tokens that the answer may contain."""

    vocabulary: Vocabulary

    def text(self, tokens: int) -> int:
        return tokens * max(self.vocabulary.widest[:1], default=0)

    def chat_logprobs(self, tokens: int, top: int | None) -> int:
        """Return how many bytes the log-probabilities of `tokens` tokens can have in a chat answer, with `top` alternatives per token. None
        means that the answer has no log-probabilities."""
        if top is None:
            return 0
        own, others = sum(self.vocabulary.widest_with_bytes[:1]), sum(self.vocabulary.widest_with_bytes[:top])
        return tokens * (own + others + (1 + top) * _CHAT_ENTRY)

    def completion_logprobs(self, tokens: int, top: int | None) -> int:
        if top is None:
            return 0
        widest = self.vocabulary.widest
        return tokens * (sum(widest[:1]) + sum(widest[: top + 1]) + (2 + top) * (_NUMBER + 2) + _OFFSET)

    def prompt_logprobs(self, tokens: int, top: int | None) -> int:
        if top is None:
            return 0
        return tokens * (sum(self.vocabulary.widest[: top + 1]) + (1 + top) * _PROMPT_ENTRY)

    def tgi_tokens(self, tokens: int, top: int) -> int:
        """Return how many bytes the details of `tokens` tokens can have in text-generation-inference's format, with `top` alternatives per
        token."""
        widest = self.vocabulary.widest
        return tokens * (sum(widest[:1]) + sum(widest[:top]) + (1 + top) * _TGI_ENTRY + 2)


def check_size(size: int, n: int, settings: Settings, *, fields: Mapping[str, object], streamable: bool) -> None:
    """Raise NeverFits if `n` choices of `size` bytes each exceed the setting `max_answer_bytes`.

    `fields`: the request fields that determine the size, with their values. The message advises to lower those that are set.
    `streamable`: whether it also advises to stream the answer.
    """
    could, most = n * (size + _AROUND), settings.max_answer_bytes
    if could > most:
        names = [name for name, value in fields.items() if value]
        advice = f"lower {', '.join(names)}" + (", or send stream=true" if streamable else "")
        message = f"the answer could have {could} bytes ({n} choices of {size}) and the most is {most}: {advice}"
        raise NeverFits(message, param=names[0])


def check_chat_size(
    model: Generator, asked: GenerationRequest, settings: Settings, *, n: int = 1, fields: Mapping[str, object], streamable: bool = False
) -> None:
    """Raise NeverFits if an answer with `n` choices in the format of chat completions could exceed the setting `max_answer_bytes`.

    The prompt's log-probabilities are counted once, not for each choice. `fields` and `streamable` are those of `check_size`.
    """
    size, tokens = AnswerSize(model.vocabulary), most_tokens(model, asked.max_tokens, len(asked.prompt))
    once = size.prompt_logprobs(len(asked.prompt), asked.prompt_logprobs)
    each = size.text(tokens) + size.chat_logprobs(tokens, asked.top_logprobs)
    check_size(each + -(-once // n), n, settings, fields=fields, streamable=streamable)
