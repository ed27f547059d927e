"""A device for decoders."""

from pathlib import Path

import pytest

from service.generation.gpu import row_copies, session
from tests.service.generation.afar import open_afar
from tests.service.generation.fake_steps import FakeSteps, byte_tokenizer


@pytest.fixture
def afar(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is to decoders of a device what a GPU is."""
    for module in (session, row_copies):
        monkeypatch.setattr(module, "open_graph", open_afar)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def steps() -> FakeSteps:
    return FakeSteps()
