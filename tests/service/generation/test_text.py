"""Tokens to text: whole characters, stop strings held back, and the same text however the tokens cut it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from export.contract import BundleError
from service.generation.text import TextStream, Vocabulary

MANY = settings(max_examples=200, deadline=None, derandomize=True)
SPECIAL = "<|end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes in the order of their letters; then some merges, a special token, and an added one that is none."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    space, e_acute = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(" é")[0][0][:1], "Ã©"
    merges = [("t", "h"), ("th", "e"), (space, "the"), ("Ã", "©"), ("ð", "Ł")]
    tokens = [*letters, "th", "the", f"{space}the", e_acute, "ðŁ"]
    made = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([SPECIAL])
    made.add_tokens([AddedToken("longword", normalized=False)])
    return made


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    file = tmp_path_factory.mktemp("text") / "tokenizer.json"
    tokenizer.save(str(file))
    return Vocabulary(file)


def stream(vocabulary: Vocabulary, *stop: str, include_stop: bool = False, skip_special_tokens: bool = True) -> TextStream:
    return TextStream(vocabulary, stop=stop, include_stop=include_stop, skip_special_tokens=skip_special_tokens)


def ids_of(data: bytes, vocabulary: Vocabulary) -> list[int]:
    """One token for each byte."""
    single = {vocabulary[token_id]: token_id for token_id in range(256)}
    return [single[bytes([byte])] for byte in data]


def told(stream: TextStream, token_ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in token_ids), stream.finish()]


def naive(text: str, stop: tuple[str, ...], include_stop: bool, since: int = 0) -> tuple[str, str | None]:
    """Letter by letter: the first place beyond `since` where a stop string ends, and of those that end there the longest."""
    for end in range(since + 1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            return (text[:end] if include_stop else text[: end - len(longest)]), longest
    return text, None


# Characters ------------------------------------------------------------------------------------------------------------------------------


def test_every_byte_has_a_token_and_every_token_its_bytes(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    assert {vocabulary[token_id] for token_id in range(256)} == {bytes([byte]) for byte in range(256)}
    assert vocabulary[tokenizer.token_to_id("the")] == b"the"
    assert vocabulary[258] == b" the"
    assert vocabulary[259] == "é".encode()
    assert vocabulary[tokenizer.token_to_id(SPECIAL)] == SPECIAL.encode()
    assert vocabulary.special == {tokenizer.token_to_id(SPECIAL)}
    assert vocabulary[10**6] == b"", "ids that only the model has"


@MANY
@given(token_ids=st.lists(st.integers(0, 262), max_size=40))
@example(token_ids=[])
def test_any_tokens_decode_as_their_bytes_do_at_once(token_ids: list[int], vocabulary: Vocabulary) -> None:
    data = b"".join(vocabulary[token_id] for token_id in token_ids)
    assert "".join(told(stream(vocabulary, skip_special_tokens=False), token_ids)) == data.decode(errors="replace")


def test_a_character_leaves_when_it_is_whole(vocabulary: Vocabulary) -> None:
    parts = told(stream(vocabulary), ids_of("aé👩".encode(), vocabulary))
    assert parts == ["a", "", "é", "", "", "", "👩", ""]
    assert told(stream(vocabulary), ids_of("👩".encode()[:3], vocabulary)) == ["", "", "", "\ufffd"]


def test_special_tokens_are_left_out_unless_asked_for(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(f"a{SPECIAL}longword").ids
    assert "".join(told(stream(vocabulary), token_ids)) == "alongword"
    assert "".join(told(stream(vocabulary, skip_special_tokens=False), token_ids)) == f"a{SPECIAL}longword"


# Stop strings ----------------------------------------------------------------------------------------------------------------------------


def test_nothing_leaves_that_may_become_a_stop_string(vocabulary: Vocabulary) -> None:
    run = stream(vocabulary, "END", "é!")
    assert told(run, ids_of("aENxEé!b".encode(), vocabulary)) == ["a", "", "", "ENx", "", "", "E", "", "", ""]
    assert run.stopped == "é!"


ALPHABET = "abé👩"
texts, stops = st.text(ALPHABET, max_size=24), st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4).map(tuple)


@MANY
@given(text=texts, stop=stops, include_stop=st.booleans(), cuts=st.lists(st.integers(1, 4), min_size=1, max_size=8))
@example(text="aabaab", stop=("aab", "abaa", "b"), include_stop=False, cuts=[1])
@example(text="aaab", stop=("aab",), include_stop=False, cuts=[2])
@example(text="abab", stop=("abab", "ab", "bab"), include_stop=True, cuts=[3])
def test_the_stop_string_is_found_however_the_tokens_cut_the_text(
    text: str, stop: tuple[str, ...], include_stop: bool, cuts: list[int]
) -> None:
    """And whatever has left at any moment is a beginning of the final text."""
    data, pieces = text.encode(), []
    while data:
        size = cuts[len(pieces) % len(cuts)]
        pieces, data = [*pieces, data[:size]], data[size:]
    run = TextStream(Pieces(pieces), stop=stop, include_stop=include_stop, skip_special_tokens=True)
    expected, by = naive(text, stop, include_stop)
    parts = told(run, list(range(len(pieces))))
    assert ("".join(parts), run.stopped) == (expected, by)


@MANY
@given(text=texts, stop=stops, include_stop=st.booleans(), least=st.integers(0, 24))
@example(text="abab", stop=("ab",), include_stop=False, least=2)
@example(text="aaa", stop=("aa",), include_stop=False, least=2)
@example(text="abé", stop=("ab", "abé"), include_stop=False, least=2)
@example(text="aba", stop=("ab", "abé"), include_stop=True, least=2)
def test_a_stop_string_is_text_like_any_other_while_it_may_not_end_the_run(
    text: str, stop: tuple[str, ...], include_stop: bool, least: int
) -> None:
    """A token is a letter here. One that began too early counts if it ends in time."""
    run = TextStream(Pieces([letter.encode() for letter in text]), stop=stop, include_stop=include_stop, skip_special_tokens=True)
    parts = [run.push(at, may_stop=at >= least) for at in range(len(text))] + [run.finish()]
    assert ("".join(parts), run.stopped) == naive(text, stop, include_stop, since=least)


class Pieces(Vocabulary):
    """A vocabulary of these bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._bytes = dict(enumerate(pieces))
        self._texts = {at: piece.decode() for at, piece in enumerate(pieces) if piece.isascii()}
        self.special = frozenset()


