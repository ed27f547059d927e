"""The ids of embedding spaces: what changes them, and the refusal of vectors of another space."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from export import contract
from service.encoding.space import space_of
from tests.service.fakes import HIDDEN, SPARSE_WIDTH, case, client, fake_app, fake_bundle


def test_only_what_changes_vectors_changes_the_space(tmp_path: Path) -> None:
    manifest = contract.Manifest.model_validate_json((fake_bundle(tmp_path / "a") / contract.MANIFEST).read_bytes(), extra="ignore")
    space = space_of(manifest, contract.EMBEDDING)
    assert space == space_of(manifest, contract.EMBEDDING, manifest.width)
    trained_again = manifest.source.model_copy(update={"weights_sha256": "1" * 64})
    for update in ({"precision": "int8"}, {"source": trained_again}, {"pooling": "cls"}, {"prompts": {"query": "search: "}}):
        with case(update):
            assert space_of(manifest.model_copy(update=update), contract.EMBEDDING) != space
    gpu_graph = contract.GpuGraph(graph=manifest.graph, min_cosine=1, largest=1)
    for update in ({"name": "other"}, {"created": "2026-02-02T00:00:00+00:00"}, {"gpu_graph": gpu_graph}, {"tool": "newer"}):
        with case(update):
            assert space_of(manifest.model_copy(update=update), contract.EMBEDDING) == space
    others = {space_of(manifest, contract.EMBEDDING, 8), space_of(manifest, contract.POOLED), space_of(manifest, contract.TOKEN_EMBEDDINGS)}
    assert len(others | {space}) == 4


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    search = {"sparse": contract.Sparse(size=SPARSE_WIDTH), "multivector": contract.MultiVector(width=HIDDEN)}
    app = fake_app(fake_bundle(tmp_path / "old"), fake_bundle(tmp_path / "new", **search), aliases={"embed": "new"})
    async with client(app) as made:
        yield made


async def test_every_answer_with_vectors_names_its_space_and_a_client_may_demand_one(http: httpx.AsyncClient) -> None:
    about = {model["id"]: model["embedding_spaces"] for model in (await http.get("/v1/models")).json()["data"]}
    old, new = about["old"]["dense"], about["embed"]["dense"]
    assert old != new
    answer = await http.post("/v1/embeddings", json={"model": "old", "input": "cat"})
    assert answer.headers["x-embedding-space"] == answer.json()["system_fingerprint"] == old
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"model": "embed", "input": "cat"},
        "/embed": {"model": "embed", "inputs": "cat"},
        "/v2/embed": {"model": "embed", "texts": ["cat"], "input_type": "search_query", "embedding_types": ["float"]},
    }
    for path, body in bodies.items():
        with case(path):
            assert (await http.post(path, json=body, headers={"x-embedding-space-match": new})).status_code == 200
            refused = await http.post(path, json=body, headers={"x-embedding-space-match": old})
            assert refused.status_code == 412
            assert [space in refused.text for space in (old, new)] == [True, True], "the alias means another space now"
    several = await http.post("/v1/embeddings", json={**bodies["/v1/embeddings"], "outputs": ["dense", "sparse", "multivector"]})
    wanted = [about["embed"][output] for output in ("dense", "sparse", "multivector")]
    assert several.headers["x-embedding-space"].split(",") == wanted
    lines = await http.post("/v1/embeddings", json=bodies["/v1/embeddings"], headers={"accept": "application/x-ndjson"})
    assert lines.headers["x-embedding-space"] == new
