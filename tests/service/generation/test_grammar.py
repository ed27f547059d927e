"""Grammars: what they allow, when they are done, how they are followed elsewhere, and what is refused."""

import json
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.contract import BundleError
from service.errors import InvalidRequest
from service.generation.request import Grammar, Sampling
from service.generation.sampling import grammar as grammar_module
from service.generation.sampling.grammar import MAX_SOURCE_BYTES, Grammars, Matcher, Words
from service.generation.sampling.sampler import Edits, Sampler
from service.generation.text import Vocabulary
from tests.service.fakes import PATIENCE_S, case, first
from tests.service.generation.fake_steps import EOS, VOCAB_SIZE, byte_tokenizer

WORDS = -(-VOCAB_SIZE // 32)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "é"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("grammar") / "tokenizer.json")


@pytest.fixture(scope="module")
def grammars(file: Path) -> Grammars:
    return Grammars(file, (EOS,))


@pytest.fixture(scope="module")
def vocabulary(file: Path) -> Vocabulary:
    return Vocabulary(file)


def json_schema(schema: object) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema))


def allowed(matcher: Matcher, size: int = WORDS) -> set[int]:
    out = np.full(size, -1, np.int32)
    matcher.mask(out)
    return set(np.flatnonzero(np.unpackbits(out.view(np.uint8), bitorder="little")).tolist())


def mask_of(matcher: Matcher) -> Words:
    out: Words = np.full(WORDS, -1, np.int32)
    matcher.mask(out)
    return out


