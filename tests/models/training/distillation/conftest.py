"""A tiny teacher, and texts to distil it on: seconds, not hours."""

from pathlib import Path

import pytest

from models.training.corpus import write_texts
from models.training.distillation.config import DistillationConfig
from tests.checkpoints import tiny_encoder
from tests.models.training.texts import SOURCES, documents


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 tokens, 3 layers, D = 48."""
    return tiny_encoder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up Python."""
    folder = tmp_path_factory.mktemp("distillation")
    write_texts(folder, {"train": documents(("p0",), files=60, seed=0), "held_out": documents(("q0",), files=12, seed=1)}, SOURCES)
    return folder


@pytest.fixture(scope="session")
def plan() -> DistillationConfig:
    return DistillationConfig(
        attention="hybrid",
        options={"block": 8},
        n_positions=200,
        per_kind=60,
        transfer_steps=20,
        end_to_end_steps=10,
        tokens=256,
        longest=64,
        end_rate=1e-4,
        evaluations=2,
        checkpoint_steps=6,
    )
