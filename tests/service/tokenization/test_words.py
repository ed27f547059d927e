"""The cache of words gives the ids that the tokenizer gives, and is used only where that is certain."""

import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from service.tokenization import words
from service.tokenization.words import Words, words_of

SPECIAL = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}
AFTER = [f"##{letter}" for letter in "aeiouxs0123456789"]
PIECES = ["the", "cat", "cats", "##s", "##at", *string.ascii_lowercase, *AFTER, *string.punctuation]


def bert(*, lowercase: bool = True, template: str = "[CLS] $A [SEP]") -> Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate([*SPECIAL, *PIECES])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.encode_special_tokens = True
    return tokenizer


def cache(tokenizer: Tokenizer) -> Words:
    found = words_of(tokenizer)
    assert found is not None
    return found


def sentencepiece(*more: str, merges: tuple[tuple[str, str], ...] = (), **options: Any) -> Tokenizer:
    """Llama's kind of tokenizer: pieces of several spaces, and of a space with the word after it."""
    pieces = ["<unk>", "<s>", "▁", *string.ascii_letters, *string.digits, *string.punctuation, "▁▁", "th", "the", "▁the", "▁c", "at", *more]
    rules = [("▁", "▁"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c"), ("a", "t"), *merges]
    model = models.BPE(dict(zip(pieces, range(len(pieces)), strict=True)), rules, unk_token="<unk>", fuse_unk=True, **options)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.encode_special_tokens = True
    return tokenizer


TOKENIZERS = [bert(), bert(lowercase=False), bert(template="$A [SEP] [SEP]"), bert(template="$A"), sentencepiece()]
CACHES = [(each, cache(each)) for each in TOKENIZERS]
SOME = st.sampled_from(["the cat", "Cats", "[SEP]", "don't", "x" * 101, "caté", "\x00", "\x0b", "\x7f", "\u3000", "\n", "\t ", "中", ""])
TEXTS = st.lists(SOME | st.text(string.printable, max_size=8), max_size=8).map("".join)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(TEXTS)
def test_the_ids_are_those_of_the_tokenizer(text: str) -> None:
    for tokenizer, each in CACHES:
        if (ids := each.ids(text)) is not None:
            assert ids == tokenizer.encode(text).ids, text


@pytest.mark.parametrize("text", ["a cat", "The cats, 12!\n", "", "[CLS] the [SEP]"])
def test_plain_texts_are_answered_again_from_the_cache(text: str) -> None:
    first = cache(bert())
    assert first.ids(text) == first.ids(text) is not None


@pytest.mark.parametrize("text", ["caté", "a\x00b", "a\x0bb", "a\x7fb", "a" * (words.MOST_CHARACTERS + 1)])
def test_other_texts_are_left_to_the_tokenizer(text: str) -> None:
    assert cache(bert()).ids(text) is None


def test_a_text_with_a_space_at_its_end_is_left_to_sentencepiece() -> None:
    assert cache(sentencepiece()).ids("the ") is None


@pytest.mark.parametrize(
    "tokenizer",
    [
        sentencepiece("e▁", merges=(("e", "▁"),)),
        sentencepiece("e▁c", merges=(("e", "▁c"),)),
        sentencepiece(dropout=0.5),
        sentencepiece(ignore_merges=True),
    ],
    ids=["space-at-the-end", "over-a-space", "dropout", "whole-words"],
)
def test_no_cache_if_a_merge_may_join_words(tokenizer: Tokenizer) -> None:
    assert words_of(tokenizer) is None


def test_no_cache_if_spaces_are_written_in_another_way() -> None:
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    assert words_of(tokenizer) is None
    tokenizer = sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    assert words_of(tokenizer) is None


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_MOST_WORDS", 10)
    small = cache(bert())
    for number in range(100):
        assert small.ids(f"{number} x{number}") == bert().encode(f"{number} x{number}").ids
        assert len(small._ids) <= 10  # what it may grow to is seen from outside only by its memory
    small.ids("y" * 41)
    assert "y" * 41 not in small._ids


def changed(change: Any) -> Tokenizer:
    tokenizer = bert()
    change(tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens([AddedToken("the cat")]),
        lambda tokenizer: setattr(tokenizer, "encode_special_tokens", False),
        lambda tokenizer: setattr(tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.NFC()),
        lambda tokenizer: setattr(tokenizer, "normalizer", None),
        lambda tokenizer: setattr(tokenizer, "model", models.BPE({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3}, [])),
        lambda tokenizer: setattr(
            tokenizer, "post_processor", processors.TemplateProcessing(single="[CLS]:1 $A:1", special_tokens=[("[CLS]", 1)])
        ),
    ],
    ids=["added token", "special tokens in texts", "pre-tokenizer", "normalizer", "no normalizer", "model", "token types"],
)
def test_a_tokenizer_whose_words_may_depend_on_each_other_has_no_cache(change: Any) -> None:
    assert words_of(changed(change)) is None
