"""What a response has said, token by token.

A client that lost its stream names the last event that it has, and events are numbered by tokens. So the text is decoded token by token
here: how much of it a token completes follows from the tokens alone, not from how they were gathered into deltas.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import orjson

from service.dialects.openai.token_json import TokenJson, token_json
from service.generation.model import DecoderModel
from service.generation.request import Delta, FinishReason, GenerationRequest
from service.generation.text import TextStream
from service.http.answers import Elements, Text

_CHUNK = 16_384  # characters that are serialised at a time


class Said:
    """A text, its tokens and their log-probabilities."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.ends: list[int] = []  # the characters of `text` that each token has completed
        self.text = ""  # after the end, also what was held back until then
        self.logprobs: list[bytes] = []  # of each token as JSON, or none at all

    @property
    def count(self) -> int:
        """Return how many tokens there are."""
        return len(self.ends)

    def end(self, count: int) -> int:
        """Return how many characters the first `count` tokens have completed."""
        return self.ends[count - 1] if count else 0

    def written(self) -> dict[str, Any]:
        """Return text and log-probabilities as JSON values that can be written in pieces."""
        text, logprobs = Text(), Elements()
        for at in range(0, len(self.text), _CHUNK):
            text.add(self.text[at : at + _CHUNK])
        for element in self.logprobs:
            logprobs.add(element)
        return {"text": text, "logprobs": logprobs}

    @classmethod
    def stored(cls, row: dict[str, Any]) -> Self:
        """Return what a row of the store has, see `rows.py`."""
        said = cls()
        said.ids, said.ends, said.text = row["ids"], row["ends"], row["text"]
        said.logprobs = [orjson.dumps(each) for each in row["logprobs"]]
        return said


class Saying(Said):
    """The same while it grows."""

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
        """Append new tokens, whose text is decoded here: that of the delta may be cut elsewhere."""
        self._push(delta.token_ids)
        self.logprobs += [self._tokens.chat((each,)) for each in delta.logprobs]
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.text += self._stream.finish()

    def resume(self, said: Said) -> None:
        """Append all tokens but the last that were said elsewhere. The last one is drawn again, and with it the reason to end, if any."""
        kept = max(0, said.count - 1)
        self._push(said.ids[:kept])
        self.logprobs += said.logprobs[:kept]

    def _push(self, ids: Iterable[int]) -> None:
        for token_id in ids:
            self.ids.append(token_id)
            if token_id not in self._ending:  # a token that ends the text is no part of it
                self.text += self._stream.push(token_id, may_stop=len(self.ids) > self._min_tokens)
            self.ends.append(len(self.text))


def joined(elements: Sequence[bytes]) -> orjson.Fragment:
    """Return JSON elements as a list."""
    return orjson.Fragment(b"[%b]" % b",".join(elements))
