"""The caller's end of a run: what waits to be taken, and since when."""

import time
from pathlib import Path

from service.generation.request import Delta, GenerationRequest, Sampling, Token, TokenLogprob
from service.generation.run import Run
from service.generation.text import TextStream, Vocabulary
from service.telemetry.usage import Usage
from tests.service.generation.fake_steps import EOS, byte_tokenizer


async def test_what_waits_is_joined_and_unread_since_the_first_of_it_came() -> None:
    run = Run(GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=9), Usage(1), lambda run: None)
    assert run.unread_since is None, "nothing has come, however long that takes"
    begun = time.monotonic()
    run.give(Delta("a", (1,)))
    first = run.unread_since
    run.give(Delta("b", (2,), (), "stop"))
    assert first is not None
    assert begun <= first
    assert run.unread_since == first
    assert run.take() == Delta("ab", (1, 2), (), "stop")
    assert run.unread_since is None


def reading(vocabulary: Vocabulary) -> Run:
    """A run whose tokens are bytes."""
    request = GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=9)
    text = TextStream(vocabulary, stop=(), include_stop=False, skip_special_tokens=True)
    return Run(request, Usage(1), lambda run: None, text)


async def test_tokens_become_text_when_they_are_taken(tmp_path: Path) -> None:
    """Whole characters, and at the end what is left; the token that ends a run is no text."""
    vocabulary = Vocabulary(byte_tokenizer(tmp_path / "tokenizer.json"))
    ids = {vocabulary[token_id]: token_id for token_id in range(256)}
    e_acute, a = [ids[bytes([byte])] for byte in "é".encode()], ids[b"a"]
    run = reading(vocabulary)
    run.give(Token(a))
    run.give(Token(e_acute[0], TokenLogprob(e_acute[0], -1.0)))
    assert run.take() == Delta("a", (a, e_acute[0]), (TokenLogprob(e_acute[0], -1.0),))
    run.give(Token(e_acute[1]))
    run.give(Token(e_acute[0]))
    run.give(Delta("", (EOS,), (), "stop"))
    assert run.take() == Delta("é\ufffd", (e_acute[1], e_acute[0], EOS), (), "stop")


async def test_who_goes_on_elsewhere_reads_on_in_the_middle_of_a_character(tmp_path: Path) -> None:
    vocabulary = Vocabulary(byte_tokenizer(tmp_path / "tokenizer.json"))
    first, second = (next(at for at in range(256) if vocabulary[at] == bytes([byte])) for byte in "é".encode())
    run = reading(vocabulary)
    run.said([first])
    run.give(Token(second, finish_reason="length"))
    assert run.take() == Delta("é", (second,), (), "length")


async def test_a_listener_is_told_of_the_first_thing_to_take_and_of_the_end(tmp_path: Path) -> None:
    run, told = reading(Vocabulary(byte_tokenizer(tmp_path / "tokenizer.json"))), list[bool]()
    run.listen(told.append)
    for _ in range(3):
        run.give(Token(1))
    assert told == [False]
    run.take()
    run.give(Token(1))
    run.give(Token(1, finish_reason="length"))
    assert told == [False, False, True]
