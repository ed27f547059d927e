"""The tokenizer: no byte is lost, indentation is one token, and a prompt has the tokens of the text it was cut from."""

import pytest
from tokenizers import Tokenizer

from models.training.tokenizer import END_OF_TEXT, TokenizerError, train_tokenizer
from tests.models.training.texts import documents

SOURCE = 'def read_table(self):\n    if x1 == 20:\n        return "ok"\n\n\n    # end\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer((d.text for d in documents(("p",), files=30, seed=0)), vocab_size=330)


@pytest.mark.parametrize("text", [SOURCE, "", "\tx\n \n", "ünïcode → 日本語 🙂", "\x00\x7f", "a\r\nb", "  \n   \n", "tail   "])
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_indentation_is_one_token_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("\n        return").tokens[:2] == ["Ċ", "Ġ" * 8]
    assert tokenizer.encode("20").tokens == ["2", "0"]


@pytest.mark.parametrize("cut", ["self):", "self):\n", "self):\n    ", "x1", "return", "self", "20:\n        "])
def test_prompts_are_cut_where_tokens_end(tokenizer: Tokenizer, cut: str) -> None:
    prompt = SOURCE[: SOURCE.index(cut) + len(cut)]
    ids = tokenizer.encode(prompt).ids
    assert tokenizer.encode(SOURCE).ids[: len(ids)] == ids


def test_end_of_text_is_token_0_and_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert tokenizer.encode(END_OF_TEXT).ids == [0]


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(TokenizerError, match="not vocab_size=5000"):
        train_tokenizer(["a b c"], vocab_size=5000)
