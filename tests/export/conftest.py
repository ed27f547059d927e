"""A tiny checkpoint that several tests look at, made once."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny_encoder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def encoder_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("checkpoints") / "encoder")
