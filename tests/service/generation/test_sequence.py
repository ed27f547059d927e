"""One run inside the engine: what ends it, when, and what it says then."""

from typing import Any

import pytest

from service.generation.request import Delta, GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.sequence import Sequence
from service.generation.submission import Submission
from service.generation.text import TextStream, Vocabulary
from service.telemetry.usage import Usage
from tests.service.generation.fake_steps import EOS, byte_tokenizer


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(byte_tokenizer(tmp_path_factory.mktemp("sequence") / "tokenizer.json"))


def begun(vocabulary: Vocabulary, **options: Any) -> Sequence:
    request = GenerationRequest(**{"prompt": (1,), "sampling": Sampling(seed=0), "max_tokens": 20, **options})
    text = TextStream(vocabulary, stop=request.stop, include_stop=request.include_stop, skip_special_tokens=True)
    ends = frozenset((EOS, *request.stop_token_ids))
    read = None if request.stop else text
    submission = Submission[Sequence](request.client, request.lane, 0.0, 0.0)
    run = Run(request, Usage(1), lambda run: None, read)
    return Sequence(run, text if request.stop else None, matcher=None, ends=ends, order=0, submission=submission)


def token(letter: str, vocabulary: Vocabulary) -> int:
    return next(token_id for token_id in range(257) if vocabulary[token_id] == letter.encode())


def said(sequence: Sequence, letters: str, vocabulary: Vocabulary) -> tuple[str, int, str | None, str | int | None]:
    """What is left of a text that the model would say, a token a letter: the text, its tokens, and how it ended."""
    text = ""
    for letter in letters:
        sequence.run.give(sequence.accept(token(letter, vocabulary), None))
        delta = sequence.run.take()
        assert delta is not None
        text += delta.text
        if delta.finish_reason is not None:
            return text, len(sequence.completion), delta.finish_reason, delta.stop_reason
    return text, len(sequence.completion), None, None


@pytest.mark.parametrize(
    ("min_tokens", "text", "tokens"),
    [
        (0, "x", 3),
        (2, "x", 3),
        (3, "xaby", 6),  # the third token completes it, and is one of the first three
        (4, "xaby", 6),  # begins at the fifth
        (5, "xaby", 6),  # begins among the first five and ends beyond them
    ],
)
def test_a_stop_string_ends_no_run_before_its_least_tokens(min_tokens: int, text: str, tokens: int, vocabulary: Vocabulary) -> None:
    sequence = begun(vocabulary, stop=("ab",), min_tokens=min_tokens)
    assert said(sequence, "xabyabz", vocabulary) == (text, tokens, "stop", "ab")


def test_ends_and_stop_tokens_are_kept_away_until_there_are_enough_tokens(vocabulary: Vocabulary) -> None:
    sequence = begun(vocabulary, stop_token_ids=(token("z", vocabulary),), min_tokens=2)
    for letter in "ab":
        assert set(sequence.banned) == {EOS, token("z", vocabulary)}
        sequence.accept(token(letter, vocabulary), None)
    assert sequence.banned == ()
    delta = sequence.accept(token("z", vocabulary), None)
    assert isinstance(delta, Delta), "an end, and no text"
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", token("z", vocabulary))


def test_what_was_held_back_is_said_when_the_tokens_are_used_up(vocabulary: Vocabulary) -> None:
    assert said(begun(vocabulary, stop=("abc",), max_tokens=3), "xabc", vocabulary) == ("xab", 3, "length", None)
    assert said(begun(vocabulary, stop=("abc",), max_tokens=4), "xabc", vocabulary) == ("x", 4, "stop", "abc"), "both at once"


def test_a_run_goes_on_with_what_was_held_back(vocabulary: Vocabulary) -> None:
    options = {"stop": ("abc",), "max_tokens": 6}
    here = begun(vocabulary, **options)
    assert said(here, "xab", vocabulary) == ("x", 3, None, None)
    for rest, told in (("c", ("", 4, "stop", "abc")), ("xyz", ("abxyz", 6, "length", None))):
        there = begun(vocabulary, **options)
        there.replay(tuple(here.completion))
        assert there.run.usage.completion_tokens == 3
        assert said(there, rest, vocabulary) == told
