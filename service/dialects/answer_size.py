"""An upper bound on the bytes of an answer, before it is computed.

Every token counts as the longest of the vocabulary. The most likely tokens of a position are all different, so they count as the longest.
"""

from dataclasses import dataclass

from service.errors import NeverFits
from service.generation.text import Vocabulary
from service.settings import Settings

_NUMBER = 26  # bytes of a log-probability and its separator
_CHAT_ENTRY = len('{"token":,"bytes":[],"logprob":,"top_logprobs":[]},') + _NUMBER
_PROMPT_ENTRY = len('"1234567890":{"decoded_token":,"logprob":,"rank":1234567},') + _NUMBER
_TGI_ENTRY = len('{"id":1234567,"text":,"logprob":,"special":false},') + _NUMBER
_OFFSET = 10
_AROUND = 512  # bytes of a choice without its text


@dataclass(frozen=True)
class AnswerSize:
    """Upper bounds on the bytes of the parts of an answer."""

    vocabulary: Vocabulary

    def text(self, tokens: int) -> int:
        return tokens * max(self.vocabulary.widest[:1], default=0)

    def chat_logprobs(self, tokens: int, top: int | None) -> int:
        """`top`: the number of most likely tokens for each token; None: no log-probabilities."""
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
        """Tokens of text-generation-inference's details, with the likeliest ones of each position."""
        widest = self.vocabulary.widest
        return tokens * (sum(widest[:1]) + sum(widest[:top]) + (1 + top) * _TGI_ENTRY + 2)


def check_size(size: int, n: int, settings: Settings, *, fields: str, streamable: bool) -> None:
    """Raise NeverFits if `n` choices of `size` bytes exceed `max_answer_bytes`. `fields` make the answer smaller."""
    could, most = n * (size + _AROUND), settings.max_answer_bytes
    if could > most:
        advice = f"lower {fields}" + (", or send stream=true" if streamable else "")
        message = f"the answer could have {could} bytes ({n} choices of {size}) and the most is {most}: {advice}"
        raise NeverFits(message, param=fields.partition(",")[0])
