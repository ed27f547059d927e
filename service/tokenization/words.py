"""A cache of the token ids of words, for tokenizers that tokenise each word by itself.

A short text costs the `tokenizers` library ten times as long as its words cost here. The library also releases the GIL, and the
event loop then waits for a thread that has taken it.
"""

import json
import re

from tokenizers import Tokenizer
from tokenizers.models import BPE, WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

MOST_CHARACTERS = 4_000  # longer texts are tokenised by the library, which does not hold the GIL
_MOST_WORDS = 32_768  # with their ids, so many words take about 8 MB
_MOST_LETTERS = 40  # longer words are not kept
_PLAIN = re.compile(r"[\t\n\r -~]*")  # the texts that are split here as BERT's pre-tokenizer splits them
_WORD = re.compile(r"[0-9A-Za-z]+|[!-/:-@\[-`{-~]")
# SentencePiece writes a space before the text and "▁" for every space. A text with a space at its end is left to the library.
_PLAIN_PIECES = re.compile(r"[ -~]*[!-~]")
_SPACED_WORD = re.compile(r" +[!-~]+")
_SPACES_ARE_PIECES = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]


class Words:
    """The token ids of the words seen so far. Thread-safe, because each operation on the dictionary is atomic.

    `begin` and `end` are the special tokens around a text. `spaced` means that a word includes the spaces before it.
    """

    def __init__(self, tokenizer: Tokenizer, begin: list[int], end: list[int], *, spaced: bool = False) -> None:
        self._tokenizer = tokenizer
        self._begin, self._end = begin, end
        self._plain, self._word, self._before = (_PLAIN_PIECES, _SPACED_WORD, " ") if spaced else (_PLAIN, _WORD, "")
        self._ids: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int] | None:
        """Return the token ids of an ASCII text, equal to those of the tokenizer. None if the tokenizer must tokenise the text."""
        if len(text) > MOST_CHARACTERS or self._plain.fullmatch(text) is None:
            return None
        ids, known = self._begin.copy(), self._ids
        for word in self._word.findall(self._before + text):
            found = known.get(word)
            ids += self._added(word) if found is None else found
        ids += self._end
        return ids

    def _added(self, word: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(word.removeprefix(self._before), add_special_tokens=False).ids
        if len(word) <= _MOST_LETTERS:
            if len(self._ids) >= _MOST_WORDS:
                self._ids.clear()
            self._ids[word] = ids
        return ids


def words_of(tokenizer: Tokenizer) -> Words | None:
    """Return a cache for this tokenizer, or None if the ids of a word may depend on the text around it.

    That is certain only without added tokens that are found in texts, and for two kinds: BERT's normalizer, pre-tokenizer and WordPiece
    model; and BPE of SentencePiece without a piece that continues over a space, so that no merge joins two words.
    """
    hidden = tokenizer.encode_special_tokens and all(token.special for token in tokenizer.get_added_tokens_decoder().values())
    encoding = tokenizer.encode("a")
    spaced = _is_sentencepiece(tokenizer)
    if not (spaced or _is_bert(tokenizer)) or not hidden or any(encoding.type_ids):
        return None
    special = encoding.special_tokens_mask
    begin, end = special.index(0), len(special) - special[::-1].index(0)
    return Words(tokenizer, encoding.ids[:begin], encoding.ids[end:], spaced=spaced)


def _is_bert(tokenizer: Tokenizer) -> bool:
    parts = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model
    return all(isinstance(part, kind) for part, kind in zip(parts, (BertNormalizer, BertPreTokenizer, WordPiece), strict=True))


def _is_sentencepiece(tokenizer: Tokenizer) -> bool:
    model = tokenizer.model
    if not isinstance(model, BPE) or tokenizer.pre_tokenizer is not None or model.dropout or model.ignore_merges:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix or tokenizer.normalizer is None:
        return False
    if json.loads(tokenizer.normalizer.__getstate__()).get("normalizers") != _SPACES_ARE_PIECES:
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    known = all(character in vocabulary for character in ("▁", *map(chr, range(ord("!"), ord("~") + 1))))
    return known and not any("▁" in piece.lstrip("▁") for piece in vocabulary)
