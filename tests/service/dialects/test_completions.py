"""`/v1/completions`, whole and streamed: by hand, and by OpenAI's own client."""

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from service.dialects.openai import completions
from service.dialects.text.pipeline import AnswerStart
from service.dialects.text.request import seed_of
from service.dialects.text.schemas import CompletionRequest
from service.errors import DeadlineExceeded, InputTooLong, InvalidRequest, NeverFits, NotReady, Overloaded, RuntimeFailed
from service.generation.request import Delta, Grammar, TokenLogprob
from service.runtime.lanes import Lane
from tests.service.dialects.asking import N_SAID, Route, expect_refusals, route
from tests.service.fakes import case, until
from tests.service.generation_fakes import BOS, EOS, SAID, FakeGenerator
from tests.service.http.test_edge import Caller

PROMPT = "Say:"
N_PROMPT = len(PROMPT) + 1  # a token a byte, and <s>


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(where: str) -> AsyncIterator[Route]:
    others = FakeGenerator("mini", kind="encoder"), FakeGenerator("no-bos", bos=False)
    body = {"prompt": PROMPT, "max_tokens": 100}
    async with route("/v1/completions", body, FakeGenerator("wordy"), *others, aliases={"gpt": "wordy"}) as made:
        yield made


def tokens(text: str) -> list[int]:
    return FakeGenerator("x").encode(text, add_special_tokens=False)


# Answers ---------------------------------------------------------------------------------------------------------------------------------


