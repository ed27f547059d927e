"""The runs of a request, as they are read: together, in time, and to the end."""

import asyncio
import re
from typing import Any

import pytest

from service.call import Call
from service.errors import DeadlineExceeded, RuntimeFailed
from service.generation.request import Delta, GenerationRequest, Sampling
from service.generation.run import Run
from service.generation.runs import Runs
from service.settings import Settings
from service.telemetry.usage import Usage
from tests.service.fakes import PATIENCE_S, client, set_forward, until
from tests.service.generation_fakes import FakeGenerator, generator_app

REQUEST = GenerationRequest(prompt=(1,), sampling=Sampling(seed=0), max_tokens=9)


def begun(n: int) -> tuple[Runs, list[Run]]:
    """So many runs that nobody works on, and their reader."""
    made = [Run(REQUEST, Usage(1), lambda run: None) for _ in range(n)]
    return Runs(made, Call("id", 0.0), n=n), made


@pytest.mark.parametrize("first_taken", [True, False])
async def test_what_befell_a_run_is_told_after_what_it_made(first_taken: bool) -> None:
    runs, (run,) = begun(1)
    async with asyncio.timeout(PATIENCE_S):
        run.give(Delta("a", (1,)))
        if first_taken:
            assert [delta.text for _, delta in await runs.take()] == ["a"]
            run.give(Delta("b", (2,)))
        run.fail(RuntimeFailed("no memory"))
        assert [delta.text for _, delta in await runs.take(interval_s=5)] == ["b" if first_taken else "a"]
        with pytest.raises(RuntimeFailed):
            await runs.take()
    assert run.cancelled


async def test_a_whole_answer_fails_with_the_first_run_that_fails() -> None:
    runs, (one, other) = begun(2)
    whole = asyncio.create_task(runs.all())
    await asyncio.sleep(0)
    one.give(Delta("a", (1,)))
    other.give(Delta("b", (1,)))
    await asyncio.sleep(0)
    one.give(Delta("a", (1,)))
    one.fail(RuntimeFailed("no memory"))
    with pytest.raises(RuntimeFailed):
        await asyncio.wait_for(whole, PATIENCE_S)
    assert other.cancelled


async def test_at_the_deadline_a_request_fails_only_if_none_of_its_runs_has_a_token() -> None:
    runs, (one, other) = begun(2)
    other.give(Delta("a", (1,)))
    other.usage.completion_tokens = 1
    for run in (one, other):
        run.fail(DeadlineExceeded("late"))
    assert [(delta.text, delta.finish_reason) for delta in await runs.all()] == [("", "length"), ("a", "length")]
    runs, (run,) = begun(1)
    run.fail(DeadlineExceeded("late"))
    with pytest.raises(DeadlineExceeded):
        await runs.all()


@pytest.mark.pool
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": "Hi", "n": 2, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/generate", {"inputs": "Hi", "parameters": {"details": True}}),
    ],
)
async def test_a_text_that_meets_its_deadline_is_answered_as_far_as_it_is(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], stream: bool
) -> None:
    async with client(generator_app(model := FakeGenerator("wordy"), default_max_tokens=4096)) as http:
        model.engine.hold(4)
        asking = asyncio.create_task(http.post(path, json={**body, "stream": stream}))
        await until(lambda: any(run.usage.completion_tokens >= 4 for run in model.engine.runs))
        set_forward(monkeypatch)(Settings().request_timeout_s)
        model.engine.release()
        answer = await asking
    assert answer.status_code == 200, answer.text
    assert '"error":{' not in answer.text
    assert ('"status":"incomplete"' if path == "/v1/responses" else '"finish_reason":"length"') in answer.text
    written = "".join(re.findall(r'"(?:text|content|delta|generated_text)":"(\w+)', answer.text))
    assert re.search("O+n+c+e+", written), "two choices come in turns"


async def test_an_end_does_not_wait_for_the_interval() -> None:
    runs, (run,) = begun(1)
    async with asyncio.timeout(PATIENCE_S):
        run.give(Delta("a", (1,)))
        await runs.take(interval_s=3600)
        taking = asyncio.create_task(runs.take(interval_s=3600))
        run.give(Delta("b", (2,)))
        await asyncio.sleep(0)
        assert not taking.done()
        run.give(Delta("c", (3,), finish_reason="length"))
        assert [(delta.text, delta.finish_reason) for _, delta in await taking] == [("bc", "length")]
    assert runs.done
