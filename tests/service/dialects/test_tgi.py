"""text-generation-inference: by hand, and through huggingface_hub's client."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio
from huggingface_hub import InferenceClient, TextGenerationInputGrammarType
from huggingface_hub.errors import ValidationError

from service.errors import InvalidRequest, NotReady, Overloaded, RuntimeFailed
from tests.service.dialects.asking import N_SAID, Route, route
from tests.service.fakes import PATIENCE_S, serve_in_thread
from tests.service.generation_fakes import EOS, SAID, FakeGenerator, events, generator_app

PROMPT = "Say:"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(where: str) -> AsyncIterator[Route]:
    async with route("/generate", {"inputs": PROMPT}, FakeGenerator("wordy"), FakeGenerator("other")) as made:
        yield made


async def asked(service: Route, **parameters: Any) -> Any:
    return await service.request(parameters=parameters)


async def test_the_answer_is_a_text_and_with_details_its_tokens(service: Route) -> None:
    assert await service.whole() == {"generated_text": SAID}
    service.model.engine.steps.gap = 1.0  # log-probabilities that are not 0, and `top_k` draws the likeliest token all the same
    answer = await service.whole(
        parameters={"details": True, "decoder_input_details": True, "top_n_tokens": 2, "seed": 7, "do_sample": True, "top_k": 1}
    )
    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", N_SAID, 7)
    assert "".join(token["text"] for token in details["tokens"] if not token["special"]) == SAID
    assert details["tokens"][-1] == {"id": EOS, "text": "</s>", "logprob": pytest.approx(-0.44, abs=0.1), "special": True}
    assert [token["text"] for token in details["prefill"]] == ["<s>", *PROMPT]
    assert {len(top) for top in details["top_tokens"]} == {2}
    full = await service.whole(parameters={"return_full_text": True, "max_new_tokens": 4, "details": True})
    assert (full["generated_text"], full["details"]["finish_reason"]) == (PROMPT + SAID[:4], "length")
    stopped = await service.whole(parameters={"stop": ["upon"], "details": True})
    assert (stopped["generated_text"], stopped["details"]["finish_reason"]) == ("Once upon", "stop_sequence")


async def test_an_answer_that_could_be_too_large_is_refused(service: Route) -> None:
    parameters = {"max_new_tokens": 100_000, "details": True, "top_n_tokens": 20}
    answer = await service.http.post("/generate", json={"inputs": PROMPT, "parameters": parameters})
    assert answer.status_code == 413
    assert answer.json()["error_type"] == "validation"
    assert answer.json()["error"].endswith("and the most is 67108864: lower max_new_tokens, top_n_tokens")


async def test_parameters_mean_what_they_mean_there(service: Route) -> None:
    greedy = await asked(service)
    assert (greedy.sampling.temperature, greedy.max_tokens, greedy.include_stop) == (0.0, 100, True)
    assert (await asked(service, temperature=1.0, top_p=1.0, top_k=0)).sampling.temperature == 0.0
    for field in ({"do_sample": True}, {"top_p": 0.5}, {"top_k": 5}, {"typical_p": 0.5}):
        assert (await asked(service, **field)).sampling.temperature == 1.0
    assert (await asked(service, temperature=0.5)).sampling.temperature == 0.5
    assert service.model.decode((await asked(service, truncate=2)).prompt) == "y:"
    grammar = (await asked(service, grammar={"type": "regex", "value": "a+"})).grammar
    assert (grammar.kind, grammar.source) == ("regex", "a+")
    for name in ("json", "json_object"):
        grammar = (await asked(service, grammar={"type": name, "value": {"type": "object"}})).grammar
        assert (grammar.kind, grammar.source) == ("json_schema", '{"type": "object"}')


@pytest.mark.pool
async def test_a_stream_is_an_event_a_token_and_its_last_has_the_text(service: Route) -> None:
    answer = await service.http.post("/generate_stream", json={"inputs": PROMPT, "parameters": {"top_n_tokens": 1}})
    told = events(answer.text)
    assert "".join(event["token"]["text"] for event in told if not event["token"]["special"]) == SAID
    assert [event["index"] for event in told] == list(range(1, N_SAID + 1))
    assert all(len(event["top_tokens"]) == 1 for event in told)
    *rest, last = told
    assert all(event["generated_text"] is None and event["details"] is None for event in rest)
    assert last["generated_text"] == SAID
    assert last["details"] == {"finish_reason": "eos_token", "generated_tokens": N_SAID, "seed": None, "input_length": len(PROMPT) + 1}


async def test_errors_have_its_form(service: Route) -> None:
    for error, status, kind in (
        (InvalidRequest("x", param="prompt"), 422, "validation"),
        (Overloaded("x", retry_after_s=2), 429, "overloaded"),
        (NotReady("x"), 503, "healthcheck"),
        (RuntimeFailed("x"), 424, "generation"),
    ):
        for path in ("/generate", "/generate_stream", "/"):
            service.engine.refusal = error
            answer = await service.http.post(path, json={"inputs": PROMPT})
            assert (answer.status_code, answer.json()) == (status, {"error": "x", "error_type": kind}), path
            assert ("retry-after" in answer.headers) is (status in (429, 503))


async def test_what_is_wrong_is_named(service: Route) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"inputs": None}, "`inputs`: Field required"),
        ({"parameters": {"watermark": True}}, "`parameters.watermark` is not supported"),
        ({"parameters": {"temperature": 0.0}}, "`parameters.temperature`"),
        ({"parameters": {"max_new_tokens": 0}}, "`parameters.max_new_tokens`"),
        ({"parameters": {"grammar": {"type": "json", "value": "{"}}}, "parameters.grammar is not JSON"),
        ({"model": "huge"}, "does not exist"),
    ]
    for fields, named in rows:
        answer = await service.post(**fields)
        assert answer.status_code in (404, 422), fields
        assert answer.json()["error_type"] == "validation"
        assert named in answer.json()["error"], fields


async def test_the_root_writes_no_prose_for_who_asks_for_labels(service: Route) -> None:
    for parameters, better in (
        ({"candidate_labels": ["a", "b"], "multi_label": False}, "/rerank"),
        ({"function_to_apply": "softmax"}, "/predict"),
    ):
        for model in (None, "wordy"):
            answer = await service.http.post("/", json={"inputs": PROMPT, "parameters": parameters, "model": model})
            assert (answer.status_code, set(answer.json())) == (400, {"error", "error_type"})
            assert better in answer.json()["error"]


async def test_the_root_is_for_what_the_model_is_for(service: Route) -> None:
    assert (await service.http.post("/", json={"inputs": PROMPT})).json() == [{"generated_text": SAID}]
    told = events((await service.http.post("/", json={"inputs": PROMPT, "stream": True})).text)
    assert told[-1]["generated_text"] == SAID


# The official client ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def official(where: str) -> Iterator[tuple[InferenceClient, FakeGenerator]]:
    model = FakeGenerator("wordy")
    app = generator_app(FakeGenerator("mini", kind="encoder"), model)
    with serve_in_thread(app) as url, InferenceClient(base_url=url, timeout=PATIENCE_S) as client:
        yield client, model


def test_huggingface_hub_continues_texts(official: tuple[InferenceClient, FakeGenerator]) -> None:
    hub, model = official
    assert hub.text_generation(PROMPT) == SAID
    hub.text_generation(PROMPT, grammar=TextGenerationInputGrammarType(type="json", value={"type": "object"}))
    grammar = model.engine.requests[-1].grammar
    assert (grammar and grammar.source) == '{"type": "object"}'
    whole = hub.text_generation(PROMPT, details=True, decoder_input_details=True, max_new_tokens=5)
    assert (whole.generated_text, whole.details.finish_reason, len(whole.details.prefill)) == (SAID[:5], "length", len(PROMPT) + 1)
    assert "".join(hub.text_generation(PROMPT, stream=True, max_new_tokens=9)) == SAID[:9]
    *_, last = hub.text_generation(PROMPT, stream=True, details=True, stop=["upon"])
    assert (last.generated_text, last.details.finish_reason, last.details.input_length) == ("Once upon", "stop_sequence", len(PROMPT) + 1)
    with pytest.raises(ValidationError, match="watermark"):
        hub.text_generation(PROMPT, watermark=True)
