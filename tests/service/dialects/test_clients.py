"""Clients that people really use, unchanged, against the real service."""

import base64
from collections.abc import Iterator
from pathlib import Path

import cohere
import httpx
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


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """For clients that leave their connections open otherwise."""
    with httpx.Client() as client:
        yield client


def test_cohere_embed_and_rerank(live_service: LiveService, http: httpx.Client) -> None:
    client = cohere.ClientV2(base_url=live_service.url, api_key="not needed", httpx_client=http)
    answer = client.embed(model=MODEL, texts=["a", "b"], input_type="search_document", embedding_types=["float", "int8", "ubinary"])
    assert answer.embeddings.float_ is not None
    assert answer.embeddings.int8 is not None
    assert answer.embeddings.ubinary is not None
    assert [len(answer.embeddings.float_[0]), len(answer.embeddings.int8[0]), len(answer.embeddings.ubinary[0])] == [384, 384, 48]
    documents = ["Bananas are yellow.", "Paris is the capital of France.", "Fish swim."]
    ranked = client.rerank(model=MODEL, query="What is the capital of France?", documents=documents, top_n=2)
    assert [result.index for result in ranked.results][:1] == [1]
    assert len(ranked.results) == 2
    assert len(client.rerank(model="tiny-reranker", query="one", documents=documents).results) == 3


def test_huggingface_hub(live_service: LiveService) -> None:
    with InferenceClient(base_url=live_service.url) as client, InferenceClient(f"{live_service.url}/similarity") as likeness:
        vector = client.feature_extraction("Paris is the capital of France.")
        scores = likeness.sentence_similarity("The cat sat.", ["A cat was sitting.", "Stocks fell."])
    assert vector.shape == (1, 384)
    assert scores[0] > scores[1]
