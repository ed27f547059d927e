"""A client that leaves is computed for no longer, on every route that computes."""

import json
from pathlib import Path
from typing import Any

from export import contract
from service.app import Application
from tests.service.fakes import case, client, fake_app, fake_bundle, until
from tests.service.http.test_edge import Caller

TEXTS = ["dog fish", "tree", "bird"]
PAIRS: dict[str, Any] = {"query": "dog", "documents": TEXTS}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/embeddings": ("encoder", {"input": TEXTS}),
    "/embeddings": ("encoder", {"input": TEXTS}),
    "/embed": ("encoder", {"inputs": TEXTS}),
    "/embed_all": ("encoder", {"inputs": TEXTS}),
    "/similarity": ("encoder", {"inputs": {"source_sentence": "dog", "sentences": TEXTS}}),
    "/rerank": ("reranker", {"query": "dog", "texts": TEXTS}),
    "/predict": ("classifier", {"inputs": [[text] for text in TEXTS]}),
    "/": ("encoder", {"inputs": TEXTS}),
    "/invocations": ("encoder", {"inputs": TEXTS}),
    "/v2/embed": ("encoder", {"texts": TEXTS, "model": "encoder", "input_type": "search_query", "embedding_types": ["float"]}),
    "/v1/embed": ("encoder", {"texts": TEXTS, "model": "encoder", "input_type": "search_query"}),
    "/v2/rerank": ("reranker", {**PAIRS, "model": "reranker"}),
    "/v1/rerank": ("reranker", {**PAIRS, "model": "reranker"}),
    "/v2/models/encoder/infer": ("encoder", {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [3], "data": TEXTS}]}),
}


async def test_what_a_client_asked_for_is_dropped_when_it_leaves(tmp_path: Path) -> None:
    kinds: tuple[contract.Kind, ...] = ("encoder", "reranker", "classifier")
    app = fake_app(*(fake_bundle(tmp_path / kind, kind) for kind in kinds), threads=1, cache_bytes=0)
    async with client(app):
        for path, (name, body) in BODIES.items():
            with case(path):
                await left_and_dropped(app, path, name, body)


async def left_and_dropped(app: Application, path: str, name: str, body: dict[str, Any]) -> None:
    session, engine = app.state.catalog.session(name), app.state.catalog.get(name).engine
    session.reset()
    session.hold()
    first = Caller(app, path=path)
    first.body(json.dumps(body).replace("bird", "cat").encode())
    await session.entered(1)
    running = engine.queued_tokens
    leaving = Caller(app, path=path)
    leaving.body(json.dumps(body).encode())
    await until(lambda: engine.queued_tokens > running)
    leaving.hang_up()
    await leaving.done()
    assert leaving.sent == []
    session.open()
    await first.done()
    assert first.status == 200
    await until(lambda: not engine.queued_tokens)
    bird = app.state.catalog.get(name).texts.tokenizer.token_to_id("bird")
    assert not any(bird in ids for batch in session.batches for ids in batch)


def test_the_table_has_every_route_of_an_encoder(tmp_path: Path) -> None:
    """Those that continue texts are tested beside their engines. The others compute nothing or little, or do it as `/embed_all`."""
    others = {"/embed_sparse", "/decode", "/tokenize", "/detokenize", "/v1/attention", "/v1/development/kill"}
    texts = {"/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/images/generations"}
    texts |= {"/v1/states", "/v1/states/{state}/fork", "/v1/states/{state}/rewind", "/v1/responses/{response_id}/cancel"}
    texts |= {
        "/v1/responses/input_tokens",
        "/v1/conversations",
        "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/items",
    }
    document = fake_app(fake_bundle(tmp_path / "encoder")).openapi()
    paths = {path.replace("{model}", "encoder") for path, methods in document["paths"].items() if "post" in methods}
    assert paths - others - texts == set(BODIES)
