"""Text to ids, and what is told about a cut."""

import resource
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from service.errors import EmptyInput, InputTooLong, InvalidRequest, ServiceError, TokenizationFailed
from service.tokenization import beginnings
from service.tokenization.patterns import PUBLISHED
from service.tokenization.texts import Cut, Encoded, Input, TextEncoder, longest_first
from service.tokenization.tokenizer_file import token_ids
from tests.service.fakes import PROMPTS, VOCABULARY, case, fake_tokenizer

CLS, SEP = VOCABULARY.index("[CLS]"), VOCABULARY.index("[SEP]")
CAT, DOG = VOCABULARY.index("cat"), VOCABULARY.index("dog")
DETERMINISTIC = settings(max_examples=200, deadline=None, derandomize=True)


def encoder(tokenizer: Tokenizer, folder: Path, **options: Any) -> TextEncoder:
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return TextEncoder(
        file,
        **{
            "max_tokens": 8,
            "vocab_size": tokenizer.get_vocab_size(),
            "pair_types": True,
            "prompts": PROMPTS,
            "default_prompt": None,
            **options,
        },
    )


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return encoder(fake_tokenizer(), tmp_path_factory.mktemp("tokenizer"))


def one(texts: TextEncoder, item: Input, **cut: Any) -> Encoded:
    (encoded,) = texts.encode([item], cut=Cut(**cut))
    assert isinstance(encoded, Encoded), encoded
    return encoded


def refused(texts: TextEncoder, item: Input, kind: type[ServiceError], prompt: str = "", **cut: Any) -> ServiceError:
    good, error = texts.encode(["cat", item], cut=Cut(**cut), prompt="" if isinstance(item, list) and not prompt else prompt)
    assert type(error) is kind, error
    assert isinstance(error, ServiceError)
    assert isinstance(good, Encoded) or prompt
    return error


# Texts -----------------------------------------------------------------------------------------------------------------------------------


def test_a_text_that_must_not_be_cut_is_refused_with_both_lengths(texts: TextEncoder) -> None:
    error = refused(texts, "cat " * 9, InputTooLong, side="none")
    assert "must have less than 9 tokens. Given: 11" in error.message


def test_a_request_may_ask_for_less_than_the_model_takes_but_not_for_more(texts: TextEncoder) -> None:
    assert len(one(texts, "cat " * 9, max_tokens=5).ids) == 5
    assert len(one(texts, "cat " * 9, max_tokens=500).ids) == 8


def test_white_space_is_a_text_where_special_tokens_are_added(texts: TextEncoder) -> None:
    assert one(texts, "  \n").ids == [CLS, SEP]


def test_a_text_without_any_token_is_refused(tmp_path: Path) -> None:
    """A tokenizer without special tokens makes nothing of white space, and a runtime cannot run on nothing."""
    bare = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    refused_by = encoder(bare, tmp_path)
    (error,) = refused_by.encode([" "], cut=Cut())
    assert isinstance(error, EmptyInput)


@pytest.mark.parametrize("item", ["\ud800", "cat \udfff dog", ("cat", "\ud800"), ("\ud800", "cat")], ids=repr)
def test_half_a_surrogate_pair_is_refused_in_words(texts: TextEncoder, item: Input) -> None:
    assert "not valid Unicode" in refused(texts, item, TokenizationFailed).message


def test_half_a_surrogate_pair_in_a_prompt_is_refused_too(texts: TextEncoder) -> None:
    refused(texts, "cat", TokenizationFailed, prompt="\ud800")


@DETERMINISTIC
@given(st.text(max_size=40))
def test_any_unicode_text_has_ids_or_a_clear_error(texts: TextEncoder, item: str) -> None:
    (encoded,) = texts.encode([item], cut=Cut())
    assert isinstance(encoded, EmptyInput) if not item else isinstance(encoded, Encoded)


# Prompts ---------------------------------------------------------------------------------------------------------------------------------


def test_a_prompt_stands_before_the_text_and_counts(texts: TextEncoder) -> None:
    (encoded,) = texts.encode(["cat"], cut=Cut(), prompt=texts.prompt("query"))
    assert isinstance(encoded, Encoded)
    assert encoded.ids == texts.tokenizer.encode("query: cat").ids


