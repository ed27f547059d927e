"""A store that outlives the services on it, and services of the real engine over `FakeSteps`."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from service.generation import runs
from service.states.sqlite import SqliteEngine
from service.states.store import Store
from tests.service.generation.fake_steps import byte_tokenizer
from tests.service.stream_fakes import gateway


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(autouse=True)
def _an_event_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the engine is."""
    monkeypatch.setattr(runs, "_PIECE_TOKENS", 1)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store(SqliteEngine(None))
    yield made
    made.close()


@pytest.fixture
async def http(tokenizer: Path, store: Store) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway(tokenizer, store) as made:
        yield made
