"""A client that leaves is computed for no longer, on a route of each kind that computes vectors or scores."""

import json
from pathlib import Path
from typing import Any

from export import contract
from service.app import Application
from tests.service.fakes import case, client, fake_app, fake_bundle, until
from tests.service.http.test_edge import Caller

TEXTS = ["dog fish", "tree", "bird"]
# A route that reads its body itself, one of FastAPI, and one that ranks: all compute by `Model.answer`.
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/embed": ("encoder", {"inputs": TEXTS}),
    "/rerank": ("reranker", {"query": "dog", "texts": TEXTS}),
    "/v2/models/encoder/infer": ("encoder", {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [3], "data": TEXTS}]}),
}


async def test_what_a_client_asked_for_is_dropped_when_it_leaves(tmp_path: Path) -> None:
    kinds: tuple[contract.Kind, ...] = ("encoder", "reranker")
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
