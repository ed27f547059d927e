"""Converts text to token ids, and counts the tokens before and after truncation.

The `tokenizers` library tokenises. Truncation is done here, on the ids, because each request may set its own length and side, and the
answer reports the number of tokens before truncation. (When the library truncates, it stores all pieces that it cuts off. For a pair of
texts it stores all combinations of these pieces, which takes gigabytes for two texts of 10,000 words.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from export import contract
from service.errors import EmptyInput, InputTooLong, InvalidRequest, ServiceError, TokenizationFailed
from service.tokenization.beginnings import beginnings, splits_at_spaces
from service.tokenization.tokenizer_file import open_tokenizer, panicked, token_ids
from service.tokenization.words import MOST_CHARACTERS, words_of

Side = Literal["left", "right", "none"]
Text = str
Pair = tuple[str, str]
TokenIds = list[int]
Input = Text | Pair | TokenIds

_MORE = 16  # tokens that a beginning has beside those that are kept
# The names that checkpoints give to the prompt of a role, the most common first. For any other role, the name is the role itself.
_PROMPT_NAMES = {
    "query": ("query", "search_query", "retrieval.query"),
    "document": ("document", "passage", "corpus", "search_document", "retrieval.passage"),
}


@dataclass(slots=True)
class Encoded:
    """One tokenised input. `n_tokens` is its length before truncation, `len(ids)` after it. A long text that is cut at its end is not read
    to its end, so it may have more tokens than `n_tokens`.

    No token attends to the last `unattended` tokens, which fill a query up.
    """

    ids: list[int]
    type_ids: list[int] | None
    n_tokens: int
    unattended: int = 0

    @property
    def truncated(self) -> bool:
        return self.n_tokens > len(self.ids)


@dataclass(frozen=True, slots=True)
class Cutting:
    """A truncated input: its index in the request, its tokens before truncation (of a long text at least so many), and the tokens that were
    kept.
    """

    index: int
    tokens: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How inputs that are too long are truncated. `side` is the end that loses tokens. If it is "none", such an input raises
    InputTooLong.
    """

    side: Side = "right"
    max_tokens: int | None = None


_PLAIN = contract.Role.model_validate({})  # nothing is added


