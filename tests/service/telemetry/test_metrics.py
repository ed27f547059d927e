"""What `/metrics` says after some traffic."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.telemetry.metrics import GeneratorMetrics, Metrics, ModelMetrics
from service.telemetry.usage import Usage
from tests.service.exposition import samples, types
from tests.service.fakes import client, fake_app, fake_bundle

# Names that dashboards of text-embeddings-inference query.
KNOWN = {
    "te_request_count",
    "te_request_success",
    "te_request_failure",
    "te_request_duration",
    "te_request_tokenization_duration",
    "te_request_queue_duration",
    "te_request_inference_duration",
    "te_request_input_length",
    "te_queue_size",
    "te_batch_next_size",
    "te_batch_next_tokens",
}
OURS = {
    "attnserve_tokens",
    "attnserve_padding_tokens",
    "attnserve_dropped_inputs",
    "attnserve_cache_hits",
    "attnserve_cache_bytes",
    "attnserve_joined_inputs",
    "attnserve_bad_outputs",
    "attnserve_truncated_inputs",
    "attnserve_queue_tokens",
    "attnserve_tokens_per_second",
    "attnserve_offered_seconds",
    "attnserve_ready",
    "attnserve_states",
    "attnserve_state_bytes",
    "attnserve_states_ended",
    "attnserve_state_damaged_blobs",
    "attnserve_state_store_seconds",
    "attnserve_state_store_queue",
    "attnserve_state_store_trouble",
}


async def series(http: object) -> dict[str, float]:
    """`name{labels}` -> value, as Prometheus itself would read them."""
    text = (await http.get("/metrics")).text  # type: ignore[attr-defined]
    return {sample.name + "".join(f"|{label}" for label in sample.labels.values()): sample.value for sample in samples(text)}


async def test_every_name_is_there_and_parses(tmp_path: Path) -> None:
    async with client(fake_app(fake_bundle(tmp_path / "mini"))) as http:
        await http.post("/v1/embeddings", json={"input": "cat"})
        await http.post("/v1/embeddings", json={"input": ""})
        names = {family.name for family in text_string_to_metric_families((await http.get("/metrics")).text)}
    assert names >= KNOWN | OURS


async def test_requests_tokens_and_padding_are_counted(tmp_path: Path) -> None:
    async with client(fake_app(fake_bundle(tmp_path / "mini"), threads=1)) as http:
        answers = [
            await http.post("/v1/embeddings", json={"input": ["cat dog", "cat dog", "fish " * 100]}),
            await http.post("/v1/embeddings", json={"input": "cat dog"}),
            await http.post("/v1/embeddings", json={"input": ""}),
            await http.get("/nowhere"),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 404]
        seen = await series(http)
    assert seen["te_request_count|/v1/embeddings|mini"] == 3
    assert seen["te_request_success|/v1/embeddings|mini"] == 2
    assert seen["te_request_failure|400|mini"] == 1
    assert seen["te_request_failure|404|"] == 1
    assert seen["te_request_count|unmatched|"] == 1, "an unknown path makes no label of its own"
    assert seen["attnserve_tokens_total|mini"] == 4 + 64
    assert seen["attnserve_joined_inputs_total|mini"] == 1
    assert seen["attnserve_cache_hits_total|mini"] == 1
    assert seen["attnserve_truncated_inputs_total|mini"] == 1
    assert seen["attnserve_cache_bytes"] > 0
    assert seen["te_request_input_length_count|mini"] == 4
    assert seen["attnserve_ready|mini"] == 1


async def test_what_only_grows_is_a_counter_and_nothing_else_is(tmp_path: Path) -> None:
    """`rate()` is for those alone, and tools that read types offer it by them."""
    async with client(fake_app(fake_bundle(tmp_path / "mini"))) as http:
        await http.post("/v1/embeddings", json={"input": "cat"})
        text = (await http.get("/metrics")).text
    found = types(text)
    growing = {name for name in found if name.endswith("_total")} | {"te_request_count", "te_request_success", "te_request_failure"}
    assert {name for name, kind in found.items() if kind == "counter"} == growing
    described = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert described == set(found)


async def test_times_are_of_requests_that_a_model_has_answered_by_lane(tmp_path: Path) -> None:
    """An objective of latency must not get better by refusals, nor worse by work that may wait for half a minute."""
    async with client(fake_app(fake_bundle(tmp_path / "mini"), bulk_inputs=2)) as http:
        for body, headers in (
            ({"input": "cat"}, {}),
            ({"input": "cat"}, {"x-lane": "bulk"}),
            ({"input": ["cat", "dog", "fish"]}, {}),
            ({"input": ["cat", "dog", "fish"]}, {"x-lane": "interactive"}),
            ({"input": ""}, {}),
        ):
            await http.post("/v1/embeddings", json=body, headers=headers)
        await http.get("/health/ready")
        seen = await series(http)
    assert {name: value for name, value in seen.items() if name.startswith("te_request_duration_count")} == {
        "te_request_duration_count|interactive|/v1/embeddings|mini": 2,
        "te_request_duration_count|bulk|/v1/embeddings|mini": 2,
    }


def test_the_number_of_series_is_the_one_of_the_book() -> None:
    """deploy/observability.md says what an encoder, a decoder, a route and a tenant cost; operators size Prometheus by it."""
    metrics = Metrics()
    steps: dict[str, Callable[[], object]] = {
        "an encoder": lambda: ModelMetrics(metrics, "mini"),
        "a decoder": lambda: GeneratorMetrics(metrics, "wordy"),
        "a route of a model": lambda: metrics.request("/v1/embeddings", "mini", 200, 0.1),
        "a route in the bulk lane": lambda: metrics.request("/v1/embeddings", "mini", 200, 0.1, bulk=True),
        "a route without a model": lambda: metrics.request("/health/ready", "", 200, 0.1),
        "a status of errors of a model": lambda: metrics.request("/v1/embeddings", "mini", 429, 0.1),
        "a tenant": lambda: metrics.tenant("acme"),
    }
    counted, before = {}, len(samples(metrics.exposition().decode()))
    for name, step in steps.items():
        step()
        now = len(samples(metrics.exposition().decode()))
        counted[name], before = now - before, now
    book = (Path(__file__).parents[3] / "deploy" / "observability.md").read_text()
    said = {name: int(number) for name, number in re.findall(r"^\| (an? [a-z ]+) \| (\d+) \|", book, flags=re.MULTILINE)}
    assert said == counted


@pytest.mark.parametrize("model", ["nothing-like-it", "x" * 200])
async def test_no_label_is_made_of_what_a_client_sends(tmp_path: Path, model: str) -> None:
    async with client(fake_app(fake_bundle(tmp_path / "mini"))) as http:
        await http.post(f"/v1/{model}", json={})
        await http.post("/v1/embeddings", json={"input": "cat", "model": model})
        assert not re.search(model, (await http.get("/metrics")).text)


async def test_a_decoders_series_have_vllms_names() -> None:
    metrics = Metrics()
    counted = GeneratorMetrics(metrics, "wordy")
    for reason in ("stop", "length", "abort", "error"):
        counted.finished(reason, Usage(7, submitted=1.0, finished=3.5))
    value = metrics.registry.get_sample_value
    assert value("vllm:e2e_request_latency_seconds_sum", {"model_name": "wordy"}) == 4 * 2.5
    for reason in ("stop", "length", "abort", "error"):
        assert value("vllm:request_success_total", {"model_name": "wordy", "finished_reason": reason}) == 1
    for name in ("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"):
        assert value(f"vllm:{name}", {"model_name": "wordy"}) == 0
    for name in ("time_to_first_token", "inter_token_latency", "request_queue_time"):
        assert value(f"vllm:{name}_seconds_sum", {"model_name": "wordy"}) == 0
