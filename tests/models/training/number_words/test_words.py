"""Which numbers are drawn, how they are said, and that none is on both sides."""

from random import Random

import pytest

from models.training.number_words.evaluation import held_out_numbers
from models.training.number_words.tokens import UNKNOWN, character_tokenizer
from models.training.number_words.words import LANGUAGES, draw, is_held_out


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer()


def test_whole_ranges_are_held_out_at_every_magnitude() -> None:
    assert not any(is_held_out(number) for number in range(100))
    assert [number for number in range(100, 200) if is_held_out(number)] == [117, 142, 167, 192]
    assert [number for number in range(1100, 1200) if is_held_out(number)] == list(range(1170, 1180))
    assert all(is_held_out(number) for number in (117_000_000, 117_999_999, 11_742))
    assert not any(is_held_out(number) for number in (116_999_999, 118_000_000))
    assert sum(is_held_out(number) for number in range(1000, 10_000)) == 360


def test_training_and_evaluation_never_see_the_same_number() -> None:
    random = Random(0)
    drawn = {
        kind: {draw(random, max_digits=9, languages=("en",), evaluation=kind, min_digits=3).number for _ in range(300)} for kind in (0, 1)
    }
    assert all(map(is_held_out, drawn[1]))
    assert not any(map(is_held_out, drawn[0]))
    for number in drawn[1]:
        assert is_held_out(number)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_character_of_every_language_has_a_token(language: str, tokenizer) -> None:
    unknown = tokenizer.token_to_id(UNKNOWN)
    for example in (example for n_digits in range(3, 10) for example in held_out_numbers(n_digits, language, numbers=20)):
        ids = tokenizer.encode(example.words).ids
        assert len(ids) == len(example.words) <= 256
        assert unknown not in ids
        assert is_held_out(example.number)


def test_capitals_and_composed_letters_are_read_as_small_ones(tokenizer) -> None:
    assert tokenizer.encode("  FÜNF ").ids == tokenizer.encode("fu\u0308nf").ids == tokenizer.encode("fünf").ids
    assert tokenizer.decode(tokenizer.encode("120").ids) == "120"