# Other tokenizers ------------------------------------------------------------------------------------------------------------------------


def saved(file: Path, decoder: Any, vocab: Any) -> Path:
    file.write_text(
        json.dumps({"model": {"vocab": vocab}, "decoder": decoder, "added_tokens": [{"id": 0, "content": "</s>", "special": True}]})
    )
    return file


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


@pytest.mark.parametrize(
    ("decoder", "vocab"),
    [
        (
            {"type": "Sequence", "decoders": [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " "}]},
            {"</s>": 0, "▁the": 1, "<0xC3>": 2, "<0xA9>": 3},
        ),
        ({"type": "Metaspace", "replacement": "▁"}, [["</s>", 0.0], ["▁the", -1.0], ["<0xC3>", -2.0], ["<0xA9>", -3.0]]),
    ],
)
def test_byte_fallback_and_metaspace(decoder: Any, vocab: Any, tmp_path: Path) -> None:
    vocabulary = Vocabulary(saved(tmp_path / "tokenizer.json", decoder, vocab))
    assert "".join(told(stream(vocabulary), [1, 2, 3, 1, 0])) == " theé the"


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece", "prefix": "##"}, {"type": "Sequence", "decoders": [{"type": "BPEDecoder"}, {"type": "Fuse"}]}]
)
def test_a_tokenizer_without_bytes_is_refused_by_name(decoder: Any, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json: a decoder of text needs"):
        Vocabulary(saved(tmp_path / "tokenizer.json", decoder, {"a": 0}))


def test_a_tokenizer_whose_tokens_are_their_own_text(tmp_path: Path) -> None:
    """Characters or words, put together as they are."""
    file = tmp_path / "tokenizer.json"
    described = {"model": {"vocab": {"é": 0, "1": 1, "</s>": 2}}, "decoder": {"type": "Fuse"}}
    file.write_text(json.dumps(described | {"added_tokens": [{"id": 2, "content": "</s>", "special": True}]}))
    vocabulary = Vocabulary(file)
    assert [vocabulary[token] for token in (0, 1, 2)] == ["é".encode(), b"1", b"</s>"]
    assert vocabulary.special == {2}
