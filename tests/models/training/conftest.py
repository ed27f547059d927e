"""One data folder for the session, in tokens of one small vocabulary, and the config of a run of 20 steps."""

from pathlib import Path

import pytest

from models.training.config import TrainingConfig
from models.training.corpus import Tokens, open_tokens
from tests.models.training.texts import small_config, write_data

VOCAB = 300  # of `small_config`


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def tokens(data: Path) -> Tokens:
    return open_tokens(data, vocab_size=VOCAB)


@pytest.fixture
def config() -> TrainingConfig:
    return small_config(evaluation_kb=1, checkpoint_steps=5)
