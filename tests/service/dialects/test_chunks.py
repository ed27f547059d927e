"""Vectors of chunks: `chunks` of `/v1/embeddings` and `/v1/contextualizedembeddings`, with a real encoder of 64 tokens."""

import base64
import re
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from service.app import build_app
from service.catalog import Catalog
from service.encoding.chunks import ChunkVectors, Splitting, TokenisedText
from service.settings import Settings
from service.tokenization.texts import TextEncoder
from tests.bundles import tiny_encoder_bundle
from tests.service.fakes import PATIENCE_S, WORDS, case, fake_bundle

TEXT = "The cat is in the house. One dog is small! Where is the river? Paris is a large capital"


@pytest.fixture(scope="module", autouse=True)
def where() -> None:
    """A real engine in this process."""


@pytest_asyncio.fixture
async def http(encoder_bundle: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    tiny_encoder_bundle(tmp_path / "cls", pooling="cls", name="by-cls")
    catalog = Catalog(Settings(bundles=(encoder_bundle, tmp_path / "cls"), threads=1))
    app = build_app(catalog)
    async with app.router.lifespan_context(app):
        await catalog.warm.wait()
        assert catalog.failure is None
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://attnserve", timeout=PATIENCE_S) as made:
            made.catalog = catalog  # type: ignore[attr-defined]
            yield made


async def post(http: httpx.AsyncClient, path: str = "/v1/embeddings", **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chunks_of(http: httpx.AsyncClient, text: str, **how: Any) -> Any:
    return (await post(http, input=text, chunks=how))["data"][0]["chunks"]


async def token_vectors(http: httpx.AsyncClient, text: str) -> Any:
    return np.array((await post(http, "/embed_all", inputs=text))[0])


def unit(rows: Any) -> Any:
    mean = np.mean(rows, axis=0)
    return mean / np.linalg.norm(mean)


async def test_one_chunk_of_a_whole_text_has_the_texts_own_vector(http: httpx.AsyncClient) -> None:
    (chunk,) = await chunks_of(http, TEXT, size=1000)
    whole = (await post(http, input=TEXT))["data"][0]["embedding"]
    assert chunk["embedding"] == pytest.approx(whole, abs=1e-6)
    assert chunk["characters"] == [0, len(TEXT)]


async def test_a_late_chunk_is_the_mean_of_its_tokens_in_the_whole_text(http: httpx.AsyncClient) -> None:
    """The first chunk has the special token before the text too, the last one that after it."""
    spans = [[0, 25], [25, 43], [43, len(TEXT)]]
    tokens = await token_vectors(http, TEXT)
    chunks = await chunks_of(http, TEXT, spans=[spans])
    borders = [0, *[chunk["tokens"][1] + 1 for chunk in chunks[:-1]], len(tokens)]
    for at, chunk in enumerate(chunks):
        assert chunk["embedding"] == pytest.approx(unit(tokens[borders[at] : borders[at + 1]]).tolist(), abs=1e-6)
        assert chunk["characters"] == spans[at]
    split = await chunks_of(http, TEXT, spans=[spans], mode="split")
    alone = (await post(http, input=[TEXT[slice(*span)] for span in spans]))["data"]
    assert [chunk["embedding"] for chunk in split] == [item["embedding"] for item in alone]
    assert split[1]["embedding"] != pytest.approx(chunks[1]["embedding"], abs=1e-3), "a late chunk knows the text around it"


async def test_sentences_stay_whole_and_chunks_overlap(http: httpx.AsyncClient) -> None:
    chunks = await chunks_of(http, TEXT, size=20, by="sentences")
    assert [TEXT[slice(*chunk["characters"])] for chunk in chunks] == [
        "The cat is in the house. One dog is small!",
        "Where is the river? Paris is a large capital",
    ]
    overlapping = await chunks_of(http, TEXT, size=8, overlap=3)
    tokens = [chunk["tokens"] for chunk in overlapping]
    assert [last - first for first, last in tokens[:-1]] == [8] * (len(tokens) - 1)
    assert [before[1] - after[0] for before, after in pairwise(tokens)] == [3] * (len(tokens) - 1)


async def test_a_text_longer_than_the_encoder_reads_has_chunks_to_its_end(http: httpx.AsyncClient) -> None:
    text = " ".join(WORDS * 8)
    answer = await post(http, input=[text, "the cat"], chunks={"size": 10})
    long, short = (item["chunks"] for item in answer["data"])
    assert long[-1]["characters"][1] == len(text)
    assert [first["tokens"][1] for first in long[:-1]] == [after["tokens"][0] for after in long[1:]]
    assert short[0]["embedding"] == pytest.approx((await post(http, input="the cat"))["data"][0]["embedding"], abs=1e-6)
    first_window = await token_vectors(http, text)  # cut to what the encoder reads
    assert long[0]["embedding"] != pytest.approx(unit(first_window[1:11]).tolist(), abs=1e-6), "with the special token before it"
    assert long[1]["embedding"] == pytest.approx(unit(first_window[11:21]).tolist(), abs=1e-6)
    assert answer["usage"]["prompt_tokens"] > len(text.split())


async def test_bad_chunks_are_refused_with_the_value_and_the_next_step(http: httpx.AsyncClient) -> None:
    for fields, words, param in (
        ({"chunks": {"spans": [[[0, 9], [5, 12]]]}}, "spans [0, 9] and [5, 12] of input 0 overlap", "chunks.spans"),
        ({"chunks": {"spans": [[[0, 1000]]]}}, f"leaves the text, which has {len(TEXT)} characters", "chunks.spans"),
        ({"chunks": {"spans": [[[4, 4]]]}}, "span [4, 4] of input 0 is empty", "chunks.spans"),
        ({"chunks": {"spans": [[[3, 4]]]}}, "has no token of its own", "chunks.spans"),
        ({"chunks": {"spans": []}}, "has 0 lists for 1 inputs", "chunks.spans"),
        ({"chunks": {"size": 5, "overlap": 5}}, "overlap=5 must be below size=5", "chunks"),
        ({"chunks": {}, "model": "by-cls"}, 'have no vectors in it: use mode "split"', "chunks.mode"),
        ({"chunks": {}, "input": [1, 2]}, "token ids cannot be split", "input"),
        ({"chunks": {}, "outputs": ["tokens"]}, "'dense', 'sparse' or 'multivector'", "outputs.0"),
        ({"chunks": {"size": 900, "overlap": 899}, "input": "a " * 3000}, "at most 16384 chunks, of 1048576 tokens in total", "chunks"),
        ({"chunks": {"size": 1}, "input": ["a " * 9000] * 2}, "at most 16384 chunks", "chunks"),
        ({"chunks": {}, "normalize": False}, "chunks have dense vectors of length 1", "chunks"),
    ):  # fmt: skip
        with case(fields):
            answer = await http.post("/v1/embeddings", json={"input": TEXT, **fields})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == param
    by_item = await http.post(
        "/v1/embeddings", json={"input": [TEXT, "a"], "chunks": {"spans": [[[4, 4]], [[0, 1]]]}}, headers={"x-item-errors": "true"}
    )
    first, second = by_item.json()["data"]
    assert "is empty" in first["error"]["message"]
    assert len(second["chunks"]) == 1


async def test_documents_of_chunks_are_read_as_a_whole(http: httpx.AsyncClient) -> None:
    """Voyage's and Perplexity's route."""
    documents = [["The cat is in the house.", "One dog is small!"], ["Where is the river?"]]
    answer = await post(http, "/v1/contextualizedembeddings", inputs=documents)
    assert [[item["index"] for item in document["data"]] for document in answer["data"]] == [[0, 1], [0]]
    text = " ".join(documents[0])
    wanted = await chunks_of(http, text, spans=[[[0, 24], [25, len(text)]]])
    got = answer["data"][0]["data"]
    assert [item["embedding"] for item in got] == [chunk["embedding"] for chunk in wanted]
    packed = await post(http, "/v1/contextualizedembeddings", input=documents, encoding_format="base64_int8", dimensions=8)
    numbers = np.frombuffer(base64.b64decode(packed["data"][0]["data"][0]["embedding"]), np.int8)
    assert (len(numbers), np.abs(numbers).max()) == (8, 127)
    asked = await post(http, "/v1/contextualizedembeddings", inputs=documents, input_type="query")
    assert asked["data"][0]["data"][0]["embedding"] != got[0]["embedding"], "the prompt is read too"
    auto = await post(http, "/v1/contextualizedembeddings", inputs=[[TEXT]], enable_auto_chunk=True, chunk_size=8)
    assert auto["data"][0]["data"][0]["text"] == TEXT[: len(auto["data"][0]["data"][0]["text"])]
    for body, words in (
        ({"inputs": [["a", ""]]}, "inputs[0] has an empty chunk: leave it out"),
        ({"inputs": [["a"]], "enable_auto_chunk": True, "chunk_size": 3, "chunk_overlap": 3}, "overlap=3 must be below size=3"),
    ):
        refused = await http.post("/v1/contextualizedembeddings", json=body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]


async def test_the_first_chunks_of_a_process_are_of_the_space_that_a_client_demands(http: httpx.AsyncClient) -> None:
    space = (await http.post("/v1/embeddings", json={"input": TEXT, "dimensions": 8})).headers["x-embedding-space"]
    body = {"input": TEXT, "dimensions": 8, "chunks": {}}
    assert (await http.post("/v1/embeddings", json=body, headers={"x-embedding-space-match": space})).status_code == 200


async def test_the_memory_of_an_answer_with_chunks_is_reserved_before_they_are_computed(http: httpx.AsyncClient) -> None:
    http.catalog.reconfigure({"max_answer_bytes": 20_000})  # type: ignore[attr-defined]
    refused = await http.post("/v1/embeddings", json={"input": "a " * 100, "chunks": {"size": 1}})
    assert refused.status_code == 413
    assert "100 chunks of 48 numbers" in refused.json()["error"]["message"]


async def test_many_texts_are_split_in_pieces_between_which_others_have_their_turns(http: httpx.AsyncClient) -> None:
    tokenizers, sizes = http.catalog.tokenizers, []  # type: ignore[attr-defined]
    run = tokenizers.run

    def counted(work: Any, *, size: int, client: str) -> Any:
        sizes.append(size)
        return run(work, size=size, client=client)

    tokenizers.run = counted
    await post(http, input=["a " * 1000] * 60, chunks={"size": 1000})
    assert sizes[:6] == [20_000] * 6


# The arithmetic of windows and chunks ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    file = fake_bundle(tmp_path_factory.mktemp("bundle")) / "tokenizer.json"
    return TextEncoder(file, max_tokens=20, vocab_size=1000, pair_types=False, prompts={}, default_prompt=None)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    words=st.lists(st.sampled_from([*WORDS, "unknownwordofpieces", ".", "é!"]), min_size=1, max_size=80),
    size=st.integers(1, 30),
    overlap=st.integers(0, 29),
    by=st.sampled_from(["tokens", "sentences"]),
    prompt=st.sampled_from(["", "query: "]),
)
def test_every_token_is_in_a_chunk_and_has_its_vector_from_the_first_window_that_has_it(
    texts: TextEncoder, words: list[str], size: int, overlap: int, by: Any, prompt: str
) -> None:
    text = " ".join(words)
    tokenised = TokenisedText(texts, text, prompt=prompt)
    whole = texts.tokenizer.encode(prompt + text).ids
    n_before = len(texts.tokenizer.encode(prompt).ids) - 1
    assert tokenised.n_tokens == len(whole) - n_before - 1
    windows = tokenised.windows
    assert max(map(len, windows)) <= texts.max_tokens
    chunks = tokenised.split(Splitting(size=size, overlap=min(overlap, size - 1), by=by))
    assert {at for chunk in chunks for at in range(*chunk.tokens)} == set(range(tokenised.n_tokens))
    assert all(chunk.tokens[1] - chunk.tokens[0] <= size for chunk in chunks)
    for chunk in chunks:
        part = text[slice(*chunk.characters)]
        assert texts.tokenizer.encode(part, add_special_tokens=False).ids == whole[n_before:][slice(*chunk.tokens)] or re.search(
            r"\w{9}", text
        )
    # A token's vector is a number that only this token of this window has.
    vectors, owners = ChunkVectors(tokenised, chunks), dict[int, float]()
    for number, (window, (first, last)) in enumerate(zip(windows, tokenised.spans_of_windows, strict=True)):
        rows = np.array([[1.0, 1000.0 * number + at] for at in range(len(window))], np.float32)
        for token in range(first, last):
            owners.setdefault(token, 1000.0 * number + n_before + token - first)
        vectors.add(rows)
    for at, (chunk, vector) in enumerate(zip(chunks, vectors.all(), strict=True)):
        numbers = [owners[token] for token in range(*chunk.tokens)]
        numbers += [0.0] * (at == 0) + [1000.0 * (len(windows) - 1) + len(windows[-1]) - 1] * (at == len(chunks) - 1)
        mean = np.array([1.0, np.mean(numbers)])
        assert vector == pytest.approx(mean / np.linalg.norm(mean), rel=1e-5)


async def test_late_chunking_of_jina_reads_all_inputs_as_one_text(http: httpx.AsyncClient) -> None:
    parts = ["The cat is in the house.", "One dog is small!"]
    whole = " ".join(parts)
    spans = [[[0, len(parts[0])], [len(parts[0]) + 1, len(whole)]]]
    wanted = (await post(http, input=whole, chunks={"spans": spans}, input_type="document"))["data"][0]["chunks"]
    data = (await post(http, input=parts, late_chunking=True, task="retrieval.passage", embedding_type="float"))["data"]
    assert [item["index"] for item in data] == [0, 1]
    for item, chunk in zip(data, wanted, strict=True):
        assert item["embedding"] == pytest.approx(chunk["embedding"], abs=1e-6)
    refused = await http.post("/v1/embeddings", json={"model": "by-cls", "input": parts, "late_chunking": True})
    assert (refused.status_code, "cls pooling" in refused.text) == (400, True)