def test_an_unknown_prompt_name_is_refused_with_the_known_ones(texts: TextEncoder) -> None:
    with pytest.raises(InvalidRequest, match="'title' is not known to this model; it has: document, query"):
        texts.prompt("title")


def test_a_prompt_in_full_goes_before_its_name_and_its_default(texts: TextEncoder, tmp_path: Path) -> None:
    with_default = encoder(fake_tokenizer(), tmp_path, default_prompt="document")
    assert with_default.prompt(None) == "passage: "
    assert with_default.prompt("query") == "query: "
    assert with_default.prompt("query", "") == ""
    assert texts.prompt(None) == ""


def test_a_prompt_before_ids_is_refused(texts: TextEncoder) -> None:
    refused(texts, [CLS, CAT, SEP], InvalidRequest, prompt="query: ")


# Ids -------------------------------------------------------------------------------------------------------------------------------------


def test_ids_are_taken_as_they_are(texts: TextEncoder) -> None:
    encoded = one(texts, [CAT, DOG])
    assert (encoded.ids, encoded.type_ids, encoded.n_tokens) == ([CAT, DOG], [0, 0], 2)


@pytest.mark.parametrize("bad", [len(VOCABULARY), 2**31 - 1, -1])
def test_an_id_outside_the_vocabulary_is_named_with_its_input(texts: TextEncoder, bad: int) -> None:
    assert f"token id {bad} of input 1 is outside" in refused(texts, [CAT, bad, DOG], TokenizationFailed).message


def test_ids_are_cut_at_either_end(texts: TextEncoder) -> None:
    ids = list(range(10))
    assert one(texts, ids).ids == ids[:8]
    assert one(texts, ids, side="left").ids == ids[2:]
    assert one(texts, ids).n_tokens == 10
    refused(texts, ids, InputTooLong, side="none")


# Pairs -----------------------------------------------------------------------------------------------------------------------------------


def test_one_empty_side_of_a_pair_is_fair_and_two_are_not(texts: TextEncoder) -> None:
    assert one(texts, ("", "cat")).ids == [CLS, SEP, CAT, SEP]
    refused(texts, ("", ""), EmptyInput)


def roberta() -> Tokenizer:
    """Two separators between the texts of a pair, and one token type."""
    tokenizer = fake_tokenizer()
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return tokenizer


def template() -> Tokenizer:
    """The special tokens at the end alone, as in T5."""
    tokenizer = fake_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("$A [SEP]", "$A [SEP] $B:1 [SEP]:1", [("[SEP]", SEP)])
    return tokenizer


def unadorned() -> Tokenizer:
    """No special tokens at all, so that nothing marks where the second text begins."""
    tokenizer = fake_tokenizer()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


words = st.lists(st.sampled_from(["cat", "dog", "paris", "é", "xyzzy", "[SEP]", "7"]), max_size=14).map(" ".join)


@DETERMINISTIC
@given(first=words, second=st.none() | words, limit=st.integers(4, 20), side=st.sampled_from(["left", "right"]))
@pytest.mark.parametrize("make", [fake_tokenizer, roberta, template, unadorned])
def test_a_cut_gives_what_the_tokenizers_library_gives(
    tmp_path_factory: pytest.TempPathFactory, make: Any, first: str, second: str | None, limit: int, side: Any
) -> None:
    """For one text and for pairs (longest first), from either side, with any arrangement of special tokens."""
    if not first and not second:
        return
    mine = _made.setdefault(make, encoder(make(), tmp_path_factory.mktemp("t"), max_tokens=20, allow_special_tokens=True))
    library: Tokenizer = make()
    library.enable_truncation(limit, strategy="longest_first", direction=side)
    wanted = library.encode(first, second)
    (encoded,) = mine.encode([first if second is None else (first, second)], cut=Cut(side=side, max_tokens=limit))
    if not len(make().encode(first, second)):
        assert isinstance(encoded, EmptyInput)
        return
    if second is None and not first:
        return
    assert isinstance(encoded, Encoded)
    assert encoded.ids == wanted.ids
    assert encoded.type_ids == wanted.type_ids
    assert encoded.n_tokens == len(make().encode(first, second))


