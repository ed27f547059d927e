"""For the execution of the pages' blocks: a checkout, bundles with the names that the pages use, and one running service."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bundles import tiny_encoder_bundle
from tests.conftest import Once
from tests.decoders import tiny_decoder, tiny_decoder_bundle, tiny_image
from tests.docs.execution import Checkout
from tests.docs.pages import ROOT
from tests.exports import exported
from tests.service.live import LiveService, live


@pytest.fixture(scope="session")
def bundles(minilm_bundle: Path, once: Once) -> dict[str, Path]:
    """By their names in the pages. MiniLM and number-words are the real models, so that shown outputs are compared with theirs."""
    decoder = {"d_model": 32, "n_layers": 2, "layers": "gated_delta", "positions": "none"}

    def with_maps(out: Path) -> Path:
        return exported(tiny_decoder(out.with_name(f"{out.name}-checkpoint"), **decoder), out, name="python-gated-delta", maps=True)

    return {
        "all-MiniLM-L6-v2": minilm_bundle,
        "all-MiniLM-L6-v2-linear": once("docs-linear", lambda out: tiny_encoder_bundle(out, name="all-MiniLM-L6-v2-linear")),
        "python-gated-delta": once("docs-decoder", with_maps),
        "digits": once(
            "docs-digits", lambda out: tiny_decoder_bundle(out, name="digits", image=tiny_image(28, 28), positions="sinusoidal")
        ),
        "number-words": once("docs-number-words", lambda out: exported(ROOT / "models/pretrained/number-words", out, name="number-words")),
    }


@pytest.fixture(scope="session")
def served(bundles: dict[str, Path]) -> Iterator[LiveService]:
    """A service with all of them, for blocks that start none."""
    with live(list(bundles.values())) as running:
        yield running


@pytest.fixture
def checkout(tmp_path: Path, minilm: Path, bundles: dict[str, Path]) -> Checkout:
    return Checkout(tmp_path / "checkout", bundles, checkpoint=minilm)
