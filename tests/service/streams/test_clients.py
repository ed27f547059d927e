"""OpenAI's own client reads streams with ids and heartbeats, and goes on with one."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from service.states.store import Store
from tests.service.fakes import serve_in_thread
from tests.service.stream_fakes import RealGenerator, parsed, storing_app

ASKED = {"model": "tiny", "prompt": "a prompt", "max_tokens": 20, "seed": 3}


@pytest.fixture
def generator(tokenizer: Path) -> RealGenerator:
    return RealGenerator(tokenizer)


@pytest.fixture
def client(generator: RealGenerator, store: Store) -> Iterator[openai.OpenAI]:
    app = storing_app(generator, store, stream_heartbeat_s=0.01)
    with serve_in_thread(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made
        generator.steps.open()


def test_heartbeats_before_and_between_events_are_no_events(client: openai.OpenAI, generator: RealGenerator) -> None:
    whole = client.completions.create(**ASKED).choices[0].text  # type: ignore[call-overload]
    generator.steps.hold()
    with client.completions.with_streaming_response.create(**ASKED, stream=True) as answer:  # type: ignore[call-overload]
        lines, pings = answer.iter_lines(), 0
        seen = []
        for line in lines:
            seen.append(line)
            pings += line == ": ping"
            if pings == 3:
                generator.steps.release(3)
            if pings == 6:
                generator.steps.open()
    first = seen.index(": ping")
    assert [line.partition(":")[0] for line in seen[: first + 1]] == ["id", "retry", ""]
    assert "" not in seen[: first + 3], "no empty line follows the first id"
    generator.steps.hold()
    stream = client.completions.create(**ASKED, stream=True)  # type: ignore[call-overload]
    generator.steps.release(4)
    text = next(stream).choices[0].text
    generator.steps.open()
    assert text + "".join(piece.choices[0].text for piece in stream) == whole


def test_it_goes_on_with_the_last_id_as_a_header(client: openai.OpenAI) -> None:
    whole = client.completions.create(**ASKED).choices[0].text  # type: ignore[call-overload]
    with client.completions.with_streaming_response.create(**ASKED, stream=True) as answer:  # type: ignore[call-overload]
        events = parsed("\n".join(answer.iter_lines()))
    assert len(events) > 5
    for event in events[:-1]:
        last = event.id or ""
        rest = client.completions.create(**ASKED, stream=True, extra_headers={"Last-Event-ID": last})  # type: ignore[call-overload]
        text = "".join(piece.choices[0].text for piece in rest)
        assert whole.endswith(text)


def test_a_text_that_has_diverged_is_its_error(client: openai.OpenAI) -> None:
    with client.completions.with_streaming_response.create(**ASKED, stream=True) as answer:  # type: ignore[call-overload]
        run = answer.headers["x-run-id"]
        assert list(answer.iter_lines())
    position = {"Last-Event-ID": f"{run}:5:{'0' * 16}"}
    with pytest.raises(openai.APIError, match="the stream cannot go on"):
        list(client.completions.create(**ASKED, stream=True, extra_headers=position))  # type: ignore[call-overload]
    with pytest.raises(openai.NotFoundError, match="there is no run"):
        client.completions.create(**ASKED, stream=True, extra_headers={"Last-Event-ID": f"run_{'0' * 32}:5"})  # type: ignore[call-overload]
