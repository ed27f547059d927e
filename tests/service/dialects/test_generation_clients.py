"""OpenAI's client, unchanged, against the real service: text from a decoder beside the encoders, on one port."""

import json
import socket
import urllib.request

import jsonschema
import openai
import pytest

from tests.service.fakes import PATIENCE_S
from tests.service.live import LiveService

pytestmark = pytest.mark.live

MODEL = "tiny-decoder"
_LOOKS = 2000  # at the metrics, before something that should have ended counts as a hang


def complete(client: openai.OpenAI, prompt: str = "def f(x):", **options: object) -> str:
    return str(client.completions.create(**{"model": MODEL, "prompt": prompt, "max_tokens": 24, "seed": 1, **options}).choices[0].text)


def running(live_service: LiveService) -> int:
    with urllib.request.urlopen(f"{live_service.url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith(("vllm:num_requests_running{", "vllm:num_requests_waiting{")))
    )


def test_encoders_and_decoders_answer_on_one_port(client: openai.OpenAI) -> None:
    assert {"all-MiniLM-L6-v2", MODEL} <= {model.id for model in client.models.list()}
    assert len(client.embeddings.create(model="all-MiniLM-L6-v2", input="a").data[0].embedding) == 384
    assert complete(client)
    with pytest.raises(openai.BadRequestError, match="kind encoder"):
        complete(client, model="all-MiniLM-L6-v2")
    with pytest.raises(openai.BadRequestError, match="kind decoder"):
        client.embeddings.create(model=MODEL, input="a")


def test_chat_and_responses_speak_through_the_template(client: openai.OpenAI) -> None:
    prompt = "user: hello\nassistant: "
    plain = complete(client, prompt, max_tokens=16, temperature=0)
    assert plain
    chat = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=16, temperature=0)
    response = client.responses.create(model=MODEL, input="hello", max_output_tokens=16, temperature=0)
    assert chat.choices[0].message.content == plain == response.output_text
    with client.responses.stream(model=MODEL, input="hello", max_output_tokens=16, temperature=0) as stream:
        events = list(stream)
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers)), "they count tokens, so they have gaps"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == plain


def test_a_client_that_disappears_frees_its_slot(live_service: LiveService, client: openai.OpenAI) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1_000_000, "stream": True, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", live_service.port), timeout=PATIENCE_S) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(65_536)
        assert running(live_service) == 1
    for _ in range(_LOOKS):
        if not running(live_service):
            break
    assert running(live_service) == 0
    assert complete(client)


SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -9, "maximum": 99},
        "kind": {"enum": ["odd", "even"]},
        "digits": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["n", "kind", "digits"],
    "additionalProperties": False,
}
LONGEST = 1000  # tokens: at most 70 characters of JSON, and 40 of white space in each of 22 places


def test_json_that_must_match_a_schema_is_complete_and_does(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a number"}],
        max_tokens=LONGEST,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}},
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
