"""Clients that people really use, unchanged, against the real service."""

import base64
import json
from pathlib import Path

import jsonschema
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient

from tests.service.live import LiveService
from tests.texts import texts

pytestmark = pytest.mark.live

MODEL = "all-MiniLM-L6-v2"
# Two fp32 programs that add the same numbers in another order; the same bar as for the torch model against sentence-transformers.
LEAST_COSINE = 0.999999


def test_vectors_equal_sentence_transformers(client: openai.OpenAI, minilm: Path) -> None:
    """The main job: a real checkpoint, rebuilt, exported and served, gives the vectors of the library it was made with."""
    from sentence_transformers import SentenceTransformer

    # That library reads the letters of a special token as the token; here they are text (`test_special_tokens.py`).
    inputs = [text for text in texts() if text and "[SEP]" not in text]
    wanted = SentenceTransformer(str(minilm), device="cpu").encode(inputs, normalize_embeddings=True)
    answer = client.embeddings.create(model=MODEL, input=inputs)
    got = np.array([entry.embedding for entry in answer.data])
    assert len(inputs) >= 100
    assert (got * wanted).sum(1).min() >= LEAST_COSINE


def test_openai_asks_for_base64_and_floats_are_the_same(client: openai.OpenAI) -> None:
    by_default = client.embeddings.create(model=MODEL, input="one text")
    floats = client.embeddings.create(model=MODEL, input="one text", encoding_format="float")
    raw = client.embeddings.with_raw_response.create(model=MODEL, input="one text", encoding_format="base64")
    sent = np.frombuffer(base64.b64decode(raw.http_response.json()["data"][0]["embedding"]), "<f4")
    assert by_default.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-7)
    assert sent == pytest.approx(floats.data[0].embedding, abs=1e-7)
    assert raw.headers["x-request-id"]
    assert by_default.usage.prompt_tokens == 4


def test_huggingface_hub(live_service: LiveService) -> None:
    with InferenceClient(base_url=live_service.url) as client, InferenceClient(f"{live_service.url}/similarity") as likeness:
        vector = client.feature_extraction("Paris is the capital of France.")
        scores = likeness.sentence_similarity("The cat sat.", ["A cat was sitting.", "Stocks fell."])
    assert vector.shape == (1, 384)
    assert scores[0] > scores[1]


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
        model="tiny-decoder",
        messages=[{"role": "user", "content": "a number"}],
        max_tokens=LONGEST,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "number", "schema": SCHEMA}},
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), SCHEMA)
