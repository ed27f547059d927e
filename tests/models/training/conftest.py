"""One data folder for the session, in tokens of one small vocabulary, and the config of a run of 20 steps."""

from pathlib import Path

import pytest

from models.training.config import TrainingConfig
from models.training.corpus import Tokens, open_tokens
from tests.models.training.texts import write_data

VOCAB = 300


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def tokens(data: Path) -> Tokens:
    return open_tokens(data, vocab_size=VOCAB)


@pytest.fixture
def config() -> TrainingConfig:
    return TrainingConfig(
        name="tiny",
        model={"layers": "causal_linear", "d_model": 16, "n_layers": 2, "n_heads": 2, "d_feedforward": 32},
        vocab_size=VOCAB,
        context=24,
        batch=4,
        max_steps=20,
        learning_rate=0.01,
        evaluations=2,
        evaluation_kb=1,
        checkpoint_steps=5,
        threads=1,
    )
