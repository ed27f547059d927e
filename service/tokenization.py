"""Text -> token ids, with an account of what was cut.

The `tokenizers` library does the work; truncation is done here, on its encodings, because a request may set its own length and side and
must be told how many tokens its input had before the cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Encoding, Tokenizer

from service.errors import EmptyInput, InputTooLong, InvalidRequest, ServiceError, TokenizationFailed

Side = Literal["left", "right", "none"]
Text = str
Pair = tuple[str, str]
TokenIds = list[int]
Input = Text | Pair | TokenIds


@dataclass(slots=True)
class Encoded:
    """One input ready to run. `n_tokens` is its length before any cut; `len(ids)` what is left of it."""

    ids: list[int]
    type_ids: list[int] | None
    n_tokens: int

    @property
    def truncated(self) -> bool:
        return self.n_tokens > len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How an over-long input is treated. `side` is the end that loses tokens; "none" makes it an error."""

    side: Side = "right"
    max_tokens: int | None = None


class TextEncoder:
    """The tokenizer of one bundle. Thread-safe: nothing in it changes after loading."""

    def __init__(
        self, file: Path, *, max_tokens: int, vocab_size: int, pair_types: bool, prompts: Mapping[str, str], default_prompt: str | None
    ) -> None:
        self.tokenizer = Tokenizer.from_file(str(file))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.prompts = prompts
        self.default_prompt = prompts.get(default_prompt or "", "")
        self._pair_types = pair_types

    def prompt(self, name: str | None, text: str | None = None) -> str:
        """The text put before every input: given as it is, or by its name in the checkpoint's configuration."""
        if text is not None:
            return text
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise InvalidRequest(f"prompt name {name!r} is not known to this model; it has: {known}", param="prompt_name")
        return self.prompts[name]

    def encode(self, inputs: Sequence[Input], *, cut: Cut, prompt: str = "") -> list[Encoded | ServiceError]:
        """Ids of each input, or the error that this one input is. Blocks for about 30 µs a short text."""
        limit = min(cut.max_tokens or self.max_tokens, self.max_tokens)
        return [self._one(item, index, limit, cut.side, prompt) for index, item in enumerate(inputs)]

    def _one(self, item: Input, index: int, limit: int, side: Side, prompt: str) -> Encoded | ServiceError:
        try:
            if isinstance(item, list):
                return self._ids(item, index, limit, side, prompt)
            return self._text(item, index, limit, side, prompt)
        except ServiceError as error:
            return error

    def _text(self, item: Text | Pair, index: int, limit: int, side: Side, prompt: str) -> Encoded:
        if isinstance(item, str):
            if not item:
                raise EmptyInput("`inputs` cannot be empty", param="input", index=index)
            encoding = self.tokenizer.encode(prompt + item)
        else:
            if not item[0] and not item[1]:
                raise EmptyInput("`inputs` cannot be empty", param="input", index=index)
            encoding = self.tokenizer.encode(*item)
        n_tokens = len(encoding)
        if n_tokens > limit:
            self._allowed(n_tokens, limit, side, index)
            encoding = self._cut(item, limit, side, prompt)
        return Encoded(encoding.ids, encoding.type_ids if self._pair_types else None, n_tokens)

    def _ids(self, ids: TokenIds, index: int, limit: int, side: Side, prompt: str) -> Encoded:
        """Ids are taken as they are, special tokens included, as text-embeddings-inference does."""
        if not ids:
            raise EmptyInput("`inputs` cannot be empty", param="input", index=index)
        if prompt:
            raise InvalidRequest("a prompt cannot be put before token ids: send text, or no prompt", param="prompt_name", index=index)
        if (worst := max(ids)) >= self.vocab_size or min(ids) < 0:
            bad = worst if worst >= self.vocab_size else min(ids)
            raise TokenizationFailed(
                f"token id {bad} of input {index} is outside this model's vocabulary of {self.vocab_size}; "
                "ids must come from this model's own tokenizer (see /tokenize)",
                param="input",
                index=index,
            )
        n_tokens = len(ids)
        if n_tokens > limit:
            self._allowed(n_tokens, limit, side, index)
            ids = ids[-limit:] if side == "left" else ids[:limit]
        return Encoded(ids, [0] * len(ids) if self._pair_types else None, n_tokens)

    def _allowed(self, n_tokens: int, limit: int, side: Side, index: int) -> None:
        if side == "none":
            raise InputTooLong(
                f"`inputs` must have less than {limit + 1} tokens. Given: {n_tokens} (input {index}); shorten it or allow truncation",
                param="input",
                index=index,
            )

    def _cut(self, item: Text | Pair, limit: int, side: Side, prompt: str) -> Encoding:
        """Encode again without the special tokens, shorten, then add them: they are never what is cut off."""
        pair = not isinstance(item, str)
        first, second = (item[0], item[1]) if pair else (prompt + str(item), None)
        room = max(limit - self.tokenizer.num_special_tokens_to_add(pair), 0)
        a = self.tokenizer.encode(first, add_special_tokens=False)
        b = self.tokenizer.encode(second, add_special_tokens=False) if second is not None else None
        keep_a, keep_b = longest_first(len(a), len(b), room) if b is not None else (room, 0)
        a.truncate(keep_a, direction=side)
        if b is not None:
            b.truncate(keep_b, direction=side)
        return self.tokenizer.post_process(a, b)


def longest_first(n_a: int, n_b: int, room: int) -> tuple[int, int]:
    """How many tokens of a pair to keep in `room`: the longer one is cut until they are even, then both (as `tokenizers` does)."""
    short, long = sorted((n_a, n_b))
    if short + long <= room:
        return n_a, n_b
    if 2 * short <= room:
        long = room - short
    else:
        short, long = room // 2, room // 2 + room % 2
    return (short, long) if n_a <= n_b else (long, short)
