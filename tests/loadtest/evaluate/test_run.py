"""Evaluations of a bundle with dense, sparse and multi-vector outputs on fake sessions, by the command as a user calls it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from rich.console import Console

from export import contract
from export.summary import render
from loadtest.evaluate import run
from loadtest.evaluate.tasks import Retrieval, read
from loadtest.evaluate.vectors import VectorFile
from loadtest.evaluate.ways import WEIGHTS, scores, ways_of
from loadtest.in_process import engine
from service import cli
from service.encoding import sparse
from service.encoding.space import space_of
from service.encoding.token_matrix import maxsim
from service.runtime.onnx import Array
from tests.loadtest.evaluate.test_tasks import PAIR, beir
from tests.service.fakes import HIDDEN, SPARSE_WIDTH, FakeCatalog, client, fake_app, fake_bundle

Evaluate = Callable[..., int]
SEARCH = {"sparse": contract.Sparse(size=SPARSE_WIDTH), "multivector": contract.MultiVector(width=HIDDEN)}


@pytest.fixture
def catalogs(monkeypatch: pytest.MonkeyPatch) -> list[FakeCatalog]:
    """Open bundles with fake sessions. Returns the catalogs that were opened."""
    opened: list[FakeCatalog] = []

    def open_fakes(settings: Any) -> FakeCatalog:
        opened.append(FakeCatalog(settings))
        return opened[-1]

    monkeypatch.setattr(engine, "Catalog", open_fakes)
    return opened


@pytest.fixture
def evaluate(catalogs: list[FakeCatalog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Return a function that calls `attnserve evaluate` and returns its exit status. Files are written to `tmp_path / "out"`."""

    def called(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["attnserve", "evaluate", *map(str, arguments), "--out", str(tmp_path / "out")])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    return called


def computed(catalog: FakeCatalog) -> int:
    """The number of texts that the fake session of a catalog has computed."""
    return sum(map(len, catalog.session("b").batches))


