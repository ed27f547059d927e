"""Which numbers are drawn, how they are said, and that none is on both sides."""

from random import Random

import pytest

from models.training.number_words.batches import NumberWordsBatches, batch_of
from models.training.number_words.evaluation import held_out_numbers
from models.training.number_words.tokens import UNKNOWN, character_tokenizer
from models.training.number_words.words import LANGUAGES, Example, draw, in_words, is_held_out, rounded


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


def test_a_rounded_number_keeps_its_first_digit_and_length() -> None:
    random = Random(1)
    found = [rounded(987_654_321, random) for _ in range(50)]
    assert all(100_000_000 <= number <= 987_654_321 and str(number)[0] == "9" for number in found)
    assert any(str(number).count("0") >= 4 for number in found)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_character_of_every_language_has_a_token(language: str, tokenizer) -> None:
    unknown = tokenizer.token_to_id(UNKNOWN)
    for example in (example for n_digits in range(3, 10) for example in held_out_numbers(n_digits, language, numbers=20)):
        ids = tokenizer.encode(example.words).ids
        assert len(ids) == len(example.words) <= 256
        assert unknown not in ids
        assert is_held_out(example.number)


def test_no_two_languages_use_the_same_words_for_different_numbers() -> None:
    said: dict[str, int] = {}
    for number in [*range(2000), *range(2000, 2_000_000, 997)]:
        for language in LANGUAGES:
            assert said.setdefault(in_words(number, language), number) == number


def test_capitals_and_composed_letters_are_read_as_small_ones(tokenizer) -> None:
    assert tokenizer.encode("  FÜNF ").ids == tokenizer.encode("fu\u0308nf").ids == tokenizer.encode("fünf").ids
    assert tokenizer.decode(tokenizer.encode("120").ids) == "120"


def test_a_batch_has_the_words_and_what_is_to_be_written(tokenizer) -> None:
    batch = batch_of(tokenizer, [Example("en", 40, "forty"), Example("en", 7, "seven!")])
    digit = [tokenizer.token_to_id(each) for each in "0123456789"]
    assert batch.mask.tolist() == [[True] * 5 + [False], [True] * 6]
    assert batch.source[1, 5] == tokenizer.token_to_id(UNKNOWN)
    assert batch.previous.tolist() == [[1, digit[4], digit[0]], [1, digit[7], 0]]
    assert batch.targets.tolist() == [[digit[4], digit[0], 2], [digit[7], 2, -100]]


def test_batches_follow_from_seed_and_step_and_grow(tokenizer) -> None:
    def batches(seed: int) -> NumberWordsBatches:
        return NumberWordsBatches(tokenizer, batch=4, seed=seed, languages=("en", "de"), max_digits=6, all_digits_from=40)

    one, other = batches(0), batches(0)
    later = one(17).source
    assert other(3).source.equal(one(3).source)
    assert other(17).source.equal(later)
    assert not (batches(1)(17).source.shape == later.shape and batches(1)(17).source.equal(later))
    assert [one.digits(step) for step in (0, 9, 10, 39, 40, 1000)] == [3, 3, 4, 6, 6, 6]