async def test_the_answer_has_openais_form(service: Route) -> None:
    content = await service.whole()
    assert list(content) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert content["id"].startswith("cmpl-")
    assert (content["object"], content["model"]) == ("text_completion", "wordy")
    assert content["system_fingerprint"] == f"fp_{service.model.manifest.fingerprint[:12]}"
    assert content["choices"] == [{"index": 0, "text": SAID, "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    details = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert content["usage"] == {"prompt_tokens": N_PROMPT, "completion_tokens": N_SAID, "total_tokens": N_PROMPT + N_SAID, **details}


async def test_sixteen_tokens_are_the_default_and_length_is_the_reason(service: Route) -> None:
    content = (await service.http.post("/v1/completions", json={"prompt": PROMPT})).json()
    assert content["choices"][0]["text"] == SAID[:16]
    assert content["choices"][0]["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == 16


async def test_prompts_are_texts_or_ids_one_or_many(service: Route) -> None:
    asked: list[tuple[Any, list[list[int]]]] = [
        ("ab", [[BOS, *tokens("ab")]]),
        (["ab", "é"], [[BOS, *tokens("ab")], [BOS, *tokens("é")]]),
        ([70, 71], [[70, 71]]),
        ([[70], [71, 72]], [[70], [71, 72]]),
        ("", [[BOS]]),
    ]
    for prompt, ids in asked:
        service.engine.forget()
        content = await service.whole(prompt=prompt, max_tokens=1)
        assert [list(request.prompt) for request in service.engine.requests] == ids, prompt
        assert [choice["index"] for choice in content["choices"]] == list(range(len(ids)))
        assert content["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_every_field_reaches_the_engine(service: Route) -> None:
    request = await service.request(
        temperature=0.5,
        top_p=0.25,
        frequency_penalty=-1,
        presence_penalty=1.5,
        logit_bias={"70": 5, "71": -100},
        stop=["zz", "yy"],
        top_k=7,
        min_p=0.125,
        typical_p=0.75,
        repetition_penalty=1.25,
        min_tokens=3,
        ignore_eos=True,
        stop_token_ids=[200],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        allowed_token_ids=[*range(2, 258)],
        logprobs=2,
        user="me",
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.typical_p) == (0.5, 0.25, 7, 0.125, 0.75)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (-1, 1.5, 1.25)
    assert sampling.logit_bias == {70: 5, 71: -100}
    assert sampling.allowed_token_ids == tuple(range(2, 258))
    assert (request.max_tokens, request.min_tokens, request.ignore_eos, request.stop_token_ids) == (100, 3, True, (200,))
    assert (request.stop, request.include_stop, request.skip_special_tokens) == (("zz", "yy"), True, False)
    assert (request.top_logprobs, request.prompt_logprobs, request.lane, request.grammar) == (2, None, Lane.INTERACTIVE, None)


async def test_constraints_become_one_grammar(service: Route) -> None:
    constraints: list[tuple[dict[str, Any], Grammar]] = [
        ({"guided_json": {"type": "integer"}}, Grammar(kind="json_schema", source='{"type": "integer"}')),
        ({"guided_json": '{"type":"integer"}'}, Grammar(kind="json_schema", source='{"type":"integer"}')),
        ({"guided_regex": "a+"}, Grammar(kind="regex", source="a+")),
        ({"guided_grammar": 'start: "a"'}, Grammar(kind="lark", source='start: "a"')),
        ({"structured_outputs": {"json": {"type": "null"}}}, Grammar(kind="json_schema", source='{"type": "null"}')),
        ({"structured_outputs": {"regex": "b"}}, Grammar(kind="regex", source="b")),
        ({"structured_outputs": {"grammar": 'start: "c"'}}, Grammar(kind="lark", source='start: "c"')),
        ({"structured_outputs": {"choice": ["yes.", "no"]}}, Grammar(kind="regex", source="yes\\.|no")),
        ({"structured_outputs": {"json_object": True}}, Grammar(kind="json_schema", source='{"type":"object"}')),
    ]
    for fields, grammar in constraints:
        assert (await service.request(max_tokens=1, **fields)).grammar == grammar, fields


# Choices and seeds -----------------------------------------------------------------------------------------------------------------------


async def test_choices_of_a_prompt_have_seeds_of_their_own_and_count_the_prompt_once(service: Route) -> None:
    content = await service.whole(prompt=["a", "b"], n=3, seed=7, max_tokens=2)
    assert [choice["index"] for choice in content["choices"]] == [0, 1, 2, 3, 4, 5]
    seeds = [request.sampling.seed for request in service.engine.requests]
    assert seeds == [seed_of(7, 0), seed_of(7, 1), seed_of(7, 2)] * 2
    assert len(set(seeds)) == 3
    assert content["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_seed_decides_and_without_one_every_request_is_its_own(service: Route) -> None:
    same = {(await service.request(seed=seed)).sampling.seed for seed in (5, 5, 5)}
    assert same == {seed_of(5, 0)}
    assert len({(await service.request()).sampling.seed for _ in range(4)}) == 4
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        assert 0 <= (await service.request(seed=seed)).sampling.seed < 2**63


# Echo and log-probabilities --------------------------------------------------------------------------------------------------------------


async def test_echo_puts_the_prompt_before_each_choice(service: Route) -> None:
    for prompt in (PROMPT, tokens(PROMPT), [BOS, *tokens(PROMPT)]):
        content = await service.whole(prompt=prompt, echo=True, n=2)
        assert [choice["text"] for choice in content["choices"]] == [PROMPT + SAID] * 2, prompt


def logprobs_after(service: Route, *ids: int) -> NDArray[np.float64]:
    """(V,): the log-probabilities of the token after these ones."""
    logits = service.engine.steps.logits(np.array(ids) + 1).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


@pytest.fixture
def close(service: Route) -> None:
    """Give all tokens log-probabilities that differ a little. Without temperature, the script is drawn all the same."""
    service.engine.steps.gap = 1 / 16


@pytest.mark.usefixtures("close")
async def test_no_tokens_with_echo_are_the_prompts_log_probabilities(service: Route) -> None:
    (choice,) = (await service.whole(max_tokens=0, echo=True, logprobs=1))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["tokens"] == ["<s>", *PROMPT]
    assert choice["logprobs"]["token_logprobs"][0] is None
    expected, (s, o) = logprobs_after(service, BOS), tokens("SO")
    assert choice["logprobs"]["top_logprobs"][1] == pytest.approx({"S": expected[s], "O": expected[o]})
    assert service.engine.requests[0].prompt_logprobs == 1


@pytest.mark.parametrize("wanted", [0, 5])
@pytest.mark.usefixtures("close")
async def test_log_probabilities_of_each_token(service: Route, wanted: int) -> None:
    (choice,) = (await service.whole(logprobs=wanted, temperature=0))["choices"]
    logprobs = choice["logprobs"]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert {len(values) for values in logprobs.values()} == {N_SAID}
    prompt, drawn = [BOS, *tokens(PROMPT)], [*tokens(SAID), EOS]
    expected = [logprobs_after(service, *prompt, *drawn[:at])[token_id] for at, token_id in enumerate(drawn)]
    assert logprobs["token_logprobs"] == pytest.approx(expected)
    assert [len(top) for top in logprobs["top_logprobs"]] == [max(wanted, 1)] * N_SAID


async def test_a_drawn_token_that_is_not_among_the_likeliest_is_told_too(service: Route) -> None:
    for wanted in (0, 5):
        (choice,) = (await service.whole(logprobs=wanted, allowed_token_ids=tokens("x"), max_tokens=2))["choices"]
        assert choice["text"] == "xx"
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [wanted + 1] * 2
        assert all("x" in top for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize("echo", [True, False])
async def test_offsets_are_places_in_the_text(service: Route, echo: bool) -> None:
    (choice,) = (await service.whole(prompt="né日:", echo=echo, logprobs=0))["choices"]
    text, named = choice["text"], choice["logprobs"]["tokens"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(named, offsets, strict=True):
        if not token.startswith("bytes:") and token not in ("<s>", "</s>"):
            assert text[offset : offset + len(token)] == token
    at = named.index("bytes:\\xc3")
    assert named[at : at + 2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert {text[offset] for offset in offsets[at : at + 2]} == {"é"}


@pytest.mark.usefixtures("close")
async def test_prompt_logprobs_have_vllms_form(service: Route) -> None:
    (choice,) = (await service.whole(prompt="Sa", prompt_logprobs=1))["choices"]
    first, s, a = choice["prompt_logprobs"]
    assert first is None
    expected, own, likeliest = logprobs_after(service, BOS), tokens("S")[0], tokens("O")[0]
    assert s == {
        str(own): {"logprob": pytest.approx(expected[own]), "rank": own + 1, "decoded_token": "S"},  # tokens with smaller ids are likelier
        str(likeliest): {"logprob": pytest.approx(expected[likeliest]), "rank": 1, "decoded_token": "O"},
    }
    assert a[str(tokens("a")[0])]["decoded_token"] == "a"


async def test_a_log_probability_that_is_very_low_is_a_number_in_json(service: Route) -> None:
    (choice,) = (await service.whole(prompt=[70, 200], max_tokens=0, echo=True, logprobs=0))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0]


async def test_how_a_text_ends(service: Route) -> None:
    """A stream ends with the same, as `test_a_stream_has_the_same_in_pieces` shows."""
    cases: list[Any] = [
        ({}, SAID, "stop", None),
        ({"max_tokens": 4}, "Once", "length", None),
        ({"stop": "time"}, "Once upon a ", "stop", "time"),
        ({"stop": ["never", " upon", "time"]}, "Once", "stop", " upon"),
        ({"stop": "time", "include_stop_str_in_output": True}, "Once upon a time", "stop", "time"),
        ({"stop_token_ids": tokens(",")}, "Once upon a time", "stop", tokens(",")[0]),
        ({"ignore_eos": True, "max_tokens": N_SAID + 4}, SAID + "Once", "length", None),
        ({"skip_special_tokens": False}, SAID, "stop", None),  # as in vLLM, a token that ends a text gives none
    ]
    for fields, text, reason, stop_reason in cases:
        with case(fields, text, reason, stop_reason):
            (choice,) = (await service.whole(**fields))["choices"]
            assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, reason, stop_reason)


# Streams ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{"echo": True, "logprobs": 3}, {"n": 1}, {"logprobs": 0, "stop": "time"}], ids=str)
@pytest.mark.usefixtures("close")
@pytest.mark.pool
async def test_a_stream_has_the_same_in_pieces(service: Route, more: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"prompt": ["né", "b"], "n": 3, "temperature": 0, **more}
    whole = await service.whole(**fields)
    *chunks, usage, done = await service.streamed(**fields, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    for wanted in whole["choices"]:
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == wanted["index"]]
        assert len(pieces) > 1
        assert "".join(piece["text"] for piece in pieces) == wanted["text"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [wanted["finish_reason"]]
        assert pieces[-1]["stop_reason"] == wanted["stop_reason"]
        for name, values in (wanted["logprobs"] or {}).items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values


def test_choices_that_begin_before_the_log_probabilities_of_their_prompt_wait_for_them() -> None:
    model = FakeGenerator("x")
    first, second = (SimpleNamespace(prompt_logprobs=[]) for _ in range(2))
    body = CompletionRequest.model_validate({"model": model.name, "prompt": "ab", "echo": True, "logprobs": 0, "n": 2, "stream": True})
    runs: Any = SimpleNamespace(runs=[first, second])
    stream = completions._CompletionAnswer(body, model, [("ab", [10, 11])], runs, AnswerStart.new("cmpl-", None, 1))  # type: ignore[arg-type]
    assert b"".join(stream.pieces([(1, Delta("c"))])) == b""
    first.prompt_logprobs = [None, TokenLogprob(11, -1.0)]
    events = b"".join(stream.pieces([(0, Delta("d"))])).decode().split("\n\n")[:-1]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(1, "ab"), (1, "c"), (0, "ab"), (0, "d")]
    assert choices[0]["logprobs"] == choices[2]["logprobs"]
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -1.0]


async def test_without_include_usage_no_chunk_speaks_of_it(service: Route) -> None:
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": {}}):
        *chunks, done = await service.streamed(**options)
        assert done == "[DONE]"
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks), options


# Errors ----------------------------------------------------------------------------------------------------------------------------------

FAILURES = [
    (Overloaded("full", retry_after_s=2.5), 429, "rate_limit_error", "overloaded"),
    (NeverFits("too long", param="prompt"), 413, "invalid_request_error", "too_large"),
    (InputTooLong("too long", param="prompt"), 400, "invalid_request_error", "context_length_exceeded"),
    (NotReady("stopping"), 503, "service_unavailable_error", "not_ready"),
    (InvalidRequest("no such grammar", param="guided_regex"), 400, "invalid_request_error", "invalid_request"),
    (DeadlineExceeded("late"), 504, "timeout_error", "deadline_exceeded"),
    (RuntimeFailed("broken"), 500, "server_error", "backend_failure"),
    (KeyError("a bug"), 500, "server_error", "internal_error"),
]


@pytest.mark.pool
@pytest.mark.parametrize("stream", [False, True])
async def test_what_fails_before_the_first_token_has_its_status(service: Route, stream: bool) -> None:
    for failure, status, kind, code in FAILURES:
        for refused in (True, False):
            service.engine.forget()
            if refused:
                service.engine.refusal = failure
            else:
                service.engine.failures[0] = (0, failure)
            answer = await service.post(stream=stream)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"], error["code"]) == (status, kind, code), (failure, refused)
            assert answer.headers["content-type"] == "application/json"
            if status == 429:
                assert answer.headers["retry-after-ms"] == "2500"


@pytest.mark.pool
async def test_what_fails_later_is_the_streams_last_event_and_the_stream_is_not_done(service: Route) -> None:
    for failure, status, kind, code in FAILURES:
        if status == 504:
            continue
        service.engine.forget()
        service.engine.failures[1] = (5, failure)
        *chunks, last = await service.streamed(n=3, stream_options={"include_usage": True})
        assert (last["error"]["type"], last["error"]["code"]) == (kind, code), failure
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"] if choice["index"] == 1)
        await until(lambda: not service.engine.pending)  # the other choices end with it


@pytest.mark.pool
async def test_a_request_is_admitted_whole_or_not_at_all(service: Route) -> None:
    service.engine.refusal, service.engine.refuse_after = Overloaded("full", retry_after_s=1), 2
    assert (await service.post(n=3)).status_code == 429
    assert not service.engine.runs, "those before the refusal are not queued"


async def test_what_is_wrong_is_a_400_that_names_it(service: Route) -> None:
    """One row for each rule and each form of a value, not for each field that has the rule."""
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": None}, "prompt", "Field required"),
        ({"prompt": []}, "prompt", "cannot be empty"),
        ({"prompt": [[]]}, "prompt.0", "cannot be empty"),
        ({"prompt": [1, "a"]}, "prompt.0", "valid"),
        ({"prompt": [258]}, "prompt", "token id 258 in prompt is outside this model's vocabulary of 258"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": "", "model": "no-bos"}, "prompt", "has no tokens"),
        ({"prompt": ["a"] * 100, "n": 3}, "n", "more than 256 completions"),
        ({"model": "huge"}, "model", "does not exist"),
        ({"model": "mini"}, "model", "is of kind encoder; this route needs: decoder, encoder_decoder"),
        ({"max_tokens": 0}, "max_tokens", "needs echo=true"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"best_of": 2}, "best_of", "best_of=2 is not supported: leave it out or send n=1"),
        ({"suffix": "x"}, "suffix", "`suffix` is not supported: leave it out"),
        ({"logprobs": 6}, "logprobs", "less than or equal to 5"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ({"prompt_logprobs": 1, "echo": True, "logprobs": 1}, "prompt_logprobs", "cannot be combined"),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"repetition_penalty": 1e-7}, "repetition_penalty", "from 1e-06 to 100"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ["a", ""]}, "stop.1", "cannot be empty"),
        ({"stop": ["a", None]}, "stop.1", "valid string. Given: None"),
        ({"logit_bias": {"70": 101}}, "logit_bias.70", "less than or equal to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "is no token id"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "token id 258"),
        ({"logit_bias": [1]}, "logit_bias", "an object"),
        ({"min_tokens": 101}, "min_tokens", "min_tokens=101 is more than max_tokens=100"),
        ({"stop_token_ids": [258]}, "stop_token_ids", "token id 258"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids.0", "valid integer"),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": {"a": "x" * 70_000}}, "guided_json", "the most is 65536"),
        ({"guided_regex": "a", "guided_grammar": "b"}, "guided_grammar", "cannot be combined"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs.regex", "cannot be combined"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "only one of"),
        ({"structured_outputs": {"whitespace": "a"}}, "structured_outputs.whitespace", "is not a parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include", "is not a parameter"),
        ({"user": "u" * 513}, "user", "at most 512"),
        ({"top-k": 5}, "top-k", "`top-k` is not a parameter of this request"),
    ]
    await expect_refusals(service, rows)


async def test_a_grammar_that_cannot_be_compiled_is_called_as_it_was_sent(service: Route) -> None:
    sent: dict[str, Any] = {"guided_json": {"type": "no"}, "guided_regex": "(", "guided_grammar": "start: foo"}
    inside = {"json": {"type": "no"}, "regex": "(", "grammar": "start: foo", "choice": ["a"], "json_object": True}
    for param, fields in [*((name, {name: value}) for name, value in sent.items())] + [
        (f"structured_outputs.{name}", {"structured_outputs": {name: value}}) for name, value in inside.items()
    ]:
        service.engine.refusal = InvalidRequest("the grammar cannot be used", param="grammar")
        answer = await service.post(**fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.pool
@pytest.mark.parametrize(("stream", "said"), [(False, 3), (True, 3)])
async def test_work_ends_with_the_client_that_asked_for_it(service: Route, said: int, stream: bool) -> None:
    service.engine.hold(after=said)
    caller = Caller(service.app, path="/v1/completions")
    caller.body(json.dumps({"prompt": PROMPT, "n": 2, "stream": stream}).encode())
    await until(lambda: len(service.engine.runs) == 2)
    if stream and said:
        await until(lambda: [run.usage.completion_tokens for run in service.engine.runs] == [said, said] and caller.sent[1:])
    caller.hang_up()
    await caller.done()
    assert [run.cancelled for run in service.engine.runs] == [True, True]
    assert b"[DONE]" not in b"".join(message.get("body", b"") for message in caller.sent)
    assert service.app.state.catalog.active == 0


@pytest.mark.pool
def test_openais_client_raises_what_ended_a_stream(official: openai.OpenAI, served: tuple[str, FakeGenerator]) -> None:
    served[1].engine.failures[0] = (4, RuntimeFailed("the runtime failed"))
    stream = official.completions.create(model="wordy", prompt=PROMPT, stream=True)
    text = ""
    while len(text) < 4:
        text += next(stream).choices[0].text
    with pytest.raises(openai.APIError, match="the runtime failed"):
        next(stream)
    assert text == SAID[:4]