def test_every_way_of_a_bundle_is_measured_and_its_spaces_are_named(
    evaluate: Evaluate, catalogs: list[FakeCatalog], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, task = fake_bundle(tmp_path / "b", **SEARCH), beir(tmp_path / "animals")
    assert evaluate(bundle, "--task", task) == 0
    told = json.loads((tmp_path / "out" / "animals.json").read_text())["b"]
    assert (told["queries"], told["documents"]) == (2, 3)
    manifest = contract.verify(bundle)
    spaces = {output: space_of(manifest, manifest.tensor_of(output)) for output in manifest.outputs}
    ways = {way["way"]: way for way in told["ways"]}
    assert [*ways] == ["dense", "dense-int8", "dense-binary", "dense-binary-rescored", "sparse", "multivector", "hybrid"]
    assert ways["dense-int8"]["spaces"] == ways["dense"]["spaces"] == [spaces["dense"]]
    assert ways["hybrid"]["spaces"] == [spaces[output] for output in ("dense", "sparse", "multivector")]
    assert all(set(way["figures"]) == {"ndcg@10", "recall@10", "recall@100", "mrr@10"} for way in ways.values())
    assert (tmp_path / "out" / "animals.png").read_bytes().startswith(b"\x89PNG")
    assert spaces["multivector"] in capsys.readouterr().out


def test_what_was_computed_is_not_computed_again(evaluate: Evaluate, catalogs: list[FakeCatalog], tmp_path: Path) -> None:
    bundle, task = fake_bundle(tmp_path / "b"), beir(tmp_path / "animals")
    evaluate(bundle, "--task", task, "--write")
    evaluate(bundle, "--task", task)
    assert list(map(computed, catalogs)) == [5, 0], "evidence does not change what was computed"
    evaluate(bundle, "--task", beir(tmp_path / "more", queries='{"_id": "1", "text": "bird"}\n{"_id": "2", "text": "dog"}\n'))
    assert computed(catalogs[-1]) == 1


def test_evidence_is_shown_and_changes_neither_spaces_nor_bundles_without_it(
    evaluate: Evaluate, catalogs: list[FakeCatalog], tmp_path: Path
) -> None:
    bundle, task = fake_bundle(tmp_path / "b", **SEARCH), beir(tmp_path / "animals")
    before = contract.verify(bundle)
    assert "evaluations" not in contract.dump(before)
    for _ in range(2):
        evaluate(bundle, "--task", task, "--write")
    after = contract.verify(bundle)
    assert [each.task for each in after.evaluations or ()] == ["animals"], "a later one takes the place of an earlier one"
    assert after.fingerprint != before.fingerprint == after.model_copy(update={"evaluations": None}).fingerprint
    assert [way.spaces for way in ways_of(after)] == [way.spaces for way in ways_of(before)]
    (console := Console(record=True, width=200)).print(render(bundle))
    assert "animals" in (shown := console.export_text())
    assert "dense-binary-rescored" in shown


async def test_served_models_tell_their_evidence(tmp_path: Path) -> None:
    bundle = fake_bundle(tmp_path / "b")
    way = contract.WayFigures(way="dense", spaces=("0" * 16,), figures={"ndcg@10": 0.5})
    told = {
        "task": "animals",
        "task_sha256": "0" * 64,
        "queries": 2,
        "documents": 3,
        "created": "2026-01-02T03:04:05+00:00",
        "tool": "fakes",
    }
    run.write(bundle, contract.Evaluation(**told, ways=(way,)))
    async with client(fake_app(bundle)) as http:
        (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["evaluations"] == [{**told, "licence": None, "ways": [way.model_dump(mode="json")]}]


def test_a_bundle_below_a_demand_ends_the_command_with_1_and_a_sentence(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(PAIR + PAIR.replace("cat", "bird").replace("2.5", "1") + PAIR.replace("dog", "fish").replace("2.5", "0"))
    bundle = fake_bundle(tmp_path / "b")
    assert evaluate(bundle, "--task", file, "--at-least", "spearman=-1", "--at-least", "dense-int8:spearman=-1") == 0
    for demand, words in (
        ("dense-int8:spearman=1.01", "spearman of b, dense-int8, is"),
        ("ndcg@10=0.4", "b has the ways dense, dense-int8, dense-binary, dense-binary-rescored and the metrics spearman in pairs"),
        ("sparse:spearman=0.4", "b has the ways dense,"),
    ):
        assert evaluate(bundle, "--task", file, "--at-least", demand) == 1
        assert f"--at-least {demand}: {words}" in " ".join(capsys.readouterr().err.split())


def test_a_bundle_without_vectors_and_an_unknown_task_are_refused(
    evaluate: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(fake_bundle(tmp_path / "r", "reranker"), "--task", beir(tmp_path / "animals")) == 1
    assert "is of kind reranker, which gives no vectors" in " ".join(capsys.readouterr().err.split())
    assert evaluate(fake_bundle(tmp_path / "b"), "--task", "python-dox") == 1
    assert "--task python-dox: there is no such file or folder, and the tasks that can be made are python-docs, numpy-related" in " ".join(
        capsys.readouterr().err.split()
    )


def test_scores_are_those_of_the_service(catalogs: list[FakeCatalog], tmp_path: Path) -> None:
    """Each score of a matrix is what the functions of the service give for one query and one document."""
    bundle = fake_bundle(tmp_path / "b", **SEARCH)
    manifest, task = contract.verify(bundle), read(beir(tmp_path / "animals"))
    assert isinstance(task, Retrieval)
    with VectorFile(tmp_path / "vectors.sqlite") as file:
        queries, documents = uvloop.run(run.vectors_of(bundle, manifest, task, file, lambda step, fraction: None))
        found = dict(scores(manifest, queries, documents, WEIGHTS))

        def table(output: contract.Output, compare: Callable[[Array, Array], float]) -> Array:
            return np.array([[compare(query, document) for document in documents[output]] for query in queries[output]])

        wanted = {
            "dense": table("dense", lambda query, document: float(query @ document)),
            "sparse": table("sparse", sparse.dot),
            "multivector": table("multivector", maxsim),
        }
        lengths = np.array([[len(query)] for query in queries["multivector"]])
    for way, table_of_way in wanted.items():
        assert found[way] == pytest.approx(table_of_way, rel=1e-4, abs=1e-5), way
    assert found["hybrid"] == pytest.approx(wanted["dense"] + 0.3 * wanted["sparse"] + wanted["multivector"] / lengths, rel=1e-4, abs=1e-5)
    assert found["dense-int8"] == pytest.approx(wanted["dense"], abs=0.02)
