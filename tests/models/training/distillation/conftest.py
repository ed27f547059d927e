"""A tiny teacher, and texts to distil it on: seconds, not hours."""

from pathlib import Path

import pytest

from models.training.corpus import write_texts
from models.training.distillation.collect import collect_pieces
from models.training.distillation.config import DistillationConfig
from tests.checkpoints import tiny_encoder
from tests.models.training.texts import SOURCES, documents


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 tokens, 3 layers, D = 48."""
    return tiny_encoder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces of made-up Python; message catalogues that happen to be installed are left alone."""
    folder = tmp_path_factory.mktemp("distillation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.training.distillation.collect.distributions", list)
        texts = {"train": documents(("p0",), files=60, seed=0), "held_out": documents(("q0",), files=12, seed=1)}
        write_texts(folder / "texts", texts, SOURCES)
        collect_pieces(folder / "texts", folder / "pieces", per_kind={"train": 60, "held_out": 20})
    return folder / "pieces"


@pytest.fixture(scope="session")
def plan() -> DistillationConfig:
    return DistillationConfig(
        attention="hybrid",
        options={"block": 8},
        n_positions=200,
        transfer_steps=20,
        end_to_end_steps=10,
        tokens=256,
        longest=64,
        end_rate=1e-4,
        evaluations=2,
        checkpoint_steps=6,
    )
