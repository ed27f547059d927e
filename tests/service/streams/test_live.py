"""The real service, killed with -9 in the middle of streams and started again: plain clients and OpenAI's go on."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.service.fakes import PATIENCE_S
from tests.service.live import LiveService, live
from tests.service.stream_fakes import Answer, parsed

pytestmark = pytest.mark.live

MODEL = "tiny-decoder"
SAMPLING = {"seed": 11, "temperature": 0.9, "frequency_penalty": 0.2, "ignore_eos": True}
BODY = {"model": MODEL, "prompt": "def f(x):", "max_tokens": 4000, "n": 2, **SAMPLING}
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
_PIECES = 12  # events before the service is killed


def kill(service: LiveService) -> None:
    """Kill all processes of the service. None of them can do anything about it."""
    family = service.family()
    for process in family:
        with suppress(psutil.NoSuchProcess):  # it ended with another
            process.kill()
    psutil.wait_procs(family, 30)


def test_streams_go_on_after_all_processes_were_killed(decoder_bundle: Path, tmp_path: Path) -> None:
    states = {"ATTNSERVE_STATES": str(tmp_path)}
    with live([decoder_bundle], env=states) as first, httpx.Client(base_url=first.url, timeout=PATIENCE_S) as http:
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            lines = answer.iter_lines()
            text = "".join(f"{next(lines)}\n" for _ in range(4 * _PIECES))
            with (
                openai.OpenAI(base_url=f"{first.url}/v1", api_key="none", max_retries=0) as client,
                client.chat.completions.with_streaming_response.create(
                    model=MODEL, messages=MESSAGES, max_tokens=3000, stream=True, seed=5, extra_body={"ignore_eos": True}
                ) as chat,
            ):
                chat_lines = chat.iter_lines()
                said = "".join(f"{next(chat_lines)}\n" for _ in range(3 * _PIECES))
                kill(first)
                with suppress(httpx.HTTPError):  # what was on its way still comes
                    text += "".join(f"{line}\n" for line in lines)
        port = first.port
    events, chat_events = (parsed(each.rpartition("\n\n")[0] + "\n\n") for each in (text, said))
    assert not Answer.of(events).done
    with live([decoder_bundle], port=port, env=states) as second, httpx.Client(base_url=second.url, timeout=PATIENCE_S) as http:
        last = {"last-event-id": events[-1].id or ""}
        told = Answer.of([*events, *parsed(http.post("/v1/completions", json={**BODY, "stream": True}, headers=last).text)])
        again = Answer.of([*events, *parsed(http.get(f"/v1/stream/{last['last-event-id'].partition(':')[0]}", headers=last).text)])
        assert told.done
        assert told == again
        whole = http.post("/v1/completions", json=BODY).json()
        assert [told.choices[index]["text"] for index in range(2)] == [choice["text"] for choice in whole["choices"]]

        with openai.OpenAI(base_url=f"{second.url}/v1", api_key="none", max_retries=0) as client:
            asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3000, "seed": 5, "extra_body": {"ignore_eos": True}}
            rest = client.chat.completions.create(**asked, stream=True, extra_headers={"Last-Event-ID": chat_events[-1].id or ""})
            content = Answer.of(chat_events).choices[0]["content"] + "".join(
                piece.choices[0].delta.content or "" for piece in rest if piece.choices
            )
            assert content == client.chat.completions.create(**asked).choices[0].message.content