class TextEncoder:
    """The tokenizer of one bundle. It is thread-safe, because nothing in it changes after loading."""

    def __init__(
        self,
        file: Path,
        *,
        max_tokens: int,
        vocab_size: int,
        pair_types: bool,
        prompts: Mapping[str, str],
        default_prompt: str | None,
        roles: Mapping[contract.RoleName, contract.Role] | None = None,
        allow_special_tokens: bool = False,
        any_pattern: bool = False,
    ) -> None:
        self.tokenizer = open_tokenizer(file, vocab_size, allow_special_tokens=allow_special_tokens, any_pattern=any_pattern)
        self.max_tokens = max_tokens
        self.vocab_size = vocab_size
        self.prompts = prompts
        self.default_prompt = prompts.get(default_prompt or "", "")
        self.roles: Mapping[contract.RoleName, contract.Role] = roles or {}
        self._pair_types = pair_types
        self._single, self._pair = self._layout(pair=False), self._layout(pair=True)
        self._words = words_of(self.tokenizer)
        self._splits_at_spaces = self._words is not None or splits_at_spaces(self.tokenizer)
        around = self.tokenizer.encode("a")
        self.special_ids = {token for token, special in zip(around.ids, around.special_tokens_mask, strict=True) if special}

    def prompt(self, name: str | None, text: str | None = None) -> str:
        """Return the prompt that is put before every input: `text`, else the checkpoint's prompt of this name, else the default prompt."""
        if text is not None:
            return text
        if not name:
            return self.default_prompt
        if name not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise InvalidRequest(f"prompt name {name!r} is not known to this model; it has: {known}", param="prompt_name")
        return self.prompts[name]

    def prompt_of(self, role: str) -> str:
        """Return the checkpoint's prompt for texts of this role, such as "query", or its default prompt if the role has none."""
        written = next((each for name, each in self.roles.items() if name == role), None)
        names = _PROMPT_NAMES.get(role, (role,)) if written is None else (written.prompt or "",)
        return next((self.prompts[name] for name in names if name in self.prompts), self.default_prompt)

    def role_of(self, prompt_name: str) -> contract.RoleName | None:
        """Return the role whose prompt, or who itself if there is no such prompt, has this name."""
        for role, written in self.roles.items():
            if prompt_name == written.prompt or (prompt_name == role and prompt_name not in self.prompts):
                return role
        return None

    def encode(
        self, inputs: Sequence[Input], *, cut: Cut, prompt: str = "", first: int = 0, role: contract.Role | None = None
    ) -> list[Encoded | ServiceError]:
        """Return the token ids of each input, or the input's error. `first` is the index of the first input in its request, for errors.

        Texts (not pairs, nor token ids) get marker, longest length and filling of `role`, but its prompt is part of `prompt`.
        The time of a call is proportional to the length of the texts, so encode long texts on another thread.
        """
        limit = min(cut.max_tokens or self.max_tokens, self.max_tokens)
        return [self._one(item, index, limit, cut.side, prompt, role) for index, item in enumerate(inputs, first)]

    def _one(self, item: Input, index: int, limit: int, side: Side, prompt: str, role: contract.Role | None) -> Encoded | ServiceError:
        try:
            if isinstance(item, list):
                return self._ids(item, index, limit, side, prompt)
            if isinstance(item, tuple):
                return self._of_pair(item, index, limit, side)
            return self._of_text(item, index, limit, side, prompt, role or _PLAIN)
        except ServiceError as error:
            return error
        except TypeError:  # `tokenizers` raises it for text that is not valid Unicode
            if not _has_lone_surrogate([prompt, item] if isinstance(item, str) else [str(text) for text in item]):
                raise
            return TokenizationFailed(
                f"input {index} is not valid Unicode: it has half of a surrogate pair; send whole characters", param="input"
            )
        except BaseException as error:
            if not panicked(error):
                raise
            return TokenizationFailed(f"input {index} takes this model's tokenizer too many steps: change or shorten it", param="input")

    def _of_text(self, item: Text, index: int, limit: int, side: Side, prompt: str, role: contract.Role) -> Encoded:
        if not item:
            raise EmptyInput(f"input {index} cannot be empty", param="input")
        limit = min(limit, role.max_tokens or limit)
        marked = int(role.marker_id is not None)
        ids, type_ids = self._read(item, prompt, limit if side == "right" else None)
        n_tokens = len(ids) + marked
        if not n_tokens:  # true for white space if the tokenizer adds no special tokens
            raise EmptyInput(f"input {index} has no tokens", param="input")
        if n_tokens > limit:
            self._check_side(n_tokens, limit, side, index)
            ids = self._cut(ids, None, limit - marked, side)
            type_ids = type_ids and self._cut(type_ids, None, limit - marked, side)
        if role.marker_id is not None:
            at = int(self._single[0] is None)
            ids.insert(at, role.marker_id)
            if type_ids is not None:
                type_ids.insert(at, 0)
        filling = 0 if role.expansion is None else max(min(role.expansion.tokens, limit) - len(ids), 0)
        if role.expansion is None or not filling:
            return Encoded(ids, type_ids, n_tokens)
        ids += [role.expansion.token_id] * filling
        type_ids = type_ids and type_ids + [0] * filling
        return Encoded(ids, type_ids, n_tokens, 0 if role.expansion.attended else filling)

    def _read(self, item: Text, prompt: str, limit: int | None) -> tuple[TokenIds, TokenIds | None]:
        """Return the ids and type ids of a text, or if it has more than `limit` tokens, of a beginning with more."""
        if len(item) <= MOST_CHARACTERS and self._words is not None and (known := self._words.ids(prompt + item)) is not None:
            return known, [0] * len(known) if self._pair_types else None
        for part in beginnings(item, limit) if limit is not None and self._splits_at_spaces else (item,):
            (encoding,) = self.tokenizer.encode_batch_fast([prompt + part])  # `_fast` computes no offsets
            ids: TokenIds = encoding.ids
            if limit is not None and len(ids) > limit + _MORE:
                break
        return ids, encoding.type_ids if self._pair_types else None

    def _of_pair(self, item: Pair, index: int, limit: int, side: Side) -> Encoded:
        if not item[0] and not item[1]:
            raise EmptyInput(f"input {index} cannot be empty", param="input")
        (encoding,) = self.tokenizer.encode_batch_fast([item])
        ids, type_ids = encoding.ids, encoding.type_ids if self._pair_types else None
        if not (n_tokens := len(ids)):
            raise EmptyInput(f"input {index} has no tokens", param="input")
        if n_tokens > limit:
            self._check_side(n_tokens, limit, side, index)
            n_first = len(token_ids(self.tokenizer, item[0], add_special_tokens=False))
            ids = self._cut(ids, n_first, limit, side)
            type_ids = type_ids and self._cut(type_ids, n_first, limit, side)
        return Encoded(ids, type_ids, n_tokens)

    def _ids(self, ids: TokenIds, index: int, limit: int, side: Side, prompt: str) -> Encoded:
        """Return an input of token ids as an Encoded. The ids are used as they are and no special tokens are added, as in
        text-embeddings-inference.
        """
        if not ids:
            raise EmptyInput(f"input {index} cannot be empty", param="input")
        if prompt:
            raise InvalidRequest("a prompt cannot be put before token ids: send text, or no prompt", param="prompt_name")
        if (worst := max(ids)) >= self.vocab_size or min(ids) < 0:
            bad = worst if worst >= self.vocab_size else min(ids)
            raise TokenizationFailed(
                f"token id {bad} of input {index} is outside this model's vocabulary of {self.vocab_size}; "
                "ids must come from this model's own tokenizer (see /tokenize)",
                param="input",
            )
        n_tokens = len(ids)
        if n_tokens > limit:
            self._check_side(n_tokens, limit, side, index)
            ids = ids[-limit:] if side == "left" else ids[:limit]
        return Encoded(ids, [0] * len(ids) if self._pair_types else None, n_tokens)

    def _check_side(self, n_tokens: int, limit: int, side: Side, index: int) -> None:
        if side == "none":
            raise InputTooLong(
                f"`inputs` must have less than {limit + 1} tokens. Given: {n_tokens} (input {index}), and the maximum context length is "
                f"{limit} tokens; shorten it or allow truncation",
                param="input",
            )

    def _cut(self, row: list[int], n_first: int | None, limit: int, side: Side) -> list[int]:
        """Return `row`, the ids or type ids of an input, truncated to `limit` tokens. `n_first` is the number of tokens of a pair's first
        text, or None if the input is no pair. Special tokens are always kept.
        """
        layout = self._single if n_first is None else self._pair
        n_texts = len(row) - layout.count(None)
        room = max(limit - layout.count(None), 0)
        lengths = (n_texts, 0) if n_first is None else (n_first, n_texts - n_first)
        kept = longest_first(*lengths, room)
        left: list[int] = []
        at = 0
        for text in layout:
            length, keep = (1, 1) if text is None else (lengths[text], kept[text])
            start = at + length - keep if side == "left" else at
            left += row[start : start + keep]
            at += length
        return left

    def _layout(self, *, pair: bool) -> tuple[int | None, ...]:
        """Return the order of special tokens (None) and texts: `(None, 0, None, 1, None)` is `[CLS] first [SEP] second [SEP]`."""
        n = len(self.tokenizer.encode("a", add_special_tokens=False))
        if not n:
            raise ValueError("the tokenizer makes no token of 'a', so the places of its special tokens cannot be determined")
        encoding = self.tokenizer.encode("a", "a" if pair else None)
        layout: list[int | None] = []
        seen = 0
        for special in encoding.special_tokens_mask:
            if special:
                layout.append(None)
            elif seen % n == 0:
                layout.append(seen // n)
            seen += not special
        return tuple(layout)


def size_of(item: Input) -> int:
    """Return the size of an input: the characters of a text or of both texts of a pair, or the number of token ids."""
    return len(item[0]) + len(item[1]) if isinstance(item, tuple) else len(item)


def _has_lone_surrogate(texts: Sequence[str]) -> bool:
    return any("\ud800" <= character <= "\udfff" for text in texts for character in text)


def longest_first(n_a: int, n_b: int, room: int) -> tuple[int, int]:
    """Return how many tokens to keep of each text of a pair. First only the longer text is cut, until both have the same length, then both
    are cut equally, as in `tokenizers`.
    """
    short, long = sorted((n_a, n_b))
    if short + long <= room:
        return n_a, n_b
    if 2 * short <= room:
        long = room - short
    else:
        short, long = room // 2, room // 2 + room % 2
    return (short, long) if n_a <= n_b else (long, short)
