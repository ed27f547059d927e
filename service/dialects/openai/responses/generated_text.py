"""Decodes the generated text of a response token by token.

A client that lost its stream names the last event that it received, and the number of an event is derived from a number of tokens. So this
module must know how many characters of the text each token completes. It decodes the tokens one at a time, so that these numbers depend
only on the tokens, and not on which tokens arrive together in a delta.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import orjson

from service.dialects.text.logprobs import TokenJson, token_json
from service.generation.model import DecoderModel
from service.generation.request import Delta, FinishReason, GenerationRequest
from service.generation.text import TextStream
from service.http.answers import Elements, Text

_CHUNK = 16_384  # number of characters that are serialised in one call


class Said:
    """A generated text with its tokens and their log-probabilities."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends: list[int] = []  # for each token, the length in characters of the text that is complete after this token
        self.text = ""  # at the end, includes text that was held back, such as a possible beginning of a stop string
        self.logprobs: list[bytes] = []  # JSON for each token; empty if no log-probabilities were requested

    @property
    def count(self) -> int:
        """Return the number of generated tokens."""
        return len(self.ends)

    def end(self, count: int) -> int:
        """Return the length, in characters, of the text that the first `count` tokens have completed."""
        return self.ends[count - 1] if count else 0

    def written(self, content: str | None = None) -> dict[str, Any]:
        """Return the text and the log-probabilities as JSON values that `http/answers.py` can write in pieces. `content` is the part of the
        text that is not in tool calls; None: all."""
        content = self.text if content is None else content
        text, logprobs = Text(), Elements()
        for at in range(0, len(content), _CHUNK):
            text.add(content[at : at + _CHUNK])
        for element in self.logprobs:
            logprobs.add(element)
        return {"text": text, "logprobs": logprobs}

    @classmethod
    def stored(cls, row: dict[str, Any]) -> Self:
        """Create the object from the fields of a stored response; see `Row.said` in `stored.py`."""
        said = cls()
        said.ids, said.ends, said.text = row["ids"], row["ends"], row["text"]
        said.logprobs = [orjson.dumps(each) for each in row["logprobs"]]
        return said


class Saying(Said):
    """A generated text that grows while tokens arrive."""

    def __init__(self, model: DecoderModel, request: GenerationRequest) -> None:
        super().__init__()
        self.finish_reason: FinishReason | None = None
        self._tokens: TokenJson = token_json(model.vocabulary)
        self._min_tokens = request.min_tokens
        self._ending = frozenset((*(() if request.ignore_eos else model.eos_token_ids), *request.stop_token_ids))
        self._stream = TextStream(
            model.vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=request.skip_special_tokens
        )

    def add(self, delta: Delta) -> None:
        """Append the tokens of `delta`. Their text is decoded here. The delta's own text is not used: it may not end with a token."""
        self._push(delta.token_ids)
        self.logprobs += [self._tokens.chat((each,)) for each in delta.logprobs]
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.text += self._stream.finish()

    def resume(self, said: Said) -> None:
        """Append the tokens that another process has generated, except the last. This process samples the last token again, so that it also
        learns the finish reason if the text ends there."""
        kept = max(0, said.count - 1)
        self._push(said.ids[:kept])
        self.logprobs += said.logprobs[:kept]

    def _push(self, ids: Iterable[int]) -> None:
        for token_id in ids:
            self.ids.append(token_id)
            if token_id not in self._ending:  # a token that ends the generation has no text
                self.text += self._stream.push(token_id, may_stop=len(self.ids) > self._min_tokens)
            self.ends.append(len(self.text))


def joined(elements: Sequence[bytes]) -> orjson.Fragment:
    """Return the serialised elements as one JSON list."""
    return orjson.Fragment(b"[%b]" % b",".join(elements))