_made: dict[Any, TextEncoder] = {}


@DETERMINISTIC
@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 300))
def test_longest_first_fills_the_room_and_never_cuts_the_shorter_below_half(n_a: int, n_b: int, room: int) -> None:
    a, b = longest_first(n_a, n_b, room)
    assert 0 <= a <= n_a
    assert 0 <= b <= n_b
    assert a + b == min(n_a + n_b, room)
    assert min(a, b) >= min(n_a, n_b, room // 2)


def test_cutting_long_pairs_costs_about_as_much_as_reading_them(texts: TextEncoder) -> None:
    """The library keeps each combination of the pieces it cuts off: two texts of 80 KB took 8 GB, and 50 s."""
    most_bytes = max(psutil.Process().memory_info().rss + 2**30, most_used_bytes())
    encoded = one(texts, ("cat " * 20_000, "dog " * 20_000))
    assert (len(encoded.ids), encoded.n_tokens) == (8, 40_003)
    assert most_used_bytes() <= most_bytes


def trained(model: Any, trainer: Any, before: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = before
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(["the cat, the dog! 12345 (cat's) naïve dog's\n\n" * 9], trainer)
    return tokenizer


def bpe(*before: Any, **options: Any) -> Tokenizer:
    letters = pre_tokenizers.ByteLevel.alphabet()
    return trained(
        models.BPE(), trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters), pre_tokenizers.Sequence(list(before)), **options
    )


GPT_4 = next(pattern for pattern in sorted(PUBLISHED) if "{1,3}|" in pattern and "?i:" in pattern)
QUICK = {
    "BERT": fake_tokenizer(),
    "white space": trained(
        models.WordLevel(unk_token="[U]"), trainers.WordLevelTrainer(special_tokens=["[U]"]), pre_tokenizers.Whitespace()
    ),
    "metaspace": trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>"),
        pre_tokenizers.Metaspace(),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
    ),
    "GPT-2": bpe(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "GPT-4": bpe(pre_tokenizers.Split(Regex(GPT_4), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)),
}
SLOW = {
    "no pattern": bpe(pre_tokenizers.ByteLevel(use_regex=False)),
    "spaces belong to the word before": bpe(pre_tokenizers.Split(" ", "merged_with_previous"), pre_tokenizers.ByteLevel()),
    "spaces vanish": bpe(pre_tokenizers.ByteLevel(), normalizer=normalizers.Replace(" ", "")),
}
pieces = st.sampled_from(
    ["cat", "dog's", " ", " ", "  ", "\n", "\t", "12345", "!", "...", "(", "é", "é", "日本", "\u3000", "\x00", "ﬁ", " \u0308", "[SEP]"]
)


@pytest.mark.parametrize("name", QUICK)
@DETERMINISTIC
@given(item=st.lists(pieces, min_size=1, max_size=20).map("".join))
def test_a_beginning_of_a_text_has_the_first_ids_of_the_whole_text(name: str, item: str) -> None:
    whole = token_ids(QUICK[name], item, add_special_tokens=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings, "_LEAST", 1)
        patch.setattr(beginnings, "_CHARACTERS", 1)
        for part in beginnings.beginnings(item, 1):
            ids = token_ids(QUICK[name], part, add_special_tokens=False)
            assert ids == whole[: len(ids)]
        assert part == item


def test_a_long_text_is_read_only_as_far_as_needed_if_its_tokenizer_splits_at_spaces(tmp_path: Path) -> None:
    item = "cat " * 100_000
    for name, tokenizer in (QUICK | SLOW).items():
        with case(name):
            mine = encoder(tokenizer, tmp_path)
            assert (one(mine, item).n_tokens < 10_000) == (name in QUICK)
            assert one(mine, item).ids == one(mine, "cat " * 100).ids
            assert one(mine, item, side="left").n_tokens >= 100_000


def most_used_bytes() -> int:
    """Of memory, since this process began."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_tokenizer_that_cannot_read_an_a_is_refused_at_load(tmp_path: Path) -> None:
    deaf = fake_tokenizer()
    deaf.normalizer = normalizers.Replace("a", "")
    with pytest.raises(ValueError, match="no token of 'a'"):
        encoder(deaf, tmp_path)