def spelled(text: str, vocabulary: Vocabulary) -> list[int]:
    single = {vocabulary[token_id]: token_id for token_id in range(VOCAB_SIZE) if len(vocabulary[token_id]) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


def drawn(matcher: Matcher, seed: int, vocabulary: Vocabulary, most: int = 2000) -> tuple[str, list[int]]:
    """A random text of the language, and its tokens. The end of text is likelier than the rest, so that it comes."""
    sampler, token_ids = Sampler(VOCAB_SIZE, 1), list[int]()
    sampling = Sampling(seed=seed, logit_bias={EOS: 3.0})
    sampler.put(0, sampling, Edits.of(sampling, VOCAB_SIZE, (1,)), position=1, top_logprobs=None)
    while not matcher.finished and len(token_ids) < most:
        result = sampler.draw(np.zeros((1, VOCAB_SIZE), np.float32), masks={0: mask_of(matcher)})
        token_id = int(result.token_ids[0])
        if token_id == EOS:
            break
        token_ids.append(token_id)
        matcher.advance(token_id)
    return b"".join(vocabulary[token_id] for token_id in token_ids).decode(), token_ids


def test_random_texts_match_the_regular_expression(grammars: Grammars, vocabulary: Vocabulary) -> None:
    for pattern in ("(yes|no)[0-9]{3}", "[a-z]+@[a-z]{2,5}\\.(com|fr)", "é{2,4}|👩+", "a*"):
        for seed in range(3):
            text, _ = drawn(grammars.matcher(Grammar(kind="regex", source=pattern)), seed, vocabulary)
            assert re.fullmatch(pattern, text), (pattern, seed)


@pytest.mark.parametrize("seed", first(3, range(10)))
def test_random_texts_are_json_of_the_schema(seed: int, grammars: Grammars, vocabulary: Vocabulary) -> None:
    matcher = grammars.matcher(json_schema(PERSON))
    text, _ = drawn(matcher, seed, vocabulary)
    assert matcher.finished, "nothing may follow the last brace"
    value = json.loads(text)
    assert {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
    assert isinstance(value["age"], int)
    assert len(value["name"]) <= 5
    assert set(value.get("tags", ())) <= {"a", "é"}


def test_a_lark_grammar_may_nest(grammars: Grammars, vocabulary: Vocabulary) -> None:
    matcher = grammars.matcher(Grammar(kind="lark", source='start: "(" start ")" | "x"'))
    matcher.advance(*spelled("((x)", vocabulary))
    assert allowed(matcher) == set(spelled(")", vocabulary))
    matcher.advance(*spelled(")", vocabulary))
    assert matcher.finished
    assert allowed(matcher) == {EOS}


def test_white_space_between_json_tokens_comes_to_an_end(grammars: Grammars, vocabulary: Vocabulary) -> None:
    compact, padded = grammars.matcher(json_schema(PERSON)), grammars.matcher(json_schema(PERSON))
    compact.advance(*spelled('{"name":"x","age":1}', vocabulary))
    assert compact.finished
    padded.advance(*spelled('{\n  "name" : "x"' + "\n" * 30, vocabulary))
    assert padded.failure is None
    padded.advance(*spelled("\n" * 30, vocabulary))
    assert padded.failure is not None


def test_a_token_that_does_not_belong_leaves_none_and_says_so(grammars: Grammars, vocabulary: Vocabulary) -> None:
    matcher, other = (grammars.matcher(Grammar(kind="regex", source="a+")) for _ in range(2))
    matcher.advance(*spelled("b", vocabulary))
    assert allowed(matcher) == set()
    assert not matcher.finished
    assert matcher.failure is not None
    assert "doesn't satisfy the grammar" in matcher.failure
    assert "<" not in matcher.failure.replace("<0x", "")
    assert other.failure is None
    assert allowed(other) >= set(spelled("a", vocabulary))


def test_ids_that_only_the_model_has_are_never_allowed(grammars: Grammars) -> None:
    matcher = grammars.matcher(Grammar(kind="regex", source="(?s:.)*"))
    assert max(allowed(matcher, WORDS + 3)) < VOCAB_SIZE
    assert allowed(matcher, 2) == {token_id for token_id in allowed(matcher) if token_id < 64}, "a model may have fewer, too"


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_CACHED", 2)
    grammars, compiled = Grammars(file, (EOS,)), list[Grammar]()
    compile_ = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda grammar, tokenizer: compiled.append(grammar) or compile_(grammar, tokenizer))
    for source in ("a", "b", "a", "c", "a", "b"):
        grammars.matcher(Grammar(kind="regex", source=source))
    assert [grammar.source for grammar in compiled] == ["a", "b", "c", "b"]


# Refusals --------------------------------------------------------------------------------------------------------------------------------


def test_a_source_that_cannot_be_used_is_refused_with_the_reason(grammars: Grammars) -> None:
    cases: list[Any] = [
        (Grammar(kind="regex", source="("), "regular expression cannot be used.*unclosed group"),
        (Grammar(kind="regex", source="(?=a)b"), "look-around"),
        (Grammar(kind="regex", source="[^\\s\\S]x"), "regular expression cannot be used: no text matches it"),
        (Grammar(kind="regex", source="a" * (MAX_SOURCE_BYTES["regex"] + 1)), "has 4097 bytes and the most is 4096"),
        (Grammar(kind="regex", source="a?" * 2000), "regular expression cannot be used"),
        (Grammar(kind="regex", source="\ud800"), "half a surrogate pair"),
        (Grammar(kind="json_schema", source='{"type":'), "not JSON"),
        (Grammar(kind="json_schema", source="[1]"), "JSON schema cannot be used"),
        (json_schema({"type": "strin"}), "Invalid type: strin"),
        (json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
        (json_schema({"$ref": "http://example.org/schema"}), "not present in a registry"),
        (json_schema({"$ref": "#"}), "the \\$ref '#' of the JSON schema leads back to itself"),
        (json_schema({"items": [{"$ref": "#/items/1"}, {"$ref": "#/items/0"}]}), "the \\$ref '#/items/[01]' .* leads back to itself"),
        (json_schema({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/%24defs/a~1b"}}}), "leads back to itself"),
        (json_schema({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "$ref": "#a"}}}), "no text matches it"),
        (json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum .3. is greater"),
        (json_schema({"type": "string", "pattern": "("}), "unclosed group"),
        (json_schema({"anyOf": [{"pattern": "a" * 3000}, {"patternProperties": {"b" * 3000: {}}}]}), "patterns .* have 6000 bytes"),
        (json_schema({"type": "integer", "multipleOf": 999983}), "least common multiple 999983"),
        (json_schema({"multipleOf": True}), "JSON schema cannot be used"),
        (Grammar(kind="json_schema", source='{"multipleOf": 1e400}'), "not JSON: number is infinity"),
        (json_schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}), "least common multiple 988027"),
        (Grammar(kind="json_schema", source='{"items":' * 900 + "{}" + "}" * 900), "Recursion limit"),
        (json_schema({"x-guidance": {"whitespace_pattern": ".*"}}), "x-guidance"),
        (Grammar(kind="lark", source="start: foo"), 'Lark grammar cannot be used.*unknown name: "foo"'),
        (Grammar(kind="lark", source=""), "Empty grammar"),
        (Grammar(kind="lark", source="start: " + "(" * 500 + '"a"' + ")" * 500), "too deeply nested"),
        (Grammar(kind="lark", source='start: %json {"type": "integer"}'), "may not hold a JSON schema"),
        (Grammar(kind="lark", source=' {"grammars": []}'), "may not hold a JSON schema"),
    ]
    for grammar, words in cases:
        with case(grammar, words):
            with pytest.raises(InvalidRequest, match=f"(?s){words}") as refused:
                grammars.matcher(grammar)
            assert refused.value.param == "grammar"
            assert len(refused.value.message) < 700


@pytest.mark.parametrize(
    ("grammar", "whole"),
    [
        (Grammar(kind="lark", source="start:a0\n" + "".join(f"a{at}:a{at + 1}\n" for at in range(700)) + 'a700:"x"'), "x"),
        (
            json_schema(
                {"$ref": "#/$defs/0", "$defs": {**{str(at): {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(1500)}, "1500": {}}}
            ),
            "[[[]]]",
        ),
    ],
    ids=["lark", "json_schema"],
)
def test_long_chains_of_rules_do_not_exhaust_the_stack(grammar: Grammar, whole: str, grammars: Grammars, vocabulary: Vocabulary) -> None:
    """On the usual stack of 8 MB the second ends the process."""
    matcher = grammars.matcher(grammar)
    for token_id in spelled(whole, vocabulary):
        assert token_id in allowed(matcher)
        matcher.advance(token_id)
    assert matcher.finished


def test_compiling_that_takes_too_long_is_given_up_and_the_next_waits_for_its_turn(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, gate = Grammars(file, (EOS,)), threading.Event()
    real = grammar_module.LLMatcher

    class Slow:
        grammar_from_regex = staticmethod(real.grammar_from_regex)

        def __new__(cls, *arguments: object, **options: object) -> object:
            gate.wait(PATIENCE_S)
            return real(*arguments, **options)

    monkeypatch.setattr(grammar_module, "COMPILE_S", 0.05)
    monkeypatch.setattr(grammar_module, "LLMatcher", Slow)
    with pytest.raises(InvalidRequest, match=r"took more than 0\.05 s"):
        grammars.matcher(Grammar(kind="regex", source="a"))
    with pytest.raises(grammar_module.Overloaded, match="still being compiled"):
        grammars.matcher(Grammar(kind="regex", source="b"))
    gate.set()
    monkeypatch.setattr(grammar_module, "COMPILE_S", PATIENCE_S)
    assert allowed(grammars.matcher(Grammar(kind="regex", source="b")))


def test_a_model_without_an_end_of_text_has_no_grammars(file: Path) -> None:
    with pytest.raises(InvalidRequest, match="no end of text"):
        Grammars(file, ()).matcher(Grammar(kind="regex", source="a"))


def test_a_tokenizer_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        Grammars(tmp_path / "tokenizer.json", (0,))


def dear(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every mask takes so much CPU time."""
    ticks = iter(at * seconds for at in range(10**6))
    monkeypatch.setattr(grammar_module.time, "thread_time", lambda: next(ticks))


def test_a_grammar_that_becomes_dear_ends_its_runs_and_is_refused_from_then_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(file, (EOS,))
    grammar = Grammar(kind="regex", source="a{1,40}")
    one, other = grammars.matcher(grammar), grammars.matcher(grammar)
    mask = np.zeros(WORDS, np.int32)
    one.mask(mask)
    assert mask.any()
    assert one.failure is None
    dear(monkeypatch, 0.1)
    one.mask(mask)  # which is the one too many
    for matcher in (one, other):
        matcher.mask(mask)
        assert not mask.any()
        assert "ms a token to follow" in (matcher.failure or "")
    with pytest.raises(InvalidRequest, match="ms a token to follow"):
        grammars.matcher(grammar)


def test_a_repetition_of_100_000_is_too_dear_and_usual_grammars_are_not(grammars: Grammars) -> None:
    """By what the library really takes: 30 ms a mask here, and hundredths of one."""
    with pytest.raises(InvalidRequest, match="a token to follow"):
        grammars.matcher(Grammar(kind="regex", source="a{100000}"))
    for kind, source in (("regex", r"[a-z ]{1,1000}"), ("json_schema", json.dumps(PERSON))):
        assert grammars.matcher(Grammar(kind=kind, source=source)).failure is None  # type: ignore[arg-type]
